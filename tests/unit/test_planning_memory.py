"""The trainers' memory in a plan: closed forms against what the real code takes on shapes, in flight, routing."""

import json
from pathlib import Path

import pytest

from megagrpo.config.schema import ActorConfig, ParallelConfig
from megagrpo.families.table import architecture_of
from megagrpo.planning.trainer_measured import measured
from megagrpo.planning.trainer_memory import Load, in_flight, trainer_side

MODELS = Path(__file__).parents[2] / "configs" / "models"
ALLOWED = 0.1  # of activations; largest found on models of 7 to 671 billion parameters: 0.09


def test_closed_forms_are_near_what_the_real_update_takes():
    description = json.loads((MODELS / "Qwen3-235B-A22B" / "config.json").read_text()) | {"num_hidden_layers": 2}
    options = {"world_size": 64, "dtype": "bfloat16", "parallel": {"tp": 4, "pp": 2, "ep": 16}, "recompute": "full"}
    actor, load = ActorConfig.model_validate(options), Load(8192, 8192, 1.5)
    side = trainer_side(architecture_of(description), actor, load)
    found = measured(side, description, actor, load)
    for closed, real in zip(side.ranks["update"], found.ranks["update"], strict=True):
        for part in ("parameters", "gradients", "optimiser"):
            assert closed.parts[part] == pytest.approx(real.parts[part], rel=1e-3)
        added = [sum(rank.parts.get(part, 0.0) for part in ("activations", "head")) for rank in (closed, real)]
        assert added[0] == pytest.approx(added[1], rel=ALLOWED)


def test_a_stage_keeps_what_the_schedule_has_in_flight():
    assert [in_flight(ParallelConfig(pp=4), stage) for stage in range(4)] == [4, 3, 2, 1]
    assert in_flight(ParallelConfig(pp=2, vpp=2), 0) == 2.5  # chunks of half a stage: 2 to warm up twice, and one


def test_a_full_micro_batch_has_as_many_of_the_longest_as_fit():
    assert Load(1000, 300).lengths == (300, 300, 300, 100)
    assert Load(1000, 1200).lengths == (1200,)
