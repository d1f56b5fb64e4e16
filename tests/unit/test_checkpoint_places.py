"""Where checkpoints lie, that the newest one is missed, and that one is whole when its run ends."""

import errno
import os
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_checkpoint import MESH, Plan, checkpointer, saved

from megagrpo.checkpoint import resume
from megagrpo.checkpoint.folder import latest, older_instead, place_problem, put_in_place
from megagrpo.loop.evaluation import evaluate
from megagrpo.loop.run import Run
from megagrpo.mesh import LeaderError, RunStopped
from megagrpo.rollout.source import EvaluationStopped
from megagrpo.system.stop_request import StopRequest
from megagrpo.types import TrainState
from tests.experiments import experiment


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
    saver = checkpointer(tmp_path, lambda folder, _: Plan(folder, gate=gate), every=2, background=True)
    state = TrainState(step=2)
    entered: list[str] = []
    run = ending_run(state, saver, updates_done=5, enter=entered.append)
    with pytest.raises(RunStopped, match="not finite"), run.saving():
        saver.on_schedule(state)
        assert saved(tmp_path) == []
        gate.set()
        raise RunStopped("not finite")
    assert saved(tmp_path) == [2]
    assert entered == ["checkpoint"], "a long one is no rollout that hangs"


def ending_run(state: TrainState, saver, start_step: int = 0, updates_done: int = 4, **more) -> Run:
    """A run, as far as its end asks it. It began after `start_step`."""
    run = object.__new__(Run)
    vars(run).update(
        actor=SimpleNamespace(mesh=MESH, updates_done=updates_done), updates_done=4, state=state,
        checkpointer=saver, recording=SimpleNamespace(start_step=start_step, note=print),
        enter=lambda phase: None, num_steps=5, evaluation_stopped=False,
    )  # fmt: skip
    vars(run).update(more)
    return run


def test_a_start_that_fails_leaves_the_checkpoint_that_it_came_from(tmp_path: Path):
    """It is for one layout, which a last save would change, and holds groups that this start may
    have left out. A step that this start finished is saved."""
    checkpointer(tmp_path, every=2).on_schedule(TrainState(step=2))
    (mark := tmp_path / "step_000002" / "mark").touch()
    for start_step, step, expected in ((2, 2, [2]), (2, 3, [2, 3])):
        saver = checkpointer(tmp_path, saved_step=start_step, every=2)
        run = ending_run(TrainState(step=step), saver, start_step)
        with pytest.raises(LeaderError, match="no engine"), run.saving():
            raise LeaderError("no engine took the weights")
        assert mark.exists() and saved(tmp_path) == expected


@pytest.mark.parametrize("evaluation", ["none", "made", "stopped"])
def test_a_stop_after_everything_is_done_asks_for_no_other_start(tmp_path: Path, evaluation: str):
    request = StopRequest(tmp_path / "trainer.stop_request")
    held_out = {"data": {"path": "d"}, "every": 2} if evaluation != "none" else None

    def groups(**_) -> list:
        if evaluation == "stopped":
            raise EvaluationStopped
        return []

    run = ending_run(
        TrainState(step=5), checkpointer(tmp_path), stop_request=request, evaluation_groups=groups,
        config=experiment(eval=held_out), inputs=SimpleNamespace(eval_prompts=SimpleNamespace(sources=[])),
    )  # fmt: skip
    evaluate(run)
    run.checkpointer.on_schedule(run.state)
    request.make()  # while the last checkpoint is written
    assert run.stopping() == (evaluation == "stopped")
    assert (request.granted() is None) == (evaluation != "stopped")


def test_a_look_that_the_file_system_refuses_is_no_stop_request(tmp_path: Path, monkeypatch):
    (request := StopRequest(tmp_path / "trainer.stop_request")).make()

    def stale(*_, **__) -> None:
        raise OSError(errno.ESTALE, "Stale file handle")

    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", stale)
        assert not request.made()
    assert request.made(), "it is asked again"


def test_checkpoints_that_were_moved_as_proposed_are_linked(tmp_path: Path):
    root, big = tmp_path / "run" / "checkpoints", tmp_path / "big"
    checkpointer(root, every=1).on_schedule(TrainState(step=1))
    assert f"move them there and remove {root}" in place_problem(root, str(big))
    root.rename(big)
    assert place_problem(root, str(big)) == ""
    assert put_in_place(root, str(big)) == root / "step_000001" and root.resolve() == big
    root.unlink()
    (big / "step_000001").rename(tmp_path / "step_000001")
    assert f"step_000001, the checkpoint that was saved last, is not in {big}" in place_problem(root, str(big))


def test_a_folder_that_another_run_has_saved_into_is_not_linked(tmp_path: Path):
    """Also if it has a step of the name that this run's newest one had."""
    root, other = tmp_path / "run" / "checkpoints", tmp_path / "other" / "checkpoints"
    checkpointer(root, every=1).on_schedule(TrainState(step=1))
    for step in (1, 2):
        checkpointer(other, every=1).on_schedule(TrainState(step=step))
    root.rename(tmp_path / "lost")
    assert "another run's step_000002" in place_problem(root, str(other))


@pytest.mark.parametrize(("suffix", "there"), [(".old", True), (".replaced.partial", True), (".partial", False)])
def test_what_counts_as_the_checkpoint(tmp_path: Path, suffix: str, there: bool):
    """A user's suffix, and the form that restore_replaced puts back; not an interrupted save."""
    root = tmp_path / "checkpoints"
    checkpointer(root, every=1).on_schedule(TrainState(step=1))
    (root / "step_000001").rename(root / f"step_000001{suffix}")
    assert (place_problem(root, None) == "") == there
    if there:
        newest = root / "step_000001" if "replaced" in suffix else None
        assert put_in_place(root, None) == newest


def test_a_run_of_an_older_version_is_protected_from_its_next_start_on(tmp_path: Path):
    root = tmp_path / "checkpoints"
    checkpointer(root, every=1).on_schedule(TrainState(step=1))
    (tmp_path / "last_checkpoint").unlink()
    put_in_place(root, None)
    (root / "step_000001").rename(tmp_path / "purged")
    assert "step_000001, the checkpoint that was saved last, is not in" in place_problem(root, None)


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
    with pytest.raises(ValueError, match=r"this run's checkpoints are in .*scratch/mine: move them"):
        put_in_place(root, str(tmp_path / "third"))
    assert not (tmp_path / "third").exists()
    new = tmp_path / "other run" / "checkpoints"
    assert "has another run's step_000010; name an empty folder" in place_problem(new, str(other))
    new.mkdir(parents=True)
    assert "move them there and remove" in place_problem(new, str(tmp_path / "third"))


def test_a_folder_that_is_another_disk_on_other_nodes_is_refused_before_the_first_step(tmp_path: Path, monkeypatch):
    """The same path on every node is not the same folder. A shared one shows what rank 0 makes, perhaps late."""
    shared, local = tmp_path / "shared", tmp_path / "local"
    config = experiment(output_dir=str(tmp_path / "run"), checkpoint={"dir": str(shared)})
    assert resume.find_checkpoint(config, MESH) is None
    assert [*shared.iterdir()] == [], "it leaves nothing"

    mark = str(tmp_path / "run" / "checkpoints" / "mark")
    made = iter(["step_000001", mark])  # by rank 0: what it finds, and what it writes
    other = SimpleNamespace(from_main=lambda *_: next(made), all_true=bool, is_main=False)
    threading.Timer(0.3, (shared / "mark").mkdir).start()
    assert resume.find_checkpoint(config, other) == "step_000001"
    monkeypatch.setattr(resume, "_SHOWN_S", 0.0)
    local.mkdir()
    (tmp_path / "run" / "checkpoints").unlink()
    (tmp_path / "run" / "checkpoints").symlink_to(local)
    made = iter(["step_000001", mark])
    with pytest.raises(ValueError, match=r"checkpoint.dir: .*shared is not the same folder on all nodes"):
        resume.find_checkpoint(config, other)


def test_the_older_checkpoint_of_a_message_is_older_by_number(tmp_path: Path):
    """Names grow at the millionth step."""
    for name in ("step_999999", "step_1000000", "step_2000000"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").touch()
    assert "step_999999 beside it" in older_instead(tmp_path / "step_1000000")
    assert older_instead(tmp_path / "step_999999") == ""
