"""Reward steps, one function each, which turn the grader's rewards into those of the advantage.

To add a step: its Section in config/objective/reward_shaping.py, its function here and its row in
REWARD_STEPS.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megagrpo.algo.statistics import DEGENERATE_RANGE, Reduce, group_statistics, moments
from megagrpo.config.objective.reward_shaping import (
    OverlongShaping,
    RewardClip,
    RewardNormalization,
    RewardOverlong,
    RewardScaling,
    RewardShapingConfig,
    RewardStep,
    Scope,
)
from megagrpo.types import AlgoState, RewardMoments


@dataclass(frozen=True)
class RewardInputs:
    """The inputs of a reward step besides the rewards: N responses on this rank."""

    response_lengths: Tensor  # [N] int64, tokens of the longest response, tool output included
    group_ids: Tensor  # [N] int64 in 0..num_groups-1
    num_groups: int  # over all ranks
    valid: Tensor  # [N] bool, the response has a reward
    max_response_tokens: int
    reduce: Reduce


@dataclass(frozen=True)
class ShapedRewards:
    """The output of a reward step, and the input of the next one."""

    values: Tensor  # [N] float64, 0 where not valid
    state: AlgoState  # running moments, this step's batch included
    metrics: dict[str, float]  # global over data-parallel ranks


# Takes the rewards of the step before, what else may be looked at, and the options. Collective if
# it reduces.
RewardFunction = Callable[[ShapedRewards, RewardInputs, Any], ShapedRewards]


def shape_rewards(
    rewards: Tensor,
    inputs: RewardInputs,
    options: RewardShapingConfig,
    state: AlgoState,
    greedy: bool = False,
) -> ShapedRewards:
    """Collective over data-parallel ranks. Takes the grader's rewards [N] through REWARD_STEPS, in
    its order.

    greedy: whether they belong to greedy responses, which only some steps change.
    """
    shaped = ShapedRewards(rewards.double().masked_fill(~inputs.valid, 0.0), state, {})
    for variant, step in REWARD_STEPS.items():
        if variant.reaches_greedy_baseline or not greedy:
            shaped = step(shaped, inputs, options)
            shaped = replace(shaped, values=shaped.values.masked_fill(~inputs.valid, 0.0))
    return shaped


def scale(rewards: ShapedRewards, inputs: RewardInputs, options: RewardScaling) -> ShapedRewards:
    """Returns scale r + shift."""
    return replace(rewards, values=rewards.values * options.scale + options.shift)


def charge_overlong(
    rewards: ShapedRewards, inputs: RewardInputs, options: RewardOverlong
) -> ShapedRewards:
    """Collective. Adds the penalty of long responses, and its mean to the metrics."""
    if options.overlong is None:
        return rewards
    penalty = overlong_penalty(
        inputs.response_lengths, inputs.max_response_tokens, options.overlong
    )
    metrics = {"reward/overlong_penalty": moments(penalty, inputs.reduce, inputs.valid).mean}
    return replace(rewards, values=rewards.values + penalty, metrics=rewards.metrics | metrics)


def overlong_penalty(
    response_lengths: Tensor, max_response_tokens: int, options: OverlongShaping | None
) -> Tensor:
    """Returns the penalty of long responses, [N] float64 in [-factor, 0], which is added to their
    reward. arXiv 2503.14476, eq. 13.

    response_lengths: [N] int64, all response tokens, tool output included.
    """
    lengths = response_lengths.double()
    if options is None or not (buffer := options.buffer(max_response_tokens)):
        return torch.zeros_like(lengths)
    excess = lengths - (max_response_tokens - buffer)
    return -(excess / buffer).clamp(0.0, 1.0) * options.factor


def normalize(
    rewards: ShapedRewards, inputs: RewardInputs, options: RewardNormalization
) -> ShapedRewards:
    """Collective. Returns (r - mean) / (std + eps), mean and std each over the group, the batch or
    all batches so far.

    "running" first adds this batch to the state (merged exactly, Chan et al. 1979), then uses it.
    A scope without spread does not divide by its std, so constant rewards stay finite. If the scope
    of the mean has no spread, the result is exactly 0.
    """
    scopes, state = _scopes(rewards, inputs, options)
    location = scopes[options.mean]
    scale_ = scopes[options.std]
    divisor = torch.where(scale_.constant, 1.0, scale_.std + options.eps)
    values = (rewards.values - location.mean) / divisor
    if options.mean != "none":
        values = values.masked_fill(location.constant.expand(values.shape), 0.0)
    return replace(rewards, values=values, state=state)


@dataclass(frozen=True)
class _ScopeMoments:
    """Moments of the rewards that are normalized together: [N] each, or [] or [1] if all responses
    share them."""

    mean: Tensor  # float64
    std: Tensor  # float64
    constant: Tensor  # bool


def _scopes(
    rewards: ShapedRewards, inputs: RewardInputs, options: RewardNormalization
) -> tuple[dict[Scope, _ScopeMoments], AlgoState]:
    """Returns the moments of the scopes that the options name, and the state with this batch where
    it is running."""
    values = rewards.values
    valid = inputs.valid
    ids = inputs.group_ids
    state = rewards.state
    named = {options.mean, options.std}
    nothing = _ScopeMoments(values.new_zeros(()), values.new_ones(()), torch.ones_like(valid))
    scopes: dict[Scope, _ScopeMoments] = {"none": nothing}
    if "group" in named:
        stats = group_statistics(values, ids, inputs.num_groups, valid, inputs.reduce)
        scopes["group"] = _ScopeMoments(stats.mean[ids], stats.std[ids], stats.degenerate[ids])
    if named & {"batch", "running"}:
        stats = group_statistics(values, torch.zeros_like(ids), 1, valid, inputs.reduce)
        scopes["batch"] = _ScopeMoments(stats.mean, stats.std, stats.degenerate)
        if "running" in named:
            merged = _merged(
                state.reward_moments,
                int(stats.count),
                float(stats.mean),
                float(stats.std),
            )
            state = replace(state, reward_moments=merged)
            # a bare float would become float32
            mean, root = values.new_tensor((merged.mean, merged.root))
            std = root / math.sqrt(max(merged.count - 1, 1))
            scopes["running"] = _ScopeMoments(mean, std, std <= DEGENERATE_RANGE * mean.abs())
    return scopes, state


def _merged(seen: RewardMoments, count: int, mean: float, std: float) -> RewardMoments:
    """Returns the moments of all rewards seen before and of a batch of `count` with this mean and
    std."""
    if count == 0:
        return seen
    total = seen.count + count
    shift = (mean - seen.mean) * math.sqrt(seen.count / total * count)
    root = math.hypot(seen.root, std * math.sqrt(max(count - 1, 0)), shift)
    return RewardMoments(total, seen.mean + (mean - seen.mean) * (count / total), root)


def clip(rewards: ShapedRewards, inputs: RewardInputs, options: RewardClip) -> ShapedRewards:
    """Limits rewards to [-clip, clip]."""
    if options.clip is None:
        return rewards
    return replace(rewards, values=rewards.values.clamp(-options.clip, options.clip))


# In the order of operations.
REWARD_STEPS: dict[type[RewardStep], RewardFunction] = {
    RewardScaling: scale,
    RewardOverlong: charge_overlong,
    RewardNormalization: normalize,
    RewardClip: clip,
}
