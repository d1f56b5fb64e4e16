"""`megagrpo run` as a user runs it, with real trainers and a real engine: what it measures, writes and repeats."""

import statistics
from pathlib import Path

import pytest
import torch
from run_megagrpo import (
    LONG_RUN,
    Job,
    assert_agrees,
    assert_same_run,
    engine,
    metrics,
    reached_before,
    rollouts,
    succeed,
    transformers_accepts,
    write_experiment,
)
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from megagrpo.checkpoint.folder import latest
from megagrpo.system.run_folder import RunFolder
from megagrpo.tools.view.samples import read_samples
from megagrpo.weights.hf_folder import HfFolder

NUM_STEPS, NUM_PROMPTS, GROUP_SIZE = 10, 8, 4
MEASURED = {  # of every step
    "reward/mean", "reward/std", "reward/error_fraction", "reward/timeout_fraction", "group/reward_std",
    "group/degenerate_fraction", "advantage/mean", "advantage/std", "loss/total", "loss/policy", "policy/entropy",
    "policy/clip_fraction_low", "policy/clip_fraction_high", "policy/ratio", "optim/grad_norm", "optim/lr",
    "response/length_mean", "response/length_max", "response/truncated_fraction", "mismatch/logprob_abs_mean",
    "mismatch/kl", "moe/load_imbalance", "batch/padding_waste", "perf/tokens_per_s", "publish/total",
    "publish/gather", "publish/transfer", "publish/verify", "time/rollout_s", "time/update_s", "time/publish_s",
    "time/evaluate_s", "time/checkpoint_s", "time/step_s", "time/framework_fraction",
}  # fmt: skip


def test_ten_steps_are_measured_and_agree_with_the_engine(long_run):
    folder, done = long_run
    assert done.stderr.strip() == ""
    entries = metrics(folder)
    assert sorted(entries) == list(range(NUM_STEPS + 1))
    assert all("eval/accuracy" in entries[step] and "eval/pass_at_k" in entries[step] for step in (0, 5, 10))
    for step in (0, 5, 10):  # both are sampled at temperature 1 with the same seeds; a cached prefix may flip a token
        assert entries[step]["eval_as_trained/accuracy"] == pytest.approx(entries[step]["eval/accuracy"], abs=0.1)
    for step in range(1, NUM_STEPS + 1):
        missing = {name for name in MEASURED if entries[step].get(name) is None}
        assert not missing, f"step {step}: {missing}"
        assert entries[step]["optim/grad_norm"] > 0, "nothing was learned, so nothing was tested"
    assert_agrees(folder)
    # 0 where no look at the engine, once a second, met the samples of a step: see test_service.py
    assert all(0 <= entry["engines/running_max"] <= NUM_PROMPTS * GROUP_SIZE for step, entry in entries.items() if step)


def test_every_sample_is_there_with_its_weights_and_its_reward(long_run):
    steps = rollouts(long_run[0])
    assert sorted(steps) == list(range(1, NUM_STEPS + 1))
    for step, groups in steps.items():
        first_id = (step - 1) * NUM_PROMPTS
        assert [group["group_id"] for group in groups] == list(range(first_id, first_id + NUM_PROMPTS))
        for group in groups:
            assert len(group["samples"]) == GROUP_SIZE
            for sample in group["samples"]:
                assert sample["weight_version"] == step - 1, "the weights before this step's update"
                share = sum(c in "01234" for c in sample["text"]) / max(len(sample["text"]), 1)
                assert sample["outcome"]["status"] == "score" and sample["reward"] == share
        mean = statistics.fmean(sample["reward"] for group in groups for sample in group["samples"])
        assert metrics(long_run[0])[step]["reward/mean"] == pytest.approx(mean, rel=1e-12)


def test_advantages_and_tokens_of_the_update_are_on_record(long_run):
    """With one update a step the log-probabilities are those of its own forward."""
    shown, notes = read_samples(RunFolder(long_run[0]), 20e6)
    samples = [sample for group in shown["groups"] for sample in group["samples"]]
    assert len(samples) == NUM_STEPS * NUM_PROMPTS * GROUP_SIZE
    assert all(sample["advantage"] is not None for sample in samples)
    with_tokens = [sample["tokens"] for sample in samples if "tokens" in sample]
    assert len(with_tokens) == NUM_STEPS * 4 * GROUP_SIZE  # log.tokens
    assert all(abs(value) <= 1e-4 for tokens in with_tokens for value in tokens["difference"])
    assert notes == []


def test_the_run_leaves_a_summary_a_curve_and_a_model(long_run, tmp_path):
    folder, done = long_run
    summary = (folder / "summary.md").read_text()
    assert summary in done.stdout and "mean abs(trainer - rollout) log-prob" in summary
    assert (folder / "curve.png").read_bytes().startswith(b"\x89PNG") and list((folder / "tensorboard").iterdir())
    assert not (folder / "service.json").exists() and not list((folder / "checkpoints").glob("*.partial"))
    assert len(list((folder / "checkpoints").glob("step_*"))) == NUM_STEPS
    succeed("export", folder.with_suffix(".yaml"), tmp_path / "exported")
    assert transformers_accepts(tmp_path / "exported") == {"wrong": [], "finite": True}
    before, after = HfFolder(folder.parent / "model"), HfFolder(tmp_path / "exported")
    assert before.specs == after.specs
    assert all(not torch.equal(before[name], after[name]) for name in before.specs), "a weight that no step has moved"


def test_a_dumped_step_is_replayed_from_the_checkpoint_before_it(long_run):
    folder = long_run[0]
    done = succeed("replay", folder.with_suffix(".yaml"), folder / "dumps" / "step_000004")
    first, _, *lines = done.stdout.splitlines()
    assert first == f"weights of version 3 ({folder / 'checkpoints' / 'step_000003'})"
    then, now = ({line.split()[0]: line.split()[column] for line in lines} for column in (1, 2))
    for name in ("loss/total", "optim/grad_norm", "optim/lr", "policy/entropy"):
        assert then[name] == now[name] == repr(metrics(folder)[4][name]), name


@pytest.mark.verifies(
    "runs",
    "a resumed run equals an undisturbed one bit by bit (deterministic engine, same layout)",
    "e2e/test_restart.py",
)
def test_killed_and_run_again_it_is_the_same_run(long_run):
    """The launcher dies without a chance to clean up; `megagrpo run` again goes on from the last checkpoint.

    Everything equals the run that nobody disturbed, whose weights took the other way to the engine.
    """
    folder = long_run[0].parent / "resumed"
    sections = LONG_RUN | {"weights": {"transport": "disk"}, "eval": None}
    config = write_experiment(folder, **sections)
    with Job("run", config, "--set", "train.num_steps=500") as job:
        job.wait_for(lambda: (folder / "checkpoints" / "step_000005").exists(), "step 5", 500)
        assert engine(folder) is not None
        job.kill()
    reached = reached_before(folder, NUM_STEPS, middle=5)
    done = succeed("run", config, "--set", "algorithm.mismatch.alarm=1.0e-9")
    assert done.stdout.count("ALARM: log-probabilities of trainer and engine are") == 1
    assert f"continues after step {reached}" in done.stdout and f" {reached + 1}/{NUM_STEPS}  " in done.stdout
    assert_same_run(folder, long_run[0], NUM_STEPS)
    assert_same_state(folder, long_run[0])


def last_state(folder: Path) -> dict[str, torch.Tensor]:
    """Weights and optimizer of the last checkpoint, by Megatron's name."""
    file = folder / "whole.pt"
    dcp_to_torch_save(latest(folder / "checkpoints") / "actor", file)
    return {name: value for name, value in torch.load(file, weights_only=False).items() if torch.is_tensor(value)}


def assert_same_state(folder: Path, other: Path) -> None:
    mine, theirs = last_state(folder), last_state(other)
    assert mine.keys() == theirs.keys() and any(name.startswith("optimizer.state.exp_avg.") for name in mine)
    assert [name for name in mine if not torch.equal(mine[name], theirs[name])] == []
