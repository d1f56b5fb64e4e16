"""What a pretended rank would hold is what real ranks hold: exactly what stays, and within 15 % what updates add."""

import json
from pathlib import Path

import pytest

from examples.laptop.recipe import TinyModelConfig
from megagrpo.certify.tiny_model import hf_config
from tests.dist.workers.launch import run_ranks

ALLOWED = 0.15
LENGTHS = [100, 52, 32]
MODELS = {
    "dense": {"family": "llama"},
    "tied": {"family": "qwen3", "tie_embeddings": True},
    "moe": {"family": "qwen3_moe"},
    "latent": {"family": "deepseek_v3"},
}
CASES = {
    1: [
        ("dense", {}, {}),
        ("tied", {}, {"recompute": "full"}),
        ("moe", {}, {"recompute": "selective", "packing": False}),
        ("latent", {}, {"recompute": "full", "optimizer": {"distributed": False}}),
    ],
    2: [
        ("dense", {"cp": 2}, {}),
        ("tied", {"pp": 2}, {"recompute": "full"}),
        ("moe", {"tp": 2, "ep": 2}, {"recompute": "full"}),
        ("dense", {"pp": 2, "vpp": 2}, {"dtype": "bfloat16"}),
        ("dense", {"tp": 2}, {"lora": {"rank": 4}}),
    ],
}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("memory")
    for name, options in MODELS.items():
        sizes = TinyModelConfig(path=str(folder / name), hidden_size=64, num_layers=4, head_dim=16, **options)
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(hf_config(sizes) | {"vocab_size": 131}))
    return folder


@pytest.mark.parametrize("world", CASES)
def test_a_pretended_update_takes_the_memory_of_a_real_one(models: Path, tmp_path: Path, world: int):
    jobs = [
        {"model": str(models / model), "actor": {"parallel": parallel, **options}, "lengths": LENGTHS}
        for model, parallel, options in CASES[world]
    ]
    run_ranks(world, tmp_path, jobs, script="memory_ranks.py")
    problems = []
    for rank in range(world):
        found = json.loads((tmp_path / f"rank{rank}.json").read_text())
        for case, result in zip(CASES[world], found, strict=True):
            problems += [f"{case}, rank {rank}: {problem}" for problem in _problems(**result)]
    assert not problems, "\n".join(problems)


def _problems(real: dict, pretended: dict) -> list[str]:
    """Where the two differ; and where tensors alone, without torch's allocator, would not tell the real peak."""
    stay = [
        f"{real[name]} bytes of {name}, not {pretended[name]}"
        for name in ("parameters", "gradients", "optimiser")
        if real[name] != pretended[name]
    ]
    assert real["parameters"] > 0 and real["gradients"] > 0 and real["optimiser"] > 0
    peaks = [
        f"{real[name]} bytes at the peak of {name}, not {pretended[name]}"
        for name in ("logprobs", "one_in_flight", "two_in_flight", "step")
        if not abs(pretended[name] - real[name]) <= ALLOWED * real[name]
    ]
    allocated = max(real["two_in_flight"], real["step"])
    if real["allocator"] and not abs(allocated - real["allocator"]) <= ALLOWED * real["allocator"]:
        peaks.append(f"the allocator gave {real['allocator']} bytes, tensors held {allocated}")
    return stay + peaks
