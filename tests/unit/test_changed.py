"""tests/changed.py and launch/test.sh: which tests run for changed files and paths, and what they install."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.changed import nearest_first

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("file", "nearest", "further"),
    [
        ("megagrpo/algo/policy_loss.py", "test_algo_policy_loss.py", "../dist/test_actor_layouts.py"),
        ("megagrpo/tools/convert/shell.py", "test_convert_slime.py", "test_convert_shell.py"),  # through another module
        ("tests/dist/workers/hf_reference.py", "../dist/test_actor_families.py", "../dist/test_draft.py"),  # a program
        ("tests/unit/conftest.py", "test_batch.py", "test_view.py"),
        ("docs/algorithms.md", "test_docs.py", None),  # in quotes
        ("docs/evidence/faults.md", "test_docs.py", None),  # which reads all pages
        ("megagrpo/rollout/group_metrics.py", "test_architecture.py", "test_curriculum.py"),  # which reads all sources
        ("megagrpo/config/presets/dapo.yaml", "test_docs.py", "test_plant.py"),
        ("bench/reports.py", "test_architecture.py", "test_bench.py"),
        ("tests/games.py", "test_architecture.py", None),
    ],
)
def test_tests_of_a_file_are_those_that_reach_it(file: str, nearest: str, further: str | None):
    found = [(ROOT / test).resolve() for test in nearest_first([Path(file)])]
    unit = ROOT / "tests" / "unit"
    assert (unit / nearest).resolve() in found
    assert further is None or found.index((unit / nearest).resolve()) < found.index((unit / further).resolve())
    assert (unit / "test_sql.py") not in found or file.endswith("conftest.py")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["tests/unit/test_one.py::test_x", "-q"], ["install", "-m pytest tests/unit/test_one.py::test_x -q"]),
        (["--full", "tests/e2e"], ["install --with smollm2", "-m pytest tests/e2e"]),
        (["tests"], ["install --with smollm2", "-m pytest tests"]),
        (["-k", "one"], ["install --with smollm2", "lint", "tests/run_parts.py -k one"]),
        (["--changed", "--full"], ["install", "tests/changed.py", "install", "-m pytest tests/unit/test_one.py"]),
        (["--changed", "-q"], ["install", "tests/changed.py", "install", "-m pytest tests/unit/test_one.py -q"]),
        (["--help"], []),
    ],
)
def test_only_what_runs_is_installed(tmp_path: Path, arguments: list[str], said: list[str]):
    for folder in ("launch", ".venv/bin", "tests/unit", "tests/e2e"):
        (tmp_path / folder).mkdir(parents=True)
    for name in ("tests/unit/test_one.py", "said"):
        (tmp_path / name).touch()
    shutil.copy(ROOT / "launch" / "test.sh", tmp_path / "launch")
    programs = {"launch/install.sh": "install", "launch/lint.sh": "lint", ".venv/bin/python": "", "slurmctld": ""}
    for name, word in programs.items():
        program = tmp_path / name
        program.write_text(f'#!/bin/sh\n[ "$1" = -c ] || echo {word} "$@" >>{tmp_path}/said\n')
        program.chmod(0o755)
    with (tmp_path / ".venv" / "bin" / "python").open("a") as python:
        python.write('case "$*" in *changed.py) echo tests/unit/test_one.py; echo tests/e2e/test_run.py;; esac\n')
    for name in ("munged", "ip"):  # with slurmctld: nothing is asked of a package manager
        shutil.copy(tmp_path / "slurmctld", tmp_path / name)
    script = ["bash", str(tmp_path / "launch" / "test.sh"), *arguments]
    done = subprocess.run(script, env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "said").read_text().splitlines()
    assert [line.replace("--durations=25 ", "").replace("-m not slow ", "").strip() for line in lines] == said
    assert ("tests/e2e/test_run.py" in done.stdout) == ("--changed" in arguments)
