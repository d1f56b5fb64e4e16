"""Advantages, one pure function each: rewards and statistics in, a float64 number per response (or token) out.

r rewards [N] float64, g group_ids [N] int64, stats over all ranks. Constant groups get exactly 0 from every function that
compares responses of a group; `single` says what a group with one valid response gets: "zero" or "raw".
"""

import math

import torch
from torch import Tensor

from megagrpo.algo.statistics import GroupStatistics, Moments, Reduce, exact_group_sums, group_range

WHITEN_EPS = 1e-8


def grpo(r: Tensor, g: Tensor, stats: GroupStatistics, eps: float, single: str) -> Tensor:
    """(r - mean) / (std + eps). DeepSeekMath, arXiv 2402.03300."""
    return _within_groups((r - _of(stats.mean, g)) / _of(stats.std + eps, g), r, g, stats, single)


def centred(r: Tensor, g: Tensor, stats: GroupStatistics, single: str) -> Tensor:
    """r - mean. Dr.GRPO, arXiv 2503.20783."""
    return _within_groups(r - _of(stats.mean, g), r, g, stats, single)


def leave_one_out(r: Tensor, g: Tensor, stats: GroupStatistics, single: str) -> Tensor:
    """r - mean of the others = n / (n - 1) (r - mean). RLOO, arXiv 2402.14740."""
    factor = stats.count / (stats.count - 1).clamp(min=1)
    return _within_groups(factor[g] * (r - _of(stats.mean, g)), r, g, stats, single)


def pass_at_k(r: Tensor, g: Tensor, valid: Tensor, stats: GroupStatistics, reduce: Reduce, eps: float | None) -> Tensor:
    """best - second best for the best response alone, 0 for the others, over (std + eps) unless eps is None. arXiv 2503.19595.

    A tie of the best two and a group with a single valid response give 0.
    """
    best = valid & (r == stats.max[g])
    rest = valid & ~best
    _, second = group_range(r[rest], g[rest], len(stats.count), reduce)
    counts = torch.stack([torch.bincount(g[which], minlength=len(stats.count)) for which in (best, rest)])
    num_best, num_rest = reduce(counts, "sum")
    gap = torch.where((num_best == 1) & (num_rest > 0), stats.max - second, 0.0)
    if eps is not None:
        gap = gap / (stats.std + eps)
    return (gap[g] * best).masked_fill(stats.degenerate[g], 0.0)


def optimal_baseline(
    r: Tensor, g: Tensor, valid: Tensor, num_tokens: Tensor, stats: GroupStatistics, reduce: Reduce, single: str
) -> Tensor:
    """r - sum_j T_j r_j / sum_j T_j, T_j = num_tokens [N] int64 of a response. OPO, arXiv 2505.23585."""
    num_groups, g_valid = len(stats.count), g[valid]
    # Relative to the mean, which changes nothing but keeps the precision of 1000 + {0, .1}.
    products = ((r - _of(stats.mean, g)) * num_tokens)[valid]
    low, high = group_range(products, g_valid, num_groups, reduce)
    tokens = torch.zeros(num_groups, dtype=torch.int64, device=r.device).scatter_add_(0, g_valid, num_tokens[valid])
    sums, tokens = exact_group_sums(products, g_valid, torch.maximum(low.abs(), high.abs()), reduce, along=tokens)
    baseline = sums / tokens.clamp(min=1)
    return _within_groups(r - _of(stats.mean, g) - baseline[g], r, g, stats, single)


def gpg(r: Tensor, g: Tensor, valid: Tensor, stats: GroupStatistics, reduce: Reduce, alpha: str, single: str) -> Tensor:
    """alpha (r - mean), alpha = B / responses in non-degenerate groups (or with r != 0, as verl). arXiv 2504.02546."""
    if alpha == "non_degenerate":
        counted = int(stats.count[~stats.degenerate].sum())
    else:
        counted = int(reduce((r[valid] != 0).sum(), "sum"))
    return int(stats.count.sum()) / max(counted, 1) * _within_groups(r - _of(stats.mean, g), r, g, stats, single)


def returns(r: Tensor, token_rewards: Tensor | None, mask: Tensor, gamma: float) -> Tensor:
    """Discounted returns [N, S]: G_t = R_t + gamma G_next over unmasked tokens, R = token_rewards plus r at the last of them.

    Credit passes through masked tokens (tool output) undiscounted, as if they were not there. REINFORCE++, arXiv 2501.03262.
    mask [N, S] bool. Column by column, so the result does not depend on the padded width.
    """
    out = torch.zeros(mask.shape, dtype=torch.float64, device=r.device)
    carry = r.clone()  # gamma has nothing to discount before the last unmasked token is met
    started = torch.zeros_like(r, dtype=torch.bool)
    for t in range(mask.shape[1] - 1, -1, -1):
        here = mask[:, t]
        value = torch.where(started, gamma * carry, carry)
        if token_rewards is not None:
            value = value + token_rewards[:, t]
        carry = torch.where(here, value, carry)
        started |= here
        out[:, t] = torch.where(here, value, 0.0)
    return out


def whiten(values: Tensor, spread: Moments) -> Tensor:
    """(x - mean) / sqrt(var + 1e-8), unbiased variance; unchanged for 0 or 1 value."""
    if spread.count < 2:
        return values
    return (values - spread.mean) / math.hypot(
        spread.std, WHITEN_EPS**0.5
    )  # hypot: the square of a huge std would overflow


def _within_groups(advantages: Tensor, r: Tensor, g: Tensor, stats: GroupStatistics, single: str) -> Tensor:
    advantages = advantages.masked_fill(_of(stats.degenerate, g), 0.0)
    return torch.where(_of(stats.count == 1, g), r, advantages) if single == "raw" else advantages


def _of(per_group: Tensor, g: Tensor) -> Tensor:
    return per_group.index_select(0, g)  # four times faster than per_group[g]
