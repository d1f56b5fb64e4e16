"""The rules of the code's shape. A rule that no test enforces gets broken."""

import ast
import re
import subprocess
import sys
import tomllib
from bisect import bisect_left, bisect_right
from collections import Counter
from pathlib import Path
from typing import get_args

import pytest

from megagrpo.config.fields import Section, members, sections
from megagrpo.config.schema import ExperimentConfig
from tests.unit.package_source import PACKAGE, ROOT, all_nodes, functions, imports, is_longer, part_of, sources, tokens

# Code tokens, without comments and docstrings: dense lines buy nothing. Tests are tables, so their files may be longer.
MAX_FILE_TOKENS, MAX_TEST_FILE_TOKENS, MAX_FUNCTION_TOKENS, MAX_TRAIN_LINES = 3200, 4500, 450, 40
MAX_FLAT_MODULES, MAX_FOLDER_FILES, MAX_ARGUMENTS = 8, 12, 7
CEILINGS = {
    name: entry["landed"] + entry["allowed"]
    for name, entry in tomllib.loads((ROOT / "tests" / "ceilings.toml").read_text()).items()
}


def over(name: str, value: int) -> str:
    """What to say if a value is above its ceiling."""
    return (
        f"{name} {value}: {value - CEILINGS[name]} more than tests/ceilings.toml allows; delete some, or raise "
        "`allowed` there and say why"
    )


MANY_ARGUMENTS = {  # "path:function" -> whose signature it is
    "weights/digests/triton_kernel.py:_block_sums": "a Triton kernel takes pointers and sizes one by one",
    "cpu/recurrences.py:mamba_chunk_scan_combined": "mamba-ssm's kernel",
    "algo/logprob.py:forward": "torch.autograd.Function takes its inputs one by one",
}
NAMES_TRANSPORTS = {"tools/convert/rules.py"}  # write an experiment

# What stands beside the core, which never imports it; its modules are found by name where a setting asks for them.
WINGS = {"tools", "cpu", "sandbox", "environments"}
# A part imports itself and parts on earlier lines; parts of one line do not know each other. Wings may know the core.
LAYERS = (
    {"system"},
    {"types"},
    {"config"},
    {"models"},
    {"mesh", "algo"},
    {"batching", "monitor", "data", "rewards", "weights"},
    {"actor", "rollout"},
    {"checkpoint"},
    {"check"},
    {"loop"},
    {"cluster"},
    {"tools", "cpu", "sandbox"},
    {"environments"},  # one of them runs programs in the sandbox
    {"cli"},
)

# Third-party library -> where it may be imported. `cpu/engine` runs inside the engine's process.
ONLY_IN = {
    "megatron": r"actor/|models/|cpu/trainer\.py|tools/bisect/capture\.py",
    "ray": r"rollout/service/",
    # a dry run builds the engine's model or resolves its arguments as on a GPU, in a process of its own
    "sglang": r"weights/engines/loader\.py|cpu/engine/"
    r"|rollout/service/(engine_process|engine_words|scoring|parser_worker)\.py|tools/plan/\w+_dry_run\.py",
    "sgl_kernel": r"cpu/engine/",
    "triton": r"weights/digests/triton_kernel\.py",
    "matplotlib": r"tools/report\.py",
    "rich": r"tools/doctor\.py",
}
ALGO_MAY_IMPORT = {"torch", "megagrpo"}
# Of models/, descriptions and costs; what trainers build of them stands in layer.py, layers/, build.py and body.py.
NO_TORCH = (
    r"(system|types|config)(/|\.py)|models/kinds/(attention|recurrence|\w+/describe)\.py|models/families/"
    r"|models/(architecture|config_json|costs|family|fields|folder|points|table|tensors)\.py|models/stored/(files|quantization|fused_experts)\.py"
)

LONG_FUNCTIONS: dict[str, str] = {}  # "path:function" -> why it is better in one piece
# These run in the engine's interpreter before any code of ours and patch what it reads from its environment.
READS_ENVIRONMENT = r"system/environment\.py|cpu/engine/"


def own_part(module: str) -> str | None:
    """The part that an imported name belongs to, None for other people's modules and for the package itself."""
    names = module.split(".")
    return names[1] if names[0] == "megagrpo" and len(names) > 1 and names[1] != "__version__" else None


def layer_of(part: str) -> int:
    found = [index for index, parts in enumerate(LAYERS) if part in parts]
    assert found, f"megagrpo/{part} has no place in LAYERS of {Path(__file__).name}: say what it may import"
    return found[0]


def test_imports_point_one_way():
    wrong = []
    for path in sources():
        part = part_of(path)
        if part == "__init__":
            continue
        layer = layer_of(part)
        for module in imports(path):
            other = own_part(module)
            if other is None or other == part:
                continue
            if part == "config" and other == "models":
                continue  # until check/rules asks the model in its place
            if layer_of(other) >= layer:
                wrong.append(f"{path} imports megagrpo.{other}")
    assert not wrong, "\n".join(sorted(set(wrong)))


def test_no_import_cycles():
    """Imports inside functions count: they only hide a circle."""
    known = {path.removesuffix(".py").removesuffix("/__init__").replace("/", "."): path for path in sources()}

    def targets(path: str) -> set[str]:
        names = [module.removeprefix("megagrpo.") for module in imports(path) if module.startswith("megagrpo.")]
        return {name if name in known else name.rpartition(".")[0] for name in names} & set(known)

    done: set[str] = set()

    def walk(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, " -> ".join((*trail, module))
        if module not in done:
            for other in targets(known[module]) - {module}:
                walk(other, (*trail, module))
            done.add(module)

    for module in known:
        walk(module, ())


@pytest.mark.parametrize("library", ONLY_IN)
def test_library_stays_in_its_place(library: str):
    users = [path for path in sources() if any(module.split(".")[0] == library for module in imports(path))]
    wrong = [path for path in users if not re.match(ONLY_IN[library], path)]
    assert not wrong, f"{library} is imported outside {ONLY_IN[library]}: {wrong}"


def test_algorithms_import_only_torch():
    allowed = ALGO_MAY_IMPORT | sys.stdlib_module_names
    used = [(path, module) for path in sources() if part_of(path) == "algo" for module in imports(path)]
    wrong = [f"{path}: {module}" for path, module in used if module.split(".")[0] not in allowed]
    assert not wrong, wrong


def test_configuration_and_types_load_without_torch():
    modules = [
        "megagrpo." + path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for path in sources()
        if re.match(NO_TORCH, path)
    ]
    heavy = ("torch", "ray", "megatron", "sglang", "transformers")
    code = f"import sys, {', '.join(modules)}; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_environment_is_read_in_one_file():
    names = {"os.environ", "os.getenv", "os.putenv", "os.environb"}
    wrong = [
        f"{path}:{node.lineno}: {ast.unparse(node)}"
        for path, node in all_nodes()
        if isinstance(node, ast.Attribute) and f"os.{node.attr}" in names
        if ast.unparse(node) in names and not re.match(READS_ENVIRONMENT, path)
    ]
    wrong += [
        f"{path}: imports {name}"
        for path in sources()
        for name in names & set(imports(path))
        if not re.match(READS_ENVIRONMENT, path)
    ]
    assert not wrong, "hand values over, or use megagrpo/system/environment.py:\n" + "\n".join(wrong)


def test_files_are_short():
    files = [*PACKAGE.rglob("*.py"), *(ROOT / "tests").rglob("*.py"), *(ROOT / "bench").rglob("*.py")]
    limits = {path: MAX_FILE_TOKENS if PACKAGE in path.parents else MAX_TEST_FILE_TOKENS for path in files}
    wrong = {str(path): len(tokens(path)) for path, limit in limits.items() if is_longer(path, limit)}
    assert not wrong, f"more than {MAX_FILE_TOKENS} tokens, {MAX_TEST_FILE_TOKENS} in tests; split it: {wrong}"


def test_functions_are_short():
    lengths = Counter()  # of several with one name in a file the longest
    for path, node in functions():
        lines, name = tokens(PACKAGE / path), f"{path}:{node.name}"
        length = bisect_right(lines, node.end_lineno) - bisect_left(lines, node.lineno)
        lengths[name] = max(lengths[name], length)
    wrong = {
        name: length for name, length in lengths.items() if length > MAX_FUNCTION_TOKENS and name not in LONG_FUNCTIONS
    }
    assert not wrong, f"more than {MAX_FUNCTION_TOKENS} tokens: {wrong}"
    needless = [name for name in LONG_FUNCTIONS if lengths[name] <= MAX_FUNCTION_TOKENS]
    assert not needless, f"exceptions that nothing needs: {needless}"


def test_the_core_is_small():
    sizes = Counter()
    for path in sources():
        sizes["wings" if part_of(path) in WINGS else "core"] += len(tokens(PACKAGE / path))
    assert sizes["core"] <= CEILINGS["core_tokens"], over("core_tokens", sizes["core"])
    assert sizes.total() <= CEILINGS["package_tokens"], over("package_tokens", sizes.total())


def test_the_core_does_not_know_what_stands_beside_it():
    """Imports inside functions count. `cli` reaches a tool when its command is given, by name."""
    wrong = [
        f"{path} imports megagrpo.{other}"
        for path in sources()
        if part_of(path) not in WINGS
        for other in map(own_part, imports(path))
        if other in WINGS
    ]
    assert not wrong, "\n".join(sorted(set(wrong)))


def test_the_loop_fits_on_a_screen():
    loops = [
        node for node in sources()["loop/train.py"].body if isinstance(node, ast.FunctionDef) and node.name == "train"
    ]
    assert len(loops) == 1, "train.py has one function train()"
    length = loops[0].end_lineno - loops[0].lineno + 1
    assert length <= MAX_TRAIN_LINES, f"train() has {length} lines"


def test_no_name_means_two_things():
    """Public classes and functions. Families, and graders, are modules with the same names on purpose."""
    # two programs; the launcher's, what SGLang calls in a loader, and a tool's command with its
    # options; the advantage and the loss of one paper; moments at which check/rules are judged
    allowed = {"main", "run", "add_options", "gpg", "as_read", "before_start"}
    places: dict[str, list[str]] = {}
    for path, tree in sources().items():
        if not re.match(r"cpu/engine/|models/|rewards/|environments/|tools/convert/", path):
            for name in {node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}:
                places.setdefault(name, []).append(path)
    wrong = {name: paths for name, paths in places.items() if len(paths) > 1 and name not in allowed and name[0] != "_"}
    assert not wrong, wrong


def test_rooms_are_few_and_not_too_full():
    flat = [path for path in sources() if "/" not in path and path != "__init__.py"]
    assert len(flat) <= MAX_FLAT_MODULES, flat
    folders = Counter(str(Path(path).parent) for path in sources() if not path.endswith("__init__.py"))
    wrong = {folder: number for folder, number in folders.items() if folder != "." and number > MAX_FOLDER_FILES}
    assert not wrong, f"more than {MAX_FOLDER_FILES} files: {wrong}"


def test_arrows_between_rooms_are_few():
    """Pairs of rooms of which one imports the other, wherever in its files; a wing is one room."""
    arrows = {
        (part_of(path), other)
        for path in sources()
        for other in map(own_part, imports(path))
        if other is not None and other != part_of(path) != "__init__"
    }
    assert len(arrows) <= CEILINGS["arrows"], over("arrows", len(arrows))


def test_settings_are_few():
    """Distinct keys of an experiment, those of copies of a section included."""
    count = len(leaves(ExperimentConfig))
    assert count <= CEILINGS["settings"], over("settings", count)


def leaves(section: type[Section]) -> set[str]:
    found = set()
    for name, field in section.model_fields.items():
        inner = sections(members(field.annotation))
        below = {f"{name}.{key}" for each in inner for key in leaves(each)}
        found |= below if inner else {name}
    return found


def test_functions_have_few_arguments():
    """self and cls do not count."""
    wrong = {}
    for path, node in functions():
        arguments = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
        number = sum(argument.arg not in ("self", "cls", "ctx") for argument in arguments)
        name = f"{path}:{node.name}"
        others = path.startswith("cpu/engine/") or name in MANY_ARGUMENTS  # their signatures
        if number > MAX_ARGUMENTS and not others:
            wrong[name] = number
    assert not wrong, f"more than {MAX_ARGUMENTS} arguments: {wrong}"


def test_errors_rise():
    """Few try blocks, very few that catch everything, and no test library in the package."""
    tries = [f"{path}:{node.lineno}" for path, node in all_nodes() if isinstance(node, ast.Try)]
    assert len(tries) <= CEILINGS["tries"], f"{over('tries', len(tries))}: {tries}"
    broad = [
        f"{path}:{node.lineno}"
        for path, node in all_nodes()
        if isinstance(node, ast.ExceptHandler)
        and (node.type is None or re.search(r"\b(Base)?Exception\b", ast.unparse(node.type)))
    ]
    assert len(broad) <= CEILINGS["broad_excepts"], f"{over('broad_excepts', len(broad))}: {broad}"
    assert not [path for path in sources() if any(module.split(".")[0] == "unittest" for module in imports(path))]


def test_types_are_named():
    uses = Counter(path for path, node in all_nodes() if isinstance(node, ast.Name) and node.id == "Any")
    assert uses.total() <= CEILINGS["any"], f"{over('any', uses.total())}: {uses.most_common(8)}"


def test_no_transport_is_asked_by_name():
    """Outside weights/ and config/ the table of transports answers what others need to know."""
    from megagrpo.config.rollout import WeightsConfig

    names = set(get_args(WeightsConfig.model_fields["transport"].annotation))
    assert "reshard" in names
    wrong = [
        f"{path}:{node.lineno}: {node.value}"
        for path, node in all_nodes()
        if isinstance(node, ast.Constant) and node.value in names
        if not path.startswith(("weights/", "config/")) and path not in NAMES_TRANSPORTS
    ]
    assert not wrong, wrong


def test_no_registries_no_utils():
    assert not [path for path in sources() if re.search(r"(^|/)(utils?|helpers?|common|misc)(\.py|/)", path)]


def test_no_paths_of_one_machine():
    """Absolute paths of a home or work folder would be wrong on every other machine."""
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("not a git checkout")
    pattern = re.compile(r"(?<![\w.$}/-])/(?:root|home|work|Users|mnt|opt)/")
    wrong = []
    for name in filter(None, done.stdout.split("\0")):
        path = ROOT / name
        if path.suffix in {".png", ".parquet", ".safetensors"} or path == Path(__file__) or not path.is_file():
            continue
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        wrong += [
            f"{name}:{number}: {line.strip()[:100]}"
            for number, line in enumerate(lines, start=1)
            if pattern.search(line)
        ]
    assert not wrong, "\n".join(wrong)
