"""An FP8 checkpoint with partial blocks under TP2 x EP2: the bits of its bfloat16 twin, and few bytes beside them."""

from pathlib import Path

import pytest

from megagrpo.config.schema import TinyModelConfig
from megagrpo.hf_files import HfFolder
from megagrpo.tiny.model import make_tiny_model
from tests.dist.workers.launch import run_ranks
from tests.fp8_checkpoint import quantise_folder

BLOCK = (24, 40)  # divides neither the tensors below nor a rank's part of them
LAYOUT = {"tp": 2, "ep": 2}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("fp8")
    sizes = TinyModelConfig(
        path=str(folder / "float32"),
        family="qwen3_moe",
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
    quantise_folder(folder / "float32", folder / "model", folder / "twin", BLOCK)
    return folder


def stored_bytes(folder: Path, replicas: int) -> int:
    """What TP2 x EP2 on two ranks holds of the files: `replicas` of the norms and of the router, one of all else."""
    whole = HfFolder(folder)
    return sum(
        whole.stored_bytes(name, shape) * (replicas if "norm" in name or "mlp.gate." in name else 1)
        for name, (shape, _) in whole.specs.items()
    )


def test_every_rank_holds_the_twins_bits(folders, tmp_path):
    job = {"model": str(folders / "model"), "twin": str(folders / "twin"), "parallel": LAYOUT, "dtype": "bfloat16"}
    (result,) = run_ranks(2, tmp_path, [job], script="fp8_ranks.py")
    assert all(rank["equal"] and rank["parameters"] > 20 for rank in result["ranks"])
    wanted = stored_bytes(folders / "model", replicas=2)
    read = sum(rank["bytes_read"] for rank in result["ranks"])
    assert wanted <= read <= 1.05 * wanted < 1.05 * 0.7 * stored_bytes(folders / "twin", replicas=2)
