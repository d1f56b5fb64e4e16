"""The objective of one micro-batch: its share of the loss of the whole optimizer update.

The loss is one sum of terms: those of rl (policy, entropy, KL to the reference) and one for each
other component (distillation, cross entropy, KL to the reference). A term is sum_t w_t l_t / N_t.

Values are those of the t trained tokens of a micro-batch, one sequence after the other. Every sum
is divided by a denominator of the WHOLE update, counted over all ranks before the micro-batch loop,
so shares simply add up over micro-batches and ranks.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from megagrpo.algo.kl import LOG_RATIO_LIMIT, kl_penalty, probability_ratio
from megagrpo.algo.policy_loss import (
    PolicyInputs,
    Rows,
    TokenLoss,
    token_loss,
    without_off_policy,
)
from megagrpo.algo.statistics import Reduce
from megagrpo.config.algorithm import AlgorithmConfig
from megagrpo.config.fields import Aggregation
from megagrpo.config.objective.streams import DistillationConfig


@dataclass(frozen=True)
class LossInputs:
    """The inputs of a micro-batch's objective: float tensors [t] of the tokens of n sequences.

    Only logprobs, entropy, full_kl and candidate_gaps carry gradients. Values off the mask, and off
    a component's tokens, are ignored, NaN included.
    """

    logprobs: Tensor
    entropy: Tensor  # nats
    loss_mask: Tensor  # positive where rl, or the metrics, have a token
    advantages: Tensor
    old_logprobs: Tensor  # of the actor before the first update of the step, or the engine's
    rollout_logprobs: Tensor  # of the engine
    rows: Rows  # the n sequences
    ref_logprobs: Tensor | None = None
    chosen: Tensor | None = None  # bool, the tokens that a CovarianceLoss treats apart
    full_kl: Tensor | None = None  # nats, estimator "full": exact KL over the vocabulary
    # correction of the trainer/rollout mismatch, see correction.py
    policy_weights: Tensor | None = None
    # [n] int64, tokens of the row's rollout that denominators count: more than those of the row if
    # the rollout has other rows, or if rejected tokens stay in them
    counted_tokens: Tensor | None = None
    # by component, 0 off its tokens; {}: only rl, with weight 1 on all of the loss mask
    weights: dict[str, Tensor] = field(default_factory=dict)
    teacher_logprobs: Tensor | None = None  # of the sampled tokens
    candidate_gaps: Tensor | None = None  # see the function


class Term(NamedTuple):
    """A term of the loss: the sum over its tokens of scale * weights * values."""

    values: Tensor  # [t]
    weights: Tensor  # [t], 0 off its tokens
    scale: Tensor | float  # float64, [t] or one for all: 1 / N, see the module

    def share(self) -> Tensor:
        """Returns the sum, a float64 scalar; nothing off the tokens (NaN, inf) reaches it."""
        weighted = self.values.masked_fill(self.weights == 0, 0.0) * self.weights
        return (weighted.double() * self.scale).sum()


@dataclass(frozen=True)
class Denominators:
    """The divisors of one optimizer update's sums, counted over all data-parallel ranks and
    micro-batches.

    A sequence is a rollout, whatever the number of its samples.
    """

    num_tokens: int  # unmasked tokens of rl, and rejected ones that stay in the denominators
    num_sequences: int  # sequences with at least one of them
    scale: float  # C of seq-mean-token-sum-norm, in tokens
    # tokens of each other component of the loss, see `count_streams`
    stream_tokens: dict[str, int] = field(default_factory=dict)
    counted: Tensor | None = None  # TokenCounts.rollouts

    @property
    def nothing(self) -> bool:
        """Returns whether there is no token to train on."""
        return not self.num_tokens and not any(self.stream_tokens.values())


def count_denominators(counts: Tensor, reduce: Reduce, scale: float) -> Denominators:
    """Collective over data-parallel ranks. Counts unmasked tokens and non-empty sequences of an
    update; one all-reduce.

    counts: [m] int64, the unmasked tokens of each of this rank's rollouts. scale: C of
    seq-mean-token-sum-norm.
    """
    tokens, sequences = reduce(torch.stack((counts.sum(), (counts > 0).sum())), "sum").tolist()
    return Denominators(tokens, sequences, scale)


def objective(
    inputs: LossInputs, algorithm: AlgorithmConfig, denominators: Denominators
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the share of the loss (scalar, with gradient) and metric sums (float64) of one
    micro-batch.

    The caller adds metric sums up over micro-batches and ranks and divides them by `tokens`, the
    number of unmasked tokens. Sums named `loss/...` and `stream/...` are divided already.
    """
    terms, sums = _rl_terms(inputs, algorithm, denominators)
    for name, number in denominators.stream_tokens.items():
        stream_inputs = _masked(inputs, inputs.weights[name] != 0)
        scale = 1 / max(number, 1)
        terms[name] = Term(
            _stream_values(name, stream_inputs, algorithm), inputs.weights[name], scale
        )
        if name == "distillation":
            assert stream_inputs.teacher_logprobs is not None, "see Streams"
            gaps = stream_inputs.teacher_logprobs - stream_inputs.old_logprobs
            sums["stream/distillation_kl"] = -gaps.double().sum() * scale
    shares = {name: term.share() for name, term in terms.items()}
    loss = torch.stack(list(shares.values())).sum()
    sums |= {f"loss/{name}": share.detach() for name, share in shares.items()}
    return loss.to(inputs.logprobs.dtype), sums


def _rl_terms(
    inputs: LossInputs, algorithm: AlgorithmConfig, denominators: Denominators
) -> tuple[dict[str, Term], dict[str, Tensor]]:
    """Returns aggregate(policy + kl.loss_coef * KL - entropy_coef * entropy) in terms, and the
    metric sums.

    rl may have fewer tokens than the loss mask, which the metrics cover.
    """
    mask = inputs.loss_mask > 0
    weights = inputs.weights.get("rl", torch.ones_like(inputs.logprobs)).masked_fill(~mask, 0.0)
    inputs = _masked(inputs, mask)
    policy = _policy(inputs, inputs.advantages, mask, algorithm)
    values = {"policy": _corrected(policy, inputs)}
    # at 0 the entropy has no gradient, and the head's backward leaves it out
    if algorithm.entropy_coef:
        values["entropy"] = -algorithm.entropy_coef * inputs.entropy
    kl = _kl_to_reference(inputs, algorithm)
    if kl is not None and algorithm.kl.loss_coef:
        values["kl"] = algorithm.kl.loss_coef * kl
    counted = inputs.counted_tokens
    if counted is None:
        counted = inputs.rows.sums(weights != 0)
    scale = token_scale(algorithm.aggregation, denominators, inputs.rows.spread(counted))
    terms = {name: Term(each, weights, scale) for name, each in values.items()}
    by_engine = algorithm.old_logprobs == "engine"
    trainer = inputs.logprobs.detach() if by_engine else inputs.old_logprobs
    return terms, _metric_sums(inputs, trainer, mask, policy, kl)


def token_scale(
    aggregation: Aggregation, denominators: Denominators, counted: Tensor
) -> Tensor | float:
    """Returns the factor of a token in the aggregated loss, float64.

    token-mean: 1 / N_tok. seq-mean-token-sum: 1 / N_seq. seq-mean-token-mean: 1 / (N_seq T_i)
    (arXiv 2402.03300). seq-mean-token-sum-norm: 1 / (N_seq C) (arXiv 2503.20783). counted: [t], T_i,
    the tokens of its sequence that count.
    """
    sequences = max(denominators.num_sequences, 1)
    match aggregation:
        case "token-mean":
            return 1 / max(denominators.num_tokens, 1)
        case "seq-mean-token-sum":
            return 1 / sequences
        case "seq-mean-token-mean":
            return 1 / sequences / counted.double().clamp(min=1)
        case "seq-mean-token-sum-norm":
            return 1 / (sequences * denominators.scale)


def _stream_values(name: str, inputs: LossInputs, algorithm: AlgorithmConfig) -> Tensor:
    """Returns the loss of every token of a component but rl, [t]; inputs: 0 off its tokens.

    As in rl, the policy loss is corrected for the trainer/rollout mismatch.
    """
    values: Tensor | None
    options = algorithm.distillation
    match name:
        case "cross_entropy":
            return -inputs.logprobs
        case "reference_kl":
            values = _kl_to_reference(inputs, algorithm)
        case _ if options is not None and options.loss == "reverse_kl":
            assert inputs.teacher_logprobs is not None, "see Streams"
            gaps = inputs.teacher_logprobs - inputs.old_logprobs
            policy = _policy(inputs, _limited(gaps, options), inputs.weights[name] != 0, algorithm)
            return _corrected(policy, inputs)
        case _:
            values = inputs.candidate_gaps
    assert values is not None, "the batch has what its components need"
    return values


def _policy(
    inputs: LossInputs, advantages: Tensor, mask: Tensor, algorithm: AlgorithmConfig
) -> TokenLoss:
    """Returns the policy loss of every token [t]."""
    policy = PolicyInputs(
        inputs.logprobs,
        inputs.old_logprobs,
        advantages,
        mask,
        inputs.rows,
        inputs.rollout_logprobs,
        inputs.chosen,
    )
    loss = token_loss(policy, algorithm.loss)
    if algorithm.off_policy_limit is None:
        return loss
    return without_off_policy(loss, policy, algorithm.off_policy_limit)


def _corrected(policy: TokenLoss, inputs: LossInputs) -> Tensor:
    """Returns the policy loss of every token [t], corrected for the trainer/rollout mismatch."""
    if inputs.policy_weights is None:
        return policy.value
    return policy.value * inputs.policy_weights


def _kl_to_reference(inputs: LossInputs, algorithm: AlgorithmConfig) -> Tensor | None:
    kl = algorithm.kl
    if kl.estimator == "full" and kl.loss_coef:
        assert inputs.full_kl is not None, 'estimator "full" needs LossInputs.full_kl'
        return inputs.full_kl
    if inputs.ref_logprobs is None:
        return None
    value = kl_penalty(inputs.logprobs, inputs.ref_logprobs, kl.estimator, kl.value_clamp)
    if kl.importance:
        value = value * probability_ratio(inputs.logprobs - inputs.old_logprobs).detach()
    return value


def _metric_sums(
    inputs: LossInputs, trainer: Tensor, mask: Tensor, policy: TokenLoss, kl: Tensor | None
) -> dict[str, Tensor]:
    """Returns sums over unmasked tokens, and their number; float64 scalars, detached.

    trainer: its log-probabilities [t] that are compared with the engine's.
    """
    log_ratio = (inputs.logprobs - inputs.old_logprobs).detach()
    mismatch = trainer - inputs.rollout_logprobs
    per_token = {
        "policy/ratio": probability_ratio(log_ratio),
        "policy/kl_old": kl_penalty(inputs.old_logprobs, inputs.logprobs.detach(), "k3"),
        "policy/clamped_fraction": log_ratio.abs() > LOG_RATIO_LIMIT,
        "policy/entropy": inputs.entropy.detach(),
        "mismatch/logprob_abs_mean": mismatch.abs(),
        "mismatch/kl": kl_penalty(inputs.rollout_logprobs, trainer, "k3"),
    }
    per_token |= {f"policy/clip_fraction_{name}": where for name, where in policy.clipped.items()}
    if kl is not None:
        per_token["policy/kl_reference"] = kl.detach()
    if inputs.policy_weights is not None:
        per_token["mismatch/weight"] = inputs.policy_weights
        per_token["mismatch/masked_fraction"] = inputs.policy_weights == 0  # icepop, mis_mask
    # promoted to the type of the log-probabilities, and added in float64
    every = torch.stack(list(per_token.values())).masked_fill_(~mask, 0.0)
    sums = every.sum(1, dtype=torch.float64)
    return dict(zip(per_token, sums, strict=True)) | {"tokens": mask.sum().double()}


def _masked(inputs: LossInputs, mask: Tensor) -> LossInputs:
    """Returns the inputs with 0 off the mask [t], so that nothing there (NaN, inf) reaches a value
    or a gradient."""
    values = dict(vars(inputs))
    for name, value in values.items():
        if isinstance(value, Tensor) and name != "counted_tokens":
            values[name] = value.masked_fill(~mask, 0.0)
    return LossInputs(**values)


def count_streams(tokens: dict[str, Tensor], rows: Tensor, reduce: Reduce) -> dict[str, int]:
    """Collective over data-parallel ranks. Returns the sums of a component's tokens over the samples
    `rows` [n]; one all-reduce. tokens: TokenCounts.streams."""
    if not tokens:
        return {}
    sums = torch.stack([each[rows].sum() for each in tokens.values()])
    return dict(zip(tokens, reduce(sums, "sum").tolist(), strict=True))


def candidate_gaps(logprobs: Tensor, teacher: Tensor, options: DistillationConfig) -> Tensor:
    """Returns the loss of each position [R] from the log-probabilities of k tokens, [R, k], under
    policy and teacher. arXiv 2606.30406, eq. 5; the plain sums: verl's docs/algo/opd.md.

    One token adds p log(p / q) - p + q to the generalized KL, whose minimum is 0 at p = q. Without
    - p + q the gradient at p = q is not 0 but lowers the total probability of the k tokens. If only
    the policy finds a token improbable, it is not clamped, because it would get no gradient.
    """
    plain = options.loss.endswith("_sum")
    least = options.logprob_min
    clamped = logprobs.clamp(min=least)
    policy = clamped
    if not plain:
        policy = torch.where(teacher > least, logprobs, clamped)
    p, q = policy, teacher.clamp(min=least)
    if options.candidates != "student_topk":
        p, q = q, p
    gaps = p.exp() * (p - q)
    if not plain:
        gaps = gaps - p.exp() + q.exp()
    return _limited(gaps.sum(-1), options)


def _limited(values: Tensor, options: DistillationConfig) -> Tensor:
    limit = options.loss_max or torch.inf
    return values.clamp(-limit, limit)
