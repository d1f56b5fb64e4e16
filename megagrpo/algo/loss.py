"""The policy objective of one micro-batch: its share of the loss of the whole optimizer update.

L = rl + sum over its other components (distillation, cross entropy, KL to the reference) of
(sum_t w_t l_t) / N, N the tokens of the component.

Rows are the sequences of a micro-batch, columns are token positions. Every sum is divided by a
denominator of the WHOLE update, counted over all ranks before the micro-batch loop, so shares
simply add up over micro-batches and ranks.
"""

from dataclasses import dataclass, field, fields, replace

import torch
from torch import Tensor

from megagrpo.algo.kl import LOG_RATIO_LIMIT, kl_penalty, probability_ratio
from megagrpo.algo.policy_loss import PolicyInputs, TokenLoss, token_loss
from megagrpo.algo.statistics import Reduce
from megagrpo.config.algorithm import AlgorithmConfig
from megagrpo.config.fields import Aggregation
from megagrpo.config.objective.streams import DistillationConfig
from megagrpo.types import Batch


@dataclass(frozen=True)
class LossInputs:
    """The inputs of a micro-batch's objective: float tensors [n, S] of n sequences.

    Only logprobs, entropy and full_kl carry gradients. Values off the mask are ignored, NaN
    included.
    """

    logprobs: Tensor
    entropy: Tensor  # nats
    loss_mask: Tensor  # positive where a token is trained on
    advantages: Tensor
    old_logprobs: Tensor  # of the actor before the first update of the step
    rollout_logprobs: Tensor  # of the engine
    ref_logprobs: Tensor | None = None
    full_kl: Tensor | None = None  # nats, estimator "full": exact KL over the vocabulary
    # correction of the trainer/rollout mismatch, see correction.py
    policy_weights: Tensor | None = None
    rl_weights: Tensor | None = None  # of the component rl, see StreamInputs; 0: not of it; None: 1
    # [n] int64, tokens of the row's rollout that denominators count: more than those of the row if
    # the rollout has other rows, or if rejected tokens stay in them
    counted_tokens: Tensor | None = None


@dataclass(frozen=True)
class Denominators:
    """The divisors of one optimizer update's sums, counted over all data-parallel ranks and
    micro-batches.

    A sequence is a rollout, whatever the number of its samples.
    """

    num_tokens: int  # unmasked tokens of rl, and rejected ones that stay in the denominators
    num_sequences: int  # sequences with at least one of them
    scale: float  # C of seq-mean-token-sum-norm, in tokens
    # tokens of each other component of the loss, see StreamInputs
    stream_tokens: dict[str, int] = field(default_factory=dict)

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

    loss = aggregate(weights * policy + kl.loss_coef * KL - entropy_coef * entropy): the component
    rl, which may have fewer tokens than the loss mask. The caller adds metric sums up over
    micro-batches and ranks and divides them by `tokens`, the number of trained tokens. Sums named
    `loss/...` are shares of the loss and are not divided.
    """
    mask = inputs.loss_mask > 0
    inputs = _without_masked(inputs, mask)
    policy_inputs = PolicyInputs(
        inputs.logprobs, inputs.old_logprobs, inputs.advantages, mask, inputs.rollout_logprobs
    )
    policy = token_loss(policy_inputs, algorithm.loss)
    terms = {"policy": _corrected(policy, inputs)}
    # at 0 the entropy has no gradient, and the head's backward leaves it out
    if algorithm.entropy_coef:
        terms["entropy"] = -algorithm.entropy_coef * inputs.entropy
    kl = _kl_to_reference(inputs, algorithm)
    if kl is not None and algorithm.kl.loss_coef:
        terms["kl"] = algorithm.kl.loss_coef * kl
    rl_mask = mask
    if inputs.rl_weights is not None:
        rl_mask = mask & (inputs.rl_weights != 0)
        terms = {name: term * inputs.rl_weights for name, term in terms.items()}
    shares = {
        name: aggregate(term, rl_mask, algorithm.aggregation, denominators, inputs.counted_tokens)
        for name, term in terms.items()
    }
    loss = sum(shares.values(), start=torch.zeros((), dtype=torch.float64, device=mask.device))
    sums = _metric_sums(inputs, mask, policy, kl)
    sums |= {f"loss/{name}": share.detach() for name, share in shares.items()}
    return loss.to(inputs.logprobs.dtype), sums


def aggregate(
    values: Tensor,
    mask: Tensor,
    aggregation: Aggregation,
    denominators: Denominators,
    counted: Tensor | None = None,
) -> Tensor:
    """Returns the share (scalar, float64) of the aggregated loss of values [n, S] (finite) under
    the bool mask [n, S].

    token-mean: sum / N_tok. seq-mean-token-sum: sum / N_seq. seq-mean-token-mean: sum_i (sum_t /
    T_i) / N_seq (arXiv 2402.03300). seq-mean-token-sum-norm: sum / (N_seq C) (arXiv 2503.20783).
    T_i is `counted` [n] int64, by default the unmasked tokens of the row.
    """
    sequences = max(denominators.num_sequences, 1)
    tokens = max(denominators.num_tokens, 1)
    rows = values.masked_fill(~mask, 0.0).sum(1, dtype=torch.float64)
    match aggregation:
        case "token-mean":
            return rows.sum() / tokens
        case "seq-mean-token-sum":
            return rows.sum() / sequences
        case "seq-mean-token-mean":
            if counted is None:
                counted = mask.sum(1)
            return (rows / counted.clamp(min=1)).sum() / sequences
        case "seq-mean-token-sum-norm":
            return rows.sum() / (sequences * denominators.scale)


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
    inputs: LossInputs, mask: Tensor, policy: TokenLoss, kl: Tensor | None
) -> dict[str, Tensor]:
    """Returns sums over unmasked tokens, and their number; float64 scalars, detached."""
    log_ratio = (inputs.logprobs - inputs.old_logprobs).detach()
    mismatch = inputs.old_logprobs - inputs.rollout_logprobs
    per_token = {
        "policy/ratio": probability_ratio(log_ratio),
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
    """Returns the inputs with 0 off the mask [n, S], so that nothing there (NaN, inf) reaches a
    value or a gradient."""
    tensors = {
        f.name: getattr(inputs, f.name) for f in fields(inputs) if f.name != "counted_tokens"
    }
    return replace(
        inputs, **{name: t.masked_fill(~mask, 0.0) for name, t in tensors.items() if t is not None}
    )


@dataclass(frozen=True)
class StreamInputs:
    """The inputs of a micro-batch's components other than rl: [n, S] each."""

    weights: dict[str, Tensor]  # by component, 0 off its tokens
    teacher_logprobs: Tensor | None = None  # of the sampled tokens
    candidate_gaps: Tensor | None = None  # with gradient, see the function


def count_streams(batch: Batch, rows: Tensor, reduce: Reduce) -> dict[str, int]:
    """Collective over data-parallel ranks. Returns the tokens of each component but rl in the
    samples `rows` [n]; one all-reduce."""
    if batch.streams is None:
        return {}
    chosen = torch.zeros(len(batch.lengths), dtype=torch.bool)
    chosen[rows] = True
    inside = chosen.repeat_interleave(batch.lengths)
    counts = {
        name: ((weights != 0) & inside).sum()
        for name, weights in batch.streams.weights.items()
        if name != "rl"
    }
    if not counts:
        return {}
    totals = reduce(torch.stack(list(counts.values())), "sum").tolist()
    return dict(zip(counts, totals, strict=True))


def stream_losses(
    inputs: LossInputs, streams: StreamInputs, algorithm: AlgorithmConfig, counts: dict[str, int]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the share of the loss (scalar float64, with gradient) of all components but rl, and
    metric sums, which are shares too.

    counts: from `count_streams`.
    """
    loss = torch.zeros((), dtype=torch.float64, device=inputs.logprobs.device)
    sums = {}
    for name, number in counts.items():
        weights = streams.weights[name]
        mask = weights != 0
        masked = _without_masked(inputs, mask)
        value: Tensor | None
        match name:
            case "cross_entropy":
                value = -masked.logprobs
            case "reference_kl":
                value = _kl_to_reference(masked, algorithm)
            case _:
                value = _distillation(masked, streams, mask, algorithm)
                gap = _on_mask(streams.teacher_logprobs, mask) - masked.old_logprobs
                sums["stream/distillation_kl"] = -gap.double().sum() / max(number, 1)
        share = (_on_mask(value, mask) * weights).sum(dtype=torch.float64) / max(number, 1)
        sums[f"loss/{name}"] = share.detach()
        loss = loss + share
    return loss, sums


def _distillation(
    inputs: LossInputs, streams: StreamInputs, mask: Tensor, algorithm: AlgorithmConfig
) -> Tensor:
    """Returns the loss of every token [n, S]; inputs: 0 off the mask.

    As in the policy loss, reverse_kl is corrected for the trainer/rollout mismatch.
    """
    options = algorithm.distillation
    assert options is not None, "the component has tokens only where it is configured"
    if options.loss != "reverse_kl":
        return _on_mask(streams.candidate_gaps, mask)
    old = inputs.old_logprobs
    advantages = _limited(_on_mask(streams.teacher_logprobs, mask) - old, options.loss_max)
    policy = PolicyInputs(inputs.logprobs, old, advantages, mask, inputs.rollout_logprobs)
    return _corrected(token_loss(policy, algorithm.loss), inputs)


def _corrected(policy: TokenLoss, inputs: LossInputs) -> Tensor:
    """Returns the policy loss of every token [n, S], corrected for the trainer/rollout mismatch."""
    if inputs.policy_weights is None:
        return policy.value
    return policy.value * inputs.policy_weights


def _limited(values: Tensor, limit: float | None) -> Tensor:
    if limit is None:
        return values
    return values.clamp(-limit, limit)


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
    return _limited(gaps.sum(-1), options.loss_max)


def _on_mask(values: Tensor | None, mask: Tensor) -> Tensor:
    """Returns values with 0 off the mask, so that nothing there (NaN, inf) reaches a gradient."""
    assert values is not None, "the batch has what its components need"
    return values.masked_fill(~mask, 0.0)
