"""What is printed while a process starts, waits and trains, and the report that a run leaves."""

import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import time
from contextlib import suppress

import pytest

from megagrpo.monitor.console import StepConsole, minutes
from megagrpo.system import progress as module
from megagrpo.system.progress import Progress
from megagrpo.system.run_folder import write_json_lines
from megagrpo.tools.report import series, summary, write_report
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
    console = StepConsole("grpo", num_steps=2, stream=stream)
    with Progress("grpo", stream=stream) as progress:
        progress.enter("meets")
        progress.follow(console.note, console.bar)
        progress.enter("evaluates")
        assert stream.getvalue().splitlines()[1] == "grpo evaluates"
        progress.calm()
        progress.enter("samples", lambda: "3 of 8 groups")
        progress._every_s = 0.02
        until(stream, "grpo samples, 0 s: 3 of 8 groups\n")
    assert "grpo samples\n" not in stream.getvalue()


RUN = """
import sys, time
from megagrpo.monitor.console import StepConsole
from megagrpo.system import progress as module
from megagrpo.system.progress import Progress

module._TERMINAL_S = 0.05
with Progress("demo") as progress:
    progress.enter("loads weights")
    console = StepConsole("demo", num_steps=4)
    progress.follow(console.note, console.bar)
    progress.calm()
    for step in range(5):
        console.update(step, {"reward/mean": step / 4})
        progress.enter("samples", lambda: "3 of 8 groups, " + 90 * "x")
        time.sleep(0.5)
    console.note("stops after step 4, as asked")
    progress.enter("")
    print("# demo: 4 steps", flush=True)
"""


def shown_by(text: str) -> list[str]:
    """The lines of a terminal that knows the end of a line, its begin, and how to clear it."""
    lines = [""]
    for part in re.split(r"(\r\n|\r|\n|\x1b\[K)", text):
        match part:
            case "\r\n" | "\n":
                lines.append("")
            case "\r" | "\x1b[K":
                lines[-1] = ""
            case _:
                lines[-1] += part
    return lines


def on_a_terminal(width: int) -> str:
    """What a program writes to a terminal."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    process = subprocess.Popen([sys.executable, "-c", RUN], stdout=theirs, stdin=subprocess.DEVNULL, env=environment)
    os.close(theirs)
    text = b""
    with suppress(OSError):  # Linux says so that the other end is closed
        while part := os.read(ours, 65536):
            text += part
    os.close(ours)
    assert process.wait(60) == 0
    return text.decode()


def test_a_terminal_has_a_bar_below_the_lines_of_steps():
    text = on_a_terminal(80)
    drawn = [part for part in re.split(r"\r\x1b\[K|\r?\n", text) if "[" in part]
    assert any(re.search(r"\[\.{24}\] 0/4  samples, \d s: 3 of 8 groups", part) for part in drawn)
    assert any(re.search(r"\[#{12}\.{12}\] 2/4, 0:00:0\d left  samples", part) for part in drawn)
    assert max(map(len, drawn)) == 79, "never a second line, which a terminal could not clear"
    lines = [line for line in shown_by(text) if line]
    assert [re.match(r"demo +\d+ s  loads|demo \d/4  reward", line) is not None for line in lines] == [True] * 6 + [
        False
    ] * 2
    assert lines[-2:] == ["demo stops after step 4, as asked", "# demo: 4 steps"]


def test_a_file_has_no_bar():
    done = subprocess.run([sys.executable, "-c", RUN], capture_output=True, text=True, check=True)
    assert "\r" not in done.stdout and "[" not in done.stdout
    assert [line.split()[1] for line in done.stdout.splitlines()[1:6]] == ["0/4", "1/4", "2/4", "3/4", "4/4"]


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
    assert stream.getvalue().splitlines()[-1].endswith("eta 0:00:30")


def run(num_steps: int) -> list[dict]:
    entries = [{"step": 0, "eval/accuracy": 0.25}]
    for step in range(1, num_steps + 1):
        times = {"time/rollout_s": 3.0, "time/update_s": 1.0, "time/step_s": 5.0}
        entries.append({"step": step, "reward/mean": step / 10, "mismatch/logprob_abs_mean": 2e-6, **times})
    entries[-1]["eval/accuracy"] = 0.75
    return entries


def cells(text: str, first: str) -> list[str]:
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {first} ")]
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


def test_summary_figures():
    text = summary(run(4), "demo")
    assert text.startswith("# demo: 4 steps\n")
    assert cells(text, "held-out accuracy") == ["0.250", "0.750", "0.750", "0.500"]
    assert cells(text, "reward") == ["0.100", "0.400", "0.400", "0.250"]
    assert cells(text, "rollout") == ["3.00", "60%"]
    assert cells(text, "unnamed rest") == ["1.00", "20%"]
    assert cells(text, "whole step") == ["5.00", "100%"]
    assert not re.search(r"\bnan\b|None", text)


def test_the_kl_is_without_its_coefficient():
    entries = [{"step": step, "loss/kl": 0.001 * 0.02 * step, "policy/kl_reference": 0.02 * step} for step in (1, 2)]
    assert cells(summary(entries, "demo"), "KL to the reference") == ["0.0200", "0.0400", "", "0.0300"]


def test_values_that_were_not_finite_are_left_out():
    assert series([{"step": 1, "a/b": None}, {"step": 2, "a/b": 3.0}, {"step": 3}], "a/b") == ([2], [3.0])


def test_a_runs_name_is_no_formula(tmp_path):
    folder = tmp_path / "price $a_{$b"
    folder.mkdir()
    write_json_lines(folder / "metrics.jsonl", [{"step": 1, "reward/mean": 0.5}])
    assert "price $a_{$b: 1 steps" in write_report(folder) and (folder / "curve.png").is_file()


@pytest.mark.parametrize(
    "entries", [run(30), run(1), [{"step": 0, "eval/accuracy": 0.5}], [{"step": 1, "reward/mean": -2.0}]]
)
def test_files_are_written(tmp_path, entries):
    write_json_lines(tmp_path / "metrics.jsonl", entries)
    text = write_report(tmp_path)
    assert (tmp_path / "summary.md").read_text() in text
    assert f"curve: {tmp_path / 'curve.png'}" in text
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "curve.png").stat().st_size > 10_000


def test_nothing_measured_is_said(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(ValueError, match="nothing was measured"):
        write_report(tmp_path)


def test_a_line_a_step():
    stream = io.StringIO()
    console = StepConsole("grpo", num_steps=4, start_step=1, stream=stream)
    console.note("resumed at step 1")
    console.update(2, {"reward/mean": 0.5, "eval/accuracy": 0.25})
    console.update(3, {"reward/mean": 0.75, "perf/tokens_per_s": 1234.4})
    console.update(4, {"loss/total": 0.5, "policy/kl_reference": 0.0123, "optim/grad_norm": 0.256})
    note, first, second, third = stream.getvalue().splitlines()
    assert note == "grpo resumed at step 1"
    assert first.startswith("grpo 2/4  reward 0.500  eval 0.250  eta ")
    # the evaluation stays on the line
    assert second.startswith("grpo 3/4  reward 0.750  eval 0.250  tok/s 1,234  eta ")
    assert "  loss 0.5000  kl 1.2e-02  grad 0.26  tok/s" in third


def test_minutes():
    said = [minutes(s) for s in (-2, 0, 61.4, 3599.6, 11045)]
    assert said == ["0:00:00", "0:00:00", "0:01:01", "1:00:00", "3:04:05"]
