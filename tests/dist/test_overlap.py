"""Communication that overlaps with computation gives the same bits.

Buckets cut gradients at other places, so that their norm is summed in another order: those of one cut are compared.
"""

import pytest
import torch

from tests.dist.workers.launch import run_ranks

WORLD = 2
ONE, MANY = {"bucket_size": 10**9}, {"bucket_size": 3000}
GRADIENTS = {"overlap_grad_reduce": True}
BOTH = {**GRADIENTS, "overlap_param_gather": True}
# name -> settings, and what it must equal
OVERLAPS = {
    "none": ({}, "none"),
    "both, one bucket": ({**BOTH, **ONE}, "none"),
    "gradients": ({**GRADIENTS, **MANY}, "gradients"),
    "both": ({**BOTH, **MANY}, "gradients"),
    "both, aligned": ({**BOTH, **MANY, "align_param_gather": True}, "gradients"),
}
MODELS = {"qwen3": {}, "qwen3_tied": {}, "qwen3_moe": {"parallel": {"ep": 2}}}


@pytest.mark.timeout(300)
def test_overlap_changes_no_bit(hf_models, tmp_path):
    jobs = {
        (model, overlap): {
            "do": "two_updates",
            "model": str(hf_models / model),
            "kept": str(tmp_path / f"{model}.{overlap}.pt"),
            "distributed": True,
            "ddp": ddp,
            "budget": 40,
            **options,
        }
        for model, options in MODELS.items()
        for overlap, (ddp, _) in OVERLAPS.items()
        if model == "qwen3" or "," not in overlap
    }
    results = dict(zip(jobs, run_ranks(WORLD, tmp_path / "ranks", list(jobs.values())), strict=True))
    for (model, overlap), result in results.items():
        settings, same = OVERLAPS[overlap]
        assert result["overlaps"] == [bool(settings.get(name)) for name in BOTH]
        assert result["same_on_all_ranks"] or model == "qwen3_moe", (model, overlap)
        assert (result["buckets"] > 2) == (settings.get("bucket_size") == MANY["bucket_size"])
        found, expected = (torch.load(tmp_path / f"{model}.{kind}.pt0") for kind in (overlap, same))
        assert found["norms"] == expected["norms"], (model, overlap)
        weights = expected["weights"]
        different = [name for name, tensor in found["weights"].items() if not torch.equal(tensor, weights[name])]
        assert not different, (model, overlap, different[:3])
