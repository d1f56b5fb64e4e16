"""Policy losses: the fields and the formula of each.

To add one: write its variant here and name it in PolicyLossConfig, then write its function and its
row in POLICY_LOSSES of algo/policy_loss.py. A variant without a row fails when that module is
imported.
"""

from typing import Annotated, Literal

from pydantic import Field

from megagrpo.config.fields import (
    LARGEST,
    NonNegativeFloat,
    Number,
    PositiveFloat,
    PositiveFraction,
    Rule,
    Variant,
)
from megagrpo.config.objective.own import OwnFunction

_LOW = "The ratio is clipped below at 1 - clip_ratio_low."
_HIGH = "The ratio is clipped above at 1 + clip_ratio_high."


class PpoClipLoss(Variant):
    """arXiv 1707.06347. clip_ratio_high > clip_ratio_low is DAPO's clip-higher. The dual clip is in
    arXiv 1912.09729."""

    formula = "-min(rho A, clip(rho) A)"

    name: Literal["ppo_clip"] = "ppo_clip"
    clip_ratio_low: PositiveFraction = Field(default=0.2, description=_LOW)
    clip_ratio_high: PositiveFloat = Field(default=0.2, description=_HIGH)
    dual_clip: float | None = Field(default=None, gt=1, le=LARGEST)
    """c in the dual clip: the loss for a negative advantage is at most c |A|."""


class GspoLoss(Variant):
    """One importance ratio per sequence. arXiv 2507.18071."""

    formula = "-min(s A, clip(s) A), s = exp(mean log rho)"
    aggregations = ("seq-mean-token-mean",)

    name: Literal["gspo"] = "gspo"
    clip_ratio_low: PositiveFraction = Field(default=3e-4, description=_LOW)
    clip_ratio_high: PositiveFloat = Field(default=4e-4, description=_HIGH)
    clamp: Literal["both", "above"] = "both"
    """Limit on the sequence's mean log-ratio: +-20 (both), or only above, at 10, as in verl
    (above)."""


class GmpoLoss(Variant):
    """The geometric mean of a sequence's ratios, each clipped. arXiv 2507.20673. Each token learns
    from its own advantage."""

    formula = "-A exp(mean s min(s log rho, s clip(log rho))), s = sign A"
    aggregations = ("seq-mean-token-mean",)

    name: Literal["gmpo"] = "gmpo"
    clip_ratio_low: PositiveFloat = 0.4
    """log rho is clipped below at -clip_ratio_low."""
    clip_ratio_high: PositiveFloat = 0.4
    """log rho is clipped above at clip_ratio_high."""


class DppoLoss(Variant):
    """A trust region in probabilities instead of ratios. A token that would leave it has no
    gradient. arXiv 2602.04879."""

    formula = "-A sg[min(rho, c)] log p inside the trust region"

    name: Literal["dppo"] = "dppo"
    against: Literal["rollout", "old"] = "rollout"
    """Probabilities to compare with: the engine's, as in the paper, or the actor's before the step,
    as in verl."""
    divergence: Literal["tv", "kl"] = "tv"
    """Divergence between the sampled token and all others: total variation, or KL."""
    low: PositiveFloat = 0.2
    """Largest divergence for a negative advantage."""
    high: PositiveFloat = 0.2
    """Largest divergence for a positive advantage."""
    ratio_limit: PositiveFloat = 20.0
    """c, the largest weight per token."""


class CispoLoss(Variant):
    """Clip the importance weights, so that every token keeps a gradient. arXiv 2506.13585."""

    formula = "-sg[clip(rho)] A log p"

    name: Literal["cispo"] = "cispo"
    clip_ratio_low: PositiveFraction = Field(default=1.0, description=_LOW)
    clip_ratio_high: NonNegativeFloat = Field(default=4.0, description=_HIGH)


class GpgLoss(Variant):
    """-log p A. arXiv 2504.02546."""

    formula = "-A log p"

    name: Literal["gpg"] = "gpg"


class SapoLoss(Variant):
    """A sigmoid gate instead of the clip. arXiv 2511.20347."""

    formula = "-sigmoid(tau (rho - 1)) (4 / tau) A"

    name: Literal["sapo"] = "sapo"
    tau_positive: PositiveFloat = 1.0
    """Steepness of the gate for positive advantages."""
    tau_negative: PositiveFloat = 1.05
    """Steepness of the gate for negative advantages."""


class DroLoss(Variant):
    """The policy gradient with a quadratic penalty on the log-ratio, without a clip. arXiv
    2405.19107."""

    formula = "-(A log p - beta / 2 (log rho)^2)"

    name: Literal["dro"] = "dro"
    beta: PositiveFloat = 0.05
    """Strength of the penalty."""


class CovarianceLoss(Variant):
    """Treats tokens apart that lower the entropy most: those whose log-probability and advantage
    are both far from the step's means, on the same side. arXiv 2505.22617."""

    fraction: PositiveFraction = 2e-4
    """Fraction of the step's tokens to choose by (log p - mean)(A - mean), before its first update.
    At least one token."""


class ClipCovLoss(CovarianceLoss):
    """ppo_clip without gradients for tokens that are drawn from those with a covariance between low
    and high. arXiv 2505.22617."""

    formula = "-min(rho A, clip(rho) A), 0 for drawn tokens of high covariance"

    name: Literal["clip_cov"] = "clip_cov"
    clip_ratio_low: PositiveFraction = Field(default=0.2, description=_LOW)
    clip_ratio_high: PositiveFloat = Field(default=0.2, description=_HIGH)
    low: Number = 1.0
    """Covariance above which a token can be drawn."""
    high: Number = 5.0
    """Covariance below which a token can be drawn."""

    def problems(self) -> list[Rule]:
        between = f"low {self.low} and high {self.high} have no covariance between them"
        return [Rule(self.low >= self.high, between, "lower low, or raise high")]


class KlCovLoss(CovarianceLoss):
    """The policy gradient without a clip, with a penalty on the log-ratio of the tokens with the
    largest covariances. arXiv 2505.22617."""

    formula = "-rho A, + kl_coef |log rho| for the tokens of largest covariance"

    name: Literal["kl_cov"] = "kl_cov"
    kl_coef: PositiveFloat = 1.0
    """Strength of the penalty."""


class OwnLoss(OwnFunction, Variant):
    """Your function, `name: "mine.py:gmpo"`. It gets PolicyInputs (algo/policy_loss.py) and returns
    the loss per token, [t]. See [extend](../extend.md)."""

    formula = "own"
    key = "algorithm.loss"

    name: Literal["own"] = "own"


PolicyLossConfig = Annotated[
    PpoClipLoss
    | GspoLoss
    | GmpoLoss
    | DppoLoss
    | CispoLoss
    | GpgLoss
    | SapoLoss
    | DroLoss
    | ClipCovLoss
    | KlCovLoss
    | OwnLoss,
    Field(discriminator="name"),
]
