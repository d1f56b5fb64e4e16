"""Which checkpoints make room for a new one."""

import json
import threading
import zlib
from pathlib import Path

import pytest
import torch

from megagrpo.checkpoint import save as checkpoint
from megagrpo.checkpoint.folder import is_reshardable, latest
from megagrpo.checkpoint.save import Checkpointer, Retention, RunIdentity, SaveSchedule, load, start_save
from megagrpo.config.schema import CheckpointConfig
from megagrpo.mesh import LeaderError, make_mesh
from megagrpo.types import TrainState

MESH = make_mesh(0, 1, torch.device("cpu"), 60.0)
LAYOUT = {"ranks": 1, "tp": 1}
ANY = RunIdentity({}, LAYOUT)


class Plan:
    """Writes one file, when it may, or fails with a reason."""

    def __init__(self, folder: Path, reshardable: bool = True, gate=None, fault: str = "", size: int = 7):
        self.file, self.reshardable, self.gate, self.fault = folder / "weights", reshardable, gate, fault
        self.content = b"weights".ljust(size)

    def write(self) -> dict[Path, tuple[int, int]]:
        if self.gate is not None:
            self.gate.wait()
        if self.fault == "write":
            raise OSError("disk full")
        self.file.write_bytes(self.content)
        return {self.file: (len(self.content), zlib.crc32(self.content))}

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
    folder = start_save(tmp_path, TrainState(step=17), ANY, Retention(keep), Plan, MESH).finish()
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step_{step:06d}" for step in left]
    assert (folder / "manifest.json").is_file() and latest(tmp_path, at_most=17) == folder


@pytest.mark.parametrize("fault", ["plan", "write", "finish"])
def test_a_failure_at_any_moment_leaves_nothing(tmp_path: Path, fault: str):
    def plan(folder: Path) -> Plan:
        if fault == "plan":
            raise OSError("disk full")
        return Plan(folder, fault=fault)

    (tmp_path / "step_000010").mkdir()
    message = r"step_000017: rank 0 could not write, \d+ MiB are free there: OSError: disk full"
    with pytest.raises(LeaderError, match=message):
        start_save(tmp_path, TrainState(step=17), ANY, Retention(1), plan, MESH).finish()
    assert [path.name for path in tmp_path.iterdir()] == ["step_000010"]


def checkpointer(root: Path, plan=Plan, saved_step: int = 0, background: bool = False, **options) -> Checkpointer:
    schedule = SaveSchedule(5, saved_step, background)
    return Checkpointer(CheckpointConfig(keep=9, **options), root, ANY, plan, lambda state: state, MESH, schedule)


def saved(root: Path) -> list[int]:
    return [int(path.name.removeprefix("step_")) for path in sorted(root.glob("step_*")) if path.suffix != ".partial"]


def test_what_is_saved_is_not_saved_again(tmp_path: Path):
    saver = checkpointer(tmp_path, saved_step=2, every=2)
    saver.on_schedule(TrainState(step=2))
    assert saved(tmp_path) == []
    saver.save_now(TrainState(step=3))
    saver.save_now(TrainState(step=3))
    assert saved(tmp_path) == [3]


def test_training_goes_on_while_a_save_is_written_and_the_next_waits_for_it(tmp_path: Path):
    gate = threading.Event()
    saver = checkpointer(tmp_path, lambda folder, _: Plan(folder, gate=gate), every=2, background=True)
    for step in (2, 3):
        saver.on_schedule(TrainState(step=step))
        assert saved(tmp_path) == []
    gate.set()
    saver.on_schedule(TrainState(step=4))
    assert saved(tmp_path) == [2]
    saver.on_schedule(TrainState(step=5))
    assert saved(tmp_path) == [2, 4, 5]


def forms(root: Path) -> dict[int, bool]:
    return {step: is_reshardable(root / f"step_{step:06d}") for step in saved(root)}


@pytest.mark.parametrize(
    ("choice", "expected"), [("last", [False, False, True]), ("always", [True] * 3), ("never", [False] * 3)]
)
def test_the_schedule_asks_for_every_second_step_and_the_last(tmp_path: Path, choice: str, expected: list[bool]):
    """Another layout can load the saves that checkpoint.reshardable chooses."""
    saver = checkpointer(tmp_path, every=2, reshardable=choice)
    for step in range(6):
        saver.on_schedule(TrainState(step=step))
        assert saved(tmp_path) == [n for n in (2, 4, 5) if n <= step]
    assert list(forms(tmp_path).values()) == expected
    manifest = json.loads((tmp_path / "step_000005" / "manifest.json").read_text())
    assert sorted(manifest) == ["actor/weights", "state.json"]


def test_a_stop_saves_the_step_for_any_layout_once(tmp_path: Path):
    planned = []

    def plan(folder: Path, reshardable: bool) -> Plan:
        planned.append(reshardable)
        return Plan(folder, reshardable)

    saver = checkpointer(tmp_path, plan, every=2)
    saver.on_schedule(TrainState(step=2))
    assert forms(tmp_path) == {2: False}
    for _ in range(2):
        saver.save_now(TrainState(step=2))
    assert forms(tmp_path) == {2: True} and planned == [False, True]
    checkpointer(tmp_path, plan, saved_step=2).save_now(TrainState(step=2))  # a start that is asked to stop at once
    assert planned == [False, True]
    assert [path.name for path in tmp_path.iterdir()] == ["step_000002"]


def test_another_layout_is_refused_with_what_to_do(tmp_path: Path):
    for step, reshardable in ((1, True), (2, False)):
        plan = lambda folder, form=reshardable: Plan(folder, form)  # noqa: E731  # two of them
        folder = start_save(tmp_path, TrainState(step=step), ANY, Retention(9), plan, MESH).finish()
    other = RunIdentity({}, {"ranks": 4, "tp": 2})
    layouts = r"by its own layout alone \(ranks 1\), this run has another \(ranks 4, tp 2\)"
    what_to_do = r".*SIGUSR1 .*checkpoint.reshardable .*step_000001 beside it"
    with pytest.raises(LeaderError, match="step_000002 can be loaded " + layouts + what_to_do):
        load(folder, other, lambda _: None, MESH)
    assert load(folder, ANY, lambda _: None, MESH).step == 2
    assert load(tmp_path / "step_000001", other, lambda _: None, MESH).step == 1


@pytest.mark.parametrize(("keep_gb", "left"), [(None, [2, 4, 5]), (3e-6, [4, 5]), (1e-9, [5])])
def test_bytes_are_bounded_but_the_newest_stays(tmp_path: Path, keep_gb: float | None, left: list[int]):
    """Three checkpoints of a little more than 1000 bytes each."""
    saver = checkpointer(tmp_path, lambda folder, _: Plan(folder, size=1000), every=2, keep_gb=keep_gb)
    for step in range(6):
        saver.on_schedule(TrainState(step=step))
    assert saved(tmp_path) == left


def test_checksums_are_those_of_the_writer_and_its_files_are_not_read_again(tmp_path: Path, monkeypatch):
    read = []
    monkeypatch.setattr(checkpoint, "_crc", lambda path: read.append(path.name) or 0)
    folder = start_save(tmp_path, TrainState(step=1), ANY, Retention(1), Plan, MESH).finish()
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["actor/weights"] == [7, zlib.crc32(b"weights")] and read == ["state.json"]
