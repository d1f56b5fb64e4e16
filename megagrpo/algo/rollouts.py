"""Rollouts of several samples: statistics, advantages and denominators see rollouts, forward passes
see samples.

A rollout is a tree of turns, and a path from its root to a leaf is a sample. A rollout has one
reward and counts once everywhere: tokens that its samples share are trained on in the first sample
and are context in the others.
"""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from megagrpo.algo.statistics import by_row, row_counts
from megagrpo.types import Batch


def by_rollout(batch: Batch) -> Batch:
    """Returns the batch with a row for each of its M rollouts instead of its N samples; tokens stay
    in their places.

    The samples of a rollout are neighbors, so it is one run of tokens, and its length is the sum of
    theirs. It is truncated if one of its samples is. Only the fields that advantages depend on are
    converted.
    """
    sizes = batch.rollout_sizes
    if sizes is None:
        return batch
    first = sizes.cumsum(0) - sizes
    names = ("values", "valid", "greedy", "parts")  # of what each sample has
    values = {name: getattr(batch.rewards, name) for name in names}
    of_first = {name: each[first] for name, each in values.items() if each is not None}
    return replace(
        batch,
        sample_ids=batch.sample_ids[first],
        group_ids=batch.group_ids[first],
        lengths=by_row(batch.lengths, sizes, "sum"),
        prompt_lengths=by_row(batch.prompt_lengths, sizes, "sum"),
        truncated=by_row(batch.truncated.long(), sizes, "sum") > 0,
        rewards=replace(batch.rewards, **of_first),
        rollout_sizes=None,
    )


def longest_responses(batch: Batch) -> Tensor:
    """Returns the tokens of each rollout's longest response, [M] int64: sampling.max_response_tokens
    limits a sample."""
    lengths = batch.lengths - batch.prompt_lengths
    if batch.rollout_sizes is None:
        return lengths
    return by_row(lengths, batch.rollout_sizes, "amax")


def to_samples(values: Tensor, batch: Batch) -> Tensor:
    """Returns for each sample [N, ...] the value of its rollout, from [M, ...]."""
    if batch.rollout_sizes is None:
        return values
    return values.repeat_interleave(batch.rollout_sizes, 0)


class TokenCounts(NamedTuple):
    """How many tokens the denominators of an update's losses count."""

    # [M] int64, of each rollout for rl: trained tokens, and rejected ones that stay in them
    rollouts: Tensor
    streams: dict[str, Tensor]  # of each sample, by component but rl: [N] int64


def token_counts(batch: Batch) -> TokenCounts:
    """Returns the counts of a batch. It reads every token, so call it once a step, not once an
    update."""
    counted = batch.correction.counted
    if counted is None:
        counted = batch.loss_mask
    of_samples = {}
    if batch.streams is not None:
        trained = {name: weights != 0 for name, weights in batch.streams.weights.items()}
        counted = counted & trained.pop("rl")
        if batch.correction.distilled is not None:
            trained["distillation"] = batch.correction.distilled
        of_samples = {name: row_counts(each, batch.lengths) for name, each in trained.items()}
    return TokenCounts(row_counts(counted, by_rollout(batch).lengths), of_samples)


def rollouts_of(rows: Tensor, batch: Batch) -> Tensor:
    """Returns the indices [m] int64, ascending, of the rollouts of these samples [n]."""
    if batch.rollout_sizes is not None:
        numbers = torch.arange(len(batch.rollout_sizes))
        rows = to_samples(numbers, batch)[rows]
    return rows.unique()
