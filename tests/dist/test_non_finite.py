"""A loss that is not finite, on two ranks: all skip it together, its batch is kept, and a replay repeats the step."""

import json
from pathlib import Path

import pytest
import torch

from tests.dist.workers.launch import run_ranks

LAYOUTS = {"dp2": {}, "tp2": {"tp": 2}, "pp2": {"pp": 2}, "dp2-distributed": {}, "pp2-experts": {"pp": 2}}


@pytest.fixture(scope="module")
def results(hf_models: Path, tmp_path_factory) -> dict[str, dict]:
    folder = tmp_path_factory.mktemp("non_finite")
    jobs = [
        {
            "model": str(hf_models / ("qwen3_moe" if "experts" in name else "qwen3")),
            "parallel": parallel,
            "routing_replay": "rollout" if "experts" in name else None,
            "distributed": "distributed" in name,
            "run": str(folder / name),
        }
        for name, parallel in LAYOUTS.items()
    ]
    done = run_ranks(2, folder / "ranks", jobs, script="non_finite_ranks.py")
    return {name: result | {"run": folder / name} for name, result in zip(LAYOUTS, done, strict=True)}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_only_that_update_is_left_out(results, layout):
    """The step's other update gives the weights, bit by bit, that it gives when the bad one's samples are masked."""
    result = results[layout]
    assert (result["non_finite"], result["skipped_when_masked"]) == (1.0, 1.0)
    assert result["counts_what_was_computed"], "perf/mfu is of what was not skipped"
    assert result["same_weights_as_without"] and result["moved"] and result["loss_is_of_the_good_update"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_halt_says_where_the_batch_is_and_skip_goes_on(results, layout):
    skipped, halted, quiet = results[layout]["messages"]
    folder = results[layout]["run"] / "dumps" / "step_000005"
    assert skipped == "" and quiet == ""
    assert halted.startswith("step 5: loss or gradient of 1 update(s) is not finite") and str(folder) in halted
    files = sorted(path.name for path in folder.iterdir())
    experts = [name for name in files if "experts" in name]
    assert len(experts) == (2 if layout == "pp2-experts" else 0), "each stage's"
    ranks = [name for name in files if name not in (*experts, "step.json")]
    assert ranks == (["dp_0.pt", "dp_1.pt"] if layout.startswith("dp2") else ["dp_0.pt"])
    parts = [torch.load(folder / name, weights_only=True, map_location="cpu") for name in ranks]
    assert sum(len(part["lengths"]) for part in parts) == 7 and any(part["advantages"].isinf().any() for part in parts)
    description = json.loads((folder / "step.json").read_text())
    assert description["weight_version"] == 4 and description["values"]["optim/non_finite_updates"] == 1.0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_replay_repeats_the_step(results, layout):
    assert results[layout]["replayed"]
    assert (
        results[layout]["says"]
        == "weights of version 3 (initial); the step itself started from version 4: figures differ"
    )
