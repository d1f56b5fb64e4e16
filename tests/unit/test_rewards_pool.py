"""The reward pool against graders that raise, hang, die or return nonsense, in real processes."""

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from megagrpo.config.schema import RewardConfig
from megagrpo.rewards.graders.table import load_grader
from megagrpo.rewards.pool import RewardPool
from megagrpo.system.processes import is_live
from megagrpo.types import Prompt

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
def pid(text, answer): return float(os.getpid())
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
"""


@pytest.fixture
def graders(tmp_path, monkeypatch):
    (tmp_path / "own_graders.py").write_text(GRADERS)
    monkeypatch.syspath_prepend(tmp_path)
    yield "own_graders"
    sys.modules.pop("own_graders", None)


def prompt(answer="", grader=None):
    return Prompt(id=0, text="", token_ids=(1,), answer=answer, grader=grader)


def grade(grader, text="abc", answer="", **options):
    with RewardPool(RewardConfig(grader=grader, workers=1, timeout_s=1.0, **options)) as pool:
        return pool.submit(prompt(answer), text).result(timeout=60)


def ended(process: psutil.Process, within_s: float = 5.0) -> bool:
    deadline = time.monotonic() + within_s
    while is_live(process) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not is_live(process)


@pytest.mark.parametrize("name, value", [("good", 3.0), ("flag", 0.0), ("prints", 1.0)])
def test_a_score_is_a_score(graders, name, value):
    outcome = grade(f"{graders}:{name}")
    assert (outcome.status, outcome.value) == ("score", value)


@pytest.mark.parametrize(
    "name, said",
    [
        ("raises", "KeyError: 'no such thing'"),
        ("nan", "nan"),
        ("inf", "-inf"),
        ("none", "None (NoneType), not a finite number"),
        ("words", "'1.0' (str)"),
        ("dies", "died: exit code -9"),
        ("leaves", "died: exit code 3"),
    ],
)
def test_whatever_is_no_finite_number_is_an_error_and_not_a_zero(graders, name, said):
    outcome = grade(f"{graders}:{name}")
    assert outcome.status == "error" and not outcome.ok
    assert name in outcome.detail and said in outcome.detail


@pytest.mark.parametrize("name", ["hangs", "hangs_holding_the_lock", "ignores_signals"])
def test_a_hang_ends_as_timeout_soon_after_the_limit(graders, name):
    with RewardPool(RewardConfig(grader=f"{graders}:{name}", workers=1, timeout_s=0.5)) as pool:
        start = time.monotonic()
        outcome = pool.submit(prompt(), "").result(timeout=60)
        seconds = time.monotonic() - start
    assert outcome.status == "timeout" and "0.5 s" in outcome.detail
    assert 0.5 <= seconds < 10


def test_a_pool_survives_bad_responses_and_keeps_every_outcome_with_its_response(graders):
    texts = ["1", "hang", "2", "die", "3", "raise", "nan", "4", "hang", "5"]
    with RewardPool(RewardConfig(grader=f"{graders}:by_text", workers=2, timeout_s=0.5)) as pool:
        outcomes = [f.result(timeout=120) for f in [pool.submit(prompt(), t) for t in texts]]
    assert [o.value for o in outcomes if o.ok] == [1, 2, 3, 4, 5]
    assert [o.status for o in outcomes if not o.ok] == ["timeout", "error", "error", "error", "timeout"]


def test_restarting_does_not_count_against_the_next_response(tmp_path, monkeypatch):
    (tmp_path / "slow_import.py").write_text("import time\ntime.sleep(1.5)\n" + GRADERS)
    monkeypatch.syspath_prepend(tmp_path)
    with RewardPool(RewardConfig(grader="slow_import:by_text", workers=1, timeout_s=0.5)) as pool:
        futures = [pool.submit(prompt(), t) for t in ("hang", "7")]
        assert [f.result(timeout=60).status for f in futures] == ["timeout", "score"]
    sys.modules.pop("slow_import")


def test_close_leaves_no_process_and_no_waiter(graders):
    pool = RewardPool(RewardConfig(grader=f"{graders}:by_text", workers=2, timeout_s=60.0))
    workers = list(filter(is_live, psutil.Process().children()))
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


def test_what_a_hung_grader_started_dies_with_it(graders, tmp_path):
    note = tmp_path / "pid"
    outcome = grade(f"{graders}:child_then_hang", text=str(note))
    assert outcome.status == "timeout"
    child = int(note.read_text())
    assert not psutil.pid_exists(child) or ended(psutil.Process(child))


def test_workers_end_when_the_trainer_is_killed(graders, tmp_path):
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
    assert all(ended(worker, 20) for worker in workers)


def test_options_reach_the_grader_and_a_prompt_may_name_another(graders):
    config = RewardConfig(grader=f"{graders}:scaled", args={"scale": 10}, workers=1)
    with RewardPool(config) as pool:
        assert pool.submit(prompt(), "ab").result(timeout=60).value == 20
        assert pool.submit(prompt("x", grader="exact"), " x ").result(timeout=60).value == 1.0
        with pytest.raises(ValueError, match="did you mean 'exact'"):
            pool.submit(prompt(grader="exct"), "x")


def test_long_and_odd_texts_arrive_unchanged(graders):
    assert grade(f"{graders}:good", text="é\n\u2028\ud800" * 100_000).value == 400_000
    assert grade(f"{graders}:flag", text="a\r\n\0", answer="a\r\n\0").value == 1.0


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
def test_a_wrong_grader_fails_before_any_process_starts(graders, name, args, said):
    with pytest.raises(ValueError, match=said):
        load_grader(name, args)
    with pytest.raises(ValueError, match=said):
        RewardPool(RewardConfig(grader=name, args=args))
