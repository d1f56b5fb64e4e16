"""Which checkpoints are Hugging Face folders, too, and which start writes them."""

import os
import shutil
from pathlib import Path

import pytest

from megagrpo.check.problems import finished
from megagrpo.system.stop_request import StopRequest
from megagrpo.types import TrainState
from tests.experiments import experiment
from tests.unit.test_checkpoint import checkpointer, saved
from tests.unit.test_checkpoint_places import ending_run


def exports(root: Path) -> dict[int, list[str]]:
    """The steps of Hugging Face folders; after which steps the starts began that wrote them."""
    return {int(path.name[3:]): sorted(file.name for file in path.iterdir()) for path in sorted(root.glob("hf_*"))}


def run_to(root: Path, stop: int, start: int = 0, **options) -> dict[int, list[str]]:
    saver = checkpointer(root, saved_step=start, **options)
    for step in range(start, stop + 1):
        saver.on_schedule(TrainState(step=step))
    saver.complete()
    return exports(root)


def test_every_nth_scheduled_save_and_the_last_are_hugging_face_folders(tmp_path: Path):
    assert run_to(tmp_path / "none", 5, every=1) == {}
    assert list(run_to(tmp_path / "each", 5, every=2, hf_every=1)) == [2, 4, 5]
    assert list(run_to(tmp_path / "second", 5, every=1, hf_every=2)) == [2, 4, 5]
    assert list(run_to(tmp_path / "newest", 5, every=1, hf_every=2, keep=2)) == [4, 5]
    assert list(run_to(tmp_path / "end", 5, every=0, hf_every=3)) == [5]
    stopped = checkpointer(tmp_path / "stopped", every=2, hf_every=1)
    stopped.save_now(TrainState(step=2))
    assert saved(tmp_path / "stopped") == [2] and exports(tmp_path / "stopped") == {}, "a stop has no time for it"


@pytest.mark.parametrize("background", [False, True])
def test_a_start_writes_the_folder_that_the_one_before_did_not(tmp_path: Path, background: bool):
    options = {"every": 2, "hf_every": 1, "background": background}
    assert run_to(tmp_path, 2, **options) == {2: ["from_0"]}
    assert run_to(tmp_path, 2, start=2, **options) == {2: ["from_0"]}, "it is there"
    shutil.rmtree(tmp_path / "hf_000002")  # as if it had been killed while it wrote
    assert run_to(tmp_path, 3, start=2, **options) == {2: ["from_2"]}
    (tmp_path / "hf_000002" / "from_2").unlink()
    assert run_to(tmp_path, 3, start=2, **options) == {2: []}
    os.utime(tmp_path / "hf_000002", (0, 0))  # older than the checkpoint: of steps that are not this run's any more
    assert run_to(tmp_path, 3, start=2, **options) == {2: ["from_2"]}


def test_copies_of_a_user_stay(tmp_path: Path):
    for name in ("hf_000001_best", "hf_000002.old"):
        (tmp_path / name).mkdir()
    saver = checkpointer(tmp_path, every=1, hf_every=1, keep=1)
    for step in (*range(6), 999_999, 1_000_000):
        saver.on_schedule(TrainState(step=step))
    assert sorted(path.name for path in tmp_path.glob("hf_*")) == ["hf_000001_best", "hf_000002.old", "hf_1000000"]


def test_a_run_that_stops_leaves_the_folder_to_the_next_start(tmp_path: Path):
    options = {"every": 2, "hf_every": 1}
    (request := StopRequest(tmp_path / "trainer.stop_request")).make()
    saver = checkpointer(tmp_path, **options)
    ending_run(TrainState(step=2), saver, stop_request=request, config=experiment()).save_on_schedule()
    assert saved(tmp_path) == [2] and exports(tmp_path) == {}
    assert run_to(tmp_path, 2, start=2, **options) == {2: ["from_2"]}


def test_a_run_is_finished_once_its_last_folder_is_there(tmp_path: Path):
    config = experiment(output_dir=str(tmp_path), train={"num_steps": 5}, checkpoint={"hf_every": 2})
    root = config.run_folder.checkpoints
    checkpointer(root).save_now(TrainState(step=5))
    assert finished(config) == "", "it was killed while it wrote, or the disk was full"
    (root / "hf_000005").mkdir()
    assert "5 of 5 steps are done" in finished(config)
