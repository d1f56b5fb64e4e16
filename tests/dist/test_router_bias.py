"""actor.router_bias_update: biases move by the counts of all real tokens of an update, the same in every layout."""

import json
from pathlib import Path

import pytest
import torch

from megagrpo.config.schema import TinyModelConfig
from megagrpo.families.table import architecture_of
from megagrpo.hf_files import write_hf_folder
from megagrpo.tiny.description import hf_config
from megagrpo.tiny.model import random_tensors
from tests.dist.workers.launch import run_ranks
from tests.dist.workers.samples import LENGTHS, VOCAB

RATE = 0.01
LAYOUTS = {
    "TP2xEP2 recomputed": {"parallel": {"tp": 2, "ep": 2}, "packing": False, "budget": 200, "recompute": "full"},
    "CP2 packed": {"parallel": {"cp": 2}},
    "PP2 padded": {"parallel": {"pp": 2}, "packing": False, "budget": 200},
    "DP2 packed": {"parallel": {}},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """DeepSeek-V3 with random biases; its first layer is dense, one pipeline stage of two has half of the others."""
    folder = tmp_path_factory.mktemp("bias") / "model"
    sizes = TinyModelConfig(
        path=str(folder),
        family="deepseek_v3",
        hidden_size=64,
        num_heads=4,
        head_dim=16,
        ffn_size=96,
        expert_ffn_size=48,
    )
    description = hf_config(sizes) | {"vocab_size": VOCAB}
    like = folder.with_name("description")
    like.mkdir()
    (like / "config.json").write_text(json.dumps(description))
    generator = torch.Generator().manual_seed(0)
    tensors = random_tensors(architecture_of(description), generator)
    for name in tensors:
        if name.endswith("e_score_correction_bias"):
            tensors[name] = 0.05 * torch.randn(tensors[name].shape, generator=generator)
    write_hf_folder(folder, iter([tensors]), like=like, dtype=torch.float32)
    return folder


def test_biases_move_against_the_load_alike_in_every_layout(model: Path, tmp_path: Path):
    base = {"model": str(model), "rate": RATE}
    alone = {**base, "packing": False, "budget": 1, "count": True}  # a sample a micro-batch: nothing is padded
    one, still = run_ranks(1, tmp_path / "one", [alone, {**alone, "rate": None}], script="router_bias_ranks.py")
    assert still["after"] == still["before"] == one["before"], "without the option they stay"
    for layer, counts in one["counts"].items():
        assert sum(counts) == 2 * sum(LENGTHS), "every token chose two experts"
        mean = sum(counts) / len(counts)
        for count, before, after in zip(counts, one["before"][layer], one["after"][layer], strict=True):
            assert after == pytest.approx(before + RATE * ((mean > count) - (mean < count)), abs=1e-7)
    jobs = [{**base, **layout} for layout in LAYOUTS.values()]
    results = run_ranks(2, tmp_path / "two", jobs, script="router_bias_ranks.py")
    for name, result in zip(LAYOUTS, results, strict=True):
        assert result["after"] == one["after"], name
