"""The components of the loss beside rl: distillation, cross entropy, KL to the reference.

L = rl + sum over components of (sum_t w_t l_t) / N, N the tokens of the component (w_t not 0) in
the whole update, over all ranks: shares add up as those of rl do.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megagrpo.algo.kl import kl_penalty
from megagrpo.algo.loss import LossInputs
from megagrpo.algo.policy_loss import PolicyInputs, token_loss
from megagrpo.algo.statistics import Reduce
from megagrpo.config.algorithm import AlgorithmConfig
from megagrpo.types import Batch


@dataclass(frozen=True)
class StreamInputs:
    """The inputs of a micro-batch's components, beside those of rl: [n, S], or [n, S, k] of k
    candidate tokens."""

    weights: dict[str, Tensor]  # by component, 0 off its tokens
    teacher_logprobs: Tensor | None = None  # of the sampled tokens
    top_logprobs: Tensor | None = None  # of the candidates, with gradient
    top_teacher: Tensor | None = None  # likewise, by the teacher


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
    metric sums that are shares too.

    counts: of `count_streams`.
    """
    loss = torch.zeros((), dtype=torch.float64, device=inputs.logprobs.device)
    sums = {}
    for name, number in counts.items():
        weights = streams.weights[name]
        mask = weights != 0
        logprobs = inputs.logprobs.masked_fill(~mask, 0.0)
        match name:
            case "cross_entropy":
                value = -logprobs
            case "reference_kl":
                assert inputs.ref_logprobs is not None, "see AlgorithmConfig.uses_reference"
                kl = algorithm.kl
                reference = inputs.ref_logprobs.masked_fill(~mask, 0.0)
                value = kl_penalty(logprobs, reference, kl.estimator, kl.value_clamp)
            case _:
                value = _distillation(inputs, streams, mask, algorithm)
                gap = _of(streams.teacher_logprobs, mask) - _of(inputs.old_logprobs, mask)
                sums["stream/distillation_kl"] = -gap.double().sum() / max(number, 1)
        weighted = (value * weights).masked_fill(~mask, 0.0)
        share = weighted.sum(dtype=torch.float64) / max(number, 1)
        sums[f"loss/{name}"] = share.detach()
        loss = loss + share
    return loss, sums


def _distillation(
    inputs: LossInputs, streams: StreamInputs, mask: Tensor, algorithm: AlgorithmConfig
) -> Tensor:
    """Returns the loss of every token [n, S]; verl's docs/algo/opd.md, arXiv 2306.13649.

    Those of reverse_kl take the correction of the trainer/rollout mismatch as the policy loss does.
    """
    options = algorithm.distillation
    assert options is not None, "the component has tokens only where it is configured"
    most = math.inf if options.loss_max is None else options.loss_max
    if options.loss == "reverse_kl":
        old, teacher = (_of(x, mask) for x in (inputs.old_logprobs, streams.teacher_logprobs))
        advantages = (teacher - old).clamp(-most, most)
        logprobs, rollout = (_of(x, mask) for x in (inputs.logprobs, inputs.rollout_logprobs))
        policy_inputs = PolicyInputs(logprobs, old, advantages, mask, rollout)
        value = token_loss(policy_inputs, algorithm.loss).value
        if inputs.policy_weights is None:
            return value
        corrected = mask & (inputs.loss_mask > 0)
        return torch.where(corrected, value * inputs.policy_weights, value)
    of_candidates = mask[..., None]
    policy, teacher = (
        _of(x, of_candidates).clamp(min=options.logprob_min)
        for x in (streams.top_logprobs, streams.top_teacher)
    )
    ahead, behind = (policy, teacher) if options.loss == "student_topk" else (teacher, policy)
    value = (ahead.exp() * (ahead - behind)).sum(-1)
    return value.clamp(-most, most)


def _of(values: Tensor | None, mask: Tensor) -> Tensor:
    """Returns values with 0 off the mask, so that nothing there (NaN, inf) reaches a gradient."""
    assert values is not None, "the batch has what its components need"
    return values.masked_fill(~mask, 0.0)
