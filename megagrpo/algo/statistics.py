"""Sums, means and standard deviations that are the same bits for every data-parallel size, rank order and placement.

Floating-point sums depend on their order, so every sum here is made of integers. A value is written relative to the
largest magnitude of its group as three 30-bit limbs; limbs are summed and all-reduced as int64, which is exact in any order.
Bits more than 90 places below the group's largest magnitude are dropped, identically everywhere.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

# All-reduce over data-parallel ranks: (tensor, "sum" | "max" | "min") -> new tensor; exact for int64.
Reduce = Callable[[Tensor, str], Tensor]

LIMB_BITS = 30
NUM_LIMBS = 3
MAX_TERMS = 2**32  # |limb| <= 2^30, so an int64 sum of this many cannot overflow
DEGENERATE_RANGE = 1e-12  # of the group's largest magnitude


def alone(tensor: Tensor, op: str) -> Tensor:
    """The Reduce of a single rank."""
    return tensor


@dataclass(frozen=True)
class GroupStatistics:
    """Of the valid values of each group, over all ranks; float64 [G] unless said. Empty groups: all zero, degenerate."""

    count: Tensor  # int64
    mean: Tensor
    std: Tensor  # 0 where count <= ddof
    min: Tensor
    max: Tensor
    degenerate: Tensor  # bool, max - min <= 1e-12 max|value|; not `std > 0`, since np.std([0.7] * 6) > 0


@dataclass(frozen=True)
class Moments:
    """Of all selected values over all ranks; all zero when there are none."""

    count: int
    mean: float
    std: float
    min: float
    max: float


def group_statistics(
    values: Tensor, group_ids: Tensor, num_groups: int, valid: Tensor, reduce: Reduce, std_ddof: int
) -> GroupStatistics:
    """Exact statistics of groups that may straddle ranks; three all-reduces, each of O(num_groups) numbers.

    values [N] float64, finite where valid; group_ids [N] int64 in 0..num_groups-1; valid [N] bool.
    """
    values, group_ids = values[valid].double(), group_ids[valid]
    low, high = group_range(values, group_ids, num_groups, reduce)
    magnitude = torch.maximum(high.abs(), low.abs())
    # From here on relative to the group's magnitude, in [-1, 1]: squares can neither overflow nor vanish.
    exponent = torch.frexp(magnitude).exponent.long()
    values = _times_power_of_two(values, -exponent[group_ids])
    low_scaled, high_scaled, bound = (_times_power_of_two(x, -exponent) for x in (low, high, magnitude))
    sums, count = exact_group_sums(values, group_ids, bound, reduce)
    mean = sums / count.clamp(min=1)
    # Rounding is monotone, so the largest squared deviation is at one of the ends and needs no all-reduce.
    largest = torch.maximum((high_scaled - mean).square(), (low_scaled - mean).square())
    squares, _ = exact_group_sums((values - mean[group_ids]).square(), group_ids, largest, reduce)
    std = (squares / (count - std_ddof).clamp(min=1)).sqrt()
    return GroupStatistics(
        count=count,
        mean=_times_power_of_two(mean, exponent),
        std=torch.where(count > std_ddof, _times_power_of_two(std, exponent), 0.0),
        min=low,
        max=high,
        degenerate=high_scaled - low_scaled <= DEGENERATE_RANGE * bound,
    )


def moments(values: Tensor, reduce: Reduce, std_ddof: int = 1) -> Moments:
    """Exact moments of the float tensor `values` (any shape, finite) together with that of the other ranks."""
    values = values.reshape(-1)
    everything = torch.ones_like(values, dtype=torch.bool)
    stats = group_statistics(values, torch.zeros_like(values, dtype=torch.int64), 1, everything, reduce, std_ddof)
    return Moments(int(stats.count), float(stats.mean), float(stats.std), float(stats.min), float(stats.max))


def group_range(values: Tensor, group_ids: Tensor, num_groups: int, reduce: Reduce) -> tuple[Tensor, Tensor]:
    """Smallest and largest value [G] of each group over all ranks; 0 and 0 for an empty group."""
    lowest = torch.finfo(torch.float64).min
    ends = values.new_full((2, num_groups), lowest)
    ends[0].scatter_reduce_(0, group_ids, -values, "amax")
    ends[1].scatter_reduce_(0, group_ids, values, "amax")
    ends = reduce(ends, "max")
    assert bool((ends < torch.inf).all()), "a valid value is not finite"  # NaN fails the comparison too
    empty = ends[1] == lowest
    return -ends[0].masked_fill(empty, 0.0), ends[1].masked_fill(empty, 0.0)


def exact_group_sums(values: Tensor, group_ids: Tensor, bound: Tensor, reduce: Reduce) -> tuple[Tensor, Tensor]:
    """Sum (float64 [G]) and count (int64 [G]) of each group over all ranks; one all-reduce.

    values [n] float64; bound [G]: at least max|value| of the group over ALL ranks, the same on every rank.
    """
    num_groups = len(bound)
    exponent = torch.frexp(bound).exponent.long()
    rest = _times_power_of_two(values, (LIMB_BITS - exponent)[group_ids])
    totals = torch.zeros(NUM_LIMBS + 1, num_groups, dtype=torch.int64, device=values.device)
    for limb in range(NUM_LIMBS):
        whole = rest.trunc()
        _add_by_group(totals[limb], group_ids, whole.long())
        rest = (rest - whole) * 2.0**LIMB_BITS  # both exact: a float minus its own leading bits
    _add_by_group(totals[NUM_LIMBS], group_ids, torch.ones_like(group_ids))
    totals = reduce(totals, "sum")
    count = totals[NUM_LIMBS]
    assert bool((count < MAX_TERMS).all()), "too many values for the head-room of the integer sums"
    # Carry, so that the lower limbs are plain digits again and their conversion to float64 is exact.
    for limb in (2, 1):
        totals[limb - 1] += totals[limb] >> LIMB_BITS
        totals[limb] &= 2**LIMB_BITS - 1
    total = (totals[2].double() * 2.0**-LIMB_BITS + totals[1].double()) * 2.0**-LIMB_BITS + totals[0].double()
    return _times_power_of_two(total, exponent - LIMB_BITS), count


def _add_by_group(totals: Tensor, group_ids: Tensor, values: Tensor) -> None:
    if len(totals) == 1:
        totals += values.sum()  # scattering millions of tokens into one place would be serial
    else:
        totals.scatter_add_(0, group_ids, values)


def _times_power_of_two(values: Tensor, exponent: Tensor) -> Tensor:
    """values * 2^exponent for exponents in +-2000, exact unless the result is subnormal; in two steps, as 2^1100 is no double."""
    half = exponent >> 1
    return values * _power_of_two(half) * _power_of_two(exponent - half)


def _power_of_two(exponent: Tensor) -> Tensor:
    return ((exponent + 1023) << 52).view(torch.float64)  # the bits themselves: pow() may be off by one in the last place
