"""Where a start takes its state from: the run's own checkpoint, another run's weights, or nothing."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megagrpo.checkpoint import resume as beginning
from megagrpo.mesh import make_mesh
from megagrpo.system.run_folder import RunFolder
from megagrpo.types import AlgoState, Prompt, RolloutGroup, Sample, TrainState
from tests.experiments import experiment

SAVED = TrainState(step=5, data_cursor=40, algo_state=AlgoState(kl_coef=0.3))


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Resumes an experiment with these `checkpoint` options; returns the state, the actor and what was read."""
    read = []
    for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(beginning, "run_identity", lambda config, actor: {})
    load = lambda folder, *_: read.append(folder) or TrainState(**vars(SAVED))  # noqa: E731
    monkeypatch.setattr(beginning.checkpoint, "load", load)

    def resume(sections: dict = {}, **options) -> tuple[TrainState, SimpleNamespace, list[Path]]:  # noqa: B006
        config = experiment(**{"output_dir": str(tmp_path), "checkpoint": options} | sections)
        actor = SimpleNamespace(mesh=make_mesh(0, 1, torch.device("cpu"), deadline_s=60), updates_done=5)
        folder = RunFolder(tmp_path)
        source = beginning.find_checkpoint(config, folder, actor.mesh)
        return beginning.resume(config, folder, source, actor), actor, read

    return resume


@pytest.mark.parametrize(("own", "load"), [(False, None), (False, "elsewhere/step_000005"), (True, "elsewhere")])
def test_the_runs_own_checkpoint_comes_first_and_another_runs_weights_without_its_progress(start, tmp_path, own, load):
    folder = tmp_path / "checkpoints" / "step_000005"
    if own:
        folder.mkdir(parents=True)
    state, actor, read = start(load=load)
    assert (state, actor.updates_done) == ((SAVED, 5) if own else (TrainState(), 0 if load else 5))
    assert read == ([folder] if own else [Path(load)] if load else [])


def test_resume_never_is_about_an_earlier_start(start, tmp_path, monkeypatch):
    (tmp_path / "checkpoints" / "step_000005").mkdir(parents=True)
    with pytest.raises(ValueError, match="checkpoint.resume is never, but .*step_000005 is there"):
        start(resume="never")
    # ranks that start again, a job that was requeued
    for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"):
        with monkeypatch.context() as patch:
            patch.setenv(name, "1")
            assert start(resume="never")[0] == SAVED


@pytest.mark.parametrize("source", [None, Path("step_000005")])
@pytest.mark.parametrize("reference", [False, True])
def test_the_model_is_read_unless_a_checkpoint_overwrites_it(monkeypatch, source: Path | None, reference: bool):
    done = []
    monkeypatch.setattr(
        beginning, "load_initial_weights", lambda actor, path, overwritten, draft: done.append(overwritten)
    )
    actor = SimpleNamespace(keep_reference=lambda: done.append("reference"))
    config = experiment(algorithm={"kl": {"loss_coef": 0.1}} if reference else {})
    beginning.initial_weights(config, config.algorithm, source, actor)
    assert done == ([False, "reference"] if reference else [source is not None])


def group(version: int) -> RolloutGroup:
    return RolloutGroup(version, Prompt(0, "", (1,), ""), (Sample(0, (7,), (-1.0,), "stop", version, "7"),), ())


DYNAMIC = {"dynamic_sampling": {}, "mismatch": {"weight": {"name": "tis"}}}


@pytest.mark.parametrize("staleness, young", [(4, [2, 3, 4]), (2, [3, 4]), (0, [4])])
def test_groups_too_old_for_a_smaller_bound_are_left_out(start, tmp_path, monkeypatch, capsys, staleness, young):
    (tmp_path / "checkpoints" / "step_000005").mkdir(parents=True)
    monkeypatch.setattr(SAVED, "surplus", [group(version) for version in (2, 3, 4)])
    state, *_ = start(sections={"rollout": {"max_staleness": staleness}, "algorithm": DYNAMIC})
    assert [group.samples[0].weight_version for group in state.surplus] == young
    assert [group.group_id for group in state.surplus] == young, "the ids that they were sampled with"
    assert ("are left out" in capsys.readouterr().out) == (len(young) < 3)


def test_more_groups_than_a_step_takes_would_get_too_old(start, tmp_path, monkeypatch):
    (tmp_path / "checkpoints" / "step_000005").mkdir(parents=True)
    monkeypatch.setattr(SAVED, "surplus", [group(4)] * 3)
    few = {"train": {"num_prompts_per_step": 3}, "algorithm": DYNAMIC}
    for staleness in (0, 2):
        with pytest.raises(ValueError, match=r"has 3 groups for the next step, .* is 3: take 4 or more"):
            start(sections=few | {"rollout": {"max_staleness": staleness}})
    assert len(start(sections=few | {"algorithm": {}})[0].surplus) == 3, "which no step takes"
