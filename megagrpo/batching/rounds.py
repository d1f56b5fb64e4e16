"""Rounds of dynamic context parallelism: which samples share how many context-parallel ranks.

In a round every rank of a context-parallel group runs one micro-batch, and all of the round's take
equally many of its ranks. Short samples stay on one rank, which exchanges nothing for them; long
ones take as many ranks as their tokens need.
"""

from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

import torch

from megagrpo.batching.balance import (
    balanced_parts,
    cheapest_cut,
    fewest_micro_batches,
    sample_cost,
)
from megagrpo.config.schema import ParallelConfig
from megagrpo.mesh import Mesh

# A further rank costs a fifth of the work it shares. Published runs with a long tail took 1.6 times
# as long with 4 ranks for every sample (verl #6555), and 2.4 times with 8 (Megatron-Bridge #4586).
_SHARED_BY = 5
_HALVED = 4  # lengths up to which a rank has a sample alone: its share of the budget, a half, ...


class Round(NamedTuple):
    """Micro-batches that run beside each other in one context-parallel group."""

    context: int  # ranks that share each
    parts: list[list[int]]  # the samples of each: the first of the first `context` ranks, and so on
    cost: int = 0  # of the costliest, in tokens of one rank

    def of(self, rank: int) -> list[int]:
        """Returns the samples of a rank of the group."""
        return self.parts[rank // self.context]


def sequence_unit(context: int) -> int:
    """Returns what the tokens of a sequence are a multiple of: every rank has two equal chunks."""
    return 2 * context if context > 1 else 1


def up(number: int, multiple: int) -> int:
    """Returns the first multiple that is not below the number."""
    return -(-number // multiple) * multiple


def largest(values: Sequence[int], mesh: Mesh) -> list[int]:
    """Collective over data-parallel ranks. Returns the largest of each value."""
    return mesh.reduce(torch.tensor(values), "max").tolist()


def common_rounds(
    lengths: Sequence[int],
    budget: int,
    attention_length: int | None,
    layout: ParallelConfig,
    mesh: Mesh,
) -> list[Round]:
    """Collective over data-parallel ranks. Returns this replica's rounds, as many as every other's:
    of several ways to give samples ranks, from the fewest that hold them to all, the cheapest."""
    sizes = layout.context_sizes
    multiple = layout.pp if layout.vpp > 1 else 1
    ways = [
        plan_rounds(lengths, budget, sizes, limit, attention_length)
        for limit in (*(budget // layout.cp >> halved for halved in range(_HALVED)), 0)
    ]
    counts = [up(max(count, 1), multiple) for count in largest(list(map(len, ways)), mesh)]
    for way, count in zip(ways, counts, strict=True):
        way += [Round(layout.cp, [[]])] * (count - len(way))
    costs = iter(largest([each.cost for way in ways for each in way], mesh))
    slowest = [list(islice(costs, count)) for count in counts]
    return ways[cheapest_cut(slowest, one_shape=layout.pp > 1)]


def plan_rounds(
    lengths: Sequence[int],
    budget: int,
    sizes: Sequence[int],
    limit: int,
    attention_length: int | None,
) -> list[Round]:
    """Cuts the samples of a context-parallel group into rounds, costliest first.

    budget: tokens of several samples that all ranks of the group hold at most. sizes: how many may
    share a sample, ascending to all. limit: tokens of a sample up to which one rank has it, two
    ranks twice as many, and so on. attention_length: as of `sample_cost`.
    """
    ranks = sizes[-1]
    by_size: dict[int, list[int]] = {}
    for sample, length in enumerate(lengths):
        size = next((size for size in sizes if length <= limit * size), ranks)
        by_size.setdefault(size, []).append(sample)
    rounds = []
    for size, samples in by_size.items():
        padded = [up(lengths[i], sequence_unit(size)) for i in samples]
        costs = [sample_cost(length, attention_length) for length in padded]
        room, beside = budget * size // ranks, ranks // size
        parts = fewest_micro_batches(padded, room, packed=True)
        count = up(len(parts), beside)
        even = balanced_parts(costs, count)
        if all(len(part) < 2 or sum(padded[i] for i in part) <= room for part in even):
            parts = even
        weights = [sum(costs[i] for i in part) for part in parts]
        order = sorted(range(len(parts)), key=lambda part: (-weights[part], part))
        own = [[samples[i] for i in parts[part]] for part in order]
        own += [[]] * (count - len(own))
        for first in range(0, count, beside):
            cost = weights[order[first]] * (_SHARED_BY - 1 + size) // (_SHARED_BY * size)
            rounds.append(Round(size, own[first : first + beside], cost))
    return sorted(rounds, key=lambda each: -each.cost)
