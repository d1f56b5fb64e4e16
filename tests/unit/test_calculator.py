"""The calculator, an environment without a reward: what is sent, masked and graded, over real HTTP."""

from contextlib import closing

import pytest
from fake_service import FakeService, running
from sampling import Grader, experiment, sampled, source_of

from examples.laptop.model import character_tokenizer
from megagrpo.config.rollout import EnvironmentConfig
from megagrpo.environments.calculator import Calculator
from megagrpo.rollout.agents.make import make_answering
from megagrpo.rollout.generation import sample_seed
from megagrpo.types import Outcome, Prompt, Sample

TOKENIZER = character_tokenizer("0123456789+-*/=.()<># ")
EOS = TOKENIZER.eos_token_id
PROMPT = Prompt(30, "48/2+1=", tuple(TOKENIZER("48/2+1=")["input_ids"]), "25")
UNREADABLE = ("48/2>", "<48/2> a", "<<1>>", "<9**9>", "<>", "< >")
# what would take long, or has more digits than Python writes, or needs a deep stack
UNREADABLE += ("<1e5000>", "<1e-4000000>", "<1e20000000>", f"<{'1+' * 1200}1>", f"<{'-' * 200_000}1>")
CALCULATOR = {"function": "calculator", "rewards": False, "workers": 1}


def ids(text: str, end: bool = False) -> list[int]:
    return TOKENIZER(text)["input_ids"] + ([EOS] if end else [])


def says(text: str, end: bool = False, reason: str = "stop") -> dict:
    """A turn of the fake engine."""
    logprobs = [[-0.25, token, None] for token in ids(text, end)]
    return {"output_token_logprobs": logprobs, "finish_reason": {"type": reason}}


def respond(*turns: dict, max_tokens: int = 32, **environment) -> tuple[Sample, list[dict], list[str], Outcome]:
    """(the sample, the requests that were sent, the texts that were graded, the outcome)"""
    config = experiment(
        train={"group_size": 1},
        rollout={"request_timeout_s": 200.0, "step_timeout_s": 200.0},
        algorithm={"advantage": {"name": "reinforce_plus_plus"}},
        sampling={
            "max_response_tokens": max_tokens,
            "stop_token_ids": [EOS],
            "stop": [">"],
            "environment": CALCULATOR | environment,
        },
    )
    grader = Grader(lambda text: 2.0)
    decode = lambda tokens: TOKENIZER.decode(tokens, skip_special_tokens=True)  # noqa: E731
    with (
        running(FakeService(version=3, script=list(turns))) as service,
        closing(make_answering(config, TOKENIZER)) as answering,
        closing(source_of(service.control, config, grader, decode, answering=answering)) as source,
    ):
        [group] = sampled(source, 7, [PROMPT], 3)
        assert not service.script, "turns that were never asked for"
        return group.samples[0], service.requests, grader.texts, group.outcomes[0]


def test_two_calls_and_an_answer():
    sample, requests, graded, outcome = respond(says("<48/2>"), says("<24+1>"), says("=25", end=True))
    parts = [(ids("<48/2>"), 1), (ids("24"), 0), (ids("<24+1>"), 1), (ids("25"), 0), (ids("=25", end=True), 1)]
    assert list(sample.token_ids) == [token for part, _ in parts for token in part]
    assert list(sample.loss_mask) == [m for part, m in parts for _ in part]
    assert list(sample.logprobs) == [-0.25 * m for m in sample.loss_mask]
    assert (sample.finish_reason, sample.text, graded) == ("stop", "<48/2>24<24+1>25=25", ["<48/2>24<24+1>25=25"])
    assert (outcome.ok, outcome.value, outcome.end) == (True, 2.0, "done")
    # every turn continues the very ids of the turns before it, within what is left of the limit
    sent = [request["input_ids"][len(PROMPT.token_ids) :] for request in requests]
    assert sent == [[], ids("<48/2>24"), ids("<48/2>24<24+1>25")]
    sampling = [request["sampling_params"] for request in requests]
    assert [s["max_new_tokens"] for s in sampling] == [32, 32 - len(sent[1]), 32 - len(sent[2])]
    assert all(s["stop_token_ids"] == [EOS] and s["stop"] == [">"] for s in sampling)
    assert len({s["sampling_seed"] for s in sampling}) == 3
    assert sampling[0]["sampling_seed"] == sample_seed(0, "train", 7, PROMPT.id, 0)


@pytest.mark.parametrize(
    ("turns", "options", "text", "reason", "end"),
    [
        ([says("=25", end=True)], {}, "=25", "stop", "done"),  # no call at all
        ([says("<48/2>"), says("24", reason="length")], {"max_tokens": 10}, "<48/2>2424", "length", "tokens"),
        ([says("<4(2>")], {}, "<4(2>", "stop", "done"),  # nothing that can be answered
        ([says("<1/3>")], {}, "<1/3>", "stop", "done"),  # no finite decimal
        # 24 would fit, a word after it would not
        ([says("<48/2>")], {"max_tokens": 8}, "<48/2>", "length", "tokens"),
    ],
    ids=["no call", "cut in a later turn", "unreadable call", "no value", "no room for the result"],
)
def test_how_a_response_ends(turns, options, text, reason, end):
    """The end has a metric and the record turns, although graders give the reward."""
    sample, _, _, outcome = respond(*turns, **options)
    assert (sample.text, sample.finish_reason, outcome.end) == (text, reason, end)
    assert len(sample.loss_mask) == len(sample.logprobs) == len(sample.token_ids)


def test_an_environment_that_fails_is_graded_by_nobody():
    _, _, graded, outcome = respond(says("<1>"), function="tests.games:Broken")
    assert graded == [] and (outcome.status, outcome.end) == ("error", "error")
    assert "step raised KeyError: 'on purpose'" in outcome.detail


@pytest.mark.parametrize(
    ("more", "said"), [({"history": "last"}, "needs history all"), ({"credit": "turn"}, "needs rewards true")]
)
def test_graders_score_whole_rollouts_of_one_sample(more, said):
    with pytest.raises(ValueError, match=said):
        EnvironmentConfig(**CALCULATOR, **more)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("<48/2>", "24"),
        ("<1+1>2<(3-5)*.5>", "-1"),
        ("<2.5e3>", "2500"),
        ("< 3+4 >", "7"),
        ("<1+1>.", "2"),  # the stop ends inside a token
        ("<1+1></", "2"),
        *((text, None) for text in UNREADABLE),
    ],
)
def test_calculator(text, said):
    assert Calculator({}, 0).step(text) == (said, 0.0, said is None)
