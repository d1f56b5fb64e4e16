"""Policy losses, one pure function each: log-probabilities and advantages in, the loss of every
token out.

To add one: its variant in config/objective/policy_loss.py, its function here and its row in
POLICY_LOSSES.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megagrpo.algo.kl import LOG_RATIO_LIMIT, probability_ratio
from megagrpo.algo.statistics import Reduce, largest_of_all, moments, ordered_bits
from megagrpo.config.fields import Variant
from megagrpo.config.objective.policy_loss import (
    CispoLoss,
    ClipCovLoss,
    CovarianceLoss,
    DppoLoss,
    DroLoss,
    GmpoLoss,
    GpgLoss,
    GspoLoss,
    KlCovLoss,
    OwnLoss,
    PpoClipLoss,
    SapoLoss,
)
from megagrpo.types import Batch, on_device

GSPO_CLAMPS = {
    "both": (-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT),
    "above": (None, 10.0),
}  # "above": verl's
_KL_EPS = 1e-8  # as in verl
_BLOCK = 32  # values that are padded, and added in pairs, together


@dataclass(frozen=True)
class Rows:
    """The rows of t values: those of n sequences, one sequence after the other."""

    lengths: Tensor  # [n] int64, on the host; 0 for a sequence without values

    def sums(self, values: Tensor) -> Tensor:
        """Returns the sum of each row [n], float64, from values [t].

        Neighbors are added in pairs, so its bits depend on no other row, on any device.
        """
        lengths, values = self.lengths, values.double()
        while True:
            blocks = (-(-lengths // _BLOCK)).clamp(min=1)
            before = (blocks.cumsum(0) - blocks) * _BLOCK - (lengths.cumsum(0) - lengths)
            places = before.repeat_interleave(lengths) + torch.arange(len(values))
            count = int(blocks.sum())
            sums = values.new_zeros(count * _BLOCK)
            sums = sums.index_copy(0, on_device(places, values.device), values)
            sums = sums.view(count, _BLOCK)
            while sums.shape[1] > 1:
                sums = sums[:, ::2] + sums[:, 1::2]
            lengths, values = blocks, sums.flatten()
            if count == len(lengths):
                return values

    def spread(self, by_row: Tensor) -> Tensor:
        """Returns for each value [t] that of its row, from [n]."""
        return by_row[on_device(torch.repeat_interleave(self.lengths), by_row.device)]


@dataclass(frozen=True)
class PolicyInputs:
    """Inputs of a policy loss: tensors [t] of the tokens of n whole sequences, finite everywhere;
    only logprobs carries a gradient."""

    logprobs: Tensor  # float
    old_logprobs: Tensor  # float, of the actor before the first update of the step
    advantages: Tensor  # float
    # bool, the tokens that are trained on; delimits the sequences of sequence-level losses
    mask: Tensor
    rows: Rows  # the sequences
    rollout_logprobs: Tensor  # float, of the engine
    chosen: Tensor | None = None  # bool, see chosen_tokens; None: the loss chooses none

    @property
    def ratio(self) -> Tensor:
        """rho [t], the probability ratio of every token."""
        return probability_ratio(self.logprobs - self.old_logprobs)

    def sequence_mean(self, values: Tensor) -> Tensor:
        """Returns for each token [t] the mean over its sequence's trained tokens."""
        count = self.rows.sums(self.mask).clamp(min=1)
        return self.rows.spread((self.rows.sums(values * self.mask) / count).to(values.dtype))


@dataclass(frozen=True)
class TokenLoss:
    """The loss of every token [t] and, by name, where a clip was active ([t] bool)."""

    value: Tensor
    clipped: dict[str, Tensor]


# Takes the inputs and the variant's options; values off the mask are ignored.
PolicyLossFunction = Callable[[PolicyInputs, Any], TokenLoss]


def ppo_clip(inputs: PolicyInputs, options: PpoClipLoss) -> TokenLoss:
    """Returns -min(rho A, clip(rho) A). arXiv 1707.06347; dual clip: arXiv 1912.09729."""
    advantages = inputs.advantages
    loss = _clipped_surrogate(inputs.ratio, advantages, options)
    if options.dual_clip is None:
        return loss
    limit = -options.dual_clip * advantages
    beyond = (advantages < 0) & (loss.value > limit)
    value = torch.where(advantages < 0, torch.minimum(loss.value, limit), loss.value)
    return TokenLoss(value, loss.clipped | {"dual": beyond})


def gspo(inputs: PolicyInputs, options: GspoLoss) -> TokenLoss:
    """Returns -min(s A, clip(s) A), s = sg[s_i] exp(logp - sg[logp]). arXiv 2507.18071, GSPO-token,
    eq. 14.

    The value of s is the sequence's ratio, its gradient is the token's, and 0 where s is clamped.
    """
    log_ratio = inputs.logprobs - inputs.old_logprobs
    mean = inputs.sequence_mean(log_ratio.detach())
    zero = inputs.logprobs - inputs.logprobs.detach()  # with the token's gradient
    ratio = (mean + zero).clamp(*GSPO_CLAMPS[options.clamp]).exp()
    return _clipped_surrogate(ratio, inputs.advantages, options)


def gmpo(inputs: PolicyInputs, options: GmpoLoss) -> TokenLoss:
    """Returns -A sg[g] exp(c - sg[c]), c = s min(s log rho, s clip(log rho)), s the sign of A, and g
    = exp(mean_t c). arXiv 2507.20673, eq. 4.

    The value has the sequence's ratio and the gradient is the token's, as in gspo, so that A may
    differ by token. The sum over a sequence has the gradient of eq. 4 if it does not.
    """
    advantages = inputs.advantages
    log_ratio = (inputs.logprobs - inputs.old_logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    least, most = -options.clip_ratio_low, options.clip_ratio_high
    clamped = torch.where(advantages < 0, log_ratio.clamp(min=least), log_ratio.clamp(max=most))
    mean = inputs.sequence_mean(clamped.detach())
    value = -advantages * (mean + clamped - clamped.detach()).exp()
    high = (advantages > 0) & (clamped < log_ratio)
    return TokenLoss(value, {"low": clamped > log_ratio, "high": high})


def dppo(inputs: PolicyInputs, options: DppoLoss) -> TokenLoss:
    """Returns -A sg[min(rho, c)] log p, 0 where p has left the trust region around q and A pushes it
    further. arXiv 2602.04879.

    tv: |p - q|; kl: q log(q / p) + (1 - q) log((1 - q) / (1 - p)).
    """
    reference = inputs.rollout_logprobs
    if options.against == "old":
        reference = inputs.old_logprobs
    logprobs = inputs.logprobs.detach()
    p, q = logprobs.exp(), reference.exp()
    if options.divergence == "tv":
        distance = (p - q).abs()
    else:
        no_p, no_q = ((1 - x).clamp(min=0) + _KL_EPS for x in (p, q))
        distance = q * (reference - logprobs) + (1 - q) * (no_q / no_p).log()
    up = inputs.advantages > 0
    beyond = {
        "low": ~up & (p < q) & (distance > options.low),
        "high": up & (p > q) & (distance > options.high),
    }
    weight = probability_ratio(logprobs - reference).clamp(max=options.ratio_limit)
    value = -inputs.advantages * weight * inputs.logprobs
    return TokenLoss(value.masked_fill(beyond["low"] | beyond["high"], 0.0), beyond)


def cispo(inputs: PolicyInputs, options: CispoLoss) -> TokenLoss:
    """Returns -sg[clip(rho)] A log p: every token keeps its gradient. arXiv 2506.13585."""
    weight = inputs.ratio.detach()
    low, high = 1 - options.clip_ratio_low, 1 + options.clip_ratio_high
    loss = -weight.clamp(low, high) * inputs.advantages * inputs.logprobs
    return TokenLoss(loss, {"low": weight < low, "high": weight > high})


def gpg(inputs: PolicyInputs, options: GpgLoss) -> TokenLoss:
    """Returns -A log p. arXiv 2504.02546."""
    return TokenLoss(-inputs.logprobs * inputs.advantages, {})


def sapo(inputs: PolicyInputs, options: SapoLoss) -> TokenLoss:
    """Returns -sigmoid(tau (rho - 1)) (4 / tau) A, tau by the sign of A. arXiv 2511.20347."""
    ratio = inputs.ratio
    advantages = inputs.advantages
    tau = torch.full_like(ratio, options.tau_negative).masked_fill(
        advantages > 0, options.tau_positive
    )
    return TokenLoss(-torch.sigmoid(tau * (ratio - 1)) * (4 / tau) * advantages, {})


def dro(inputs: PolicyInputs, options: DroLoss) -> TokenLoss:
    """Returns -(A log p - beta / 2 (log rho)^2). arXiv 2405.19107, with A for the reward less its
    value, as in verl."""
    log_ratio = inputs.logprobs - inputs.old_logprobs
    value = -inputs.logprobs * inputs.advantages + options.beta / 2 * log_ratio.square()
    return TokenLoss(value, {})


def clip_cov(inputs: PolicyInputs, options: ClipCovLoss) -> TokenLoss:
    """Returns the loss of ppo_clip, 0 for the chosen tokens. arXiv 2505.22617."""
    assert inputs.chosen is not None, "see chosen_tokens"
    loss = _clipped_surrogate(inputs.ratio, inputs.advantages, options)
    value = loss.value.masked_fill(inputs.chosen, 0.0)
    return TokenLoss(value, loss.clipped | {"covariance": inputs.chosen})


def kl_cov(inputs: PolicyInputs, options: KlCovLoss) -> TokenLoss:
    """Returns -rho A, plus kl_coef |log rho| for the chosen tokens. arXiv 2505.22617, whose KL is
    |log rho| in verl."""
    assert inputs.chosen is not None, "see chosen_tokens"
    log_ratio = inputs.logprobs - inputs.old_logprobs
    penalty = options.kl_coef * log_ratio.abs().masked_fill(~inputs.chosen, 0.0)
    value = penalty - inputs.ratio * inputs.advantages
    return TokenLoss(value, {"covariance": inputs.chosen})


def chosen_tokens(batch: Batch, options: CovarianceLoss, reduce: Reduce) -> Tensor:
    """Collective over data-parallel ranks. Returns the tokens of the step [T] (bool) that the loss
    treats apart, by their covariance (log p - mean)(A - mean) before the first update.

    kl_cov: those with the largest ones. clip_cov: drawn from those between low and high. Means and
    number are of all tokens of rl in the step. A token's draw, which also decides between equal
    covariances, depends only on its sample's id and its place in the sample.
    """
    assert batch.advantages is not None
    logprobs = batch.rollout_logprobs if batch.old_logprobs is None else batch.old_logprobs
    mask = batch.rl_mask
    covariances = torch.ones(int(mask.sum()), dtype=torch.float64)
    for values in (logprobs[mask], batch.advantages[mask]):
        spread = moments(values, reduce)
        covariances *= values.double() - spread.mean
    keys = ordered_bits(covariances)  # never 0
    if isinstance(options, ClipCovLoss):
        keys = ((covariances > options.low) & (covariances < options.high)).long()
    count = max(int(options.fraction * spread.count), 1)
    chosen = torch.zeros_like(mask)
    order = torch.stack((keys, _draws(batch)[mask]))
    chosen[mask] = largest_of_all(order, count, reduce) & (keys != 0)
    return chosen


def _draws(batch: Batch) -> Tensor:
    """Returns a different number [T] int64 for every token of the run, in no order: splitmix64 of
    its sample and place. Steele, Lea, Flood 2014."""
    first = (batch.sample_ids << 32) - batch.starts
    x = first.repeat_interleave(batch.lengths) + torch.arange(len(batch.tokens))
    # the factors as signed numbers; >> repeats the sign
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15), (31, 1)):
        x = (x ^ ((x >> shift) & (2 ** (64 - shift) - 1))) * factor
    return x


def own_loss(inputs: PolicyInputs, options: OwnLoss) -> TokenLoss:
    """Returns the loss from a user's function, which returns a TokenLoss or only its values. Raises
    ValueError unless there is a value for every token."""
    made = options.load()(inputs)
    loss = made
    if not isinstance(made, TokenLoss):
        loss = TokenLoss(made, {})
    shape = getattr(loss.value, "shape", None)
    if shape != inputs.logprobs.shape:
        shown = None if shape is None else list(shape)
        returned = f"{type(made).__name__}, shape {shown}"
        raise ValueError(
            f"algorithm.loss {options.function} returned {returned}; it should return the loss of "
            f"every token, a tensor [t], here {list(inputs.logprobs.shape)}"
        )
    return loss


POLICY_LOSSES: dict[type[Variant], PolicyLossFunction] = {
    PpoClipLoss: ppo_clip,
    GspoLoss: gspo,
    GmpoLoss: gmpo,
    DppoLoss: dppo,
    CispoLoss: cispo,
    GpgLoss: gpg,
    SapoLoss: sapo,
    DroLoss: dro,
    ClipCovLoss: clip_cov,
    KlCovLoss: kl_cov,
    OwnLoss: own_loss,
}


def token_loss(inputs: PolicyInputs, options: Variant) -> TokenLoss:
    """Returns the policy loss of every token [t]."""
    return POLICY_LOSSES[type(options)](inputs, options)


def without_off_policy(loss: TokenLoss, inputs: PolicyInputs, limit: float) -> TokenLoss:
    """Returns the loss, 0 where A < 0 in a sequence whose mean of log(rollout / new) is above the
    limit.

    Off-policy sequence masking: arXiv 2512.02556, whose old probabilities are the engine's, so that
    it sees stale weights and the mismatch too, also in the first update of a step.
    """
    distance = inputs.sequence_mean((inputs.rollout_logprobs - inputs.logprobs).detach())
    left_out = (inputs.advantages < 0) & (distance > limit)
    value = loss.value.masked_fill(left_out, 0.0)
    return TokenLoss(value, loss.clipped | {"off_policy": left_out})


def _clipped_surrogate(
    ratio: Tensor, advantages: Tensor, options: PpoClipLoss | GspoLoss | ClipCovLoss
) -> TokenLoss:
    low, high = 1 - options.clip_ratio_low, 1 + options.clip_ratio_high
    loss = torch.maximum(-ratio * advantages, -ratio.clamp(low, high) * advantages)
    clipped = {
        "low": (advantages < 0) & (ratio < low),
        "high": (advantages > 0) & (ratio > high),
    }
    return TokenLoss(loss, clipped)
