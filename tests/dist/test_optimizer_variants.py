"""Adam of fewer bits and Adam on the host: what they compute, and that a resumed run goes on bit by
bit.

Transformer Engine's optimizer is the stand-in's. Which parameters lie on the GPU is pretended:
there is none.
"""

from pathlib import Path

import pytest
import torch

from tests.dist.cases import SMALL
from tests.dist.random_models import write_random_model
from tests.dist.workers.launch import TRANSFORMER_ENGINE_POOL, run_ranks

AWARE = {"use_precision_aware_optimizer": True}
VARIANTS = {
    "plain": {},
    "aware": AWARE,
    "short gradients": {**AWARE, "main_grads_dtype": "bfloat16", "store_param_remainders": False},
    "half on the host": {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5},
}
OWN_PARTS = ("aware", "half on the host")  # saved in both ways
EXPERTS = {"family": "qwen3_moe", "num_experts": 4, "experts_per_token": 2}
SAME_ARITHMETIC = 1e-2  # share of bfloat16 weights that may differ
# Two updates after the first difference, each of at most the learning rate in either direction, and
# one rounding of a weight below 1
FURTHEST = 2 * 2 * 1e-3 + 2**-8


@pytest.mark.verifies("actor", "Adam in fewer bits, and on the host: trained, saved, resumed")
@pytest.mark.timeout(300)
def test_kinds_of_adam_train_and_resume(tmp_path: Path):
    model = str(write_random_model(tmp_path / "tiny", SMALL | EXPERTS))
    base = {"model": model, "dtype": "bfloat16", "transformer_engine": True}
    jobs = []
    for name, reshardable in [(name, True) for name in VARIANTS] + [(name, False) for name in OWN_PARTS]:
        saved = str(tmp_path / f"{name} {reshardable}")
        own = {"optimizer": VARIANTS[name], "reshardable": reshardable, "checkpoint": saved, "weights": f"{saved}.pt"}
        jobs += [{**base, **own, "load": load} for load in (False, True)]
    jobs.append({**base, "load": True, "checkpoint": str(tmp_path / "aware True")})
    parts = {"optimizer": AWARE, "load": True, "checkpoint": str(tmp_path / "aware False")}
    jobs.append({**base, **parts, "transformer_engine": False})
    jobs.append({**base, **parts, "ddp": {"overlap_grad_reduce": True, "bucket_size": 5000}})
    jobs.append({**base, **parts, "optimizer": AWARE | {"main_grads_dtype": "bfloat16"}})
    adam = {"adam_beta1": 0.8, "adam_beta2": 0.9, "adam_eps": 1e-5}
    for name, optimizer in VARIANTS.items():
        saved = str(tmp_path / f"{name} True")
        megatron = {name: adam[name] for name in ("adam_beta1", "adam_eps")}
        own = {"optimizer": optimizer | megatron, "checkpoint": saved, "weights": f"{saved}.pt"}
        jobs.append({**base, **own, "load": True, "adam": {"adam_beta2": adam["adam_beta2"]}})
    *runs, other_kind, other_layers, other_buckets, other_gradients, _, _, _, _ = results = run_ranks(
        1, tmp_path / "ranks", jobs, "optimizer_ranks.py", pool=TRANSFORMER_ENGINE_POOL
    )
    for job, first, resumed in zip(jobs[::2], runs[::2], runs[1::2], strict=False):
        # A second copy of the state would not fit beside large models.
        assert resumed.pop("in place") or resumed["kinds"] != ["FusedAdam"], job
        assert resumed | {"in place": False} == first and resumed["same"], job
    kinds = {name: first["kinds"] for name, first in zip(VARIANTS, runs[::2], strict=False)}
    assert kinds["aware"] == ["FusedAdam"] and kinds["half on the host"] == ["HybridDeviceOptimizer"]
    after = {name: torch.load(tmp_path / f"{name} True.pt", map_location="cpu") for name in VARIANTS}
    apart = {name: (flat(weights) - flat(after["plain"])).abs() for name, weights in after.items()}
    share = {name: float((of > 0).float().mean()) for name, of in apart.items()}
    # Float32 states behind other interfaces are the same arithmetic, in another order: float32 weights are a few eps32
    # = 2^-23 apart, so a share of some eps32 / eps16 = 2^-16 of them, per operation and update, lies across a rounding
    # boundary of bfloat16 (eps16 = 2^-7). That changes later gradients by eps16: 1e-3 of the weights in all, 0 on some
    # processors; another formula changes most.
    assert share["aware"] < SAME_ARITHMETIC and share["half on the host"] < SAME_ARITHMETIC
    assert share["short gradients"] > 0
    assert all(float(of.max()) <= FURTHEST for of in apart.values()), apart
    assert "use_precision_aware_optimizer" in other_kind["refused"]
    # torch's experts lie one after the other in a bucket, Transformer Engine's as two groups
    assert "actor.transformer_engine True, here it is False" in other_layers["refused"]
    for other in (other_buckets, other_gradients):
        assert "cut by actor.ddp (bucket_size, overlap_grad_reduce) and main_grads_dtype" in other["refused"]
    for changed in results[-len(VARIANTS) :]:  # the experiment's, not those of the file
        assert changed["adam"] == [[0.8, 0.9, 1e-5]] and not changed["same"]


def flat(weights: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.float().flatten() for tensor in weights.values()])
