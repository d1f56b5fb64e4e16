"""Environments of verifiers in an interpreter of their own, each rollout against its endpoint of the real gateway."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
import time
import venv
from pathlib import Path

import pytest
from test_agents import says
from test_programs import masked, run_all

from megagrpo.environments import verifiers_episodes, verifiers_program
from megagrpo.types import RolloutGroup
from tests.experiments import ROOT

GAMES = ROOT / "tests" / "verifiers_games"
RELEASES = {"guess_classic": ["verifiers==0.2.0"], "env.toml": ["verifiers==0.4.0", "uv"]}  # uv starts its harness


def play(answers: list[str], *turns, python: str = sys.executable, environment: str = "guess", **more):
    more |= {"args": {"python": python, "environment": environment}, "extra": lambda n: {"index": int(answers[n])}}
    return run_all(answers, *turns, program="", function="verifiers", **more)


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(GAMES / "verifiers.py", tmp_path)
    monkeypatch.chdir(tmp_path)  # environments are found in the working folder, and so is it


def checked(groups: list[RolloutGroup]) -> None:
    assert [group.outcomes[0].value for group in groups] == [1.0], groups[0].outcomes
    assert masked(groups[0], 0).count("[H]") == 1 and masked(groups[0], 0).count("[L]") == 1, "exact ids, one sample"
    assert len(groups[0].samples) == 1


@pytest.mark.usefixtures("stand_in")
def test_episodes_are_played_against_the_endpoints_of_their_rollouts():
    groups, requests = play(["7"], says("3"), says("9"), says("7"))
    checked(groups)
    assert len(requests) == 3 and groups[0].outcomes[0].detail == "over"
    groups, _ = play(["1"], *[says("2")] * 4)
    assert (groups[0].outcomes[0].value, groups[0].outcomes[0].detail) == (0.0, "max_turns")


@pytest.mark.usefixtures("stand_in")
def test_an_episode_that_does_not_end_in_time_takes_no_other_with_it():
    """One that cleans up for long after its limit, and one that waits for the model meanwhile."""
    begun = time.monotonic()

    def hang(body: dict) -> bool:
        return len(body["input_ids"]) > 1 and time.monotonic() < begun + 16

    groups, _ = play(["8", "9"], says("m"), says("m"), hang=hang, timeout_s=3.0)
    assert [group.outcomes[0].status for group in groups] == ["timeout", "score"], [g.outcomes for g in groups]


@pytest.mark.usefixtures("stand_in")
def test_a_process_is_replaced_after_a_number_of_episodes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(verifiers_program, "_EPISODES", 1)
    monkeypatch.setattr(verifiers_program, "foreign_environment", lambda _: dict(os.environ))

    async def pids() -> list[int]:
        verifiers_program._slot.cache_clear()
        made = []
        for _ in range(4):
            with pytest.raises(RuntimeError, match="urlopen|refused"):
                arguments = {"key": "", "row": {"extra": {"index": 0}}, "python": sys.executable, "environment": "x"}
                await verifiers_program.play_verifiers("http://127.0.0.1:9", **arguments)
            made += [process._process.pid for process in verifiers_program._slot(sys.executable, "x")._processes]
        verifiers_program._slot(sys.executable, "x").close()
        return made

    assert len(set(asyncio.run(pids()))) == 2


@pytest.mark.usefixtures("stand_in")
def test_an_episode_that_fails_has_no_reward():
    groups, _ = play(["7"], says("u"))
    assert groups[0].outcomes[0].status == "error" and "ValueError: no number" in groups[0].outcomes[0].detail
    groups, _ = play(["7"], says("r"))
    assert groups[0].outcomes[0].status == "error" and "its process died: exit code 3" in groups[0].outcomes[0].detail
    groups, _ = play(["7"], says("t"), timeout_s=1.0)
    assert groups[0].outcomes[0].status == "timeout"
    groups, _ = play(["7"], python="no-such-python")
    assert groups[0].outcomes[0].status == "error" and "no-such-python" in groups[0].outcomes[0].detail
    groups, _ = run_all(["7"], program="", function="verifiers", args={"python": "p", "environment": "guess"})
    assert "the row has no extra.index" in groups[0].outcomes[0].detail


@pytest.mark.usefixtures("stand_in")
def test_the_script_prints_rows():
    script = verifiers_episodes.__file__
    found = subprocess.run([sys.executable, script, "guess", "2"], check=True, capture_output=True, text=True)
    rows = [json.loads(line) for line in found.stdout.splitlines()]
    assert rows == [
        {"prompt": [{"role": "user", "content": "?"}], "answer": str(n), "extra": {"index": n}} for n in range(2)
    ]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("environment", RELEASES)
def test_the_released_library_plays(environment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("guess_classic.py", "guess_v1.py", "env.toml"):
        shutil.copy(GAMES / name, tmp_path)
    python = tmp_path / "venv" / "bin" / "python"
    venv.create(tmp_path / "venv", with_pip=True)
    subprocess.run([python, "-I", "-m", "pip", "install", "-q", *RELEASES[environment]], check=True)
    monkeypatch.setenv("PATH", f"{python.parent}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    groups, _ = play(["7"], says("3"), says("9"), says("7"), python=str(python), environment=environment)
    checked(groups)
