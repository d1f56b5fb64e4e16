"""DAPO's dynamic sampling: selects the sampled groups to train on. arXiv 2503.14476, section
3.2."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megagrpo.algo.statistics import Reduce, group_statistics


@dataclass(frozen=True)
class Selection:
    """Holds group ids in ascending order, the same on every rank."""

    chosen: list[int]  # to train on now, at most `limit`
    surplus: list[int]  # informative too, and kept for the next step
    dropped: list[int]  # all responses alike


def select_groups(
    metric: Tensor,
    group_ids: Tensor,
    num_groups: int,
    valid: Tensor,
    limit: int,
    reduce: Reduce,
    keeps: Callable[[list[float]], object] | None = None,
) -> Selection:
    """Collective. Chooses the first `limit` groups whose valid responses differ in the metric, or
    for whose metric values `keeps` returns true (then a group must be on one rank).

    metric [N] float64; group_ids [N] int64 in 0..num_groups-1 over all ranks; valid [N] bool. A
    group with fewer than two valid responses has no difference. Every rank chooses the same,
    because the decision is made on all-reduced values.
    """
    if keeps is None:
        stats = group_statistics(metric, group_ids, num_groups, valid, reduce)
        informative = ~stats.degenerate
    else:
        votes = torch.zeros(num_groups, dtype=torch.int64, device=metric.device)
        for group in group_ids.unique():
            values = metric[(group_ids == group) & valid].tolist()
            votes[group] = bool(values and keeps(values))  # without a score, nothing to keep
        informative = reduce(votes, "sum") > 0
    chosen = informative.nonzero()[:, 0].tolist()
    dropped = (~informative).nonzero()[:, 0].tolist()
    return Selection(chosen[:limit], chosen[limit:], dropped)
