"""Reasoning apart from the answer: for built-in graders and environments, and the tool calls of agents."""

import asyncio
import json
import string
import sys
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hostile_services import serving

from examples.laptop.model import character_tokenizer
from megagrpo.config.data import DataConfig
from megagrpo.config.rollout import AgentConfig, EnvironmentConfig
from megagrpo.config.schema import RewardConfig
from megagrpo.data.texts import reasoning_end
from megagrpo.rewards.graders.functions import BUILT_IN as GRADERS
from megagrpo.rewards.graders.functions import SERVICES
from megagrpo.rewards.pool import RewardPool
from megagrpo.rollout.agents.answering import RolloutTask
from megagrpo.rollout.agents.conversation import Conversation
from megagrpo.rollout.agents.environments import BUILT_IN as ENVIRONMENTS
from megagrpo.rollout.agents.environments import Environments
from megagrpo.rollout.agents.renderer import Renderer
from megagrpo.rollout.response import Response
from megagrpo.sandbox.sandbox import isolation
from megagrpo.types import Outcome, Prompt
from tests.experiments import experiment

END = "</think>"
SERVER = f"{sys.executable} {Path(__file__).parents[1] / 'mcp_server.py'}"
ADD = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'
isolated = pytest.mark.skipif(bool(isolation()), reason=f"no namespaces here: {isolation()}")
TESTS = json.dumps({"inputs": ["\n"], "outputs": ["5\n"]})


@pytest.mark.parametrize(
    ("prompt", "response", "end", "answer"),
    [
        ("q", "<think>a</think> 5", END, " 5"),
        ("q<think>\n", "a</think> 5", END, " 5"),  # the template has begun it
        ("q<think>\n", "5", END, ""),
        ("q", "<think>a 5", END, ""),
        ("q", "a 5", END, "a 5"),  # it did not think
        ("q<think>\n\n</think>\n\n", "a 5", END, "a 5"),  # the template has thought for it
        ("q", "<think>a</think><tool/>4<think>b</think>5", END, "5"),
        ("q", "<think>a</think><tool/>4<think>b 5", END, ""),  # of two turns, the second is cut
        ("q", "a</think>b</think>5", END, "5"),
        ("q<think>", "a 5", "", "a 5"),
        ("q", "a Answer: 5", "Answer:", " 5"),
        ("q", "a 5", "Answer:", ""),
    ],
)
def test_the_answer_is_what_follows_the_reasoning(prompt, response, end, answer):
    assert Prompt(0, prompt, (), "").answer_in(response, end) == answer


def right(grader: str) -> str:
    """A response that a grader scores with 1."""
    forms = {"gsm8k": "#### 5", "math": r"\boxed{5}", "math_dapo": "Answer: 5", "code": "```python\nprint(5)\n```"}
    return forms.get(grader, "5")


@pytest.mark.parametrize(
    "grader", [pytest.param("code", marks=isolated), *sorted(GRADERS.keys() - {"code", "format"}), "judge"]
)
def test_every_grader_of_answers_reads_no_reasoning(grader, tmp_path):
    (tmp_path / "judge.txt").write_text("{response}")

    def judged(body: dict) -> dict:
        score = float(body["messages"][0]["content"].strip() == "5")
        return {"choices": [{"message": {"content": f"Score: {score}"}}]}

    with serving(judged, []) as server:
        args = {}
        if grader == "judge":
            args = {"url": server.url, "model": "m", "prompt_file": str(tmp_path / "judge.txt")}
        prompt = Prompt(0, "q<think>\n", (), TESTS if grader == "code" else "5")
        good, wrong = right(grader), right(grader).replace("5", "4")
        responses = [f"{wrong}{END}{good}", f"{good}{END}{wrong}", good]
        config = RewardConfig(grader=grader, args=args, workers=1, timeout_s=60)
        with RewardPool(config, reasoning_end=END) as pool:
            outcomes = [pool.submit(prompt, text).result(100) for text in responses]
    assert all(outcome.ok for outcome in outcomes), outcomes
    assert [outcome.value > 0 for outcome in outcomes] == [True, False, False], "the last is not closed"


def test_format_the_users_service_and_function_read_the_whole_response(tmp_path):
    (tmp_path / "mine.py").write_text("def whole(text, answer):\n    return float(len(text))\n")
    text, prompt = "a</think> <answer>5</answer>", Prompt(0, "q<think>\n", (), "5")
    with serving(lambda body: {"scores": [len(body["samples"][0]["response"])]}, []) as server:
        graders = [{"grader": "format"}, {"grader": "http", "args": {"url": server.url}}]
        graders.append({"grader": f"{tmp_path}/mine.py:whole"})
        with RewardPool(RewardConfig(graders=graders, workers=1), reasoning_end=END) as pool:
            assert pool.submit(prompt, text).result(100).value == 1 + 2 * len(text)
    assert SERVICES == ("http", "judge")


PYTHON = ({"grader": "exact"}, {})
TOKENIZER = character_tokenizer(string.printable)


def played(environment: EnvironmentConfig, row: dict, *turns: str) -> tuple[Outcome, str]:
    """(the outcome of a rollout whose model says these turns, its whole text)"""
    left = list(turns)
    decode = lambda ids: TOKENIZER.decode(ids, skip_special_tokens=True)  # noqa: E731

    async def turn(number: int, context: np.ndarray, max_tokens: int, known: int) -> Response:
        ids = [*TOKENIZER(left.pop(0))["input_ids"], TOKENIZER.eos_token_id]
        return Response(ids, np.zeros(len(ids)), "stop", 0)

    prompt = Prompt(0, "q<think>\n", (5,), **row)
    task = RolloutTask(prompt, lambda whose: 0, turn, 4000, decode)
    renderer = Renderer(TOKENIZER, DataConfig(path="d", max_prompt_tokens=4000), True, END)
    with closing(Environments(environment, renderer)) as environments:
        parts, outcome = asyncio.run(environments.rollout(task))
    assert not left, "turns that were never asked for"
    return outcome, decode(parts[0].response.token_ids)


@pytest.mark.parametrize(
    ("function", "args", "row", "turns", "reward"),
    [
        ("calculator", {}, {}, ["<1+1>", "a</think><1+2>", "</think>3"], None),
        pytest.param("python", *PYTHON, ["```python\nprint(4)\n```</think>5"], 1.0, marks=isolated),
        pytest.param("python", *PYTHON, ["```python\nprint(4)\n``` 5"], 0.0, marks=isolated),
        ("mcp", {"grader": "exact", "command": SERVER}, {}, [f"{ADD}</think>{ADD}", f"{ADD}</think>5"], 1.0),
        ("mcp", {"grader": "exact", "command": SERVER}, {}, [f"{ADD} 5"], 0.0),
        (
            "sql",
            {},
            {"answer": "select x from t", "extra": {"database": "create table t (x); insert into t values (7);"}},
            ["select 0 from t</think>select x from t"],
            1.0,
        ),
        (
            "gymnasium",
            {"id": "FrozenLake-v1", "actions": "left down right up", "is_slippery": False},
            {"extra": {"desc": ["SG"]}},
            ["down</think>right"],
            1.0,
        ),
    ],
)
def test_every_environment_takes_calls_and_answers_behind_the_reasoning(function, args, row, turns, reward):
    for name in {"gymnasium": ["gymnasium"], "mcp": ["mcp"]}.get(function, []):
        pytest.importorskip(name)
    config = EnvironmentConfig(function=function, args=args, workers=1, rewards=reward is not None)
    row = {"answer": "5"} | row
    if function == "calculator":  # its first turn is all reasoning: a call there is none
        outcome, text = played(config, row, turns[0])
        assert outcome == Outcome("", end="done") and text == turns[0]
        turns = turns[1:]
    outcome, text = played(config, row, *turns)
    assert text.startswith(turns[0]), "records keep the reasoning"
    if reward is None:
        assert outcome == Outcome("", end="done") and text == "".join((turns[0], "3", turns[1]))
    else:
        assert (outcome.ok, outcome.value, outcome.end) == (True, reward, "done"), outcome


def test_every_environment_was_tried():
    tried = {"calculator", "python", "mcp", "sql", "gymnasium"}
    assert ENVIRONMENTS.keys() - tried == {"openenv"}, "whose turns are texts for a server, as gymnasium's"


def test_your_own_environment_reads_the_whole_turn():
    config = EnvironmentConfig(function="tests.games:Sums", workers=1)
    outcome, _ = played(config, {"answer": "5"}, "</think>", "1", "1")
    assert outcome.value == 2.0 and outcome.turn_rewards[0] == 0.0


@pytest.mark.parametrize(
    ("function", "parser", "prompt", "text", "parsed", "content"),
    [
        ("a:b", "", "q<think>\n", "a1</think>2", "2", "a1</think>2."),
        ("a:b", "", "q<think>\n", "a12", "", "a12."),
        ("a:b", "", "q", "12", "12", "12."),
        ("a:b", "qwen3", "q<think>\n", "a1</think>2", "<think>a1</think>2", "a1</think>2."),
        ("a:b", "qwen3", "q", "<think>a1</think>2", "<think>a1</think>2", "<think>a1</think>2."),
        # a draft of a command is no command
        ("harbor", "", "q<think>\n", "```bash\nrm x\n```</think>2", "2", "2."),
        ("harbor", "", "q<think>\n", "```bash\nrm x\n```", "", "."),
        ("harbor", "", "q", "2", "2", "2."),
    ],
)
def test_parsers_of_agents_find_no_call_in_the_reasoning(function, parser, prompt, text, parsed, content):
    seen = []

    async def parse(text: str, tools, prefix: str) -> dict:
        seen.append(text)
        return {"role": "assistant", "content": f"{text}."}

    async def turn(*_: object) -> Response:
        return Response((5,), (0.0,), "stop", 0)

    async def say() -> dict:
        task = RolloutTask(Prompt(0, prompt, (), ""), lambda whose: 0, turn, 100, lambda ids: text)
        renderer = Renderer(TOKENIZER, DataConfig(path="d"), True, END)
        config = AgentConfig(function=function, tool_parser="qwen25", reasoning_parser=parser)
        talk, asked = Conversation(config, renderer, task, parse), {"role": "user", "content": "q"}
        said = await talk.say([asked])
        assert (await talk.say([asked, said.message, asked])).before is said, "its ids continue"
        return said.message

    assert asyncio.run(say())["content"] == content and seen == [parsed] * 2


@pytest.mark.parametrize(
    ("sampling", "template", "special", "end"),
    [
        ({}, "{{ '<think>' }}{{ x.split('</think>') }}", [], END),
        ({}, "{{ x }}", [], ""),
        ({}, None, [], ""),
        ({"reasoning_end": None}, "</think>", [], ""),
        ({"reasoning_end": "[/THINK]"}, None, [], "[/THINK]"),
        ({"skip_special_tokens": True}, "</think>", [END], ""),
        ({"skip_special_tokens": True}, "</think>", [], END),
    ],
)
def test_by_default_the_chat_template_says_what_ends_reasoning(sampling, template, special, end):
    config = experiment(data={"path": "d", "chat_template": template is not None}, sampling=sampling)
    tokenizer = SimpleNamespace(chat_template=template, all_special_tokens=special)
    assert reasoning_end(config, tokenizer) == end


def test_an_end_that_no_text_can_have_is_refused():
    config = experiment(sampling={"reasoning_end": END, "skip_special_tokens": True})
    tokenizer = SimpleNamespace(chat_template=None, all_special_tokens=[END])
    with pytest.raises(ValueError, match="reasoning_end '</think>' is a special token, which"):
        reasoning_end(config, tokenizer)
