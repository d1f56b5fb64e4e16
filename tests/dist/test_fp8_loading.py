"""An FP8 checkpoint with partial blocks under TP2 x EP2: the bits of its bfloat16 twin, and few bytes beside them."""

from pathlib import Path

import pytest

from examples.laptop.model import make_tiny_model
from examples.laptop.recipe import TinyModelConfig
from megagrpo.weights.hf_folder import HfFolder
from tests.dist.workers.launch import run_ranks
from tests.fp8_checkpoint import quantize_folder
from tests.int4_checkpoint import pack_folder

BLOCK = (24, 40)  # divides neither the tensors below nor a rank's part of them
LAYOUT = {"tp": 2, "ep": 2}


TWICE = ("norm", "mlp.gate.", "moe.gate.", "q_a_proj", "kv_a_proj")  # what both ranks of the layout hold whole


def write_models(folder: Path, family: str) -> None:
    """A tiny model in FP8 and its bfloat16 twin; DeepSeek's first layer is dense."""
    sizes = TinyModelConfig(
        path=str(folder / "float32"),
        family=family,
        hidden_size=128,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        ffn_size=96,
        num_experts=4,
        experts_per_token=2,
        expert_ffn_size=100,
        tie_embeddings=False,
    )
    make_tiny_model(sizes, seed=0)
    quantize_folder(folder / "float32", folder / "model", folder / "twin", BLOCK)


def wanted_bytes(folder: Path) -> int:
    """What the two ranks together hold of the files, scales left out."""
    whole = HfFolder(folder)
    return sum(
        whole.stored_bytes(name, shape) * (2 if any(part in name for part in TWICE) else 1)
        for name, (shape, _) in whole.specs.items()
    )


@pytest.mark.verifies(
    "weights",
    "FP8 checkpoints are read as by SGLang's own routine, bit by bit",
    see="[bytes](../../bench/results/fp8_loading.md)",
)
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "minimax_m2"])
def test_every_rank_holds_the_twins_bits(family, tmp_path):
    write_models(tmp_path, family)
    job = {"model": str(tmp_path / "model"), "twin": str(tmp_path / "twin"), "parallel": LAYOUT, "dtype": "bfloat16"}
    (result,) = run_ranks(2, tmp_path / "ranks", [job], script="fp8_ranks.py")
    assert all(rank["equal"] and rank["parameters"] > 20 for rank in result["ranks"])
    wanted, read = (wanted_bytes(tmp_path / "model"), sum(rank["bytes_read"] for rank in result["ranks"]))
    assert wanted <= read <= 1.05 * wanted < 1.05 * 0.75 * wanted_bytes(tmp_path / "twin")


def test_every_rank_holds_the_bits_of_an_int4_checkpoints_twin(tmp_path):
    """As Kimi-K2.5 is published; a rank's part of an expert's columns begins within a group."""
    sizes = {"num_layers": 2, "hidden_size": 64, "num_experts": 4, "expert_ffn_size": 96}
    make_tiny_model(TinyModelConfig(path=str(tmp_path / "float32"), family="kimi_k25", **sizes), seed=0)
    pack_folder(tmp_path / "float32", tmp_path / "model", tmp_path / "twin")
    job = {
        "model": str(tmp_path / "model"),
        "twin": str(tmp_path / "twin"),
        "parallel": {"tp": 2, "etp": 2},
        "dtype": "bfloat16",
    }
    (result,) = run_ranks(2, tmp_path / "ranks", [job], script="fp8_ranks.py")
    assert all(rank["equal"] and rank["parameters"] > 20 for rank in result["ranks"])
