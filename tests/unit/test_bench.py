"""What programs in bench/ import from this repository exists: no other test runs most of them. Some
of them run at a tiny size."""

import ast
import inspect
import json
import runpy
from pathlib import Path

import pytest

from megagrpo.config.libraries import REFUSED, refusal
from megagrpo.weights.engines.fleet import EngineRegistry
from tests.experiments import ROOT, python

# Programs put their own folder and that of the engine tests on the path.
FOLDERS = (ROOT, ROOT / "bench", ROOT / "tests" / "e2e")
FILES = [*sorted((ROOT / "bench").rglob("*.py")), *sorted((ROOT / "tests" / "e2e").glob("*.py"))]


def place_of(module: str) -> Path | None:
    """The file or folder of a module of this repository, None for other people's modules."""
    parts = module.split(".")
    for folder in FOLDERS:
        path = folder.joinpath(*parts)
        if path.with_suffix(".py").is_file():
            return path.with_suffix(".py")
        if path.is_dir():
            return path
    is_ours = any((folder / parts[0]).is_dir() for folder in FOLDERS)
    assert not is_ours, f"no module {module}"
    return None


def names_in(place: Path) -> set[str]:
    """What can be imported from a module or a folder."""
    inside = {path.stem for path in place.glob("*")}
    file = place / "__init__.py" if place.is_dir() else place
    tree = ast.parse(file.read_text()) if file.is_file() else ast.Module([], [])
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            inside.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            inside.update(alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            inside.add(node.id)
    return inside


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_own_imports_exist(file):
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and (place := place_of(node.module)):
            missing = {alias.name for alias in node.names} - names_in(place)
            assert not missing, f"line {node.lineno}: {node.module} has no {missing}"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                place_of(alias.name)


def test_the_engines_registry_of_the_exchange_answers_what_a_fleet_asks():
    registry = runpy.run_path(str(ROOT / "bench" / "exchange_ranks.py"))["Registry"]
    for name, method in vars(EngineRegistry).items():
        if inspect.isfunction(method) and not name.startswith("_"):
            asked = inspect.signature(method).parameters
            assert inspect.signature(getattr(registry, name)).parameters == asked, name


def test_no_setting_that_the_fuzz_draws_as_right_is_refused_by_its_name(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    right = runpy.run_path(str(ROOT / "bench" / "fuzz.py"))["SPECIAL"]
    drawn = [(path, name) for path in REFUSED for value in right[".".join(path)] for name in value]
    assert [each for each in drawn if refusal(*each)] == []


def test_a_step_at_scale_runs_at_a_tiny_one(tmp_path):
    size = ("--scale", "0.002", "--tokens", "64")
    program = ROOT / "bench" / "step_at_scale.py"
    python(program, "--cases", "1,000 engines", *size, "--folder", tmp_path)
    (row,) = json.loads((tmp_path / "step_at_scale_engines.json").read_text())["rows"]
    assert (row["engines"], row["requests"], row["tokens"]) == (2, 16, 16 * 64)
    assert 0 < row["in_flight"] <= 16
    assert "| 2 | now" in (tmp_path / "step_at_scale_engines.md").read_text()


def test_the_table_beside_peers_has_our_figures_and_why_others_are_missing(tmp_path):
    program = ROOT / "bench" / "peers.py"
    python(program, tmp_path, "--own", "--scale", "0.002", "--repeats", "1", "--results", tmp_path)
    rows = json.loads((tmp_path / "peers.json").read_text())["rows"]
    assert {row["side"].split(" ")[0] for row in rows} == {"megagrpo", "slime", "verl", "TRL"}
    for row in rows:
        if row["side"] == "megagrpo":
            assert row["seconds"] > 0, row
        else:
            assert row["seconds"] > 0 or "is not installed" in row["problem"], row
    # slime's way is in this repository, and reads what we read
    (slime,) = (row for row in rows if row["side"] == "slime")
    assert slime["difference"] == 0
