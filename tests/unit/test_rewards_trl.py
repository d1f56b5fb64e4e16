"""TRL's reward functions, f(completions, **columns) -> list, as graders."""

import json

import pytest

from megagrpo.check.rules.inputs import before_start
from megagrpo.check.rules.subject import Subject
from megagrpo.config.data import DataConfig
from megagrpo.data.rows import read_rows
from megagrpo.rewards.graders.functions import call_grader, check_grader, required_columns
from megagrpo.rewards.worker import grade
from tests.experiments import experiment

FUNCTIONS = """
import asyncio

def exact(completions, solution, **kwargs):
    return [float(c == s) for c, s in zip(completions, solution)]

def spoken(completions, answer=None, prompts=None, **kwargs):
    return [float(c[0]["content"] == a and c[0]["role"] == "assistant") for c, a in zip(completions, answer)]

def of_the_row(prompts, completions, level, bonus=0.5):
    return [level[0] + bonus + float("1 + 1" in prompts[0])]

def all_columns(completions, **columns):
    return [columns["level"][0] + (columns["solution"] == columns["answer"] == ["2"]) / 2]

def none(completions, **kwargs):
    return [None]

LOOPS = set()

async def later(completions, solution, **kwargs):
    # a client of this module would belong to the first loop
    LOOPS.add(asyncio.get_running_loop())
    assert len(LOOPS) == 1
    return exact(completions, solution)

def short(completions, **kwargs):
    return [1.0, 2.0]

def number(completions, **kwargs):
    return 1.0

def parts(text, answer):
    return [1.0, 0.0]
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("trl") / "trl_rewards.py"
    path.write_text(FUNCTIONS)
    return path


@pytest.mark.parametrize(
    ("name", "args", "chat", "score"),
    [
        ("exact", {}, False, 1.0),
        ("later", {}, False, 1.0),
        ("later", {}, True, 0.0),
        ("spoken", {}, True, 1.0),
        ("of_the_row", {}, False, 4.5),
        ("of_the_row", {"bonus": 2}, False, 6.0),
        ("all_columns", {}, False, 3.5),
    ],
)
def test_the_score_of_one_completion(file, name, args, chat, score):
    check_grader(f"{file}:{name}", args)
    inputs = ("2", "2", "source", {"level": 3}, "What is 1 + 1?", chat)
    assert grade("grade", f"{file}:{name}", args, inputs).scores == (score,)


def test_none_is_no_score(file):
    assert grade("grade", f"{file}:none", {}, ("2", "2", "", {})).status == "none"


def test_arguments_that_it_does_not_take_are_named(file):
    with pytest.raises(ValueError, match="do not fit grader .*of_the_row.*'level_of'"):
        check_grader(f"{file}:of_the_row", {"level_of": 1})


@pytest.mark.parametrize(
    ("name", "detail"), [("short", "[1.0, 2.0], not a list of one"), ("number", "1.0, not a list")]
)
def test_another_value_is_an_error(file, name, detail):
    graded = grade("grade", f"{file}:{name}", {}, ("2", "2", "", {}))
    assert graded.status == "error" and detail in graded.detail


def test_a_list_of_another_grader_stays_rewards_of_its_tokens(file):
    graded = grade("grade", f"{file}:parts", {}, ("2", "2", "", {}))
    assert (graded.scores, graded.tokens) == ((0.0,), (1.0, 0.0))


def test_without_a_prompt_the_function_still_gets_a_list():
    assert call_grader(lambda completions, answer: [len(completions)], {}, ("a", "b", "", {})) == 1


def test_a_column_that_no_key_names_is_refused_and_no_answer(file, tmp_path):
    """Else it would silently be the answer."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "What is 1 + 1?", "final": "2", "level": 3, "topic": "sums", "by": "one"}))
    grader = f"{file}:of_the_row"
    more = {"reward": {"grader": grader}, "data": {"path": str(rows), "answer_key": "final"}}

    def problems(sections=None, **data) -> list[str]:
        subject = Subject(experiment(**more | (sections or {}) | {"data": more["data"] | data}))
        return [rule.text for rule in before_start(subject) if rule.when and "level" in rule.text]

    (said,) = problems()
    assert (
        said == f"{rows}:1: grader {grader} needs a value for level: set data.extra_key to [level], columns of the row"
    )
    assert not problems(extra_key="level") and not problems(extra_key=["level", "topic"])
    assert read_rows(DataConfig(**more["data"], extra_key=["level", "topic"]))[0].extra == {"level": 3, "topic": "sums"}
    warm_up = {"sft": {"path": str(rows), "model": str(tmp_path)}}
    assert not problems(warm_up, extra_key="level")  # its rows have no grader
    twice = [{"grader": grader, "args": {"level": 1}, "name": "one"}, {"grader": grader, "name": "two"}]
    assert not problems({"reward": {"graders": twice}}, grader_key="by")
    rows.write_text(rows.read_text().replace('"one"', json.dumps(grader)))
    assert problems({"reward": {"grader": "exact"}}, grader_key="by") == [said]
    assert required_columns(f"{file}:exact", {}) == required_columns("math", {}) == set()
    assert required_columns(grader, {"level": 1}) == set()
