"""From the grader's rewards to the rewards that the advantage sees, in the order of the functions below."""

import math

import torch
from torch import Tensor

from megagrpo.algo.kl import kl_penalty
from megagrpo.algo.statistics import DEGENERATE_RANGE, Reduce, alone, exact_group_sums, group_statistics, moments
from megagrpo.config.algorithm import KL_ERROR_LIMIT, AlgorithmConfig, KlConfig, OverlongShaping, RewardShapingConfig


def overlong_penalty(response_lengths: Tensor, max_response_tokens: int, options: OverlongShaping | None) -> Tensor:
    """What is added to the reward of a long response, float64, in [-factor, 0]. arXiv 2503.14476, eq. 13.

    response_lengths: int64, all response tokens, tool output included.
    """
    lengths = response_lengths.double()
    buffer = options.buffer(max_response_tokens) if options is not None else 0
    if buffer == 0:
        return torch.zeros_like(lengths)
    excess = lengths - (max_response_tokens - buffer)
    return -(excess / buffer).clamp(0.0, 1.0) * options.factor


def normalise_rewards(
    rewards: Tensor,
    group_ids: Tensor,
    num_groups: int,
    valid: Tensor,
    reduce: Reduce,
    options: RewardShapingConfig,
    state: dict,
) -> Tensor:
    """(r - mean) / (std + eps), mean and std each over the group, the batch or all batches so far; clipped to +-clip.

    "running" first adds this batch to `state` (merged exactly, Chan et al. 1979), then uses it. Where a scope has no spread
    its std does not divide, so constant rewards stay finite; where the scope of the mean has none the result is exactly 0.
    """
    if options.mean != "none" or options.std != "none":
        location, scale, flat = _location_and_scale(rewards, group_ids, num_groups, valid, reduce, options, state)
        rewards = (rewards - location) / scale
        rewards = rewards.masked_fill(flat, 0.0)
    if options.clip is not None:
        rewards = rewards.clamp(-options.clip, options.clip)
    return rewards.masked_fill(~valid, 0.0)


def _location_and_scale(
    rewards: Tensor,
    group_ids: Tensor,
    num_groups: int,
    valid: Tensor,
    reduce: Reduce,
    options: RewardShapingConfig,
    state: dict,
) -> tuple[Tensor, Tensor, Tensor]:
    """What is subtracted and divided by, broadcastable to [N], and [N] bool: whether mean's scope is constant."""
    scopes = {options.mean, options.std}
    of_sample = {"none": (rewards.new_zeros(()), rewards.new_ones(()), torch.ones_like(valid))}  # mean, std, degenerate
    if "group" in scopes:
        stats = group_statistics(rewards, group_ids, num_groups, valid, reduce, options.std_ddof)
        of_sample["group"] = (stats.mean[group_ids], stats.std[group_ids], stats.degenerate[group_ids])
    if scopes & {"batch", "running"}:
        stats = group_statistics(rewards, torch.zeros_like(group_ids), 1, valid, reduce, options.std_ddof)
        of_sample["batch"] = (stats.mean, stats.std, stats.degenerate)
        if "running" in scopes:
            merged = _merge_running(state, int(stats.count), float(stats.mean), float(stats.std), options.std_ddof)
            mean, std = rewards.new_tensor(merged)  # a bare float would become float32
            of_sample["running"] = (mean, std, std <= DEGENERATE_RANGE * mean.abs())
    location, _, flat = of_sample[options.mean]
    _, scale, degenerate = of_sample[options.std]
    scale = torch.where(degenerate, 1.0, scale + options.eps)
    flat = torch.zeros_like(flat) if options.mean == "none" else flat
    return location, scale, flat.expand(rewards.shape)


def _merge_running(state: dict, count: int, mean: float, std: float, ddof: int) -> tuple[float, float]:
    """Add a batch to state["reward_moments"]; returns the mean and std of everything so far.

    The state is [count, mean, root of the sum of squared deviations]; roots, because squares of huge rewards overflow.
    """
    seen, seen_mean, seen_root = state.get("reward_moments", [0, 0.0, 0.0])
    total = seen + count
    if count:
        shift = (mean - seen_mean) * math.sqrt(seen / total * count)
        root = math.hypot(seen_root, std * math.sqrt(max(count - ddof, 0)), shift)
        seen_mean += (mean - seen_mean) * (count / total)
        state["reward_moments"] = [total, seen_mean, root]
    total, mean, root = state.get("reward_moments", [0, 0.0, 0.0])
    return mean, root / math.sqrt(total - ddof) if total > ddof else 0.0


def token_kl(old_logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, options: KlConfig) -> Tensor:
    """KL [N, S] float64 of the policy before the update to the reference, 0 off the mask (bool)."""
    old, ref = (x.double().masked_fill(~mask, 0.0) for x in (old_logprobs, ref_logprobs))
    return kl_penalty(old, ref, options.estimator.removesuffix("+"), options.value_clamp).masked_fill(~mask, 0.0)


def exact_row_sums(values: Tensor) -> Tensor:
    """Sums over the columns of [N, S] float64 that do not depend on S, the padded width, which differs between layouts."""
    rows = torch.arange(len(values), device=values.device)[:, None].expand(values.shape)
    bound = values.abs().amax(1) if values.numel() else values.new_zeros(len(values))
    return exact_group_sums(values.reshape(-1), rows.reshape(-1), bound, alone)[0]


def with_current_kl_coef(algorithm: AlgorithmConfig, state: dict) -> AlgorithmConfig:
    """The algorithm with the KL coefficient that adaptation has reached; unchanged where it is fixed."""
    if algorithm.kl.adaptive is None or "kl_coef" not in state:
        return algorithm
    field = "reward_coef" if algorithm.kl.reward_coef else "loss_coef"
    return algorithm.model_copy(update={"kl": algorithm.kl.model_copy(update={field: state["kl_coef"]})})


def adapt_kl_coef(
    algorithm: AlgorithmConfig, state: dict, kl: Tensor, mask: Tensor, num_responses: int, reduce: Reduce
) -> float:
    """Set state["kl_coef"] for the next step from this step's mean token KL, which is returned. arXiv 1909.08593, section 2.2."""
    current = moments(kl[mask], reduce).mean
    options = algorithm.kl.adaptive
    if options is not None:
        error = min(max(current / options.target - 1, -KL_ERROR_LIMIT), KL_ERROR_LIMIT)
        coef = algorithm.kl.reward_coef or algorithm.kl.loss_coef
        state["kl_coef"] = coef * (1 + error * num_responses / options.horizon)
    return current
