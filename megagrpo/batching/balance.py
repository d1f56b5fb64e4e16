"""Load balance of samples over ranks and micro-batches. Pure functions of lengths, identical on
every rank.

Invariants (asserted, tested): every sample is in exactly one micro-batch of one rank; no
micro-batch of several samples is above the token budget; every rank runs the same number of
micro-batches, largest first; the plan depends on the lengths and not on the order in which samples
arrived.

Two things are balanced. Ranks, by cost, since they meet at the end of an update (`balanced_parts`).
And the k-th micro-batches of all ranks, by tokens, since experts and pipelines make ranks meet in
every one of them: `candidate_cuts` offers several ways to cut a rank's samples, and the ranks
together take the one whose slowest micro-batches are the shortest (`cheapest_cut`). Lengths and
budgets are in tokens.
"""

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence

_MAX_ROUNDS = 1000  # of exchanges; each shortens the fullest part, and a few dozen are usual
_CLOSE_ENOUGH = 1000  # parts that differ by less than a thousandth are left alone


def sample_cost(length: int, attention_length: int | None = None) -> int:
    """Returns the cost of a sample in units of one token's matrix products: linear, plus attention
    if that is known.

    attention_length: the sequence length, in tokens, at which causal attention costs as much as the
    rest of the model.
    """
    if attention_length is None:
        return length
    return length + length * length // attention_length


def balanced_parts(
    costs: Sequence[int], num_parts: int, head_start: Sequence[int] | None = None
) -> list[list[int]]:
    """Splits indices into parts whose largest sum of costs is small; returns one sorted list of
    indices per part.

    head_start: [num_parts], initial cost of each part, default 0. The costliest remaining index
    goes to the part with the smallest sum, which is at most 4/3 of the optimum (Graham 1969); then
    the largest part exchanges members with others as long as that reduces the larger of the two
    sums.
    """
    assert num_parts > 0
    head_start = head_start or [0] * num_parts
    order = _longest_first(costs)
    # From here on members are places in this order: equal costs are alike, however they arrived.
    sizes = [costs[i] for i in order]
    heap = [(cost, part) for part, cost in enumerate(head_start)]
    heapq.heapify(heap)
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    for member, size in enumerate(sizes):
        lightest, part = heapq.heappop(heap)
        parts[part].append(member)
        heapq.heappush(heap, (lightest + size, part))
    loads = [
        start + sum(sizes[i] for i in part) for start, part in zip(head_start, parts, strict=True)
    ]
    for _ in range(_MAX_ROUNDS):
        if not _exchange(sizes, parts, loads):
            break
    return [sorted(order[i] for i in part) for part in parts]


def _longest_first(costs: Sequence[int]) -> list[int]:
    return sorted(range(len(costs)), key=lambda i: (-costs[i], i))


def _exchange(sizes: Sequence[int], parts: list[list[int]], loads: list[int]) -> bool:
    """Moves or swaps one member of the fullest part; returns False when nothing makes the fuller of
    two parts shorter.

    Changes `parts` and `loads`.
    """
    full = max(range(len(parts)), key=lambda p: (loads[p], -p))
    for other in sorted(range(len(parts)), key=lambda p: (loads[p], p)):
        excess = loads[full] - loads[other]
        if excess * _CLOSE_ENOUGH < loads[full] or excess < 2:
            break  # the parts that follow are fuller still
        shortest_first = sorted(parts[other], key=lambda i: (sizes[i], i))
        keys = [sizes[i] for i in shortest_first]
        # (distance from moving half the excess, doubled; tokens moved; what leaves; what comes
        # back)
        options = []
        for leaves in sorted(parts[full]):
            place = bisect_left(keys, sizes[leaves] - excess / 2)
            for comes in ([], *([i] for i in shortest_first[max(place - 1, 0) : place + 1])):
                moved = sizes[leaves] - sum(sizes[i] for i in comes)
                options.append((abs(excess - 2 * moved), moved, leaves, comes))
        distance, moved, leaves, comes = min(options, default=(excess, 0, 0, []))
        if distance < excess:
            parts[full] = [i for i in parts[full] if i != leaves] + comes
            parts[other] = [i for i in parts[other] if i not in comes] + [leaves]
            loads[full] -= moved
            loads[other] += moved
            return True
    return False


def token_load(members: Sequence[int], lengths: Sequence[int], packed: bool) -> int:
    """Returns the tokens of a micro-batch: the sum of the members' lengths if packed, else their
    number times the longest.
    """
    sizes = [lengths[i] for i in members]
    if packed:
        return sum(sizes)
    return len(sizes) * max(sizes, default=0)


def fewest_micro_batches(lengths: Sequence[int], budget: int, packed: bool) -> list[list[int]]:
    """Puts one rank's samples into as few micro-batches as the rules here find; returns the indices
    of each.

    Even micro-batches are taken if they are fewer than full ones with the rest in the last.
    """
    found = _filled(lengths, budget, packed)
    # no two samples of more than half of the budget fit
    fewest = max(-(-sum(lengths) // budget), sum(2 * length > budget for length in lengths))
    # downwards: of samples near the budget many fewer would fit by their sum, and none does
    step, growing = 1, True
    while packed and step and len(found) > fewest:
        even = balanced_parts(lengths, max(len(found) - step, fewest))
        if _fits(even, lengths, budget, packed):
            found = even
        else:
            growing = False
        step = 2 * step if growing else step // 2
    return found


def longest_lengths(lengths: Sequence[int], count: int) -> list[int]:
    """Returns the `count` largest lengths of one rank, largest first, with zeros where there are
    fewer."""
    return sorted([*lengths, *[0] * count], reverse=True)[:count]


def candidate_cuts(
    lengths: Sequence[int], budget: int, packed: bool, count: int, longest_of_all: Sequence[int]
) -> list[list[list[int]]]:
    """Returns ways to cut one rank's samples into `count` micro-batches, each ordered by tokens,
    largest first.

    count: not below the number of `fewest_micro_batches`. longest_of_all: [count], the element-wise
    largest `longest_lengths` of all ranks. Every rank has the same number of ways, so that they can
    be compared: full micro-batches and the rest; even ones; even ones except for the first, which
    meet other ranks' long samples.
    """
    order = _longest_first(lengths)
    lengths = [lengths[i] for i in order]
    safe = fewest_micro_batches(lengths, budget, packed)
    ways = [safe]
    if packed:
        targets = _targets(sum(lengths), count, [min(length, budget) for length in longest_of_all])
        ways += [
            balanced_parts(lengths, count),
            balanced_parts(lengths, count, [max(targets) - target for target in targets]),
        ]
    ways = [way if _fits(way, lengths, budget, packed) else safe for way in ways]
    ways = [_with_count(way, count) for way in ways]
    ways = [sorted(way, key=lambda b: (-token_load(b, lengths, packed), b)) for way in ways]
    return [[sorted(order[i] for i in b) for b in way] for way in ways]


def _targets(total: int, count: int, pieces: Sequence[int]) -> list[int]:
    """Returns the tokens that each micro-batch should have: as many as the piece that it runs
    beside; the rest is spread evenly."""
    targets: list[int] = []
    for piece in pieces:
        if piece * (count - len(targets)) <= total:
            break
        targets.append(min(piece, total))
        total -= targets[-1]
    rest = count - len(targets)
    return targets + [total // max(rest, 1)] * rest


def cheapest_cut(slowest: Sequence[Sequence[int]], one_shape: bool) -> int:
    """Returns the index of the way that takes the least time.

    slowest: for each way, the tokens of the slowest rank in every micro-batch. one_shape: all
    micro-batches are padded to the largest, as pipeline stages need it.
    """
    totals = list(map(sum, slowest))
    if one_shape:
        totals = [max(way, default=0) * len(way) for way in slowest]
    return totals.index(min(totals))


def _fits(bins: list[list[int]], lengths: Sequence[int], budget: int, packed: bool) -> bool:
    return all(len(b) < 2 or token_load(b, lengths, packed) <= budget for b in bins)


def _filled(lengths: Sequence[int], budget: int, packed: bool) -> list[list[int]]:
    """Returns as few micro-batches as a simple rule finds; a sample above the budget is alone in
    one.

    Packed: best-fit decreasing. Padded: neighbors in length together.
    """
    bins: list[list[int]] = []
    room: list[tuple[int, int]] = []  # left, and of which: ascending
    for index in _longest_first(lengths):
        length = lengths[index]
        if not packed and bins and (len(bins[-1]) + 1) * lengths[bins[-1][0]] <= budget:
            bins[-1].append(index)
        elif packed and (fit := bisect_left(room, (length, 0))) < len(room):
            space, number = room.pop(fit)
            bins[number].append(index)
            insort(room, (space - length, number))
        else:
            insort(room, (budget - length, len(bins)))
            bins.append([index])
    return [sorted(b) for b in bins]


def _with_count(bins: list[list[int]], count: int) -> list[list[int]]:
    """Raises the number of micro-batches to `count` by halving the fullest, and by empty ones when
    all are single.

    An empty one is a dummy forward pass, in which this rank takes part in the others' collectives.
    """
    assert len(bins) <= count, f"{len(bins)} micro-batches cannot become {count}"
    bins = [list(b) for b in bins]
    while len(bins) < count:
        widest = max(bins, key=len, default=[])
        bins.append(widest[1::2])
        del widest[1::2]
    return bins
