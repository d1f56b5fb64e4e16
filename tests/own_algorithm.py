"""A loss, an estimator and a filter of groups as users write them in a file of their own."""

import torch
from torch import Tensor

from megagrpo.algo.estimators import EstimatorInputs
from megagrpo.algo.policy_loss import PolicyInputs, TokenLoss


def gmpo(inputs: PolicyInputs, clip: float = 0.4) -> TokenLoss:
    """GMPO, arXiv 2507.20673: the geometric mean of a sequence's clipped ratios."""
    log_ratio = inputs.logprobs - inputs.old_logprobs
    sign = inputs.advantages.sign()
    kept = torch.minimum(sign * log_ratio, sign * log_ratio.clamp(-clip, clip)) * sign
    mean = inputs.sequence_mean(kept.detach())
    # the value has the sequence's ratio, its gradient is the token's
    value = -inputs.advantages * (mean + kept - kept.detach()).exp()
    return TokenLoss(value, {"low": log_ratio < -clip, "high": log_ratio > clip})


def plain(inputs: PolicyInputs, weight: float) -> Tensor:
    """-weight rho A, without a clip."""
    return -weight * inputs.ratio * inputs.advantages


def mad(inputs: EstimatorInputs, eps: float = 1e-6) -> Tensor:
    """(r - mean) / (mad + eps), mad the mean absolute deviation of the group."""
    stats = inputs.stats
    centered = inputs.totals - inputs.to_responses(stats.mean)
    sums = torch.zeros_like(stats.mean)
    sums.scatter_add_(0, inputs.group_ids, centered.abs() * inputs.valid)
    mean_deviation = inputs.reduce(sums, "sum") / stats.count.clamp(min=1)
    return centered / (inputs.to_responses(mean_deviation) + eps)


def mixed(values: list[float], most: float) -> bool:
    """Groups of which some, and not too many, are right."""
    return 0 < sum(values) / max(len(values), 1) <= most


def wrong_shape(inputs: PolicyInputs) -> Tensor:
    return inputs.advantages.sum()


NUMBER = 3
