"""The groups of each optimizer update of a step. A pure function of numbers, identical on every
rank."""

import random
from collections.abc import Sequence
from itertools import pairwise

from megagrpo.config.schema import TrainConfig
from megagrpo.types import Updates


def plan_updates(train: TrainConfig, seed: int, step: int) -> Updates:
    """Cuts a step's groups into num_updates_per_step equal parts, differently for each of
    num_epochs_per_step passes.

    The first pass takes the groups in the order of their ids, every other pass in a different
    order, drawn from (seed, step, pass).
    """
    passes = []
    for number in range(train.num_epochs_per_step):
        order = list(range(train.num_prompts_per_step))
        if number:
            # a text as seed is hashed: near seeds give unrelated orders
            random.Random(f"updates {seed} {step} {number}").shuffle(order)
        passes.append(_equal_parts(order, train.num_updates_per_step))
    return tuple(passes)


def one_pass(num_groups: int, num_updates: int = 1) -> Updates:
    """Cuts groups 0 .. num_groups - 1 into parts as equal as can be, for a single pass."""
    return (_equal_parts(range(num_groups), num_updates),)


def _equal_parts(order: Sequence[int], count: int) -> tuple[tuple[int, ...], ...]:
    bounds = [-(-len(order) * part // count) for part in range(count + 1)]
    return tuple(tuple(sorted(order[start:end])) for start, end in pairwise(bounds))
