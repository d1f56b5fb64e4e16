"""README, docs/ and the project's papers say what is so: links resolve, commands parse, copies equal their sources."""

import ast
import re
import shlex
import tomllib
from pathlib import Path
from urllib.parse import unquote

import pytest
import yaml

from bench.picture import svg
from bench.readme import pages, reference_pages, refreshed
from megagrpo import cli
from megagrpo.config.load import load_config
from megagrpo.models.table import FAMILIES
from tests.experiments import ROOT, documented_metrics, metric_patterns

PAGES = [*pages(), ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
MAX_README_LINES, MAX_PAGE_LINES = 150, 180
# Names in commands that stand for the reader's own; everything else that looks like a file must exist.
EXAMPLES = {
    "CONFIG", "run.sh", "mine.yaml", "out/", "runs/mine", "runs/quickstart", "runs/quickstart/dumps/step_000012",
}  # fmt: skip
NODE_SCRIPTS = {"launch/rollout_node.sh": "serve", "launch/torchrun_node.sh": "train"}  # they hand their words on
SCRIPTS = re.compile(r"(?:launch|slurm)/\w+\.(?:sh|sbatch)")
FOLDERS = r"(?:megagrpo|docs|tests|bench|launch|slurm|configs|\.ci)/"

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def fenced(page: Path, language: str) -> list[str]:
    """The blocks of a page in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    prose = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^#+ (.*)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def commands(page: Path) -> list[list[str]]:
    """The words after `megagrpo` of every command on a page, in shell blocks and inline."""
    prose = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    lines = [line for block in fenced(page, "bash") for line in block.splitlines()]
    inline = [text for text in re.findall(r"`(megagrpo [^`]+)`", prose) if "COMMAND" not in text]
    found = []
    for line in [*lines, *inline]:
        words = shlex.split(re.split(r" [|>] ", line)[0], comments=True)  # without where the output goes
        if words[:1] == ["megagrpo"]:
            found.append(words[1:])
        elif words and words[0] in NODE_SCRIPTS:
            found.append([NODE_SCRIPTS[words[0]], *words[1:]])
    return found


@every_page
def test_links_resolve_and_named_files_exist(page):
    for text, target in re.findall(r"\[([^\]]+)\]\(([^)\s]+)\)", page.read_text()):
        if "://" in target or target.startswith("../../actions/"):  # GitHub's picture of a workflow
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"[{text}]({target})"
        assert not anchor or anchor in anchors(file), f"[{text}]({target}): anchors are {sorted(anchors(file))}"
    for name in re.findall(rf"`({FOLDERS}[\w./-]*)`", page.read_text()):
        assert (ROOT / name).exists(), name


@every_page
def test_commands_parse_and_scripts_exist(page):
    for script in (script for block in fenced(page, "bash") for script in SCRIPTS.findall(block)):
        assert (ROOT / script).is_file(), script
    for words in commands(page):
        if len(words) == 1:  # a command in running text
            with pytest.raises(SystemExit, match="0"):
                cli._parser(words).parse_args([*words, "--help"])
            continue
        args = cli._parser(words).parse_args(words)  # exits on an unknown command or option
        for name in {vars(args).get(key) for key in ("config", "run_dir", "dump", "output")} - {None}:
            assert str(name) in EXAMPLES or (ROOT / name).exists(), f"megagrpo {shlex.join(words)}: no {name}"


@every_page
def test_snippets_are_valid(page, tmp_path):
    for block in fenced(page, "yaml"):
        rest = {"name": "n", "output_dir": "o", "model": {"path": "m"}, "data": {"path": "d.jsonl"}}
        (tmp_path / "experiment.yaml").write_text(yaml.safe_dump(rest | yaml.safe_load(block)))
        load_config(tmp_path / "experiment.yaml")
    for block in fenced(page, "python"):
        if block.startswith("def "):  # a grader
            space: dict = {}
            exec(block, space)
            (grade,) = (value for value in space.values() if callable(value))
            assert (grade("so 3.5", "3.51", tolerance=0.1), grade("so 3.5", "3.51")) == (1.0, 0.0)


def test_a_description_of_a_key_stands_without_its_heading():
    page = (ROOT / "docs" / "reference" / "configuration.md").read_text()
    rows = re.findall(r"^\| (`\w+`.*?) \| .*? \| (.*) \|$", page, re.MULTILINE)
    assert len(rows) > 200
    assert not [row for row in rows if re.match("(Of|Its|Their|Instead)\\b", row[1])]


def test_pages_are_short_and_reachable():
    """At most 180 lines but the generated ones, 150 for README; and every page is linked from the index."""
    assert len((ROOT / "README.md").read_text().splitlines()) <= MAX_README_LINES
    generated = {"configuration.md", "rules.md", "cli.md", "names.md"}
    pages_of_docs = [page for page in pages() if page.name != "README.md"]
    lengths = {page.name: len(page.read_text().splitlines()) for page in pages_of_docs if page.name not in generated}
    assert not {name: length for name, length in lengths.items() if length > MAX_PAGE_LINES}
    index = ROOT / "docs" / "index.md"
    targets = re.findall(r"\]\(([^)#\s]+)", index.read_text())
    linked = {(index.parent / target).resolve() for target in targets}
    assert {page.resolve() for page in pages_of_docs} - linked == {index.resolve()}


def test_badges_say_what_the_repository_holds():
    badges = re.findall(r"\[!\[(.*?)\]\((.*?)\)\]\((.*?)\)", (ROOT / "README.md").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    prefix = "Programming Language :: Python :: "
    versions = [name.removeprefix(prefix) for name in project["classifiers"] if name.startswith(f"{prefix}3.")]
    shown = {target: unquote(image) for _, image, target in badges}
    workflow = ".github/workflows/cpu.yml"
    assert shown.pop(workflow) == "../../actions/workflows/cpu.yml/badge.svg" and (ROOT / workflow).is_file()
    assert f"/Python-{'_|_'.join(versions)}-" in shown.pop("pyproject.toml")
    assert f"/License-{project['license'].replace('-', '--')}-" in shown.pop("LICENSE") and not shown
    assert (ROOT / "LICENSE").is_file()


def test_pages_have_one_width():
    """Prose ends at 120 columns; tables, blocks of code and formulas, and copied parts are as wide as they are."""
    for page in pages():
        if page.parent.name == "reference":
            continue
        prose = re.sub(r"^ *```.*?^ *```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        prose = re.sub(r"^<!-- \S+ -->$.*?^<!-- end -->$", "", prose, flags=re.DOTALL | re.MULTILINE)
        for line in prose.splitlines():
            if not line.startswith(("|", "    ", "<!--", "![", "[![")):
                assert len(line) <= 120, f"{page.name}: {line}"


def test_the_generated_reference_is_fresh():
    for name, text in reference_pages().items():
        assert (ROOT / "docs" / "reference" / name).read_text() == text, "python bench/readme.py"
    assert (ROOT / "docs" / "picture.svg").read_text() == svg(), "python bench/readme.py"


def test_every_metric_is_explained():
    """Every name of a metric in the package's source matches a row of docs/reference/metrics.md."""
    rows = documented_metrics()
    groups = {row.partition("/")[0] for row in rows}
    patterns = metric_patterns()
    sources = "\n".join(path.read_text() for path in (ROOT / "megagrpo").rglob("*.py"))
    names = {name for name in re.findall(r"f?\"([a-z_]+/[a-z_0-9{}]+)\"", sources) if name.partition("/")[0] in groups}
    assert len(names) > 40
    for name in sorted(names):  # of f"loss/{name}" at least one row has the prefix
        prefix, is_family, _ = name.partition("{")
        explained = (row.startswith(prefix) for row in rows) if is_family else (p.fullmatch(name) for p in patterns)
        assert any(explained), name


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_copies_equal_their_sources(page):
    assert refreshed(page.read_text()) == page.read_text(), "`python bench/readme.py` copies them"


def test_the_loop_in_the_readme_is_the_one_that_runs():
    """Line by line, whatever bench/readme.py believes: nothing of train()'s loop is left out or changed."""
    shown = re.search(r"<!-- loop -->\n```python\n(.*?)\n```", (ROOT / "README.md").read_text(), re.DOTALL)[1]
    source = (ROOT / "megagrpo" / "loop" / "train.py").read_text()
    train = next(node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef) and node.name == "train")
    loop = next(index for index, node in enumerate(train.body) if isinstance(node, ast.For))
    assert ast.dump(ast.parse(shown)) == ast.dump(ast.Module(body=train.body[loop:], type_ignores=[]))
    assert all(f"    {line}" in source.splitlines() for line in shown.splitlines())


def test_the_table_of_files_to_open_counts_them():
    """In docs/architecture.md: the number of files touched is the number of the package's files and folders named."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    rows = re.findall(r"^\| (?:read|find|add) .*$", page, re.MULTILINE)
    assert len(rows) >= 9
    for row in rows:
        _, _, files, touched, _ = row.split("|")
        assert len(re.findall(rf"`{FOLDERS}", files)) == int(touched), row


def test_the_list_of_model_types_is_whole():
    (listed,) = re.findall(r"supported `model_type`: (.*?)\n\n", (ROOT / "docs" / "models.md").read_text(), re.DOTALL)
    missing = {name for name in FAMILIES if f"`{name}`" not in listed and not name.endswith("_text")}
    assert not missing, "those ending in _text are text parts of others"


def test_quoted_messages_are_the_programs():
    """Messages in the first column of docs/troubleshooting.md are texts of the program; `...` stands
    for what they put in."""
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    texts = [
        node.value
        for path in (ROOT / "megagrpo").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    messages = re.findall(r"^\| `([^`]+)`", page, re.MULTILINE)
    assert len(messages) >= 25
    for part in (part.strip() for message in messages for part in message.split("...")):
        assert any(part in text for text in texts), part


def test_measured_tables_are_shown_or_linked_and_figures_in_prose_are_measured():
    text = "\n".join(page.read_text() for page in pages())
    shown = set(re.findall(r"bench/results/(\w+)\.md", text))
    names = "learning_quickstart learning_quickstart_arithmetic learning_gsm8k_calc faults soak "
    assert set(f"{names}presets certificates layouts".split()) <= shown
    text = (ROOT / "README.md").read_text().replace("\n", " ")
    before, after = re.search(r"Seed 0 of the quickstart.*? from (0\.\d+) to (0\.\d+);", text).groups()
    assert f"| seed 0 | {before} | {after} |" in (ROOT / "bench/results/learning_quickstart.md").read_text()
    ranges = re.search(r"from (0\.\d+)-(0\.\d+) to (0\.\d+)-(0\.\d+) under three", text).groups()
    rows = (ROOT / "bench/results/learning_quickstart_arithmetic.md").read_text().splitlines()[2:]
    starts, ends = zip(*(row.split(" | ")[1:3] for row in rows if row.startswith("| seed")), strict=True)
    assert ranges == (min(starts), max(starts), min(ends), max(ends))


def test_papers_agree_and_commit_hooks_fetch_nothing():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["license"] == "Apache-2.0" and "Apache License" in (ROOT / "LICENSE").read_text()
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["license"] == project["license"] and citation["title"] == project["name"]
    version = re.search(r'__version__ = "(.*)"', (ROOT / "megagrpo" / "__init__.py").read_text())[1]
    assert citation["version"] == version and version in (ROOT / "CHANGELOG.md").read_text()
    repositories = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert [repository["repo"] for repository in repositories] == ["local"]
    assert {hook["language"] for repository in repositories for hook in repository["hooks"]} == {"system"}
