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

    chosen: list[int]  # to train on now, at most `wanted`
    surplus: list[int]  # informative too; kept for the next step, not thrown away
    dropped: list[int]  # all responses alike


def select_groups(
    metric: Tensor,
    group_ids: Tensor,
    num_groups: int,
    valid: Tensor,
    wanted: int,
    reduce: Reduce,
    keeps: Callable[[list[float]], object] | None = None,
) -> Selection:
    """Collective. Chooses the first `wanted` groups whose valid responses differ in the metric, or
    that `keeps` takes, given these responses' metric; a group's are all on one rank.

    metric [N] float64; group_ids [N] int64 in 0..num_groups-1 over all ranks; valid [N] bool. One
    valid response, or none, is no difference. Decided on all-reduced values, so every rank chooses
    the same.
    """
    if keeps is None:
        stats = group_statistics(metric, group_ids, num_groups, valid, reduce, std_ddof=1)
        kept = ~stats.degenerate
    else:
        own = torch.zeros(num_groups, dtype=torch.int64, device=metric.device)
        for group in group_ids.unique():
            own[group] = bool(keeps(metric[(group_ids == group) & valid].tolist()))
        kept = reduce(own, "sum") > 0
    informative = kept.nonzero()[:, 0].tolist()
    dropped = (~kept).nonzero()[:, 0].tolist()
    return Selection(informative[:wanted], informative[wanted:], dropped)
