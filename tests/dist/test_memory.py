"""The closed forms of a trainer rank's memory against the measured memory of real ranks, on a CPU."""

import json
from pathlib import Path

import pytest

from examples.laptop.recipe import TinyModelConfig
from megagrpo.config.schema import ActorConfig
from megagrpo.models.architecture import Architecture
from megagrpo.models.folder import Model
from megagrpo.tools.certify.tiny_model import hf_config
from megagrpo.tools.plan.trainer_memory import Load, in_flight, trainer_stages
from tests.dist.workers.launch import run_ranks

# of the bytes that an update adds at its peak: a CPU's kernels have temporaries that are not counted
ALLOWED = 0.2
HELD = 0.01  # of what stays: Megatron's buffers are padded to 64 elements a tensor, 128 a buffer
LENGTHS = [1024, 512, 512]
MODELS = {
    "dense": {"family": "llama"},
    "tied": {"family": "qwen3", "tie_embeddings": True},
    "moe": {"family": "qwen3_moe"},
    "latent": {"family": "deepseek_v3"},
    "sparse": {"family": "glm_moe_dsa"},  # frozen indexers have neither gradients nor moments
    "norm over heads": {"family": "minimax_m2"},
}
CASES = {
    1: [
        ("dense", {}, {}),
        ("dense", {}, {"dtype": "bfloat16"}),
        ("tied", {}, {"recompute": "full"}),
        ("moe", {}, {"recompute": "none"}),
        ("latent", {}, {"recompute": "full", "optimizer": {"distributed": False}}),
        ("sparse", {}, {"recompute": "full"}),
        ("sparse", {}, {"recompute": "full", "dtype": "bfloat16"}),
        ("norm over heads", {}, {}),
        ("norm over heads", {}, {"dtype": "bfloat16"}),
    ],
    2: [
        ("dense", {"cp": 2}, {}),
        ("tied", {"pp": 2}, {"recompute": "full"}),
        ("dense", {"pp": 2}, {}),
        ("dense", {"tp": 2}, {"recompute": "full"}),
        ("moe", {"tp": 2, "ep": 2}, {}),
        ("dense", {"pp": 2, "vpp": 2}, {"dtype": "bfloat16"}),
        ("dense", {"tp": 2}, {"lora": {"rank": 4}}),
        ("moe", {"ep": 2}, {}),
    ],
}


def measured_on_a_cpu(model: str, parallel: dict) -> bool:
    """A CPU's kernels keep attention's scores for latent attention, and whole masks under context parallelism."""
    return model not in ("latent", "sparse") and "cp" not in parallel


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("memory")
    for name, options in MODELS.items():
        sizes = TinyModelConfig(path=str(folder / name), hidden_size=64, num_layers=4, head_dim=16, **options)
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(hf_config(sizes) | {"vocab_size": 131}))
    return folder


@pytest.mark.parametrize("world", [pytest.param(world, marks=[pytest.mark.slow] * (world == 1)) for world in CASES])
def test_closed_forms_are_what_real_ranks_take(models: Path, tmp_path: Path, world: int):
    jobs = [
        {"model": str(models / model), "actor": {"parallel": parallel, **options}, "lengths": LENGTHS}
        for model, parallel, options in CASES[world]
    ]
    run_ranks(world, tmp_path, jobs, script="memory_ranks.py")
    problems = []
    for rank in range(world):
        found = json.loads((tmp_path / f"rank{rank}.json").read_text())
        for (model, parallel, options), real in zip(CASES[world], found, strict=True):
            actor = ActorConfig.model_validate({"world_size": world, "parallel": parallel, **options})
            closed = _closed(Model.read(models / model).arch, actor, rank)
            names = [*HELD_PARTS, *(["added"] if measured_on_a_cpu(model, parallel) else [])]
            for name in names:
                allowed = ALLOWED if name == "added" else HELD
                if not real[name] > 0 or abs(closed[name] / real[name] - 1) > allowed:
                    case = f"{model} {parallel} {options}, rank {rank}"
                    problems.append(f"{case}: {real[name]} bytes of {name}, by closed forms {closed[name]:.0f}")
            if abs(real["allocator"] / real["added"] - 1) > ALLOWED:
                problems.append(f"{model} {parallel}: the allocator gave {real['allocator']}, tensors {real['added']}")
    assert not problems, "\n".join(problems)


HELD_PARTS = ("parameters", "gradients", "optimizer")


def _closed(arch: Architecture, actor: ActorConfig, rank: int) -> dict[str, float]:
    """The closed forms, and what only a CPU's RMSNorm keeps: normalized inputs, for bfloat16 float32 copies."""
    p = actor.parallel
    stage = rank * p.pp // actor.world_size
    stages = trainer_stages(arch, actor, Load(sum(LENGTHS)))
    parts = stages[stage].memory("update", bucket_bytes=0.0).parts
    attention = arch.attention
    normed = attention.head_dim * getattr(attention, "qk_norm", False)  # latent attention has none
    heads = (attention.heads + attention.kv_heads) * normed
    norms = (2 * arch.hidden_size + heads) * sum(LENGTHS) / p.tp * (8 if actor.dtype == "bfloat16" else 4)
    layers = 1 if actor.recompute == "full" else arch.num_layers / p.pp * in_flight(p, stage)
    added = sum(size for name, size in parts.items() if name not in (*HELD_PARTS, "NCCL")) + norms * layers
    return {name: parts[name] for name in HELD_PARTS} | {"added": added}
