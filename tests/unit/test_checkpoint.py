"""Which checkpoints make room for a new one."""

import json
import threading
from pathlib import Path

import pytest
import torch

from megagrpo.checkpoint import Checkpointer, begin, latest
from megagrpo.config.schema import CheckpointConfig
from megagrpo.mesh import LeaderError, make_mesh
from megagrpo.types import TrainState

MESH = make_mesh(0, 1, torch.device("cpu"), 60.0)


class Plan:
    """Writes one file, when it may, or fails with a reason."""

    def __init__(self, folder: Path, gate: threading.Event | None = None, fault: str = ""):
        self.file, self.gate, self.fault = folder / "weights", gate, fault

    def write(self) -> list[Path]:
        if self.gate is not None:
            self.gate.wait()
        if self.fault == "write":
            raise OSError("disk full")
        self.file.write_text("weights")
        return [self.file]

    def finish(self) -> None:
        if self.fault == "finish":
            raise OSError("disk full")


@pytest.mark.parametrize(
    ("there", "keep", "left"),
    [
        ([10, 12, 14], 2, [14, 17]),
        ([10], 5, [10, 17]),
        ([10, 12, 14, 16], 5, [10, 12, 14, 16, 17]),
        (["step_000020.partial", 10], 1, [17]),  # an interrupted save of a history that was left
        ([100, 120], 2, [17, 100, 120]),  # the new one never goes
    ],
)
def test_the_newest_stays(tmp_path: Path, there, keep, left):
    for name in there:
        (tmp_path / (name if isinstance(name, str) else f"step_{name:06d}")).mkdir()
    folder = begin(tmp_path, TrainState(step=17), {}, keep, Plan, MESH).finish()
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step_{step:06d}" for step in left]
    assert (folder / "manifest.json").is_file() and latest(tmp_path, at_most=17) == folder


@pytest.mark.parametrize("fault", ["plan", "write", "finish"])
def test_a_failure_at_any_moment_leaves_nothing(tmp_path: Path, fault: str):
    def plan(folder: Path) -> Plan:
        if fault == "plan":
            raise OSError("disk full")
        return Plan(folder, fault=fault)

    (tmp_path / "step_000010").mkdir()
    with pytest.raises(
        LeaderError, match=r"step_000017: rank 0 could not write, \d+ MiB are free there: OSError: disk full"
    ):
        begin(tmp_path, TrainState(step=17), {}, 1, plan, MESH).finish()
    assert [path.name for path in tmp_path.iterdir()] == ["step_000010"]


def checkpointer(root: Path, plan=Plan, saved_step: int = 0, **options) -> Checkpointer:
    config = CheckpointConfig(keep=9, **options)
    return Checkpointer(config, root, {}, plan, lambda state: state, MESH, num_steps=5, saved_step=saved_step)


def saved(root: Path) -> list[int]:
    return [int(path.name.removeprefix("step_")) for path in sorted(root.glob("step_*")) if path.suffix != ".partial"]


def test_the_schedule_asks_for_every_second_step_and_the_last(tmp_path: Path):
    saver = checkpointer(tmp_path, every=2, asynchronous=False)
    for step in range(6):
        saver.on_schedule(TrainState(step=step))
        assert saved(tmp_path) == [n for n in (2, 4, 5) if n <= step]
    manifest = json.loads((tmp_path / "step_000005" / "manifest.json").read_text())
    assert sorted(manifest) == ["actor/weights", "state.json"]


def test_what_is_saved_is_not_saved_again(tmp_path: Path):
    saver = checkpointer(tmp_path, saved_step=2, every=2, asynchronous=False)
    saver.on_schedule(TrainState(step=2))
    assert saved(tmp_path) == []
    saver.save_now(TrainState(step=3))
    saver.save_now(TrainState(step=3))
    assert saved(tmp_path) == [3]


def test_training_goes_on_while_a_save_is_written_and_the_next_waits_for_it(tmp_path: Path):
    gate = threading.Event()
    saver = checkpointer(tmp_path, lambda folder: Plan(folder, gate), every=2, asynchronous=True)
    for step in (2, 3):
        saver.on_schedule(TrainState(step=step))
        assert saved(tmp_path) == []
    gate.set()
    saver.on_schedule(TrainState(step=4))
    assert saved(tmp_path) == [2]
    saver.on_schedule(TrainState(step=5))
    assert saved(tmp_path) == [2, 4, 5]
