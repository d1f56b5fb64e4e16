"""Divergence of the policy from its reference, token by token, from log-probabilities of the sampled tokens.

x = logp - ref_logp. http://joschu.net/blog/kl-approx.html; on their gradients: arXiv 2512.21852.
"""

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0  # exp(20) = 5e8: beyond it the value says nothing and the gradient is 0


def kl_penalty(logprobs: Tensor, ref_logprobs: Tensor, estimator: str, value_clamp: float | None = None) -> Tensor:
    """Per-token KL estimate, same shape as `logprobs`, differentiable in it.

    "k1+", "abs+", "k3+": the value of the estimator with the gradient of k2, whose expectation on-policy is that of the true KL.
    value_clamp: k3's value is limited to it (no gradient beyond).
    """
    x = logprobs - ref_logprobs
    value = _ESTIMATORS[estimator.removesuffix("+")](x)
    if value_clamp is not None:
        value = value.clamp(-value_clamp, value_clamp)
    if not estimator.endswith("+"):
        return value
    square = _k2(x)
    return value.detach() + square - square.detach()


def _k2(x: Tensor) -> Tensor:
    return x.square() / 2


def _k3(x: Tensor) -> Tensor:
    x = x.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return torch.expm1(-x) + x  # not exp(-x) - 1 + x, which rounds to 0 for |x| < 1e-4


_ESTIMATORS = {"k1": lambda x: x, "abs": torch.abs, "k2": _k2, "k3": _k3}
