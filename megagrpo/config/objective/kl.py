"""The `algorithm.kl` section: the divergence of the policy from its reference."""

from typing import Literal, Self, cast

from megagrpo.config.fields import NonNegativeFloat, PositiveFloat, PositiveInt, Rule, Section

# How far from its target the adaptive coefficient sees the divergence; arXiv 1909.08593, section
# 2.2.
KL_ERROR_LIMIT = 0.2

KlEstimator = Literal["k1", "abs", "k2", "k3", "k1+", "abs+", "k3+", "full"]


class AdaptiveKl(Section):
    """Adapt the coefficient beta after every step: beta <- beta (1 + clip(KL / target - 1, +-0.2)
    responses / horizon), arXiv 1909.08593. A resumed run keeps beta."""

    target: PositiveFloat
    """KL per sampled token to steer to, in nats."""
    horizon: PositiveFloat
    """Responses over which the coefficient adapts."""


class KlConfig(Section):
    """KL to the reference, the initial weights unless `reference_every` moves it. If both
    coefficients are 0, no reference is kept."""

    loss_coef: NonNegativeFloat = 0.0
    """Coefficient of the KL in the loss."""
    reward_coef: NonNegativeFloat = 0.0
    """Coefficient of the KL that is subtracted from the reward at each token."""
    estimator: KlEstimator = "k3"
    """Estimate from the sampled tokens. +: with the gradient of k2. full: exact, over the
    vocabulary."""
    value_clamp: PositiveFloat | None = None
    """Largest k3 per token, in nats (verl: 10)."""
    importance: bool = False
    """Multiply the "+" estimators by the detached probability ratio, which makes them right
    off-policy too."""
    adaptive: AdaptiveKl | None = None
    reference_every: PositiveInt | None = None
    """Steps after which the reference becomes the actor, again and again. That step is saved, and
    its checkpoint stays while a resumed run needs it. Default: the initial weights."""

    @property
    def value_estimator(self) -> KlEstimator:
        """The estimator whose value this one has: without a +, its own."""
        return cast(KlEstimator, self.estimator.removesuffix("+"))

    @property
    def coef(self) -> float:
        """The coefficient that is not 0, of the loss or of the reward."""
        return self.reward_coef or self.loss_coef

    def with_coef(self, coef: float) -> Self:
        """Returns the section with this coefficient in the place of the one that is not 0."""
        return self.model_copy(update={"reward_coef" if self.reward_coef else "loss_coef": coef})

    def problems(self) -> list[Rule]:
        own = f'"{self.estimator}"'
        full = self.estimator == "full"
        plus = self.estimator.endswith("+")
        return [
            Rule(
                self.loss_coef and self.reward_coef,
                "loss_coef and reward_coef are both set: the KL would be charged twice",
                "set one of them to 0",
            ),
            Rule(
                self.reward_coef and (full or plus),
                f"estimator {own} is a form for the loss",
                "with reward_coef use k1, abs, k2 or k3",
            ),
            Rule(
                self.importance and not plus,
                f'importance corrects the gradient of the "+" estimators; {own} is none of them',
                "remove importance, or use k1+, abs+ or k3+",
            ),
            Rule(
                self.value_clamp and self.value_estimator != "k3",
                f"value_clamp belongs to k3; estimator is {own}",
                "remove one of them",
            ),
            Rule(
                self.adaptive and full,
                'adaptive measures the KL on the sampled tokens, estimator "full" does not',
                "use k1, abs, k2 or k3",
            ),
            Rule(
                self.adaptive and not self.coef,
                "adaptive needs a starting coefficient",
                "set loss_coef or reward_coef",
            ),
        ]
