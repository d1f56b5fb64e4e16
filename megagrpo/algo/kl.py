"""Divergence of the policy from its reference, token by token, from log-probabilities of the
sampled tokens.

x = logp - ref_logp. http://joschu.net/blog/kl-approx.html; on their gradients: arXiv 2512.21852.
"""

import torch
from torch import Tensor

from megagrpo.config.algorithm import AlgorithmConfig
from megagrpo.config.objective.kl import KL_ERROR_LIMIT, AdaptiveKl, KlConfig, KlEstimator
from megagrpo.types import AlgoState

LOG_RATIO_LIMIT = 20.0  # exp(20) = 5e8: beyond it the value says nothing and the gradient is 0


def probability_ratio(log_ratio: Tensor) -> Tensor:
    """Returns exp of a log-ratio of any shape; beyond +-20 it is constant and without gradient."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def kl_penalty(
    logprobs: Tensor, ref_logprobs: Tensor, estimator: KlEstimator, value_clamp: float | None = None
) -> Tensor:
    """Returns the KL estimate of every token, in nats, in the shape of `logprobs` and
    differentiable in it.

    "k1+", "abs+", "k3+": the value of the estimator with the gradient of k2, which on-policy equals
    the gradient of the true KL in expectation. value_clamp: limits k3's value, in nats (no gradient
    beyond). "full" needs more than the sampled tokens: see chunked_full_kl.
    """
    x = logprobs - ref_logprobs
    match estimator.removesuffix("+"):
        case "k1":
            value = x
        case "abs":
            value = x.abs()
        case "k2":
            value = x.square() / 2
        case "k3":
            limited = x.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
            # not exp(-x) - 1 + x, which rounds to 0 for |x| < 1e-4
            value = torch.expm1(-limited) + limited
        case _:
            raise ValueError("the exact KL cannot be computed from the sampled tokens")
    if value_clamp is not None:
        value = value.clamp(-value_clamp, value_clamp)
    if not estimator.endswith("+"):
        return value
    square = kl_penalty(logprobs, ref_logprobs, "k2")
    return value.detach() + square - square.detach()


def token_kl(old_logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, options: KlConfig) -> Tensor:
    """Returns the KL [T] float64 of the policy before the update to the reference, 0 off the mask.

    old_logprobs, ref_logprobs: [T]; mask: [T] bool. Values without their straight-through
    gradients.
    """
    old, ref = (x.double().masked_fill(~mask, 0.0) for x in (old_logprobs, ref_logprobs))
    return kl_penalty(old, ref, options.value_estimator, options.value_clamp)


def with_current_kl_coef(algorithm: AlgorithmConfig, state: AlgoState) -> AlgorithmConfig:
    """Returns the algorithm with the KL coefficient that adaptation has reached; unchanged where it
    is fixed."""
    if algorithm.kl.adaptive is None or state.kl_coef is None:
        return algorithm
    return algorithm.model_copy(update={"kl": algorithm.kl.with_coef(state.kl_coef)})


def adapted_kl_coef(coef: float, mean_kl: float, num_responses: int, options: AdaptiveKl) -> float:
    """Returns the coefficient of the next step. arXiv 1909.08593, section 2.2.

    coef: this step's. mean_kl: this step's, per sampled token, in nats. num_responses: this step's,
    over all ranks.
    """
    error = min(max(mean_kl / options.target - 1, -KL_ERROR_LIMIT), KL_ERROR_LIMIT)
    # at 0 no reference would be kept, and it would stay 0
    return max(coef * (1 + error * num_responses / options.horizon), 1e-12)
