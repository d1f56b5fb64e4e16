"""`megagrpo run` with the engine's experts in the trainer: through tools, surplus groups, checkpoints and a restart."""

import pytest
from run_megagrpo import assert_same_run, metrics, rollouts, run_experiment
from test_tools import SAYS_IT_AGAIN

from megagrpo.checkpoint.folder import latest
from megagrpo.checkpoint.groups import read_groups
from megagrpo.system.run_folder import RunFolder

STEPS = 2


@pytest.mark.slow
def test_the_engines_experts_are_the_trainers_own_in_float32(experiments):
    """Another token's experts, or another layer's, would be others for almost every token."""
    folder = experiments / "replayed"
    sections = {
        "actor": {"routing_replay": "rollout"},
        "algorithm": {"dynamic_sampling": {"max_num_gen_batches": 20}},
        "sampling": {"max_response_tokens": 24} | SAYS_IT_AGAIN,
        "checkpoint": {"every": 1},
    }
    for steps in (STEPS, 2 * STEPS):  # the second start goes on from a checkpoint
        run_experiment(folder, train={"num_steps": steps}, **sections)
    entries = metrics(folder)
    for step in range(1, 2 * STEPS + 1):
        assert entries[step]["mismatch/logprob_abs_mean"] <= 1e-5 or entries[step]["dynamic_sampling/carried"]
        assert entries[step]["router/replay_differs"] < 0.05, "surplus groups alone are of older weights"
    assert all("routed" not in str(group) for groups in rollouts(folder).values() for group in groups)
    surplus = latest(RunFolder(folder).checkpoints).parent.glob("*/surplus-*.npz")
    for sample in (sample for file in surplus for group in read_groups(file) for sample in group.samples):
        assert sample.routed_experts is not None and sample.routed_experts.dtype.name == "uint8"


@pytest.mark.slow
def test_runs_repeat_and_change_no_bit_while_experts_agree(experiments):
    """The same experts from the engine as from the routers: through the whole loop, the same losses and responses."""
    folders = {"first": "rollout", "second": "rollout", "without": None}
    for name, source in folders.items():
        actor = {} if source is None else {"routing_replay": source}
        run_experiment(experiments / name, train={"num_steps": 3}, rollout={"deterministic": True}, actor=actor)
    first, second, without = (experiments / name for name in folders)
    assert_same_run(first, second, 3)
    differs = [metrics(first)[step]["router/replay_differs"] for step in range(1, 4)]
    assert differs[0] == 0, "else nothing of what follows is compared"
    agreed = next((step for step, share in enumerate(differs) if share), len(differs))
    ours, theirs = metrics(first), metrics(without)
    for step in range(1, agreed + 1):
        for name in ("loss/total", "optim/grad_norm", "mismatch/logprob_abs_mean"):
            assert ours[step][name] == theirs[step][name], (step, name)
        assert rollouts(first)[step] == rollouts(without)[step]
