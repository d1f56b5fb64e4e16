"""The trainers' closed forms against recorded bytes of GPU kernels, and micro-batches in flight."""

import json
from pathlib import Path

import pytest

from megagrpo.config.schema import ActorConfig, ParallelConfig
from megagrpo.families.table import architecture_of
from megagrpo.planning.trainer_memory import Load, in_flight, trainer_stages

MODELS = Path(__file__).parents[2] / "configs" / "models"
ALLOWED = {"DeepSeek-V3-0324": 0.16}  # of what an update adds; the others: 0.05, the largest difference is 0.031
# Recorded at commit 110b4be, whose dry run made Megatron's real update on shapes, with what a GPU's kernels keep: by
# rank MB of parameters, gradients and optimizer, and what forward and backward add to them. All models of 4 layers,
# Qwen3-235B of 2; tokens of a micro-batch and of the longest sample, imbalance of experts.
RECORDED = [
    (
        "Qwen2.5-7B", {"world_size": 8, "parallel": {"tp": 2, "pp": 2}, "recompute": "none"}, (8192, 4096, 1.0),
        {0: (1011.1, 2022.3, 3033.4, 4454), 4: (1011.1, 2022.3, 3033.4, 4022)},
    ),
    (
        "Qwen3-30B-A3B", {"world_size": 8, "parallel": {"ep": 8}, "recompute": "none"}, (8192, 4096, 1.3),
        {0: (2001.8, 4003.5, 4672.2, 8387)},
    ),
    (
        "Qwen3-235B-A22B", {"world_size": 64, "parallel": {"tp": 4, "pp": 2, "ep": 16}, "recompute": "full"},
        (8192, 8192, 1.5), {0: (649.9, 1299.7, 1166.9, 1728), 32: (649.9, 1299.8, 1166.9, 1684)},
    ),
    (
        "GLM-4.5-Air", {"world_size": 16, "parallel": {"tp": 2, "ep": 8, "pp": 2}, "recompute": "none"},
        (4096, 4096, 1.3), {0: (1545.4, 3090.8, 4809.5, 3236), 8: (1982.9, 3965.9, 7957.2, 3697)},
    ),
    (
        "DeepSeek-V3-0324", {"world_size": 32, "parallel": {"tp": 2, "ep": 16, "pp": 2}, "recompute": "none"},
        (4096, 4096, 1.3), {0: (2124.0, 4247.9, 1593.0, 4359), 16: (3184.6, 6369.2, 9787.2, 5644)},
    ),
]  # fmt: skip


@pytest.mark.parametrize(("model", "options", "load", "recorded"), RECORDED, ids=lambda value: str(value)[:20])
def test_closed_forms_are_near_the_bytes_of_gpu_kernels(model, options, load, recorded):
    layers = {"num_hidden_layers": 2 if "235B" in model else 4}
    description = json.loads((MODELS / model / "config.json").read_text()) | layers
    actor = ActorConfig.model_validate(options | {"dtype": "bfloat16"})
    stages = trainer_stages(architecture_of(description), actor, Load(*load))
    ranks = [stage.memory("update", bucket_bytes=0.0) for stage in stages]
    assert [rank.rank for rank in ranks] == list(recorded)
    for rank, (*held, added) in zip(ranks, recorded.values(), strict=True):
        names = ("parameters", "gradients", "optimiser")
        assert [rank.parts[name] / 1e6 for name in names] == pytest.approx(held, rel=1e-3)
        found = sum(rank.parts.get(part, 0.0) for part in ("activations", "head"))
        assert found / 1e6 == pytest.approx(added, rel=ALLOWED.get(model, 0.05))


def test_a_stage_keeps_what_the_schedule_has_in_flight():
    assert [in_flight(ParallelConfig(pp=4), stage) for stage in range(4)] == [4, 3, 2, 1]
    assert in_flight(ParallelConfig(pp=2, vpp=2), 0) == 2.5  # chunks of half a stage: 2 to warm up twice, and one
