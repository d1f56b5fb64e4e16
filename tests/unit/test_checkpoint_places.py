"""Where checkpoints lie, that the newest one is missed, and that one is whole when its run ends."""

import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_checkpoint import Plan, checkpointer, saved

from megagrpo.checkpoint.folder import latest, place_problem, put_in_place
from megagrpo.mesh import RunStopped
from megagrpo.run import Run
from megagrpo.types import TrainState


def test_the_newest_checkpoint_is_missed(tmp_path: Path):
    """Also if older ones are left; one that was set aside in its place is no loss."""
    root = tmp_path / "checkpoints"
    saver = checkpointer(root, every=1)
    for step in (1, 2):
        saver.on_schedule(TrainState(step=step))
    assert place_problem(root, None) == ""
    newest = root / "step_000002"
    newest.rename(root / "step_000002.bad")
    assert place_problem(root, None) == ""
    (root / "step_000002.bad").rename(tmp_path / "step_000002")
    said = place_problem(root, None)
    assert "but step_000002, " in said and f"goes on from {root / 'step_000001'}" in said
    root.rename(tmp_path / "moved")
    root.symlink_to(tmp_path / "not_mounted")
    said = place_problem(root, str(tmp_path / "not_mounted"))
    assert f"is not in {tmp_path / 'not_mounted'}" in said and "goes on from step 0" in said
    with pytest.raises(ValueError, match="Put it back or correct checkpoint.dir"):
        put_in_place(root, str(tmp_path / "not_mounted"))
    assert not (tmp_path / "not_mounted").exists(), "an empty folder would hide it"


def test_a_run_that_ends_itself_finishes_the_save_in_the_background(tmp_path: Path):
    """Step 3 left weights between two versions: only step 2 can be saved, and is being written."""
    gate = threading.Event()
    saver = checkpointer(
        tmp_path, lambda folder, _: Plan(folder, gate=gate), every=2, background=True
    )
    run = object.__new__(Run)
    state = TrainState(step=2)
    vars(run).update(
        actor=SimpleNamespace(updates_done=5), updates_done=4, state=state, checkpointer=saver
    )
    with pytest.raises(RunStopped, match="not finite"), run.saving():
        saver.on_schedule(state)
        assert saved(tmp_path) == []
        gate.set()
        raise RunStopped("not finite")
    assert saved(tmp_path) == [2]


def test_checkpoints_on_another_disk_are_found_in_the_run_folder(tmp_path: Path):
    root = tmp_path / "run" / "checkpoints"
    other = tmp_path / "scratch" / "mine"
    put_in_place(root, None)
    assert not root.exists()
    put_in_place(root, str(other))
    (other / "step_000010").mkdir()
    assert latest(root) == root / "step_000010"
    for directory in (str(other), None):  # of a run that goes on, and of one that says no more
        put_in_place(root, directory)
        assert latest(root) == root / "step_000010"
    with pytest.raises(
        ValueError, match=r"this run's checkpoints are in .*scratch/mine: move them"
    ):
        put_in_place(root, str(tmp_path / "third"))
    assert not (tmp_path / "third").exists()
    new = tmp_path / "other run" / "checkpoints"
    assert "has another run's step_000010; name an empty folder" in place_problem(new, str(other))
    new.mkdir(parents=True)
    assert "move them there and remove" in place_problem(new, str(tmp_path / "third"))
