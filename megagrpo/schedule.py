"""Which sample goes to which rank and which micro-batch: pure functions of lengths, the same on every rank.

Invariants (asserted, tested): every sample is in exactly one micro-batch of one rank; no micro-batch of several samples is
above the token budget; every rank runs the same number of micro-batches; the plan depends on the lengths and not on the
order in which samples arrived.
"""

import heapq
from collections.abc import Sequence


def balance(lengths: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Split sample indices over ranks so that the largest token sum is small: longest first, to the least loaded rank.

    Returns one sorted list of indices per rank (LPT rule; Graham 1969: at most 4/3 of the best).
    """
    heap = [(0, rank) for rank in range(num_ranks)]
    parts: list[list[int]] = [[] for _ in range(num_ranks)]
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        load, rank = heapq.heappop(heap)
        parts[rank].append(index)
        heapq.heappush(heap, (load + lengths[index], rank))
    return [sorted(part) for part in parts]


def micro_batches(lengths: Sequence[int], budget: int, packed: bool) -> list[list[int]]:
    """Cut one rank's samples into micro-batches of at most `budget` tokens; a longer sample gets one of its own.

    Packed: tokens are the sum of lengths (best-fit decreasing). Padded: samples x longest (neighbours in length together).
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    bins: list[list[int]] = []
    if packed:
        room: list[int] = []
        for index in order:
            fits = [(space, b) for b, space in enumerate(room) if space >= lengths[index]]
            if fits:
                _, b = min(fits)
                bins[b].append(index)
                room[b] -= lengths[index]
            else:
                bins.append([index])
                room.append(budget - lengths[index])
    else:
        for index in order:
            if bins and (len(bins[-1]) + 1) * lengths[bins[-1][0]] <= budget:
                bins[-1].append(index)
            else:
                bins.append([index])
    return [sorted(b) for b in bins]


def same_count(bins: list[list[int]], count: int) -> list[list[int]]:
    """Raise the number of micro-batches to `count` by halving the fullest; empty ones (a dummy forward) when all are single."""
    assert len(bins) <= count, f"{len(bins)} micro-batches cannot become {count}"
    bins = [list(b) for b in bins]
    while len(bins) < count:
        widest = max(range(len(bins)), key=lambda b: (len(bins[b]), -b), default=None)
        if widest is None or len(bins[widest]) < 2:
            bins.append([])
            continue
        members = bins[widest]
        bins[widest], extra = members[::2], members[1::2]
        bins.append(extra)
    return bins


def update_of_group(group_id: int, num_groups: int, num_updates: int) -> int:
    """Which optimiser update of the step a group belongs to: contiguous, equal parts."""
    return group_id * num_updates // num_groups
