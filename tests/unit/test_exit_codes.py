"""Every way in which a run ends, by the real launcher beside played ranks: the table in docs/operate.md."""

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megagrpo.system.environment import child_environment
from megagrpo.system.run_folder import RunFolder
from megagrpo.system.stop_request import StopRequest
from tests.experiments import QUICKSTART, until

ROOT = Path(__file__).parents[2]
# `megagrpo run`, which starts the two programs below in the place of torchrun and of the service
_RUN = """
import sys
from pathlib import Path
from megagrpo import cli
from megagrpo.cluster import machine

here = Path(sys.argv[1])

def start_service(launch, config, env):
    machine.write_experiment(config)
    command = [sys.executable, str(here / "service.py"), str(here)]
    return launch.spawn(command, config.run_folder.log("service"), {})

if sys.argv[2] != "refused":
    machine.refuse_what_cannot_run = lambda *_: None
machine.visible_gpus = list
machine.start_service = start_service
machine.torchrun = lambda *_, **__: [str(here / "ranks.py"), str(here), sys.argv[2]]
sys.exit(cli.main(["run", *sys.argv[3:]]))
"""
_SERVICE = """
import sys, time
from pathlib import Path
while not (Path(sys.argv[1]) / "service_ends").exists():
    time.sleep(0.05)
"""
_RANKS = """
import os, sys, time
from pathlib import Path

here, way = Path(sys.argv[1]), sys.argv[2]
path = Path(os.environ["MEGAGRPO_STOP_FILE"])
if way == "finished":
    sys.exit(0)
if way == "lost":
    sys.exit(1)
if way == "final":
    (path.parent / "error_trainer_rank0.final.txt").write_text("too few groups")
if way != "starting":
    path.with_suffix(".stop_listens").touch()
(here / "up").touch()
while not (path.exists() or path.with_suffix(".stop_final").exists()):
    if (here / "service_ends").exists():
        sys.exit(1)
    time.sleep(0.05)
if way == "slow":
    time.sleep(600)
path.with_suffix(".stop_granted").write_text("saved after step 3")
"""
_STOP = "megagrpo stop"
_NOW = "megagrpo stop --now"
_SERVICE_ENDS = "the service ends"
_WAYS = {  # what ranks do, and what happens to the run
    "has made its last step": ("finished",),
    "gets Ctrl-C before its first step: ends at once": ("starting", signal.SIGINT),
    "gets Ctrl-C: saves after the current step": ("steps", signal.SIGINT),
    "gets Ctrl-C again: ends at once": ("slow", signal.SIGINT, signal.SIGINT),
    "gets USR1, as at a time limit or a pre-emption: saves": ("steps", signal.SIGUSR1),
    "gets `megagrpo stop runs/mine`: saves": ("steps", _STOP),
    "gets `megagrpo stop runs/mine --now`, or TERM: ends at once": ("steps", _NOW),
    "fails in a way that a restart would repeat": ("final",),
    "loses a rank more often than `actor.max_restarts`": ("lost",),
    "loses its service: saves": ("steps", _SERVICE_ENDS),
    "is wrong in its experiment": ("refused",),
    "lacks a file": ("refused",),
}


def table() -> dict[str, tuple[int, str]]:
    """The exit code and the last line of each way, by docs/operate.md."""
    text = (ROOT / "docs/operate.md").read_text()
    rows = re.findall(r"^\| (.*) \| (\d+) \| (?:`(.*)` )?\|$", text, re.MULTILINE)
    return {way: (int(code), line) for way, code, line in rows}


def test_the_table_has_every_way():
    assert table().keys() == _WAYS.keys()


@pytest.mark.parametrize("way", _WAYS)
def test_a_run_ends_with_the_code_and_the_line_of_the_table(way, tmp_path):
    ranks, *events = _WAYS[way]
    folder = RunFolder(tmp_path / "run")
    for name, code in (("service", _SERVICE), ("ranks", _RANKS)):
        (tmp_path / f"{name}.py").write_text(code)
    experiment = tmp_path / "mine.yaml"
    text = QUICKSTART.read_text()
    experiment.write_text(text + "trainn: {}\n" if "wrong" in way else text)
    words = [experiment, "--set", f"output_dir={folder.path}", "--set", "actor.device=cpu"]
    if "lacks" in way:
        words += ["--set", "model.path=none", "--set", "sft=null", "--set", "checkpoint.load=none"]
    command = [sys.executable, "-c", _RUN, tmp_path, ranks, *words]
    run = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=child_environment())
    try:
        until(lambda: (tmp_path / "up").exists() or run.poll() is not None, 120)
        for event in events:
            if event in (_STOP, _NOW):
                stop = [sys.executable, "-m", "megagrpo.cli", *event.split()[1:], folder.path]
                subprocess.run(stop, check=True, env=child_environment())
            elif event == _SERVICE_ENDS:
                (tmp_path / "service_ends").touch()
            else:
                run.send_signal(event)
                if ranks == "slow":
                    until(StopRequest(folder.stop_request("trainer")).made, 120)
        said = run.communicate(timeout=120)[1]
    finally:
        run.kill()
    code, line = table()[way]
    pattern = re.escape(line).replace("TEXT", ".*").replace("FILE", r"/\S*")
    pattern = re.sub(r"\bN\b", r"\\d+", pattern)
    last = said.splitlines()[-1] if said else ""
    assert run.returncode == code and re.search(f"{pattern}$", last), said
