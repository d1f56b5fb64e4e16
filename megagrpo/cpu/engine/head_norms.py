"""Stands in for the two Triton kernels of MiniMax-M2's norm over all heads of queries and of keys."""

import torch
from torch import Tensor


def sums_of_squares(queries: Tensor, keys: Tensor) -> Tensor:
    """Returns those of each token, of queries [n, d] and then of keys [n, e], float32 [2 n]."""
    return torch.cat([x.float().square().sum(-1) for x in (queries, keys)])


def normed(
    queries: Tensor,
    keys: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    sums: Tensor,
    ranks: int = 1,
    eps: float = 1e-5,
) -> tuple[Tensor, ...]:
    """Returns this rank's queries and keys, divided by the root of the mean square over all ranks."""
    return tuple(
        (x.float() * torch.rsqrt(of[:, None] / x.shape[-1] / ranks + eps) * weight.float()).to(
            x.dtype
        )
        for x, weight, of in zip(
            (queries, keys), (query_weight, key_weight), sums.chunk(2), strict=True
        )
    )


def install(module) -> None:
    """Patches sglang.srt.models.minimax_m2."""
    module.rms_sumsq_serial = sums_of_squares
    module.rms_apply_serial = normed
