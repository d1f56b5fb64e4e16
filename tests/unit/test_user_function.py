"""The one loader of functions that an experiment names; a user's own grader and tool, with nothing else touched."""

import asyncio
import re
import subprocess
import sys

import pytest

from examples.laptop.model import character_tokenizer
from megagrpo.config.schema import RewardConfig, ToolConfig
from megagrpo.rewards.graders import table as graders
from megagrpo.rewards.pool import RewardPool
from megagrpo.rollout import tools
from megagrpo.rollout.response import Response
from megagrpo.system import user_function
from megagrpo.system.user_function import load_function
from megagrpo.types import Prompt

BUILT_IN = {"join": "os.path:join", "split": "os.path:split"}
OWN = '''
LIMIT = 3
def length(text, answer, longest=10):
    """A grader: the share of the allowed length that is used."""
    return min(len(text), longest) / longest
def upper(text):
    """A tool: repeats the last call in capitals."""
    return text.rpartition("<")[2].removesuffix(">").upper()
'''


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A module of the user's, in a folder on PYTHONPATH."""
    (tmp_path / "own_functions.py").write_text(OWN)
    (tmp_path / "broken_functions.py").write_text("raise KeyError('on purpose')")
    monkeypatch.syspath_prepend(tmp_path)
    yield "own_functions"
    sys.modules.pop("own_functions", None)


def test_built_in_and_own_functions_are_found(own):
    import os.path

    assert load_function("join", BUILT_IN, "a.key") is os.path.join
    assert load_function(f"{own}:length", BUILT_IN, "a.key")("ab", "", longest=4) == 0.5
    for table in (graders.BUILT_IN, tools.BUILT_IN):
        assert all(callable(load_function(name, table, "a.key")) for name in table)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("joni", "a.key 'joni' is unknown; did you mean 'join'? (your own is written package.module:function)"),
        ("xyz", "a.key 'xyz' is unknown; known: join, split (your own"),
        ("no.such:f", "importing no.such failed: ModuleNotFoundError: No module named 'no'; is its folder"),
        ("broken_functions:f", "importing broken_functions failed: KeyError: 'on purpose'"),
        ("own_functions:lenght", "own_functions has no function lenght; did you mean 'length'?"),
        ("own_functions:LIMIT", "own_functions has no function LIMIT"),
    ],
)
def test_a_wrong_name_is_explained(own, name, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        load_function(name, BUILT_IN, "a.key")


def test_naming_functions_imports_nothing_heavy():
    modules = "megagrpo.system.user_function, megagrpo.rewards.graders.table"
    code = f"import sys, {modules}; print({{'torch', 'sympy'}} & set(sys.modules))"
    folder = user_function.__file__.rpartition("/megagrpo/")[0]
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_a_toy_grader_from_a_file_of_the_user(own):
    config = RewardConfig(grader=f"{own}:length", args={"longest": 4}, workers=1)
    with RewardPool(config) as pool:
        assert pool.submit(Prompt(0, "", (1,), ""), "abc").result(timeout=60).value == 0.75


def test_a_toy_tool_from_a_file_of_the_user(own):
    tokenizer = character_tokenizer("abcABC<>")
    tool = tools.make_tool(ToolConfig(function=f"{own}:upper", call_end=">"), tokenizer)
    turns = [Response(tuple(tokenizer(text)["input_ids"]), (-0.5,) * len(text), "stop", 0) for text in ("a<bc>", "c")]

    async def turn(number, so_far, stops):
        return turns[number]

    response, mask = asyncio.run(tools.respond_with_tool(turn, tool, tokenizer.decode, 20))
    assert tokenizer.decode(response.token_ids) == "a<bc>BCc" and mask.tolist() == [True] * 5 + [False] * 2 + [True]
