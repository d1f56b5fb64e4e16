"""The `algorithm.mismatch` section: engine and trainer give the same token different
probabilities."""

from typing import Annotated, Literal

from pydantic import Field

from megagrpo.config.fields import NonNegativeFloat, PositiveFloat, Rule, Section


class TruncatedImportance(Section):
    """min(old / rollout, cap)."""

    name: Literal["tis"]
    over: Literal["token", "sequence", "geometric"] = "token"
    """Ratio per token, or per sequence: the product of token ratios, or their geometric mean."""
    cap: PositiveFloat = 2.0
    """Largest weight."""
    floor: NonNegativeFloat = 0.0
    """Smallest weight."""
    self_normalize: bool = False
    """Divide by the mean weight over the step's tokens or sequences."""

    @property
    def formula(self) -> str:
        """The weight, as AlgorithmConfig.formula writes it."""
        scaled = " / its mean" if self.self_normalize else ""
        return f"old / rollout of the {self.over} in [{self.floor:g}, {self.cap:g}]{scaled}"

    def problems(self) -> list[Rule]:
        return [
            Rule(
                self.floor >= self.cap,
                f"floor {self.floor} is not below cap {self.cap}",
                "lower floor, or raise cap",
            )
        ]


class Band(Section):
    """icepop: the ratio if it is in [low, high], else 0. mis_mask: 1 there, else 0."""

    name: Literal["icepop", "mis_mask"]
    """Weight inside the band: the ratio (icepop) or 1 (mis_mask)."""
    low: NonNegativeFloat = 0.5
    """Smallest ratio old / rollout that has a weight."""
    high: PositiveFloat = 5.0
    """Largest ratio old / rollout that has a weight."""

    @property
    def formula(self) -> str:
        """The weight, as AlgorithmConfig.formula writes it."""
        inside = "old / rollout" if self.name == "icepop" else "1"
        return f"{inside} if old / rollout in [{self.low:g}, {self.high:g}], else 0"

    def problems(self) -> list[Rule]:
        return [
            Rule(
                not self.low <= 1 <= self.high,
                f"[low, high] = [{self.low:g}, {self.high:g}] has no weight for perfect agreement, old / rollout = 1",
                "widen them",
            )
        ]


class Rejection(Section):
    """Take responses on which trainer and engine disagree too much out of the loss mask. Their
    rewards still count in the statistics of their groups."""

    measure: Literal["ratio", "k2", "k3"] = "ratio"
    """Quantity to limit: old / rollout, or a KL estimate of it, in nats."""
    over: Literal["mean", "sum", "max", "token"] = "mean"
    """Mean (geometric for ratios), sum or extremes over a sequence. token: every token by
    itself."""
    low: NonNegativeFloat = 0.0
    """Smallest ratio to keep. A KL estimate has only an upper limit."""
    high: PositiveFloat
    """Largest ratio, or KL estimate, to keep."""
    keep_denominator: bool = False
    """Still count rejected tokens in the denominators."""

    @property
    def formula(self) -> str:
        """Returns the rejected part, as AlgorithmConfig.formula writes it."""
        units = "tokens" if self.over == "token" else "responses"
        measure = "old / rollout" if self.measure == "ratio" else self.measure
        over = "" if self.over == "token" else f"{self.over} "
        return f"{units} of {over}{measure} outside [{self.low:g}, {self.high:g}]"

    def problems(self) -> list[Rule]:
        agreement = 1.0 if self.measure == "ratio" else 0.0
        limits = f"[low, high] = [{self.low}, {self.high}]"
        outside = not self.low <= agreement <= self.high
        return [
            Rule(
                outside,
                f"{limits} rejects perfect agreement, {self.measure} = {agreement:g}",
                "widen them",
            )
        ]


class MismatchConfig(Section):
    """Correct for different probabilities of the same token in engine and trainer."""

    weight: Annotated[TruncatedImportance | Band, Field(discriminator="name")] | None = None
    """Weight for each token's policy term."""
    reject: Rejection | None = None
    alarm: PositiveFloat | None = 1.0
    """Factor on the bounds above which the first step of a start prints an alarm about the
    difference between trainer and engine, in nats over trained tokens. null: no alarm. Bounds: mean
    0.001 in float32, 0.05 in bfloat16 (0.1 if experts are not replayed); 99.9th percentile 0.1, 1,
    4."""

    @property
    def corrects(self) -> bool:
        """Returns whether tokens are weighted or rejected, by the trainer's old log-probabilities."""
        return self.weight is not None or self.reject is not None
