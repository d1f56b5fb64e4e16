"""What is printed while a process starts or waits: a line a phase, its seconds, and how far it is."""

import io
import re
import time

import pytest

from megagrpo.monitor.console import StepConsole
from megagrpo.system import progress as module
from megagrpo.system.progress import Progress
from tests import experiments


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def often(monkeypatch):
    monkeypatch.setattr(module, "_START_S", 0.05)
    monkeypatch.setattr(module, "_TERMINAL_S", 0.02)


def until(stream: io.StringIO, pattern: str) -> None:
    """Waits until the text has the pattern."""
    experiments.until(lambda: re.search(pattern, stream.getvalue()), said=stream.getvalue)


def test_in_a_file_a_line_for_each_phase_and_for_those_that_last():
    stream, engines = io.StringIO(), iter(range(1000))
    with Progress("run", stream=stream) as progress:
        progress.enter("reads prompts")
        progress.enter("waits for the engines", lambda: f"{next(engines)} of 8 engines answer")
        until(stream, r"0 s: 1 of 8 engines answer\n")
        progress.enter("")
        seen = stream.getvalue()
        time.sleep(0.1)
        assert stream.getvalue() == seen, "no phase"
    lines = stream.getvalue().splitlines()
    assert re.fullmatch(r"run +\d+ s  reads prompts", lines[0])
    assert re.fullmatch(r"run +\d+ s  waits for the engines", lines[1])
    assert re.fullmatch(r"run +\d+ s  waits for the engines, 0 s: 0 of 8 engines answer", lines[2])


def test_on_a_terminal_one_line_that_changes():
    stream = Terminal()
    with Progress("run", stream=stream) as progress:
        progress.enter("loads weights")
        until(stream, "loads weights, 0 s")
        progress.enter("meets")
    text = stream.getvalue()
    assert text.count("\n") == 1 and text.endswith("meets\n")
    assert all(part.startswith("run ") for part in text.split("\r\033[K")[1:])


def test_a_console_takes_over_and_a_calm_one_says_only_what_lasts():
    stream = io.StringIO()
    with StepConsole("grpo", num_steps=2, stream=stream) as console, Progress("grpo", stream=stream) as progress:
        progress.enter("meets")
        progress.follow(console.status)
        progress.enter("evaluates")
        assert stream.getvalue().splitlines()[1] == "grpo evaluates"
        progress.calm()
        progress.enter("samples", lambda: "3 of 8 groups")
        progress._every_s = 0.02
        until(stream, "grpo samples, 0 s: 3 of 8 groups\n")
    assert "grpo samples\n" not in stream.getvalue()


def test_without_a_console_nothing_is_printed():
    stream = io.StringIO()
    with Progress("run", enabled=False, stream=stream) as progress:
        progress.enter("reads prompts")
        time.sleep(0.1)
    assert stream.getvalue() == ""


def test_the_start_does_not_count_in_what_is_left(monkeypatch):
    stream, now = io.StringIO(), [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    console = StepConsole("grpo", num_steps=4, stream=stream)
    for seconds, step in ((500.0, 0), (510.0, 1)):
        now[0] = seconds
        console.update(step, {"loss/total": 0.5})
    assert stream.getvalue().splitlines()[-1].endswith("eta 0:30")
