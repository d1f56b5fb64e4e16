"""Commands that start ranks besides a run's: what they refuse before, and two of them in one run folder."""

import json
from pathlib import Path

import pytest

from examples.laptop.recipe import TinyModelConfig
from megagrpo import cli
from megagrpo.cluster import machine
from megagrpo.system.run_folder import RunFolder
from megagrpo.tools.certify.tiny_model import hf_config
from megagrpo.tools.ranks import start
from tests.experiments import QUICKSTART, experiment, python

# Starts an export, or is its ranks: those of the first start another one, whose ranks fail.
_TWO_EXPORTS = """
import os, subprocess, sys, time
from pathlib import Path
from megagrpo.system.run_folder import RunFolder, write_whole
from megagrpo.tools.ranks import start
from tests.experiments import experiment

if len(sys.argv) == 3:
    folder, seed = sys.argv[1:]
    start.torchrun = lambda ranks, **_: [__file__, folder]
    actor = {"device": "cpu"}
    sys.exit(start.train_ranks(experiment(output_dir=folder, seed=int(seed), actor=actor), "export", [seed]))
folder, seed = sys.argv[1], sys.argv[-1]
own = Path(sys.argv[-2])
assert f"seed: {seed}" in own.read_text()
if seed == "2":
    reports = os.environ.get("MEGAGRPO_REPORTS", "export")
    write_whole(RunFolder(Path(folder)).error_report(reports, 0, True), "the second one's reason")
    sys.exit(1)
other = subprocess.run([sys.executable, __file__, folder, "2"], stderr=subprocess.PIPE, text=True)
assert other.returncode == 1 and "the second one's reason" in other.stderr
time.sleep(3)  # until its launcher has looked
assert "seed: 1" in own.read_text(), "a rank that starts late reads it"
"""

# A rank that forks, as on a CPU, fails for good, is restarted before its launcher looks, and does its work; a thread of
# a library that it called goes on. Then torchrun is killed beside a rank.
_FORKED = """
import multiprocessing, os, sys, threading
from pathlib import Path
import psutil
from megagrpo.loop.ranks import guarded
from megagrpo.system.processes import is_live
from tests.experiments import experiment, until

fork = multiprocessing.get_context("fork")
done = fork.Event()

def work(device):
    threading.Thread(target=threading.Event().wait).start()
    done.set()

def fail(device):
    raise ValueError("the disk is full")

def stay(device):
    Path(sys.argv[1], "pid").write_text(str(os.getpid()))
    done.set()
    threading.Event().wait()

def torchrun():
    fork.Process(target=guarded, args=(config, "trainer", stay)).start()
    threading.Event().wait()

os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
config = experiment(output_dir=sys.argv[1], actor={"device": "cpu"})
rank = fork.Process(target=guarded, args=(config, "trainer", fail))
rank.start()
rank.join()
rank = fork.Process(target=guarded, args=(config, "trainer", work), daemon=True)
rank.start()
assert done.wait(300)
rank.join(20)
assert rank.exitcode == 0, "it waits for the thread"
done.clear()
parent = fork.Process(target=torchrun)
parent.start()
assert done.wait(300)
rank = psutil.Process(int(Path(sys.argv[1], "pid").read_text()))
parent.kill()
until(lambda: not is_live(rank), 20)
"""


def test_a_forked_rank_ends_whatever_its_threads_do_and_with_torchrun(tmp_path):
    (tmp_path / "forked.py").write_text(_FORKED)
    python(tmp_path / "forked.py", tmp_path / "run")
    (report,) = RunFolder(tmp_path / "run").error_reports("trainer", True)
    assert report.read_text() == "the disk is full"


def test_ranks_fork_only_if_the_experiment_is_for_a_cpu(tmp_path, monkeypatch):
    """The process that they fork from hides GPUs: asked why there is none, they would name that."""
    asked = []
    monkeypatch.setattr(start, "trainer_gpus", lambda config: [])
    monkeypatch.setattr(start, "torchrun", lambda ranks, forks: asked.append(forks) or ["-c", ""])
    for actor in ({}, {"dtype": "bfloat16"}, {"device": "cuda"}, {"dtype": "bfloat16", "device": "cpu"}):
        assert start.train_ranks(experiment(output_dir=str(tmp_path), actor=actor), "export", []) == 0
    assert asked == [True, False, False, True]


def test_two_exports_of_a_run_leave_each_other_alone(tmp_path):
    (tmp_path / "exports.py").write_text(_TWO_EXPORTS)
    python(tmp_path / "exports.py", tmp_path / "run", "1")


@pytest.mark.parametrize(
    "words, said",
    [
        (["sft", "--set", "sft.model=other"], "sft.model: other/config.json does not exist"),
        (["sft"], "model.path: none would be replaced, and what is in it removed: name a new"),  # it starts there
        (["sft", "--set", "model.path=saved"], "model.path: saved would be replaced"),
        (["sft", "--set", "sft.model=older/base", "--set", "model.path=older"], "model.path: older would be replaced"),
        (["export", "out"], "run/checkpoints holds no finished checkpoint; name one with --checkpoint"),
        (
            ["export", "out", "--checkpoint", "cut"],
            "--checkpoint cut is no finished checkpoint: it has no manifest.json",
        ),
        (["export", "out", "--checkpoint", "saved"], "none/config.json does not exist"),
        (["export", "saved", "--checkpoint", "saved"], "saved would be replaced, and what is in it removed"),
        (["export", "none", "--checkpoint", "saved"], "none would be replaced"),  # the model
        (["export", "disk", "--checkpoint", "saved"], "disk would be replaced"),  # a mount point, which has no files
        # the start of the warm-up, and rows beside an older export
        (["export", "older", "--checkpoint", "saved", "--set", "sft.model=older"], "older would be replaced"),
        (
            ["export", "older", "--checkpoint", "saved", "--set", "data.path=older/rows.jsonl"],
            "older would be replaced",
        ),
        (
            ["export", "out", "--checkpoint", "saved", "--set", "model.path=tiny", "--set", "model.tokenizer=gone"],
            "model.tokenizer: gone does not exist",
        ),
        (["export", "out", "--lora"], "export --lora writes adapters, but the experiment has no actor.lora"),
        (["replay", "cut"], "cut is not a finished dump of a step"),
        (["replay", "dumped"], "dumped is of 3 data-parallel ranks, this layout has 2"),
    ],
)
def test_what_is_not_there_is_said_before_any_rank_starts(words, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(machine, "torchrun", lambda ranks: pytest.fail("ranks start"))
    for folder in ("cut", "saved", "dumped", "older", "disk", "tiny"):
        Path(folder).mkdir()
    Path("saved/manifest.json").touch()
    Path("older/config.json").touch()
    Path("tiny/config.json").write_text(json.dumps(hf_config(TinyModelConfig())))
    is_mount = Path.is_mount
    monkeypatch.setattr(Path, "is_mount", lambda path: path == tmp_path / "disk" or is_mount(path))
    dump = {"weight_version": 0, "dp": 3, "algorithm": {}, "values": {}}
    Path("dumped/step.json").write_text(json.dumps(dump))
    changes = ["output_dir=run", "model.path=none", "sft.model=none", "actor.parallel={}", "actor.world_size=2"]
    options = [word for change in changes for word in ("--set", change)]
    assert cli.main([words[0], str(QUICKSTART), *options, *words[1:]]) == 2
    assert said in capsys.readouterr().err
