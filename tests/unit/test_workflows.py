"""The hosted workflows run scripts of this repository, on every folder of tests."""

import re

import pytest
import yaml

from tests.unit.package_source import ROOT

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def jobs(path) -> dict:
    """Returns a workflow's jobs; YAML reads the key `on` as True."""
    workflow = yaml.safe_load(path.read_text())
    assert set(workflow) >= {"name", True, "permissions", "jobs"}
    return workflow["jobs"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_every_job_is_bounded_and_runs_files_that_exist(path):
    for job in jobs(path).values():
        assert job["timeout-minutes"] > 0
        commands = [step["run"] for step in job["steps"] if "run" in step]
        assert commands
        for name in re.findall(r"(?:bash|python) ((?!-)\S+)", "\n".join(commands)):
            assert (ROOT / name).is_file(), f"{path.name} runs {name}"


def test_every_folder_of_tests_runs_in_the_night_or_on_a_gpu():
    parts = jobs(ROOT / ".github" / "workflows" / "nightly.yml")["full"]["strategy"]["matrix"]["part"]
    folders = {path.parent.name for path in (ROOT / "tests").glob("*/test_*.py")}
    assert folders == {*parts, "gpu"}
