"""A whole run whose engine drafts: the samples are the model's, and one that is killed goes on bit by bit."""

import json

import pytest
from run_megagrpo import (
    assert_same_run,
    killed_and_run_again,
    make_inputs,
    metrics,
    run_experiment,
    succeed,
    write_experiment,
)

from megagrpo.weights.hf_folder import HfFolder

STEPS = 4
DRAFTS = {
    "train": {"num_steps": STEPS, "num_updates_per_step": 2},
    "actor": {"device": "cpu", "draft": {}},
    "rollout": {"deterministic": True, "draft_tokens": 2},
    "checkpoint": {"every": 1},
}
NAMES = ("draft/kl", "optim/draft_grad_norm", "draft/accepted_1", "draft/accepted_2", "draft/tokens_per_forward")


@pytest.mark.slow
def test_a_run_with_drafts_that_is_killed_goes_on_as_the_undisturbed_one(tmp_path):
    """Which tokens are sampled depends on the draft's weights: they are part of a checkpoint, as its optimizer is."""
    make_inputs(write_experiment(tmp_path / "prepared"), model={"family": "glm4_moe", "draft": True})
    reference, folder = tmp_path / "undisturbed", tmp_path / "killed"
    run_experiment(reference, **DRAFTS)
    experiment = write_experiment(folder, **DRAFTS)
    killed_and_run_again(experiment)
    assert_same_run(folder, reference, STEPS)
    ours, theirs = metrics(folder), metrics(reference)
    for step in range(1, STEPS + 1):
        assert theirs[step]["mismatch/logprob_abs_mean"] < 1e-5 and theirs[step]["draft/accepted_1"] > 0.0
        assert {name: ours[step][name] for name in NAMES} == {name: theirs[step][name] for name in NAMES}
    succeed("export", experiment, tmp_path / "exported")
    exported, before = HfFolder(tmp_path / "exported"), HfFolder(tmp_path / "model")
    assert exported.keys() == before.keys()
    assert not exported["model.layers.2.eh_proj.weight"].equal(before["model.layers.2.eh_proj.weight"])
    assert json.loads((tmp_path / "exported" / "config.json").read_text())["num_nextn_predict_layers"] == 1
