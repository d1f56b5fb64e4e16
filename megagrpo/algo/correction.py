"""Correcting for the engine and the trainer giving the same token different probabilities.

The ratio is old / rollout: the trainer's probability before the update over the engine's when it sampled.
TIS: https://fengyao.notion.site/off-policy-rl; IcePop: https://ringtech.notion.site/icepop.
"""

from typing import Literal

import torch
from torch import Tensor

from megagrpo.algo.kl import LOG_RATIO_LIMIT, kl_penalty, probability_ratio
from megagrpo.algo.statistics import Reduce, moments
from megagrpo.config.correction import Band, Rejection, TruncatedImportance


def policy_weights(log_ratio: Tensor, mask: Tensor, options: TruncatedImportance | Band, reduce: Reduce) -> Tensor:
    """Collective where it normalises. Returns weights [N, S] float32 of the policy term, 0 off the mask.

    log_ratio: [N, S] float64, old - rollout. mask: [N, S] bool.
    """
    match options:
        case TruncatedImportance():
            weights = probability_ratio(_log_ratio_over(log_ratio, mask, options.over))
            weights = weights.clamp(options.floor, options.cap).masked_fill(~mask, 0.0)
            if options.self_normalise:
                # A sequence's weight counts once, whatever its length.
                sampled = weights[mask] if options.over == "token" else weights.amax(1)[mask.any(1)]
                weights = weights / max(moments(sampled.double(), reduce).mean, 1e-8)
        case Band():
            ratio = probability_ratio(log_ratio)
            inside = (ratio >= options.low) & (ratio <= options.high) & mask
            weights = torch.where(inside, ratio if options.name == "icepop" else 1.0, 0.0)
    return weights.float()


def kept(log_ratio: Tensor, mask: Tensor, options: Rejection) -> Tensor:
    """Returns which tokens [N, S] (bool) stay trained on.

    log_ratio: [N, S] float64, old - rollout. mask: [N, S] bool. Unless options.over is "token", a sequence is judged
    whole: all its tokens stay or go together.
    """
    match options.measure:
        case "ratio":
            value = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        case "k2" | "k3":
            # of the rollout from the trainer
            value = kl_penalty(-log_ratio, torch.zeros_like(log_ratio), options.measure)
    value = value.masked_fill(~mask, 0.0)
    match options.over:
        case "mean":
            value = value.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
        case "sum":
            value = value.sum(1, keepdim=True)
        case "max":
            value = torch.cat((value.amax(1, keepdim=True), value.amin(1, keepdim=True)), 1)
    if options.measure == "ratio":
        value = value.exp()
    inside = (value >= options.low) & (value <= options.high)
    if options.over != "token":
        inside = inside.all(1, keepdim=True)
    return inside & mask


def _log_ratio_over(log_ratio: Tensor, mask: Tensor, over: Literal["token", "sequence", "geometric"]) -> Tensor:
    total = log_ratio.masked_fill(~mask, 0.0).sum(1, keepdim=True)
    match over:
        case "token":
            return log_ratio
        case "sequence":
            return total.expand(log_ratio.shape)
        case "geometric":
            return (total / mask.sum(1, keepdim=True).clamp(min=1)).expand(log_ratio.shape)
