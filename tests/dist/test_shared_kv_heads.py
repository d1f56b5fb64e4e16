"""More tensor-parallel ranks than key/value heads: updates are of one rank, exports equal the folder bit by bit."""

from pathlib import Path

from tests.dist.random_models import write_model
from tests.dist.test_actor_layouts import problems_of
from tests.dist.workers.launch import run_ranks

CASES = {
    "qwen3": {"packing": True, "budget": 64},  # norms of heads, whose gradients several ranks have a part of
    "minimax_m2": {"packing": False, "budget": 64},  # the norm over all heads counts each once
    "qwen2": {"packing": False, "budget": 200, "recompute": "full"},  # biases of projections
}


def test_ranks_that_share_a_head_compute_what_one_rank_does(model_of, tmp_path: Path):
    """Four heads of queries and one of keys and values."""
    base = {
        family: {"model": str(model_of(write_model, family, 1)), "reference": str(tmp_path / f"{family}.pt")}
        for family in CASES
    }
    run_ranks(1, tmp_path / "one", [{**job, "do": "layout", "write": True, "budget": 4096} for job in base.values()])
    jobs = [
        {**job, **CASES[family], "parallel": {"tp": 2}, "do": what}
        for family, job in base.items()
        for what in ("layout", "export")
    ]
    for job, result in zip(jobs, run_ranks(2, tmp_path / "two", jobs), strict=True):
        if job["do"] == "layout":
            assert result["gradients"] and not (found := problems_of("update", result)), found
        else:
            assert result["export"], job
