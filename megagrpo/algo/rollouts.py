"""Rollouts of several samples: statistics, advantages and denominators see rollouts, forward passes
see samples.

A rollout is a tree of turns, and a path from its root to a leaf is a sample. A rollout has one
reward and counts once everywhere: tokens that its samples share are trained on in the first sample
and are context in the others.
"""

from dataclasses import replace

import torch
from torch import Tensor

from megagrpo.algo.statistics import row_counts, row_max, row_sums
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
    greedy, parts = batch.rewards.greedy, batch.rewards.parts
    rewards = replace(
        batch.rewards,
        values=batch.rewards.values[first],
        valid=batch.rewards.valid[first],
        greedy=None if greedy is None else greedy[first],
        parts=None if parts is None else parts[first],
    )
    return replace(
        batch,
        sample_ids=batch.sample_ids[first],
        group_ids=batch.group_ids[first],
        lengths=row_sums(batch.lengths, sizes),
        prompt_lengths=row_sums(batch.prompt_lengths, sizes),
        truncated=row_sums(batch.truncated.long(), sizes) > 0,
        rewards=rewards,
        rollout_sizes=None,
    )


def longest_responses(batch: Batch) -> Tensor:
    """Returns the tokens of each rollout's longest response, [M] int64: sampling.max_response_tokens
    limits a sample."""
    lengths = batch.lengths - batch.prompt_lengths
    if batch.rollout_sizes is None:
        return lengths
    return row_max(lengths, batch.rollout_sizes)


def to_samples(values: Tensor, batch: Batch) -> Tensor:
    """Returns for each sample [N, ...] the value of its rollout, from [M, ...]."""
    if batch.rollout_sizes is None:
        return values
    return values.repeat_interleave(batch.rollout_sizes, 0)


def counted_tokens(batch: Batch) -> Tensor:
    """Returns how many tokens of each rollout the denominators of rl count, [M] int64: the trained
    tokens, and rejected ones if they stay in the denominators.
    """
    counted = batch.correction.counted
    if counted is None:
        counted = batch.loss_mask
    if batch.streams is not None:
        counted = counted & (batch.streams.weights["rl"] != 0)
    return row_counts(counted, by_rollout(batch).lengths)


def rollouts_of(rows: Tensor, batch: Batch) -> Tensor:
    """Returns the indices [m] int64, ascending, of the rollouts of these samples [n]."""
    if batch.rollout_sizes is not None:
        numbers = torch.arange(len(batch.rollout_sizes))
        rows = to_samples(numbers, batch)[rows]
    return rows.unique()
