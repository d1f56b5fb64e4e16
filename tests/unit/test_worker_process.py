"""Worker processes: real ones that hang, die, write nonsense, or cannot start."""

import asyncio
import gc
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
import pytest

from megagrpo.config.reward import RewardConfig
from megagrpo.rewards.pool import RewardPool
from megagrpo.system import background, worker_process
from megagrpo.system.background import BackgroundLoop
from megagrpo.system.worker_process import WorkerError, WorkerProcess, WorkerSlot
from megagrpo.types import Prompt
from tests.experiments import live_children, until

CHILD = """
import asyncio, os, signal, sys, time
from megagrpo.system.worker_process import answer_calls, answer_calls_concurrently

def answer(message):
    match message:
        case "hang": time.sleep(3600)
        case "exit": os._exit(3)
        case "raise": raise KeyError("on purpose")
        case "set": return {1}
        case "killed": os.kill(os.getpid(), signal.SIGKILL)
        case "nonsense": os.write(int(sys.argv[1]), b"nonsense\\n")
    return [message, os.getpid()]

class Mute(Exception):
    def __str__(self):
        raise TypeError("no text")

async def start(message):
    if message == "mute":
        raise Mute
    if message == "stubborn":
        time.sleep(3600)
    if message == "slow to end":
        try:
            await asyncio.sleep(3600)
        finally:
            await asyncio.sleep(3600)
    if message == "others":
        await asyncio.sleep(2.5)
    await asyncio.sleep(3600 if message == "hang" else 0)
    return message

if sys.argv[2] == "one":
    answer_calls(int(sys.argv[1]), answer)
else:
    asyncio.run(answer_calls_concurrently(int(sys.argv[1]), start, cancels=True))
"""


@pytest.fixture
def slot(tmp_path: Path):
    """Makes places for processes of CHILD: "one" call at a time, or "many"."""
    (tmp_path / "child.py").write_text(CHILD)
    made: list[WorkerSlot] = []

    def make(kind: str) -> WorkerSlot:
        command = [sys.executable, str(tmp_path / "child.py")]
        made.append(WorkerSlot(lambda: WorkerProcess(command, [kind])))
        return made[-1]

    before = live_children()
    yield make
    for each in made:
        each.close()
    until(lambda: live_children() <= before, said=live_children)  # no process is left


def test_a_call_has_its_answer_or_the_reason_why_there_is_none(slot):
    async def run() -> None:
        place = slot("one")
        process = await place.started()
        assert await process.only_call("x", 60) == (["x", process._process.pid], None)
        assert await process.only_call("raise", 60) == (None, "KeyError: 'on purpose'")
        assert "not JSON serializable" in (await process.only_call("set", 60))[1]
        assert await place.started() is process
        for message, reason, killed in (
            ("exit", "exit code 3", False),
            ("killed", "exit code -9", True),
            ("nonsense", "it wrote b'nonsense.n' to its socket, which answers no call", False),
        ):
            process = await place.started()
            with pytest.raises(WorkerError, match=reason):
                await process.only_call(message, 60)
            assert process.was_killed == killed and not process.is_open
        process = await place.started()
        with pytest.raises(TimeoutError):
            await process.only_call("hang", 0.2)
        assert not process.is_open and await (await place.started()).only_call("x", 60)

    asyncio.run(run())


def test_a_call_arrives_as_it_is(slot):
    """Not as orjson writes it, which has no NaN, no half characters and no large numbers."""
    message = ["grade", {"x": math.inf}, ["é\n≤ " * 1000, "\ud83d half", -math.inf, 2**70, None, True, {"a": ["é"]}]]

    async def run() -> None:
        process = await slot("one").started()
        (value, _), error = await process.only_call(message, 60)
        assert value == message and error is None

    asyncio.run(run())


def test_a_cancelled_call_ends_or_its_process_does(slot, monkeypatch):
    monkeypatch.setattr(worker_process, "GRACE_S", 0.3)

    async def cancelled(process: WorkerProcess, message: str) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await process.call(message)
        await asyncio.sleep(1.0)

    async def run() -> tuple[bool, bool]:
        process = await slot("many").started()
        assert await asyncio.gather(*map(process.call, "ab")) == [("a", None), ("b", None)]
        assert await asyncio.wait_for(process.call("mute"), 60) == (None, "Mute"), "its text cannot be made"
        await cancelled(process, "hang")
        first = process.is_open
        await cancelled(process, "stubborn")
        return first, process.is_open

    assert asyncio.run(run()) == (True, False)


def test_a_call_that_goes_on_after_its_cancellation_takes_no_other_with_it(slot, monkeypatch):
    """Its process gets no new calls, and ends with the others that it has."""
    monkeypatch.setattr(worker_process, "GRACE_S", 0.3)

    async def run() -> None:
        place = slot("many")
        process = await place.started()
        other = asyncio.create_task(process.call("others"))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await process.call("slow to end")
        await asyncio.sleep(1.0)
        assert process.is_open and place.process is None
        following = await place.started()
        assert following is not process and await following.call("a") == ("a", None)
        assert await other == ("others", None)
        await asyncio.sleep(0)
        assert not process.is_open and following.is_open

    asyncio.run(run())


def test_a_loop_that_ends_leaves_no_task_of_its_calls_behind(slot, caplog):
    """asyncio would print two lines for each call that a run has open at its end."""

    async def call(place: WorkerSlot) -> None:
        await (await place.started()).call("hang")

    gc.collect()  # what a loop of another test left that was too busy to end
    caplog.clear()
    loop, place = BackgroundLoop("loop"), slot("many")
    calls = [loop.submit(call(place)) for _ in range(2)]
    until(lambda: place.process is not None and len(place.process._results) == 2)
    loop.close()
    assert all(call.cancelled() for call in calls)
    gc.collect()
    assert caplog.text == ""


def test_a_process_is_killed_once_and_leaves_nothing(slot):
    async def run() -> int:
        process = await slot("one").started()
        scratch = Path(psutil.Process(process._process.pid).environ()["TMPDIR"])
        assert scratch.is_dir()
        process.close()
        process.kill()
        assert process.is_gone and not process.was_killed and not scratch.exists()
        await asyncio.sleep(0.2)  # its reader sees the end
        return len(os.listdir("/proc/self/fd"))

    open_files = asyncio.run(run())
    assert open_files <= asyncio.run(run()), "files stay open"


def test_a_process_that_cannot_be_killed_does_not_hold_its_owner(slot, monkeypatch):
    """Such as one in a call to a file system that hangs."""
    monkeypatch.setattr(worker_process, "_END_S", 0.2)
    gone = threading.Event()

    async def run() -> WorkerProcess:
        process = await slot("one").started()
        reap = process._reap
        monkeypatch.setattr(process, "_reap", lambda: gone.wait() and reap())
        process.close()
        return process

    process = asyncio.run(run())
    assert not process.is_gone
    gone.set()
    until(lambda: process.is_gone, 30)


def test_a_grader_whose_replacement_cannot_start_loses_no_place(tmp_path, monkeypatch):
    (tmp_path / "graders.py").write_text(
        "import time\ndef grade(text, answer):\n    if text == 'hang': time.sleep(3600)\n    return 1.0\n"
    )
    prompt = Prompt(id=0, text="q", token_ids=(1,), answer="a")
    config = RewardConfig(grader=f"{tmp_path / 'graders.py'}:grade", workers=1, timeout_s=1.0)
    with RewardPool(config) as pool:
        ask = lambda text: pool.submit(prompt, text).result(timeout=60)  # noqa: E731
        monkeypatch.setattr(tempfile, "tempdir", "/no/such/folder")  # as on a full disk
        assert ask("hang").status == "timeout"
        failed = ask("x")
        assert failed.status == "error" and "cannot start" in failed.detail
        monkeypatch.undo()
        assert ask("x").value == 1.0
        began = time.monotonic()
    assert time.monotonic() - began < 20


def test_closing_a_loop_that_is_busy_hides_no_exception(monkeypatch, capsys):
    monkeypatch.setattr(background, "_CLOSE_S", 0.2)
    loop = BackgroundLoop("a busy loop")

    async def blocks() -> None:
        time.sleep(1.5)

    def work() -> None:
        loop.submit(blocks())
        time.sleep(0.1)
        raise ValueError("the real reason")

    with pytest.raises(ValueError, match="the real reason"):
        try:
            work()
        finally:
            loop.close()
    assert "a busy loop: did not end within 0.2 s" in capsys.readouterr().err


FREED = """
import psutil
from megagrpo.system.processes import return_freed_memory

def held():
    return psutil.Process().memory_info().rss

pieces = [bytes([1]) * 50_000 for _ in range(2000)]
before = held()
del pieces[:1990:2]  # pieces between them stay
kept = held()
return_freed_memory()
print((before - kept) / 1e6, (before - held()) / 1e6)
"""


def test_memory_that_is_freed_between_pieces_in_use_is_returned():
    done = subprocess.run([sys.executable, "-c", FREED], capture_output=True, text=True, check=True)
    at_once, then = map(float, done.stdout.split())
    assert at_once < 10 and then > 35  # MB, of 50
