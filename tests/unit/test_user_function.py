"""The one loader of functions that an experiment names; test_rewards_pool.py and test_calculator.py use own ones."""

import hashlib
import json
import pickle
import re
import sys

import pytest

from megagrpo.config.objective.own import own_digest
from megagrpo.config.reward import RewardConfig
from megagrpo.config.rollout import AgentConfig, EnvironmentConfig
from megagrpo.rewards.graders import functions as graders
from megagrpo.rollout.agents import environments, program_worker
from megagrpo.system.user_function import load_function
from tests.experiments import ROOT, python

BUILT_IN = {"join": "os.path:join", "split": "os.path:split"}
OWN = """
LIMIT = 3
def length(text, answer, longest=10):
    return min(len(text), longest) / longest
def __getattr__(name):
    if name != "lazy":
        raise AttributeError(name)
    return length
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A module of the user's, in a folder on PYTHONPATH."""
    (tmp_path / "own_functions.py").write_text(OWN)
    (tmp_path / "broken_functions.py").write_text("raise KeyError('on purpose')")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "script_functions.py").write_text("import sys\nsys.exit(0)")
    yield "own_functions"
    sys.modules.pop("own_functions", None)


def test_built_in_and_own_functions_are_found(own):
    import os.path

    assert load_function("join", BUILT_IN, "a.key") is os.path.join
    for name in ("length", "lazy"):
        assert load_function(f"{own}:{name}", BUILT_IN, "a.key")("ab", "", longest=4) == 0.5
    for table in (graders.BUILT_IN, program_worker.BUILT_IN):
        assert all(callable(load_function(name, table, "a.key")) for name in table)


@pytest.mark.parametrize(
    ("section", "key", "names", "page"),
    [
        (RewardConfig, "grader", [*graders.BUILT_IN, *graders.SERVICES], "graders.md"),
        (RewardConfig, "group_grader", graders.GROUP_BUILT_IN, "data-and-rewards.md"),
        (EnvironmentConfig, "function", environments.BUILT_IN, ""),
        (AgentConfig, "function", program_worker.BUILT_IN, "environments.md"),
    ],
)
def test_all_that_is_built_in_is_named_at_its_key_and_in_the_handbook(section, key, names, page):
    texts = {key: section.model_fields[key].description}
    if page:
        texts[page] = (ROOT / "docs" / page).read_text()
    missing = {place: [name for name in names if f"`{name}`" not in text] for place, text in texts.items()}
    assert not any(missing.values()), f"not named: {missing}"


def test_a_folder_may_have_a_colon(tmp_path):
    """As one that is named after a time."""
    folder = tmp_path / "2026-11-29T10:00"
    folder.mkdir()
    (folder / "grader.py").write_text(OWN)
    name = f"{folder}/grader.py:length"
    assert load_function(name, BUILT_IN, "a.key")("ab", "", longest=4) == 0.5
    sha256 = hashlib.sha256(OWN.encode()).hexdigest()
    assert own_digest("a.key", name) == f"a.key: {name}, sha256 {sha256}"
    (folder / "grader.py").write_text("import functools\nlength = functools.partial(max, 1)\n")
    assert own_digest("a.key", name) != f"a.key: {name}, sha256 {sha256}"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "joni",
            "a.key 'joni' is unknown; did you mean 'join'? (your own is written package.module:function, or file.py:",
        ),
        ("xyz", "a.key 'xyz' is unknown; known: join, split (your own"),
        ("no.such:f", "importing no.such failed: ModuleNotFoundError: No module named 'no'; is its folder"),
        ("no_such.py:f", "no_such.py'; paths begin in the folder where megagrpo starts"),
        ("broken_functions:f", "importing broken_functions failed: KeyError: 'on purpose'"),
        ("script_functions:f", "importing script_functions failed: ImportError: it calls sys.exit: 0"),
        ("own_functions:lenght", "own_functions has no function lenght; did you mean 'length'?"),
        ("own_functions:LIMIT", "own_functions has no function LIMIT"),
    ],
)
def test_a_wrong_name_is_explained(own, name, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        load_function(name, BUILT_IN, "a.key")


def test_a_module_that_is_a_file_here_is_named_as_one(tmp_path, monkeypatch):
    (tmp_path / "my_graders.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    with pytest.raises(ValueError, match=r"'my_graders'; write my_graders.py:length$"):
        load_function("my_graders:length", {}, "a.key")


def test_naming_functions_imports_nothing_heavy():
    modules = "megagrpo.system.user_function, megagrpo.rewards.graders.functions"
    assert python("-c", f"import sys, {modules}; print({{'torch', 'sympy'}} & set(sys.modules))") == "set()"


def test_a_file_is_loaded_once_and_its_module_is_registered(tmp_path):
    """Dataclasses and pickle look their module up; what a grader keeps between calls stays."""
    file = tmp_path / "with_state.py"
    file.write_text(
        "from __future__ import annotations\nimport dataclasses\n\n"
        "@dataclasses.dataclass\nclass Kept:\n    x: int = 0\n\nKEPT = Kept()\n\n"
        "def count(text, answer):\n    KEPT.x += 1\n    return KEPT.x\n"
    )
    count = load_function(f"{file}:count", {}, "a.key")
    assert count("", "") == 1 and load_function(f"{file}:count", {}, "a.key")("", "") == 2
    assert pickle.loads(pickle.dumps(count)) is count
    for taken in ("json", "this"):  # of libraries that are imported by now, and not yet
        other = tmp_path / f"{taken}.py"
        other.write_text(f"import {taken}\ndef f(): return {taken}.__file__\n")
        assert load_function(f"{other}:f", {}, "a.key")() != str(other)
    assert json.dumps(1) == "1"
    file.with_name("broken.py").write_text("import json\n1 / 0\n")
    for _ in range(2):
        with pytest.raises(ValueError, match="division by zero"):
            load_function(f"{tmp_path / 'broken.py'}:f", {}, "a.key")
