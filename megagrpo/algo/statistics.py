"""Sums, means and standard deviations with the same bits for every data-parallel size, rank order
and placement.

Floating-point sums depend on their order, so every sum here is made of integers. A value is written
relative to the largest magnitude of its group as three 30-bit limbs; limbs are summed and
all-reduced as int64, which is exact in any order. Bits more than 90 places below the group's
largest magnitude are dropped, identically everywhere.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

# All-reduce over data-parallel ranks: (tensor, "sum" | "max" | "min") -> new tensor; exact for
# int64.
Reduce = Callable[[Tensor, str], Tensor]
# values [n], their groups [n] and how often each counts [n]; None: all of a single group, at most
# _BLOCK; once
_Block = tuple[Tensor, Tensor | None, Tensor | None]

LIMB_BITS = 30
NUM_LIMBS = 3
MAX_TERMS = 2**32  # |limb| <= 2^30, so an int64 sum of this many cannot overflow
_BLOCK = 2**16  # values; a sum of 2^16 limbs is below 2^53, and they fit into a cache
LARGEST = 2.0**1022  # a reward beyond it is no number
_LOWEST = torch.finfo(torch.float64).min  # the largest value of no values
DEGENERATE_RANGE = 1e-12  # of the group's largest magnitude


def alone(tensor: Tensor, op: str) -> Tensor:
    """Returns the tensor itself: the Reduce of a single rank."""
    return tensor


@dataclass(frozen=True)
class GroupStatistics:
    """Describes the valid values of each of G groups over all ranks: float64 [G] unless noted.

    Empty groups are all zero and degenerate.
    """

    count: Tensor  # int64
    mean: Tensor
    std: Tensor  # of a sample: sqrt(sum of squares / (n - 1)); 0 where count <= 1
    min: Tensor
    max: Tensor
    # bool, max - min <= 1e-12 max|value|; not `std > 0`, since np.std([0.7] * 6) > 0
    degenerate: Tensor


@dataclass(frozen=True)
class Moments:
    """Describes all selected values over all ranks; all zero when there are none."""

    count: int
    mean: float
    std: float
    min: float
    max: float


def group_statistics(
    values: Tensor,
    group_ids: Tensor,
    num_groups: int,
    valid: Tensor,
    reduce: Reduce,
) -> GroupStatistics:
    """Collective. Returns exact statistics of groups that may straddle ranks.

    Three all-reduces, each of O(num_groups) numbers.

    values [N] float64, finite (below 2^1022) where valid; group_ids [N] int64 in 0..num_groups-1;
    valid [N] bool.
    """
    if not bool(valid.all()):
        values = values[valid]
        group_ids = group_ids[valid]
    values = values.double()
    low, high = group_range(values, group_ids, num_groups, reduce)
    count = torch.bincount(group_ids, minlength=num_groups)
    return _described(lambda: [(values, group_ids, None)], count, low, high, reduce)


def moments(values: Tensor, reduce: Reduce, mask: Tensor | None = None) -> Moments:
    """Collective. Returns exact moments of the float tensors `values` (any shape, finite) of all
    ranks.

    mask: the same shape, the values that count (bool), or how often each counts (int64); None: all,
    once. The result has the same bits as group_statistics with one group; blocks of tokens stay in
    the processor's cache.
    """
    flat = values.reshape(-1).numpy()

    def blocks() -> Iterator[_Block]:
        for start in range(0, len(flat), _BLOCK):
            part = flat[start : start + _BLOCK]
            times = None
            if mask is not None:
                # torch selects in ten times the time
                counted = mask.reshape(-1).numpy()[start : start + _BLOCK]
                part = part[counted.astype(bool, copy=False)]
                if mask.dtype != torch.bool:
                    times = torch.from_numpy(counted[counted > 0])
            yield torch.from_numpy(part).double(), None, times

    ends = torch.full((2, 1), _LOWEST, dtype=torch.float64)
    count = torch.zeros(1, dtype=torch.int64)
    for block, _, times in blocks():
        if block.numel():
            count += block.numel() if times is None else times.sum()
            block_ends = torch.stack((-block.amin(), block.amax()))
            ends[:, 0] = torch.maximum(ends[:, 0], block_ends)
    low, high = _range_of_ends(ends, reduce)
    stats = _described(blocks, count, low, high, reduce)
    return Moments(int(stats.count), *map(float, (stats.mean, stats.std, stats.min, stats.max)))


def _described(
    blocks: Callable[[], Iterable[_Block]],
    count: Tensor,
    low: Tensor,
    high: Tensor,
    reduce: Reduce,
) -> GroupStatistics:
    """Collective. Returns the statistics of G groups; count: this rank's values; low, high: of all
    ranks, [G] each."""
    # Relative to the group's magnitude from here on: squares can neither overflow nor vanish.
    magnitude = torch.maximum(high.abs(), low.abs())
    up, down = _powers_of_two(magnitude)
    scaled = ((values * _to_values(down, ids), ids, times) for values, ids, times in blocks())
    sums, count = _sums_of_scaled(scaled, count, reduce)
    assert bool((count < MAX_TERMS).all()), "too many values for the head-room of the integer sums"
    mean = sums / count.clamp(min=1)
    # Rounding is monotone, so the largest deviation is at one of the ends and needs no all-reduce.
    spread_up, spread_down = _powers_of_two(torch.maximum(high * down - mean, mean - low * down))

    def squared(values: Tensor, ids: Tensor | None) -> Tensor:
        deviations = values * _to_values(down, ids) - _to_values(mean, ids)
        return (deviations * _to_values(spread_down, ids)).square()

    squares, _ = _sums_of_scaled(
        ((squared(values, ids), ids, times) for values, ids, times in blocks()),
        torch.zeros_like(count),
        reduce,
    )
    std = (squares / (count - 1).clamp(min=1)).sqrt()
    return GroupStatistics(
        count=count,
        mean=mean * up,
        std=std * spread_up * up,
        min=low,
        max=high,
        degenerate=high - low <= DEGENERATE_RANGE * magnitude,
    )


def _to_values(per_group: Tensor, ids: Tensor | None) -> Tensor:
    """Returns for every value of a block the value of its group, from [G]."""
    if ids is None:
        return per_group
    return per_group.index_select(0, ids)


def group_range(
    values: Tensor, group_ids: Tensor, num_groups: int, reduce: Reduce
) -> tuple[Tensor, Tensor]:
    """Collective. Returns the smallest and the largest value [G] of each group over all ranks; 0
    for an empty group.

    values [n] float64; group_ids [n] int64 in 0..num_groups-1.
    """
    ends = values.new_full((2, num_groups), _LOWEST)
    ends[0].scatter_reduce_(0, group_ids, -values, "amax")
    ends[1].scatter_reduce_(0, group_ids, values, "amax")
    return _range_of_ends(ends, reduce)


def _range_of_ends(ends: Tensor, reduce: Reduce) -> tuple[Tensor, Tensor]:
    """Collective. Returns smallest and largest values [G] from this rank's (-smallest, largest) [2,
    G]."""
    ends = reduce(ends, "max")
    # NaN fails the comparison too
    assert bool((ends < LARGEST).all()), "a valid value is not finite"
    ends = ends.masked_fill(ends == _LOWEST, 0.0)
    return 0.0 - ends[0], ends[1] + 0.0  # never -0.0, whose place among zeros depends on the order


def exact_group_sums(
    values: Tensor, group_ids: Tensor, along: Tensor, reduce: Reduce
) -> tuple[Tensor, Tensor]:
    """Collective. Returns the sums (float64 [G]) of each group over all ranks, and those of `along`
    (int64 [G]).

    Two all-reduces. values [n] float64, finite; group_ids [n] int64 in 0..G-1.
    """
    low, high = group_range(values, group_ids, len(along), reduce)
    up, down = _powers_of_two(torch.maximum(-low, high))
    scaled = values * _to_values(down, group_ids)
    sums, along = _sums_of_scaled([(scaled, group_ids, None)], along, reduce)
    return sums * up, along


def exact_row_sums(values: Tensor, lengths: Tensor) -> Tensor:
    """Returns the sums [N] float64 of values [T] float64 over samples of `lengths` [N] tokens
    each."""

    def sums(rows: slice, tokens: slice) -> Tensor:
        of_row = torch.repeat_interleave(lengths[rows])
        none = torch.zeros_like(lengths[rows])
        return exact_group_sums(values[tokens], of_row, none, alone)[0]

    return in_runs(sums, lengths)


def largest_of_all(keys: Tensor, count: int, reduce: Reduce) -> Tensor:
    """Collective. Returns which values [n] (bool) are among the `count` largest of all ranks.

    keys: [k, n] int64, read as unsigned numbers; the next row decides between values that are equal
    so far. Values that are equal in all rows are chosen together.
    """
    tied = torch.ones_like(keys[0], dtype=torch.bool)
    chosen = ~tied
    for key in keys:
        for shift in range(56, -1, -8):
            digits = (key >> shift) & 255
            counts = reduce(torch.bincount(digits[tied], minlength=256), "sum")
            at_least = counts.flip(0).cumsum(0).flip(0)
            digit = int((at_least >= count).sum()) - 1  # of the last one chosen; -1: all are
            count -= int(at_least[digit] - counts[digit])
            chosen |= tied & (digits > digit)
            tied &= digits == digit
    return chosen | tied


def ordered_bits(values: Tensor) -> Tensor:
    """Returns int64 that are in the order of the float64 values if they are read as unsigned."""
    bits = (values + 0.0).view(torch.int64)  # -0.0 is 0.0
    return torch.where(bits < 0, ~bits, bits ^ torch.iinfo(torch.int64).min)


def row_counts(flags: Tensor, lengths: Tensor) -> Tensor:
    """Returns how many flags [T] bool of each sample are set, [N] int64, without numbers for each
    token; lengths: [N], of the samples in tokens."""
    of_samples = flags.split(lengths.tolist())
    return torch.tensor([int(part.count_nonzero()) for part in of_samples], dtype=torch.int64)


def by_row(values: Tensor, lengths: Tensor, how: Literal["sum", "amax"]) -> Tensor:
    """Returns the sums [N] of values [T], one by one in their own type, or the largest of 0 and the
    values, over samples of `lengths` [N] tokens each."""

    def reduced(rows: slice, tokens: slice) -> Tensor:
        run = lengths[rows]
        of_row = torch.repeat_interleave(run)  # [T] int64, the sample of each token
        return values.new_zeros(len(run)).scatter_reduce_(0, of_row, values[tokens], how)

    return in_runs(reduced, lengths)


def in_runs(work: Callable[[slice, slice], Tensor], lengths: Tensor) -> Tensor:
    """Returns the joined results of work(rows, tokens) for runs of whole samples, whose tokens fit
    into a cache unless they are of a single one. What it makes for each token is soon gone."""
    ends = lengths.cumsum(0)
    first = start = 0
    results: list[Tensor] = []
    while first < len(lengths) or not results:
        last = max(first + 1, int(torch.searchsorted(ends, start + _BLOCK, right=True)))
        end = start + int(lengths[first:last].sum())
        results.append(work(slice(first, last), slice(start, end)))
        first = last
        start = end
    return torch.cat(results)


def to_tokens(values: Tensor, lengths: Tensor) -> Tensor:
    """Returns for each token [T] the value of its sample, from [N], on the host; lengths: [N], of the
    samples in tokens."""
    # torch's repeat_interleave makes 8 bytes for each token in addition
    return torch.from_numpy(values.numpy().repeat(lengths.numpy()))


def _sums_of_scaled(
    blocks: Iterable[_Block], along: Tensor, reduce: Reduce
) -> tuple[Tensor, Tensor]:
    """Collective. Returns exact sums [G] of values in [-1, 1], and those of `along` [G]; drops bits
    below 2^-90."""
    totals = torch.zeros(NUM_LIMBS + 1, len(along), dtype=torch.int64, device=along.device)
    totals[NUM_LIMBS] = along
    for rest, ids, times in blocks:
        for limb in totals[:NUM_LIMBS]:
            rest = rest * 2.0**LIMB_BITS
            leading = rest.round()
            rest -= leading  # exact: a float minus its own leading bits
            if times is not None:
                limb += (leading.long() * times).sum()
            elif ids is None:
                limb += leading.sum().long()  # exact: integers, together below 2^53
            else:
                limb.scatter_add_(0, ids, leading.long())
    totals = reduce(totals, "sum")
    high, middle, low = totals[:NUM_LIMBS].double()
    # The integers are the same everywhere, so these roundings are too.
    sums = ((low * 2.0**-LIMB_BITS + middle) * 2.0**-LIMB_BITS + high) * 2.0**-LIMB_BITS
    return sums, totals[NUM_LIMBS]


def _powers_of_two(bound: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (2^e, 2^-e) with bound <= 2^e, [G] each, made from their bits: pow() may be off in
    the last place.

    e is at least -1000, so that both are normal numbers; 90 bits below that are under the smallest
    double anyway.
    """
    exponent = torch.frexp(bound).exponent.long().clamp_(min=-1000)
    up, down = (exponent + 1023) << 52, (1023 - exponent) << 52
    return up.view(torch.float64), down.view(torch.float64)
