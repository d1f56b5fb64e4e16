"""Corrects for differences between the engine's and the trainer's probabilities of the same token.

The ratio is old / rollout: the trainer's probability before the update over the engine's when it
sampled. TIS: https://fengyao.notion.site/off-policy-rl; IcePop:
https://ringtech.notion.site/icepop.
"""

import torch
from torch import Tensor

from megagrpo.algo.kl import LOG_RATIO_LIMIT, kl_penalty, probability_ratio
from megagrpo.algo.statistics import Reduce, by_row, exact_row_sums, moments, row_counts, to_tokens
from megagrpo.config.objective.correction import Band, Rejection, TruncatedImportance


def policy_weights(
    log_ratio: Tensor,
    mask: Tensor,
    lengths: Tensor,
    options: TruncatedImportance | Band,
    reduce: Reduce,
) -> Tensor:
    """Collective if it normalizes. Returns weights [T] float32 of the policy term, 0 off the mask.

    log_ratio: [T] float64, old - rollout. mask: [T] bool. lengths: [N] int64, tokens of the
    samples.
    """
    match options:
        case TruncatedImportance():
            value = log_ratio.masked_fill(~mask, 0.0)
            match options.over:
                case "sequence":
                    value = to_tokens(exact_row_sums(value, lengths), lengths)
                case "geometric":
                    value = to_tokens(_row_means(value, mask, lengths), lengths)
            weights = (
                probability_ratio(value).clamp(options.floor, options.cap).masked_fill(~mask, 0.0)
            )
            if options.self_normalize:
                # A sequence's weight counts once, whatever its length.
                sampled = weights[mask]
                if options.over != "token":
                    sampled = by_row(weights, lengths, "amax")[row_counts(mask, lengths) > 0]
                weights = weights / max(moments(sampled.double(), reduce).mean, 1e-8)
        case Band():
            ratio = probability_ratio(log_ratio)
            inside = (ratio >= options.low) & (ratio <= options.high) & mask
            weights = torch.where(inside, ratio if options.name == "icepop" else 1.0, 0.0)
    return weights.float()


def accepted_tokens(log_ratio: Tensor, mask: Tensor, lengths: Tensor, options: Rejection) -> Tensor:
    """Returns which tokens [T] (bool) stay trained on.

    log_ratio: [T] float64, old - rollout. mask: [T] bool. lengths: [N] int64, tokens of the
    samples. Unless options.over is "token", all tokens of a sequence stay or go together.
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
            value = _row_means(value, mask, lengths)[None]
        case "sum":
            value = exact_row_sums(value, lengths)[None]
        case "max":  # the masked are 0, as if a token agreed
            value = torch.stack((by_row(value, lengths, "amax"), -by_row(-value, lengths, "amax")))
        case "token":
            value = value[None]
    if options.measure == "ratio":
        value = value.exp()
    inside = ((value >= options.low) & (value <= options.high)).all(0)
    if options.over != "token":
        inside = to_tokens(inside, lengths)
    return inside & mask


def _row_means(values: Tensor, mask: Tensor, lengths: Tensor) -> Tensor:
    """Returns the mean over the mask of each sample, [N]; values [T] are 0 off the mask."""
    return exact_row_sums(values, lengths) / row_counts(mask, lengths).clamp(min=1)


def staleness_metrics(
    lags: Tensor, log_ratio: Tensor | None, mask: Tensor, reduce: Reduce
) -> dict[str, float]:
    """Collective. Returns lag/mean, lag/max and, for every lag present, lag/fraction_L and the
    mismatch.

    lags: [T] integer, versions. log_ratio: [T] float64, old - rollout, if it is known. mask: [T] bool, the tokens
    counted. mismatch/logprob_abs_mean_lag_L is the mean of |log_ratio|; at lag 0 only numerics
    differ.
    """
    spread = moments(lags, reduce, mask)
    differences = lags if log_ratio is None else log_ratio.abs()
    largest = max(int(spread.max), 0)
    metrics = {"lag/mean": spread.mean, "lag/max": float(largest)}
    for lag in range(largest + 1):
        at_lag = moments(differences, reduce, mask & (lags == lag))
        metrics[f"lag/fraction_{lag}"] = at_lag.count / max(spread.count, 1)
        if at_lag.count and log_ratio is not None:
            metrics[f"mismatch/logprob_abs_mean_lag_{lag}"] = at_lag.mean
    return metrics
