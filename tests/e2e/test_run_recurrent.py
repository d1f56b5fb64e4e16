"""`megagrpo run` with Qwen3.5, whose engines keep recurrent states: ahead of the trainer, asleep, bit by bit."""

from pathlib import Path

import pytest
from run_megagrpo import assert_agrees, assert_same_run, make_inputs, metrics, run_experiment, write_experiment
from test_tools import SAYS_IT_AGAIN

pytestmark = [
    pytest.mark.slow,
    pytest.mark.verifies(
        "runs", "recurrent layers: sampled ahead with experts replayed; colocated, the run of engines apart"
    ),
]
NUM_STEPS = 3


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("recurrent")
    make_inputs(write_experiment(folder / "inputs"), model={"family": "qwen3_5_moe_text", "num_layers": 4})
    return folder


def test_engines_sample_ahead_and_their_experts_are_replayed(inputs):
    """Responses outlive publishes. The first step is of the weights that it trains."""
    folder = inputs / "ahead"
    run_experiment(
        folder,
        train={"num_steps": NUM_STEPS},
        rollout={"max_staleness": 1},
        sampling={"max_response_tokens": 48},
        actor={"routing_replay": "rollout"},
        algorithm={"mismatch": {"weight": {"name": "tis"}}},
        weights={"transport": "reshard"},
    )
    first, *later = (metrics(folder)[step] for step in range(1, NUM_STEPS + 1))
    assert first["mismatch/logprob_abs_mean"] <= 1e-5 and first["router/replay_differs"] == 0
    assert all("mismatch/logprob_abs_mean_lag_1" in entry for entry in later)


def test_colocated_engines_sample_the_same_bits(inputs):
    """Their states are released while they sleep; another transport brings the weights."""
    train = {"num_steps": NUM_STEPS}
    apart, asleep = inputs / "apart", inputs / "asleep"
    run_experiment(apart, train=train, rollout={"deterministic": True})
    colocated = {"deterministic": True, "colocate": True}
    run_experiment(asleep, train=train, rollout=colocated, weights={"transport": "ipc"})
    assert_same_run(apart, asleep, NUM_STEPS)


def test_turns_go_on_from_the_states_before_them(inputs):
    """Each turn begins with all tokens before it, of which the engine may keep states."""
    folder = inputs / "turns"
    sampling = {"max_response_tokens": 24, **SAYS_IT_AGAIN}
    run_experiment(folder, train={"num_steps": NUM_STEPS}, sampling=sampling)
    assert_agrees(folder)
    entries = metrics(folder)
    assert all(entries[step]["response/tool_use_fraction"] > 0 for step in range(1, NUM_STEPS + 1))
