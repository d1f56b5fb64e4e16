"""Everything that a GPU machine installs resolves together, without installing it. Needs a package index.

pip chooses files for the named Python and platform, and evaluates markers for the Python that runs it.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest

from examples.laptop.model import character_tokenizer

ROOT = Path(__file__).parents[2]
# Released as source alone, which pip would have to build to read its metadata: version -> its requirements. A wheel
# without content stands for each; the first is a stub whose build fetches the real one from NVIDIA's index.
SOURCES = {
    ("cuda-tile", "1.6.0rc5"): (),
    **{
        ("transformer-engine-torch", version): (
            "torch>=2.1", "einops", "onnxscript", "onnx", "packaging", "pydantic", "nvdlfw-inspect",
        )
        for version in ("2.9.0", "2.10.0", "2.11.0", "2.12.0", "2.13.0", "2.14.0", "2.14.1")
    },
}  # fmt: skip
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in range(5, 36)]
PLATFORMS += ["manylinux1_x86_64", "manylinux2010_x86_64", "manylinux2014_x86_64", "linux_x86_64"]
UNREACHABLE = r"from versions: none|Could not fetch|Connection|Temporary failure|Max retries"


def stand_in(folder: Path, name: str, version: str, requirements: tuple[str, ...]) -> None:
    stem = f"{name.replace('-', '_')}-{version}"
    metadata = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as wheel:
        text = "\n".join([*metadata, *(f"Requires-Dist: {requirement}" for requirement in requirements)]) + "\n"
        wheel.writestr(f"{stem}.dist-info/METADATA", text)
        tags = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        wheel.writestr(f"{stem}.dist-info/WHEEL", tags)
        wheel.writestr(f"{stem}.dist-info/RECORD", "")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("python", ["3.11", "3.12"])
def test_extras_gpu_and_te_resolve_on_linux(python, tmp_path):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["gpu"], *extras["te"]]
    (tmp_path / "wheels").mkdir()
    for (name, version), requirements in SOURCES.items():
        stand_in(tmp_path / "wheels", name, version, requirements)
    abi = "cp" + python.replace(".", "")
    words = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
    # launch/install.sh does it on 3.11; elsewhere pip would ask for what it runs on itself
    if python == "3.11" or not sys.version.startswith(f"{python}."):
        words.append("--ignore-requires-python")
    words += ["--only-binary=:all:", "--python-version", python, "--implementation", "cp", "--abi", abi]
    words += ["--abi", "abi3", "--abi", "none", *(word for name in PLATFORMS for word in ("--platform", name))]
    words += ["--target", str(tmp_path / "none"), "--report", str(tmp_path / "report.json")]
    words += ["--find-links", str(tmp_path / "wheels"), *wanted]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode != 0 and re.search(UNREACHABLE, done.stderr):
        pytest.skip(f"no package index is reachable: {done.stderr.splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    packages = [entry["metadata"] for entry in report["install"]]
    found = {package["name"].lower().replace("_", "-"): package["version"] for package in packages}
    print(f"Python {python}: {len(found)} packages, " + ", ".join(f"{n} {found[n]}" for n in ("torch", "sglang")))
    assert found["transformer-engine"] == found["transformer-engine-torch"] == "2.14.1"
    assert found["torch"].startswith("2.13.0") and found["sglang"] == "0.5.21" and found["megatron-core"] == "0.19.2"


HEADERS = ("cuda_runtime.h", "cudnn.h", "nccl.h", "cublas_v2.h", "cusolverDn.h", "cusparse.h", "nvtx3/nvToolsExt.h")
PYTHON = """#!/bin/sh
echo "$@" >>{folder}/words
case "$*" in
    *torch.version.cuda*) echo {cuda} ;;
    *nvidia.__path__*) echo {folder}/nvidia ;;
    *transformer_engine.pytorch*) {imports} ;;
    *"pip wheel"*) echo "$CUDA_HOME $CPATH" >{folder}/variables; {wheel} ;;
esac
"""


@pytest.mark.parametrize(
    "planted, says",
    [
        ({}, ""),
        ({"without": "te"}, ""),
        ({"cuda": ""}, "is built without CUDA"),
        ({"cuda": "12.9"}, "is for CUDA 12.9"),
        ({"lacks": "cudnn.h"}, "cudnn.h is in none of"),
        ({"lacks": "nvcc"}, "bin/nvcc is missing: package nvidia-cuda-nvcc"),
        ({"wheel": "exit 1"}, ""),  # the compiler says why
        ({"imports": "exit 1"}, "its import fails"),
    ],
)
def test_transformer_engine_may_fail_or_be_left_out(planted, says, tmp_path):
    """install_gpu itself, with a python that notes its words, over planted CUDA packages of torch."""
    python, cuda = tmp_path / "bin" / "python", tmp_path / "nvidia" / "cu13"
    for path in (
        python,
        cuda / "bin" / "nvcc",
        *(tmp_path / "nvidia" / "cudnn" / "include" / name for name in HEADERS),
    ):
        if path.name != planted.get("lacks"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch(0o755)
    wheel = "touch {}/transformer_engine_torch-2.14.1-cp311.whl".format(
        "$(echo $* | sed 's/.*--wheel-dir //; s/ .*//')"
    )
    values = {"cuda": "13.0", "wheel": wheel, "folder": tmp_path, "imports": "exit 0"} | planted
    python.write_text(PYTHON.format_map(values))
    script = (ROOT / "launch" / "install.sh").read_text()
    functions = script[script.index("say() {") : script.index("repair=no")]
    without = planted.get("without", "")
    code = f"set -euo pipefail\nvenv={tmp_path}\nwithout={without!r}\n{functions}\ninstall_gpu\necho went on\n"
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0 and "went on" in done.stdout, done.stderr
    words = (tmp_path / "words").read_text()
    [first] = [line for line in words.splitlines() if "--editable" in line]
    assert ".[gpu,test,lint]" in first and "--no-build-isolation" not in first
    assert ("could not be built" in done.stderr) == bool(planted.keys() - {"without"})
    compiled = not without and (not says or "imports" in planted)
    assert says in done.stderr and ("--no-build-isolation" in words) == compiled
    if not planted:  # headers of torch's own packages, of a toolkit nothing
        assert (tmp_path / "variables").read_text().split(":")[0] == f"{cuda} {tmp_path}/nvidia/cudnn/include\n"


REPLACED = """#!/bin/sh
cd {folder}
echo "$@" >>words
case "$*" in
    *torch.version.cuda*) cat cuda ;;
    *uninstall*) rm cuda ;;
    *--editable*) echo {next} >cuda ;;
esac
"""


@pytest.mark.parametrize("before, after, status", [("none", "13.0", 0), ("none", "none", 1), ("13.0", "13.0", 0)])
def test_an_environment_for_cpus_ends_with_torch_for_cuda_or_says_why(tmp_path, before, after, status):
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python"
    python.write_text(REPLACED.format(folder=tmp_path, next=after))
    python.chmod(0o755)
    (tmp_path / "cuda").write_text(before)
    functions = of_install(r"say\(\) \{[\s\S]*?(?=^repair=no)")
    code = f"set -euo pipefail\nvenv={tmp_path}\nwithout=te\n{functions}\ninstall_gpu"
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == status, done.stderr
    words = (tmp_path / "words").read_text()
    assert ("pip uninstall --yes torch torchvision" in words) == (before == "none")
    assert ("pip chose a torch without CUDA" in done.stderr) == bool(status)


def test_a_file_system_without_locks_ends_no_installation(tmp_path):
    (tmp_path / "flock").write_text("#!/bin/sh\necho flock: 9: Function not implemented >&2\nexit 69\n")
    (tmp_path / "flock").chmod(0o755)
    step = of_install(r"if command -v flock[\s\S]*?^fi")
    code = f"set -euo pipefail\nPATH={tmp_path}:$PATH venv={tmp_path}\nsay() {{ echo $*; }}\n{step}\necho went on"
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True)
    assert done.stdout == "went on\n" and "start no second installation" in done.stderr


PYENV = "pyenv/versions/{}/bin/python"


@pytest.mark.parametrize(
    "versions, chosen",
    [
        ({"python3.12": "3.12"}, "python3.12"),
        ({"python3": "3.11", "python3.12": "3.12", "python3.13": "3.13"}, "python3.12"),
        ({"python3": "3.11", "python3.12": "3.12, no pip"}, "python3"),
        ({"python3": "3.10", "python3.11": "3.11"}, "python3.11"),
        ({PYENV.format("3.12.9"): "3.12", PYENV.format("3.12.11"): "3.12"}, PYENV.format("3.12.11")),
        ({PYENV.format("3.12.9"): "3.12, no pip"}, None),
    ],
)
def test_a_python_that_the_libraries_know(versions, chosen, tmp_path):
    newer = dict.fromkeys(("python3", "python3.11", "python3.12", "python3.13", "uv"), "3.14")
    for name, version in (newer | versions).items():
        path = tmp_path / name
        numbers, *without = version.split(", ")
        lines = [
            f"#!{sys.executable}",
            "import importlib.util, sys",
            f"sys.version_info = ({numbers.replace('.', ', ')}, 0)",
            *("importlib.util.find_spec = lambda name: None" for _ in without),
            "exec(sys.argv[2]) if sys.argv[1] == '-c' else sys.exit(1)",
        ]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(lines) + "\n")
        path.chmod(0o755)
    functions = of_install(r"find_python\(\) \{[\s\S]*?^newest_of_pyenv[\s\S]*?^\}")
    words = ["/bin/bash", "-euc", f"say() {{ echo $*; }}\n{functions}\nfind_python"]
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "PYENV_ROOT": str(tmp_path / "pyenv")}
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert done.stdout == (f"{tmp_path / chosen}\n" if chosen else "")
    assert done.returncode == (not chosen) == ("no Python from 3.11 to 3.13 found" in done.stderr)


EXPERIMENT = """\
name: from_a_wheel
output_dir: run
preset: dapo
model: {path: model}
data: {path: data/train.jsonl}
actor: {device: cpu}
"""


def run(*words, cwd: Path, status: int = 0, timeout_s: float = 300) -> subprocess.CompletedProcess:
    """Runs a command that sees neither this checkout nor the caller's Python settings, to an end with `status`."""
    # bytecode is kept: without it a command that imports all of SGLang compiles for 20 s
    settings = {key for key in os.environ if key.startswith("PYTHON")} - {"PYTHONPYCACHEPREFIX"}
    environment = {key: value for key, value in os.environ.items() if key not in settings}
    command = [str(word) for word in words]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == status, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """The Python of an empty environment into which a wheel of this package was installed, and nothing else."""
    folder = tmp_path_factory.mktemp("wheel")
    source, environment = folder / "source", folder / "environment"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "megagrpo", source / "megagrpo", ignore=ignored)  # a build leaves files in its source folder
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    run(*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, source, cwd=folder)
    (wheel,) = folder.glob("megagrpo-*.whl")
    python = environment / "bin" / "python"
    run(sys.executable, "-m", "venv", "--without-pip", environment, cwd=folder)
    run(*pip, "--python", python, "install", "--no-deps", wheel, cwd=folder)
    # Other people's packages come from the environment of the tests. The .pth files in a folder that a .pth names are
    # not read, so an editable installation of this checkout stays out of reach.
    (site,) = environment.glob("lib/python*/site-packages")
    (site / "requirements.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


TE_WHEELS = os.environ.get("MEGAGRPO_TE_WHEELS")


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(TE_WHEELS is None, reason="MEGAGRPO_TE_WHEELS names no folder of launch/build_te.sh")
def test_transformer_engine_is_imported_without_a_gpu(tmp_path):
    """What launch/build_te.sh has built, in a fresh environment with torch for CUDA."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [
        *(word for word in project["dependencies"] if word.startswith(("torch", "megatron-core"))),
        *project["optional-dependencies"]["te"],
    ]
    run(sys.executable, "-m", "venv", "environment", cwd=tmp_path)
    python = tmp_path / "environment" / "bin" / "python"
    pip = (python, "-m", "pip", "install", "--quiet", "--no-compile", "--only-binary=:all:")
    run(*pip, "--find-links", TE_WHEELS, *wanted, cwd=tmp_path, timeout_s=3000)
    layers = "from megatron.core.extensions.transformer_engine import TEColumnParallelLinear"
    run(python, "-c", f"import torch, transformer_engine.pytorch; {layers}", cwd=tmp_path)


def test_a_users_settings_of_pip_do_not_lead_out_of_the_environment():
    script = (ROOT / "launch" / "install.sh").read_text()
    settings = re.findall(r"^(?:export|unset) PIP.*", script, re.MULTILINE)
    shown = 'echo "$PIP_USER ${PIP_TARGET-none} ${PIP_PREFIX-none} ${PYTHONHOME-none}"'
    given = dict.fromkeys(("PIP_USER", "PIP_TARGET", "PIP_PREFIX", "PYTHONHOME"), "1")
    words = ["bash", "-euc", "\n".join([*settings, shown])]
    done = subprocess.run(words, env=os.environ | given, capture_output=True, text=True, check=True)
    assert done.stdout == "0 none none none\n"


def of_install(pattern: str) -> str:
    """The part of launch/install.sh that begins a line and fits the pattern."""
    script = (ROOT / "launch" / "install.sh").read_text()
    return re.search(f"^{pattern}", script, re.MULTILINE).group()


@pytest.mark.parametrize(
    ("version", "renewed"), [("21.2.4", True), ("9.0.3", True), ("21.3", False), ("26.1b1", False)]
)
def test_a_pip_that_is_too_old_is_renewed(tmp_path, version, renewed):
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\ncase "$*" in *import*) echo {version};; *) echo "$@";; esac\n')
    python.chmod(0o755)
    function = of_install(r"renew_pip\(\) \{[\s\S]*?^\}")
    words = ["bash", "-euc", f"say() {{ :; }}\nvenv={tmp_path}\n{function}\nrenew_pip"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout == ("-m pip install --upgrade pip>=21.3\n" if renewed else "")


@pytest.mark.parametrize("found", ["false", f"echo {sys._base_executable}"])
def test_an_environment_without_pip_or_of_a_python_that_is_gone_gets_both(found, tmp_path):
    """As uv makes it, also with a Python that find_python would not choose; and after an upgrade of the system."""
    subprocess.run([sys._base_executable, "-m", "venv", "--without-pip", tmp_path], check=True)
    if found != "false":
        for link in (tmp_path / "bin").glob("python*"):
            link.unlink()
            link.symlink_to("/gone/python3.10")
    functions = of_install(r"make_venv\(\) \{[\s\S]*?^renew_pip[\s\S]*?^\}")
    code = f"say() {{ :; }}\nfind_python() {{ {found}; }}\nvenv={tmp_path}\n{functions}\nmake_venv"
    subprocess.run(["bash", "-euc", code], check=True)
    subprocess.run([tmp_path / "bin" / "python", "-m", "pip", "--version"], check=True)


def test_a_machine_with_many_gpus_has_one(tmp_path):
    """A reader that ends at the first line ends nvidia-smi by SIGPIPE, which pipefail reports."""
    fake = tmp_path / "nvidia-smi"
    fake.write_text('#!/bin/sh\nfor n in 0 1 2; do echo "GPU $n: H100"; sleep 0.2; done\n')
    fake.chmod(0o755)
    function = of_install(r"has_gpu\(\).*")
    words = ["bash", "-c", f"set -euo pipefail\n{function}\nhas_gpu"]
    subprocess.run(words, check=True, env={"PATH": f"{tmp_path}:/usr/bin:/bin"})


def test_what_pip_was_cut_short_in_is_removed_and_nothing_of_others(tmp_path):
    """The step of launch/install.sh, in a user's own environment (MEGAGRPO_VENV)."""
    packages = tmp_path / "lib" / "python3.12" / "site-packages"
    for name, files in {
        "whole-1": {"RECORD": "", "INSTALLER": "pip\n"},
        "cut-1": {"METADATA": ""},
        "cut_late-1": {"INSTALLER": "pip\n"},
        "of_conda-1": {"INSTALLER": "conda\n"},
    }.items():
        (packages / f"{name}.dist-info").mkdir(parents=True)
        for file, text in files.items():
            (packages / f"{name}.dist-info" / file).write_text(text)
    step = of_install(r"find .*(?:\n    .*)*")
    subprocess.run(["bash", "-ec", f'venv="{tmp_path}"\n{step}'], check=True)
    left = {path.name.partition("-")[0] for path in packages.iterdir()}
    assert left == {"whole", "of_conda"}


@pytest.fixture
def empty(tmp_path) -> Path:
    (tmp_path / "experiment.yaml").write_text(EXPERIMENT)
    for name in ("model", "data"):
        (tmp_path / name).mkdir()
    shutil.copy(ROOT / "configs" / "models" / "Qwen3-8B" / "config.json", tmp_path / "model")
    character_tokenizer("12+=").save_pretrained(tmp_path / "model")
    (tmp_path / "data" / "train.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    return tmp_path


def test_every_file_of_the_package_is_in_the_wheel_and_imported_from_there(installed, empty):
    done = run(installed, "-c", "import megagrpo; print(megagrpo.__file__)", cwd=empty)
    (package,) = installed.parents[1].glob("lib/python*/site-packages/megagrpo")
    assert Path(done.stdout.strip()).parent == package, done.stdout + done.stderr
    ours = {path.relative_to(ROOT / "megagrpo") for path in (ROOT / "megagrpo").rglob("*") if path.is_file()}
    theirs = {path.relative_to(package) for path in package.rglob("*") if path.is_file()}
    assert {path for path in ours - theirs if "__pycache__" not in path.parts} == set()
    assert (package / "py.typed").is_file()


def test_an_experiment_with_a_preset_is_read_and_checked(installed, empty):
    load = "from megagrpo.config.load import load_config"
    program = f"{load}; print(load_config('experiment.yaml').algorithm.formula)"
    done = run(installed, "-c", program, cwd=empty)
    assert "1/N_tok sum_it [-min(rho A, clip(rho) A)]" in done.stdout, "the preset's objective"
    words = ("check", "experiment.yaml", "--set", "preset=dapoo")
    unknown = run(installed.parent / "megagrpo", *words, cwd=empty, status=2)
    assert unknown.stdout == "" and "Traceback" not in unknown.stderr
    assert "did you mean 'dapo'?" in unknown.stderr
