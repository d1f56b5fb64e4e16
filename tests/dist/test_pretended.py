"""What a pretended trainer rank copies is what the real one of that place in a real world copies."""

import json

import pytest
import torch

from examples.laptop.recipe import TinyModelConfig
from megagrpo.certify.tiny_model import hf_config, random_tensors
from megagrpo.families.table import architecture_of
from megagrpo.weights.hf_folder import write_hf_folder
from tests.dist.workers.launch import run_ranks

VOCAB = 45  # padded under tensor parallelism


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, str]:
    folder, found = tmp_path_factory.mktemp("pretended"), {}
    for name, family, tied in (("moe", "qwen3_moe", False), ("tied", "qwen3", True)):
        sizes = TinyModelConfig(
            path=str(folder / name), family=family, hidden_size=32, num_layers=4, head_dim=8, tie_embeddings=tied
        )
        description = hf_config(sizes) | {"vocab_size": VOCAB}
        like = folder / f"{name}.description"
        like.mkdir()
        (like / "config.json").write_text(json.dumps(description))
        tensors = random_tensors(architecture_of(description), torch.Generator().manual_seed(0))
        write_hf_folder(sizes.path, iter([tensors]), like=like, dtype=torch.float32)
        found[name] = sizes.path
    return found


CASES = {
    2: [
        ("moe", {"tp": 2}, [0, 1]),
        ("moe", {"tp": 2, "ep": 2}, [0, 1]),
        ("moe", {"ep": 2}, [0, 1]),
        ("moe", {"tp": 2, "etp": 2}, [0, 1]),
        ("moe", {"pp": 2, "vpp": 2}, [0, 1]),
        ("moe", {}, [0, 0]),
        ("tied", {"pp": 2}, [0, 1]),
        ("tied", {"tp": 2}, [0, 1]),
        ("tied", {"cp": 2}, [0, 0]),
    ],
    4: [
        ("moe", {"tp": 2, "pp": 2, "ep": 2}, [0, 1, 2, 3]),
        ("moe", {"tp": 2, "ep": 2}, [0, 1, 0, 1]),
        ("moe", {"tp": 2, "ep": 4}, [0, 1, 2, 3]),
        ("tied", {"tp": 2, "pp": 2}, [0, 1, 2, 3]),
    ],
}


@pytest.mark.parametrize("world", CASES)
def test_pretended_ranks_copy_what_real_ones_do(models, tmp_path, world):
    jobs = [{"model": models[name], "parallel": parallel} for name, parallel, _ in CASES[world]]
    run_ranks(world, tmp_path, jobs, script="pretended_ranks.py")
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(world)]
    for (name, parallel, representatives), *results in zip(CASES[world], *ranks, strict=True):
        assert [result["representative"] for result in results] == representatives, (name, parallel)
        assert all(result["equal"] and result["same_place"] for result in results), (name, parallel, results)
        assert all(result["copies"] > 10 for result in results)
