"""The policy objective of one micro-batch: its share of the loss of the whole optimiser update.

Rows are the sequences of a micro-batch, columns are token positions. Every sum is divided by a denominator of the WHOLE
update, counted over all ranks before the micro-batch loop, so shares simply add up over micro-batches and ranks.
"""

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from megagrpo.algo.kl import LOG_RATIO_LIMIT, kl_penalty
from megagrpo.algo.statistics import Reduce
from megagrpo.config.algorithm import (
    AlgorithmConfig,
    CispoLoss,
    GpgLoss,
    GspoLoss,
    PolicyLossConfig,
    PpoClipLoss,
    SapoLoss,
)

GSPO_VERL_LIMIT = 10.0


@dataclass(frozen=True)
class LossInputs:
    """Tensors [n, S]; only logprobs, entropy and full_kl carry gradients. Values off the mask are ignored, NaN included."""

    logprobs: Tensor
    entropy: Tensor
    loss_mask: Tensor
    advantages: Tensor
    old_logprobs: Tensor  # the actor before the first update of the step
    rollout_logprobs: Tensor
    ref_logprobs: Tensor | None = None
    full_kl: Tensor | None = None  # estimator "full": exact KL over the vocabulary
    policy_weights: Tensor | None = None  # correction of the trainer/rollout mismatch, see correction.py
    counted_mask: Tensor | None = (
        None  # what denominators count where that is more than loss_mask: rejected tokens that stay in them
    )


@dataclass(frozen=True)
class Denominators:
    """Of one optimiser update, over all data-parallel ranks and micro-batches."""

    num_tokens: int  # unmasked tokens, and rejected ones that stay in the denominators
    num_sequences: int  # sequences with at least one
    scale: float  # C of seq-mean-token-sum-norm


@dataclass(frozen=True)
class TokenLoss:
    """Per-token loss [n, S] and, by name, where a clip was active (bool)."""

    value: Tensor
    clipped: dict[str, Tensor]


def count_denominators(loss_mask: Tensor, reduce: Reduce, scale: float) -> Denominators:
    """Count unmasked tokens and non-empty sequences of this rank's rows [n, S] of an update; one all-reduce."""
    mask = loss_mask > 0
    tokens, sequences = reduce(torch.stack((mask.sum(), mask.any(1).sum())), "sum").tolist()
    return Denominators(tokens, sequences, scale)


def objective(
    inputs: LossInputs, algorithm: AlgorithmConfig, denominators: Denominators
) -> tuple[Tensor, dict[str, Tensor]]:
    """Share of the loss (scalar, with gradient) and metric sums (float64) of one micro-batch.

    loss = aggregate(weights * policy + kl.loss_coef * KL - entropy_coef * entropy). Metric sums added up over micro-batches
    and ranks are divided by the sum `tokens`, those trained on; `loss/...` are shares of the loss and only added up.
    """
    mask = inputs.loss_mask > 0
    inputs = _without_masked(inputs, mask)
    policy = token_loss(inputs.logprobs, inputs.old_logprobs, inputs.advantages, mask, algorithm.loss)
    value = policy.value if inputs.policy_weights is None else policy.value * inputs.policy_weights
    terms = {"policy": value}
    if algorithm.entropy_coef:  # at 0 no gradient of the entropy is asked for, which the backward of the head notices
        terms["entropy"] = -algorithm.entropy_coef * inputs.entropy
    kl = _kl_to_reference(inputs, algorithm)
    if kl is not None and algorithm.kl.loss_coef:
        terms["kl"] = algorithm.kl.loss_coef * kl
    counted = mask if inputs.counted_mask is None else inputs.counted_mask > 0
    shares = {name: aggregate(term, mask, algorithm.aggregation, denominators, counted) for name, term in terms.items()}
    loss = sum(shares.values())
    sums = _metric_sums(inputs, mask, policy, kl)
    sums |= {f"loss/{name}": share.detach() for name, share in shares.items()}
    return loss.to(inputs.logprobs.dtype), sums


def aggregate(
    values: Tensor, mask: Tensor, aggregation: str, denominators: Denominators, counted: Tensor | None = None
) -> Tensor:
    """Scalar float64 share of the aggregated loss of values [n, S] (finite) under the bool mask.

    token-mean: sum / N_tok. seq-mean-token-sum: sum / N_seq. seq-mean-token-mean: sum_i (sum_t / T_i) / N_seq (arXiv 2402.03300).
    seq-mean-token-sum-norm: sum / (N_seq C) (arXiv 2503.20783). T_i counts `counted`, by default the mask.
    """
    sequences, tokens = max(denominators.num_sequences, 1), max(denominators.num_tokens, 1)
    rows = values.masked_fill(~mask, 0.0).sum(1, dtype=torch.float64)
    match aggregation:
        case "token-mean":
            return rows.sum() / tokens
        case "seq-mean-token-sum":
            return rows.sum() / sequences
        case "seq-mean-token-mean":
            return (rows / (mask if counted is None else counted).sum(1).clamp(min=1)).sum() / sequences
        case "seq-mean-token-sum-norm":
            return rows.sum() / (sequences * denominators.scale)
    raise ValueError(f"unknown aggregation {aggregation!r}")


def token_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, options: PolicyLossConfig
) -> TokenLoss:
    """Per-token policy loss [n, S] of finite inputs; `mask` (bool) delimits the sequences of the sequence-level losses."""
    log_ratio = logprobs - old_logprobs
    match options:
        case PpoClipLoss():
            return _ppo_clip(
                _ratio(log_ratio), advantages, options.clip_ratio_low, options.clip_ratio_high, options.dual_clip
            )
        case GspoLoss():
            ratio = _sequence_ratio(logprobs, log_ratio, mask, options.clamp)
            return _ppo_clip(ratio, advantages, options.clip_ratio_low, options.clip_ratio_high, None)
        case CispoLoss():
            return _cispo(_ratio(log_ratio), logprobs, advantages, options.clip_ratio_low, options.clip_ratio_high)
        case GpgLoss():
            return TokenLoss(-logprobs * advantages, {})
        case SapoLoss():
            return _sapo(_ratio(log_ratio), advantages, options.tau_positive, options.tau_negative)
    raise ValueError(f"unknown loss {options!r}")


def _ratio(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def _sequence_ratio(logprobs: Tensor, log_ratio: Tensor, mask: Tensor, clamp: str) -> Tensor:
    """sg[s_i] exp(logp - sg[logp]): the value is the sequence's ratio, the gradient is the token's (GSPO-token, eq. 14)."""
    mean = (log_ratio.detach() * mask).sum(1) / mask.sum(1).clamp(min=1)
    mean = mean.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT) if clamp == "both" else mean.clamp(max=GSPO_VERL_LIMIT)
    return mean.exp()[:, None] * (logprobs - logprobs.detach()).exp()


def _ppo_clip(ratio: Tensor, advantages: Tensor, low: float, high: float, dual_clip: float | None) -> TokenLoss:
    plain = -ratio * advantages
    loss = torch.maximum(plain, -ratio.clamp(1 - low, 1 + high) * advantages)
    clipped = {"low": (advantages < 0) & (ratio < 1 - low), "high": (advantages > 0) & (ratio > 1 + high)}
    if dual_clip is not None:
        limit = -dual_clip * advantages
        clipped["dual"] = (advantages < 0) & (loss > limit)
        loss = torch.where(advantages < 0, torch.minimum(loss, limit), loss)
    return TokenLoss(loss, clipped)


def _cispo(ratio: Tensor, logprobs: Tensor, advantages: Tensor, low: float, high: float) -> TokenLoss:
    weight = ratio.detach()
    loss = -weight.clamp(1 - low, 1 + high) * advantages * logprobs
    return TokenLoss(loss, {"low": weight < 1 - low, "high": weight > 1 + high})


def _sapo(ratio: Tensor, advantages: Tensor, tau_positive: float, tau_negative: float) -> TokenLoss:
    tau = torch.full_like(ratio, tau_negative).masked_fill(advantages > 0, tau_positive)
    return TokenLoss(-torch.sigmoid(tau * (ratio - 1)) * (4 / tau) * advantages, {})


def _kl_to_reference(inputs: LossInputs, algorithm: AlgorithmConfig) -> Tensor | None:
    kl = algorithm.kl
    if kl.estimator == "full" and kl.loss_coef:
        assert inputs.full_kl is not None, 'estimator "full" needs LossInputs.full_kl'
        return inputs.full_kl
    if inputs.ref_logprobs is None:
        return None
    value = kl_penalty(inputs.logprobs, inputs.ref_logprobs, kl.estimator, kl.value_clamp)
    if kl.importance:
        value = value * _ratio(inputs.logprobs - inputs.old_logprobs).detach()
    return value


def _metric_sums(inputs: LossInputs, mask: Tensor, policy: TokenLoss, kl: Tensor | None) -> dict[str, Tensor]:
    """Sums over unmasked tokens, and their number; float64, detached."""
    log_ratio = (inputs.logprobs - inputs.old_logprobs).detach()
    mismatch = inputs.old_logprobs - inputs.rollout_logprobs
    per_token = {
        "policy/ratio": _ratio(log_ratio),
        "policy/kl_old": kl_penalty(inputs.old_logprobs, inputs.logprobs.detach(), "k3"),
        "policy/clamped_fraction": log_ratio.abs() > LOG_RATIO_LIMIT,
        "policy/entropy": inputs.entropy.detach(),
        "mismatch/logprob_abs_mean": mismatch.abs(),
        "mismatch/kl": kl_penalty(inputs.rollout_logprobs, inputs.old_logprobs, "k3"),
    }
    per_token |= {f"policy/clip_fraction_{name}": where for name, where in policy.clipped.items()}
    if kl is not None:
        per_token["policy/kl_reference"] = kl.detach()
    if inputs.policy_weights is not None:
        per_token["mismatch/weight"] = inputs.policy_weights
        per_token["mismatch/masked_fraction"] = inputs.policy_weights == 0  # icepop, mis_mask
    sums = {name: value.double().masked_fill(~mask, 0.0).sum() for name, value in per_token.items()}
    return sums | {"tokens": mask.sum().double()}


def _without_masked(inputs: LossInputs, mask: Tensor) -> LossInputs:
    """Zero off the mask, so that nothing there (NaN, inf) reaches a value or a gradient."""
    tensors = {f.name: getattr(inputs, f.name) for f in fields(inputs) if f.name != "counted_mask"}
    return replace(inputs, **{name: t.masked_fill(~mask, 0.0) for name, t in tensors.items() if t is not None})
