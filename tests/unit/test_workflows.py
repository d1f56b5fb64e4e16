"""The hosted workflows run scripts of this repository, on every folder of tests."""

import re

import pytest
import yaml

from tests.unit.package_source import ROOT

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))


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


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_every_step_is_pinned_and_every_expression_has_a_value(path):
    for job in jobs(path).values():
        names = {f"matrix.{name}" for name in job.get("strategy", {}).get("matrix", {})}
        said = set(re.findall(r"\$\{\{ *(.*?) *\}\}", yaml.safe_dump(job)))
        assert said <= names | {"github.ref", "github.token"}, f"{path.name} reads {said - names}"
        for step in job["steps"]:
            assert ("run" in step) != ("uses" in step) and step.keys() <= {"name", "run", "uses", "with", "env"}
            assert re.fullmatch(r"actions/[\w-]+@v\d+", step.get("uses", "actions/of-a@v1"))
            for name in step.get("with", {}).get("cache-dependency-path", "").split():
                assert (ROOT / name).is_file(), f"{path.name} caches by {name}"


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_every_issue_form_asks_for_something(path):
    form = yaml.safe_load(path.read_text())
    assert form.keys() == {"name", "description", "body"}
    for field in form["body"]:
        assert field["type"] == "textarea" and field["attributes"].keys() <= {"label", "description", "render"}
    labels = [field["attributes"]["label"] for field in form["body"]]
    assert len(set(labels)) == len(labels)
    assert any(field.get("validations", {}).get("required") for field in form["body"])


@pytest.mark.parametrize("name", ["AGENTS.md", "SECURITY.md", "CONTRIBUTING.md", ".github/pull_request_template.md"])
def test_every_file_that_a_page_for_contributors_names_exists(name):
    text = (ROOT / name).read_text()
    links = re.findall(r"\]\((?!http)([^)#]+)", text)
    paths = re.findall(r"(?<![\w/.])((?:launch|tests|bench|docs|megagrpo|configs)/[\w./-]*[\w/])(?!<|[\w*])", text)
    assert links or paths
    for path in (*links, *paths):
        assert (ROOT / path).exists(), f"{name} names {path}"
