"""What a pretended trainer rank copies is what the real one of that place in a real world
copies."""

import json

import pytest

from tests.dist.random_models import write_random_model
from tests.dist.workers.launch import run_ranks

VOCAB = 45  # padded under tensor parallelism


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
def test_pretended_ranks_copy_what_real_ones_do(tmp_path, world):
    sizes = {"hidden_size": 32, "num_layers": 4, "head_dim": 8}
    families = {"moe": {"family": "qwen3_moe"}, "tied": {"family": "qwen3", "tie_embeddings": True}}
    models = {
        name: str(write_random_model(tmp_path / name, sizes | of, vocab=VOCAB))
        for name, of in families.items()
    }
    jobs = [{"model": models[name], "parallel": parallel} for name, parallel, _ in CASES[world]]
    run_ranks(world, tmp_path, jobs, script="pretended_ranks.py")
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(world)]
    for (name, parallel, representatives), *results in zip(CASES[world], *ranks, strict=True):
        assert [result["representative"] for result in results] == representatives, (name, parallel)
        assert all(result["equal"] and result["same_place"] for result in results), (
            name,
            parallel,
            results,
        )
        assert all(result["copies"] > 10 for result in results)
