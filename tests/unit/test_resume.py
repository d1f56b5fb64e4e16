"""Where a start takes its state from: the run's own checkpoint, another run's weights, or nothing."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megagrpo import beginning
from megagrpo.config.schema import ExperimentConfig
from megagrpo.mesh import make_mesh
from megagrpo.run_folder import RunFolder
from megagrpo.types import AlgoState, TrainState

SAVED = TrainState(step=5, data_cursor=40, algo_state=AlgoState(kl_coef=0.3))


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Resumes an experiment with these `checkpoint` options; returns the state, the actor and what was read."""
    read = []
    for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(beginning, "run_identity", lambda config, actor: {})
    monkeypatch.setattr(
        beginning.checkpoint, "load", lambda folder, *_: read.append(folder) or TrainState(**vars(SAVED))
    )

    def resume(**options) -> tuple[TrainState, SimpleNamespace, list[Path]]:
        sections = {"model": {"path": "m"}, "data": {"path": "d"}, "checkpoint": options}
        config = ExperimentConfig.model_validate({"name": "t", "output_dir": str(tmp_path)} | sections)
        actor = SimpleNamespace(mesh=make_mesh(0, 1, torch.device("cpu"), deadline_s=60), updates_done=5)
        folder = RunFolder(tmp_path)
        source = beginning.find_checkpoint(config, folder, actor.mesh)
        return beginning.resume(config, folder, source, actor), actor, read

    return resume


def test_nothing_is_there(start):
    assert start()[0] == TrainState() and start()[2] == []


def test_another_runs_weights_come_without_its_progress(start, tmp_path):
    state, actor, read = start(load="elsewhere/step_000005")
    assert state == TrainState() and actor.updates_done == 0 and read == [Path("elsewhere/step_000005")]


def test_the_runs_own_checkpoint_comes_first(start, tmp_path):
    own = tmp_path / "checkpoints" / "step_000005"
    own.mkdir(parents=True)
    state, actor, read = start(load="elsewhere")
    assert state == SAVED and actor.updates_done == 5 and read == [own]


def test_resume_never_is_about_an_earlier_start(start, tmp_path, monkeypatch):
    (tmp_path / "checkpoints" / "step_000005").mkdir(parents=True)
    with pytest.raises(ValueError, match="checkpoint.resume is never, but .*step_000005 is there"):
        start(resume="never")
    for name in (
        "TORCHELASTIC_RESTART_COUNT",
        "SLURM_RESTART_COUNT",
    ):  # ranks that start again, a job that was requeued
        with monkeypatch.context() as patch:
            patch.setenv(name, "1")
            assert start(resume="never")[0] == SAVED


@pytest.mark.parametrize("source", [None, Path("step_000005")])
@pytest.mark.parametrize("reference", [False, True])
def test_the_model_is_read_unless_a_checkpoint_overwrites_it(monkeypatch, source: Path | None, reference: bool):
    done = []
    monkeypatch.setattr(beginning, "load_initial_weights", lambda actor, path, overwritten: done.append(overwritten))
    actor = SimpleNamespace(keep_reference=lambda: done.append("reference"))
    sections = {"model": {"path": "m"}, "data": {"path": "d"}}
    sections |= {"algorithm": {"kl": {"loss_coef": 0.1}}} if reference else {}
    config = ExperimentConfig.model_validate({"name": "t", "output_dir": "t"} | sections)
    beginning.initial_weights(config, config.algorithm, source, actor)
    assert done == ([False, "reference"] if reference else [source is not None])
