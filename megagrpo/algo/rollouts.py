"""Rollouts of several samples: statistics, advantages and denominators see rollouts, forward passes
see samples.

A rollout is a tree of turns; a path from its root to a leaf is a sample. Its reward is one, and it
counts once in everything: what its samples share is trained on in the first of them and is context
in the others.
"""

from dataclasses import replace

import torch
from torch import Tensor

from megagrpo.algo.statistics import row_max, row_sums
from megagrpo.types import Batch


def of_rollouts(batch: Batch) -> Batch:
    """Returns the batch with a row for each of its M rollouts instead of its N samples; tokens stay
    in their places.

    A rollout's samples are neighbors, so it is one run of tokens: lengths [M] sum those of its
    samples. It is truncated if one of them is. Only fields that advantages are made of are
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
    return lengths if batch.rollout_sizes is None else row_max(lengths, batch.rollout_sizes)


def of_samples(values: Tensor, batch: Batch) -> Tensor:
    """Returns for each sample [N, ...] the value of its rollout, from [M, ...]."""
    sizes = batch.rollout_sizes
    return values if sizes is None else values.repeat_interleave(sizes, 0)


def counted_tokens(batch: Batch) -> Tensor:
    """Returns the tokens of each rollout that rl's denominators count, [M] int64: those that it is
    trained on, and more if rejected ones stay in the denominators.
    """
    counted = batch.loss_mask if batch.correction.counted is None else batch.correction.counted
    if batch.streams is not None:
        counted = counted & (batch.streams.weights["rl"] != 0)
    return row_sums(counted.long(), of_rollouts(batch).lengths)


def rollouts_of(rows: Tensor, batch: Batch) -> Tensor:
    """Returns the indices [m] int64, ascending, of the rollouts of these samples [n]."""
    numbers = torch.arange(
        len(batch.lengths if batch.rollout_sizes is None else batch.rollout_sizes)
    )
    return of_samples(numbers, batch)[rows].unique()
