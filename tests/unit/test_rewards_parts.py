"""What a grader may return for parts of a response, which tokens get it, and verl's graders as they are."""

import numpy as np
import pytest

from megagrpo.config.reward import RewardConfig
from megagrpo.rewards.graders.table import check_grader
from megagrpo.rewards.parts import ResponseTokens, read_parts
from megagrpo.rewards.pool import RewardPool
from megagrpo.types import Prompt

PIECES = ["st", "ep 1", "\n", "step", " 2", "\n", "7"]
TEXT = "".join(PIECES)
PROMPT = Prompt(0, "q", (1,), "7", source="math", extra={"level": 3})
GRADERS = '''
def steps(text, answer, factor=1.0):
    """0.1 for each line but the last, 1 for the answer."""
    ends, spans = 0, []
    for line in text.split("\\n")[:-1]:
        spans.append([ends, ends + len(line) + 1, 0.1 * factor])
        ends += len(line) + 1
    return {"score": float(text.split("\\n")[-1] == answer), "spans": spans}

def tokens(text, answer, number=7):
    return [0.5] * number

def outside(text, answer):
    return {"spans": [[0, 999, 1.0]]}

def nothing(text, answer):
    return {"acc": 1.0}

def compute_score(data_source, solution_str, ground_truth, extra_info=None, bonus=0.0):
    score = extra_info["level"] * float(solution_str.endswith(ground_truth)) + bonus
    return {"score": score, "acc": data_source == "math"}

def plain(text, answer, extra_info):
    return float(extra_info["level"])
'''


def response(sampled=None) -> ResponseTokens:
    return ResponseTokens(np.arange(len(PIECES)), sampled, lambda ids: "".join(PIECES[i] for i in ids))


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("graders") / "my_reward.py"
    path.write_text(GRADERS)
    return path


def graded(file, name: str, args=None, tokens=response, **reward):
    entry = reward or {"grader": f"{file}:{name}", "args": args or {}}
    with RewardPool(RewardConfig(**entry, workers=1)) as pool:
        return pool.submit(PROMPT, TEXT, tokens()).result(timeout=60)


def test_a_span_belongs_to_the_token_that_completes_it(file):
    outcome = graded(file, "steps")
    assert outcome.value == pytest.approx(1.2) and outcome.token_rewards == ((2, 0.1), (5, 0.1))


def test_a_tools_token_hands_it_to_the_sampled_token_before(file):
    sampled = np.array([True, True, False, False, True, False, True])
    assert graded(file, "steps", tokens=lambda: response(sampled)).token_rewards == ((1, 0.1), (4, 0.1))


def test_a_list_is_a_reward_for_each_token(file):
    assert graded(file, "tokens").token_rewards == tuple((i, 0.5) for i in range(7))
    outcome = graded(file, "tokens", {"number": 6})
    assert outcome.status == "error" and "6 rewards of tokens for a response of 7" in outcome.detail


def test_weights_and_group_graders(file):
    entries = [{"grader": f"{file}:steps", "weight": 2.0}, {"grader": "exact", "weight": 1.0}]
    outcome = graded(file, "", graders=entries)
    assert outcome.value == pytest.approx(2.4) and outcome.token_rewards == ((2, 0.2), (5, 0.2))
    with RewardPool(RewardConfig(grader=f"{file}:steps", group_grader="rank", workers=1)) as pool:
        first = [pool.submit(PROMPT, text, response()).result(timeout=60) for text in (TEXT, TEXT[:-1] + "8")]
        ranked = pool.submit_group(PROMPT, [TEXT, ""], first).result(timeout=60)
    assert [one.value for one in ranked] == [1.0, 0.0] and not any(one.token_rewards for one in ranked)


@pytest.mark.parametrize(
    ("name", "message"), [("outside", "the span [0, 999]"), ("nothing", "returned a dict with 'acc'")]
)
def test_what_cannot_be_read_is_an_error_of_this_sample(file, name, message):
    outcome = graded(file, name)
    assert outcome.status == "error" and message in outcome.detail


def test_numbers_stay_what_they_are():
    assert read_parts(0.5, "x") == (0.5, (), ())
    with pytest.raises(ValueError, match="the reward nan of a part"):
        read_parts([float("nan")], "x")


def test_verls_compute_score_runs_as_it_is(file):
    assert graded(file, "compute_score", {"bonus": 0.5}).value == 3.5
    assert graded(file, "plain").value == 3.0
    check_grader(f"{file}:compute_score", {"bonus": 1})
    with pytest.raises(ValueError, match="did you mean 'bonus'"):
        check_grader(f"{file}:compute_score", {"bonuss": 1})
