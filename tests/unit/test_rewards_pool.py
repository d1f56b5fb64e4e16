"""The reward pool in real processes: graders that raise, hang, die or return nonsense; several; group graders."""

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from megagrpo.algo.statistics import alone
from megagrpo.check.problems import preflight
from megagrpo.config.schema import RewardConfig
from megagrpo.monitor.metrics import Metrics
from megagrpo.monitor.rollout_log import RolloutLog
from megagrpo.rewards.graders.functions import load_grader
from megagrpo.rewards.group_graders import distinct, rank
from megagrpo.rewards.pool import RewardPool
from megagrpo.rollout.group_metrics import grader_metrics
from megagrpo.system.processes import is_live
from megagrpo.system.run_folder import RunFolder
from megagrpo.types import Outcome, Prompt, RolloutGroup, Sample
from tests.experiments import experiment, until

GRADERS = """
import math, os, re, signal, subprocess, time
def good(text, answer): return len(text)
def flag(text, answer): return text == answer
def raises(text, answer): raise KeyError("no such thing")
def nan(text, answer): return math.nan
def inf(text, answer): return -math.inf
def none(text, answer): return None
def words(text, answer): return "1.0"
def hangs(text, answer): time.sleep(3600)
def hangs_holding_the_lock(text, answer): return re.fullmatch("(a+)+b", "a" * 40) is None
def ignores_signals(text, answer):
    for s in (signal.SIGTERM, signal.SIGINT): signal.signal(s, signal.SIG_IGN)
    while True: pass
def dies(text, answer): os.kill(os.getpid(), signal.SIGKILL)
def leaves(text, answer): os._exit(3)
def prints(text, answer):
    print("noise on stdout"); os.write(1, b"more noise")
    return 1.0
def child_then_hang(text, answer):
    child = subprocess.Popen(["sleep", "3600"])
    open(text, "w").write(str(child.pid))
    time.sleep(3600)
def by_text(text, answer):
    if text == "hang": time.sleep(3600)
    if text == "die": os._exit(1)
    if text == "raise": raise ValueError("bad text")
    return float(text)
def scaled(text, answer, scale): return scale * len(text)
def length(text, answer, scale=1.0): return scale * len(text)
def picky(text, answer):
    if text == "bad": raise ValueError("on purpose")
    return 1.0, f"saw {text}"
def minus_mean(texts, answer, scores, factor=1.0):
    mean = sum(scores) / len(scores)
    return [factor * (score - mean) for score in scores]
def too_few(texts, answer, scores): return scores[1:]
def hangs_on_groups(texts, answer, scores): time.sleep(3600)
"""
SEVERAL = [
    {"grader": "own_graders:length", "args": {"scale": 0.5}, "weight": 2.0},
    {"grader": "own_graders:picky", "name": "taste", "weight": 0.25},
]


@pytest.fixture(autouse=True)
def own_module(tmp_path, monkeypatch):
    (tmp_path / "own_graders.py").write_text(GRADERS)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("own_graders", None)


def prompt(answer="a", grader=None) -> Prompt:
    return Prompt(id=0, text="q", token_ids=(1,), answer=answer, grader=grader)


def graded(
    graders: str | list[dict], prompts_and_texts: Sequence[tuple[Prompt, str]], workers=1, **options
) -> list[Outcome]:
    """What a pool makes of these responses. graders: one of the module above, or all of them."""
    named = {"grader": f"own_graders:{graders}"} if isinstance(graders, str) else {"graders": graders}
    with RewardPool(RewardConfig(**named, workers=workers, **{"timeout_s": 1.0, **options})) as pool:
        return [future.result(timeout=120) for future in [pool.submit(*each) for each in prompts_and_texts]]


def grade(name: str, text: str = "abc", answer: str = "", **options) -> Outcome:
    return graded(name, [(prompt(answer), text)], **options)[0]


@pytest.mark.parametrize(
    "name, text, answer, value, said",
    [
        ("good", "abc", "", 3.0, ""),
        ("flag", "abc", "", 0.0, ""),
        ("prints", "abc", "", 1.0, ""),
        pytest.param("good", "é\n\u2028\ud800" * 100_000, "", 400_000, "", id="long and odd"),
        ("flag", "a\r\n\0", "a\r\n\0", 1.0, ""),
        ("raises", "abc", "", None, "KeyError: 'no such thing'"),
        ("nan", "abc", "", None, "nan"),
        ("inf", "abc", "", None, "-inf"),
        ("none", "abc", "", None, "returned None, no score"),
        ("words", "abc", "", None, "'1.0' (str)"),
        ("dies", "abc", "", None, "died: exit code -9"),
        ("leaves", "abc", "", None, "died: exit code 3"),
    ],
)
def test_a_finite_number_is_a_score_and_anything_else_an_error_and_not_a_zero(name, text, answer, value, said):
    outcome = grade(name, text, answer)
    assert (outcome.status, outcome.ok) == (("error", False) if value is None else ("score", True))
    assert said in outcome.detail and (name in outcome.detail if value is None else outcome.value == value)


@pytest.mark.parametrize("name", ["hangs", "hangs_holding_the_lock", "ignores_signals"])
def test_a_hang_ends_as_timeout_soon_after_the_limit(name):
    with RewardPool(RewardConfig(grader=f"own_graders:{name}", workers=1, timeout_s=0.5)) as pool:
        start = time.monotonic()
        outcome = pool.submit(prompt(), "").result(timeout=60)
        seconds = time.monotonic() - start
    assert outcome.status == "timeout" and "0.5 s" in outcome.detail
    assert 0.5 <= seconds < 10


def test_a_pool_survives_bad_responses_and_keeps_every_outcome_with_its_response():
    texts = ["1", "hang", "2", "die", "3", "raise", "nan", "4", "hang", "5"]
    outcomes = graded("by_text", [(prompt(), text) for text in texts], workers=2, timeout_s=0.5)
    assert [o.value for o in outcomes if o.ok] == [1, 2, 3, 4, 5]
    assert [o.status for o in outcomes if not o.ok] == ["timeout", "error", "error", "error", "timeout"]


def test_neither_a_restart_nor_the_import_of_a_rows_grader_counts_against_a_response(tmp_path):
    (tmp_path / "own_graders.py").write_text("import time\ntime.sleep(1.5)\n" + GRADERS)
    outcomes = graded("by_text", [(prompt(), text) for text in ("hang", "7")], timeout_s=0.5)
    assert [outcome.status for outcome in outcomes] == ["timeout", "score"]
    own = prompt(grader="own_graders:by_text")
    assert graded([{"grader": "exact"}], [(own, "7")], timeout_s=0.5)[0].status == "score"


def test_close_leaves_no_process_and_no_waiter():
    others = psutil.Process().children()  # of other tests
    pool = RewardPool(RewardConfig(grader="own_graders:by_text", workers=2, timeout_s=60.0))
    workers = [child for child in psutil.Process().children() if child not in others and is_live(child)]
    running = [pool.submit(prompt(), "hang") for _ in range(2)]
    waiting = pool.submit(prompt(), "1")
    time.sleep(0.3)
    assert len(workers) == 2
    start = time.monotonic()
    pool.close()
    pool.close()
    assert time.monotonic() - start < 5
    assert not any(map(is_live, workers))
    assert all(f.result(timeout=5).status == "error" for f in [*running, waiting])


def test_what_a_hung_grader_started_dies_with_it(tmp_path):
    assert grade("child_then_hang", text=str(tmp_path / "pid")).status == "timeout"
    child = int((tmp_path / "pid").read_text())
    until(lambda: not psutil.pid_exists(child) or not is_live(psutil.Process(child)), 5)


def test_workers_end_when_the_trainer_is_killed(tmp_path):
    """SIGKILL runs no clean-up: the workers, idle or hung with the interpreter lock held, must notice by themselves."""
    code = f"""
import psutil, sys, time
sys.path.insert(0, {str(tmp_path)!r})
from megagrpo.config.schema import RewardConfig
from megagrpo.rewards.pool import RewardPool
from megagrpo.types import Prompt
pool = RewardPool(RewardConfig(grader="own_graders:hangs_holding_the_lock", workers=2, timeout_s=0.5))
print(*(child.pid for child in psutil.Process().children()), flush=True)
pool.submit(Prompt(0, "", (1,), ""), "x")
time.sleep(60)
"""
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=env)
    workers = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
    assert len(workers) == 2
    time.sleep(0.2)
    parent.kill()
    parent.communicate()
    until(lambda: not any(map(is_live, workers)), 20)


def test_options_reach_the_grader_and_a_prompt_may_name_another():
    each = [(prompt(), "ab"), (prompt("x", grader="exact"), " x ")]
    assert [outcome.value for outcome in graded("scaled", each, args={"scale": 10})] == [20, 1.0]
    with pytest.raises(ValueError, match="did you mean 'exact'"):
        graded("scaled", [(prompt(grader="exct"), "x")], args={"scale": 10})


def test_a_function_that_is_called_like_a_service_is_called(tmp_path, monkeypatch):
    """By a row, or by data.grader_by_source; the service is not asked."""
    (tmp_path / "like_services.py").write_text("def http(text, answer): return 7.0\njudge = http\n")
    (tmp_path / "judge.txt").write_text("{response}")
    monkeypatch.syspath_prepend(tmp_path)
    nowhere = {"url": "http://127.0.0.1:9/", "retries": 0}
    judge = nowhere | {"model": "m", "prompt_file": str(tmp_path / "judge.txt")}
    for service, args in (("http", nowhere), ("judge", judge)):
        each = [(prompt(grader=f"like_services:{service}"), "x")]
        config = RewardConfig(grader=service, args=args, workers=1)
        with closing(RewardPool(config)) as pool:
            futures = [pool.submit(*one) for one in each]
            assert [future.result(60).value for future in futures] == [7.0]


@pytest.mark.parametrize(
    "name, args, said",
    [
        ("gsmk8", {}, "did you mean 'gsm8k'"),
        ("no_such_module:grade", {}, "importing no_such_module failed.*PYTHONPATH"),
        ("own_graders:god", {}, "no function god; did you mean 'good'"),
        ("own_graders:good", {"scale": 2}, "unexpected keyword argument 'scale'"),
        ("own_graders:scaled", {}, "missing a required argument: 'scale'"),
        ("gsm8k", {"formt": "last"}, "did you mean 'format'"),
    ],
)
def test_a_wrong_grader_fails_before_any_process_starts(name, args, said):
    with pytest.raises(ValueError, match=said):
        load_grader(name, args)
    with pytest.raises(ValueError, match=said):
        RewardPool(RewardConfig(grader=name, args=args))


def test_the_reward_is_the_weighted_sum_and_an_error_of_one_is_the_outcome(tmp_path):
    own = [(prompt(grader=grader), text) for grader, text in (("taste", "abcd"), ("exact", "a"))]
    outcomes = good, bad, only, other = graded(SEVERAL, [(prompt(), "abcd"), (prompt(), "bad"), *own], timeout_s=60)
    assert (good.status, good.value, good.detail) == ("score", 2.0 * 2.0 + 0.25, "saw abcd")
    parts = {name: (part.status, part.value) for name, part in good.parts.items()}
    assert parts == {"length": ("score", 2.0), "taste": ("score", 1.0)}
    assert bad.status == "error" and "ValueError: on purpose" in bad.detail
    assert bad.parts["length"].value == 1.5 and bad.parts["taste"].status == "error"
    assert (only.value, list(only.parts), other.value, list(other.parts)) == (0.25, ["taste"], 1.0, ["exact"])

    samples = tuple(Sample(i, (3,), (-0.1,), "stop", 0, "t") for i in range(4))
    group = RolloutGroup(0, prompt(), samples, tuple(outcomes))
    with closing(RolloutLog(RunFolder(tmp_path), 0)) as log:
        log.write(1, [group])
    record = json.loads((tmp_path / "rollouts" / "step_000001.replica_0.jsonl").read_text())["samples"][0]["outcome"]
    length = {"status": "score", "value": 2.0, "detail": ""}
    taste = {"status": "score", "value": 1.0, "detail": "saw abcd"}
    parts = {"length": length, "taste": taste}
    assert record == {"status": "score", "value": 4.25, "detail": "saw abcd", "parts": parts}
    metrics = Metrics()
    grader_metrics(metrics, [group], RewardConfig(graders=SEVERAL))
    expected = {"grader/length_mean": 1.75, "grader/length_failed_fraction": 0.0, "grader/taste_mean": 1.0}
    expected |= {"grader/taste_failed_fraction": pytest.approx(1 / 3)}
    assert metrics.reduced(alone) == expected


def test_a_grader_that_returns_none_is_in_no_mean():
    several = [{"grader": "exact"}, {"grader": "own_graders:none"}]
    (outcome,) = graded(several, [(prompt(), "a")], timeout_s=60)
    assert (outcome.status, outcome.value, outcome.parts["none"].status) == ("score", 1.0, "none")
    metrics = Metrics()
    grader_metrics(metrics, [RolloutGroup(0, prompt(), (), (outcome,))], RewardConfig(graders=several))
    assert metrics.reduced(alone) == {"grader/exact_mean": 1.0, "grader/exact_failed_fraction": 0.0}


def test_metrics_do_not_depend_on_who_has_the_groups():
    """Any split of the groups over ranks adds up to the same sums; a rank without groups adds the same names."""
    config = RewardConfig(graders=[{"grader": "exact"}, {"grader": "format"}])
    parts = [{"exact": Outcome("score", i / 4), "format": Outcome("error")} for i in range(4)]
    groups = [RolloutGroup(i, prompt(), (), (Outcome("error", parts=part),)) for i, part in enumerate(parts)]
    whole, *split = (Metrics() for _ in range(4))
    grader_metrics(whole, groups, config)
    for metrics, share in zip(split, (groups[:1], groups[1:], []), strict=True):
        grader_metrics(metrics, share, config)
    added = {name: sum(metrics._sums[name] for metrics in split) for name in whole._sums}
    assert added == whole._sums and all(metrics._kinds == whole._kinds for metrics in split)
    of_one = Metrics()
    grader_metrics(of_one, groups, RewardConfig(grader="exact"))
    assert not of_one._kinds, "one grader's score is the reward"


def test_a_group_grader_sees_those_that_have_a_score():
    graders = {"grader": "own_graders:picky", "group_grader": "own_graders:minus_mean"}
    config = RewardConfig(**graders, group_args={"factor": 10.0}, workers=1)
    bad = Outcome("timeout", detail="10 s")
    outcomes = [Outcome("score", 1.0), bad, Outcome("score", 3.0, parts={"picky": Outcome("score", 3.0)})]
    with RewardPool(config) as pool:
        got = pool.submit_group(prompt(), ["a", "b", "c"], outcomes).result(timeout=60)
        assert pool.submit_group(prompt(), ["b"], [bad]).result(timeout=60) == [bad]
    assert got == [Outcome("score", -10.0), bad, Outcome("score", 10.0, parts={"picky": Outcome("score", 3.0)})]


@pytest.mark.parametrize(
    "name, status, said",
    [("too_few", "error", "not a list of 2 scores"), ("hangs_on_groups", "timeout", "gave no result in 1 s")],
)
def test_a_group_grader_that_fails_fails_for_the_whole_group(name, status, said):
    config = RewardConfig(grader="exact", group_grader=f"own_graders:{name}", workers=1, timeout_s=1.0)
    with RewardPool(config) as pool:
        got = pool.submit_group(prompt(), ["a", "b"], [Outcome("score", 1.0)] * 2).result(timeout=60)
    assert [outcome.status for outcome in got] == [status] * 2 and all(said in outcome.detail for outcome in got)


def test_built_in_group_graders():
    assert rank(["a"] * 4, "", [5.0, -1.0, 5.0, 9.0]) == [0.5, 0.0, 0.5, 1.0]
    assert rank(["a"], "", [3.0]) == [0.5]
    assert distinct(["x  y", "x y", "z"], "", [1.0, 1.0, 1.0]) == [0.5, 0.5, 1.0]
    assert distinct(["x", "x"], "", [-1.0, 0.0]) == [-1.0, 0.0]


def test_cancelling_a_reward_cancels_what_has_not_begun():
    config = RewardConfig(graders=[{"grader": f"own_graders:{name}"} for name in ("length", "picky")], workers=1)

    async def run(pool: RewardPool) -> float:
        task = asyncio.create_task(asyncio.wait_for(asyncio.wrap_future(pool.submit(prompt(), "abc")), 0))
        await asyncio.gather(task, return_exceptions=True)
        return (await asyncio.wrap_future(pool.submit(prompt(), "abcd"))).value

    with RewardPool(config) as pool:
        assert asyncio.run(run(pool)) == 5.0


def test_check_finds_every_wrong_grader(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("d.jsonl").write_text('{"prompt": "p", "answer": "{\\"asserts\\": [\\"assert (\\"]}", "by": "code"}\n')
    judge = {"url": "http://127.0.0.1:1/v1/chat/completions", "model": "m", "prompt_file": "judge.txt"}
    graders = [{"grader": "exat"}, {"grader": "judge", "args": judge}, {"grader": "own_graders:lenght"}]
    data = {"path": "d.jsonl", "grader_key": "by"}
    config = experiment(model={"path": "."}, data=data, reward={"graders": graders, "group_grader": "rnk"})
    found = "\n".join(preflight(config))
    for said in (
        "reward.grader 'exat' is unknown; did you mean 'exact'",
        "prompt_file judge.txt cannot be read",
        "has no function lenght; did you mean 'length'",
        "reward.group_grader 'rnk' is unknown; did you mean 'rank'",
        "d.jsonl:1: the answer's test 'assert (' is not Python",
    ):
        assert said in found, found
    Path("judge.txt").write_text("{prompt}")
    assert "has no {response}" in "\n".join(preflight(config))
