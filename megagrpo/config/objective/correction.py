"""The `algorithm.mismatch` section: engine and trainer give the same token different probabilities."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from megagrpo.config.section import Section
from megagrpo.config.variant import NonNegative, Positive


class TruncatedImportance(Section):
    """min(old / rollout, cap): of the token, of the whole sequence (product), or its geometric mean."""

    name: Literal["tis"] = Field(description="Selects truncated importance sampling.")
    over: Literal["token", "sequence", "geometric"] = Field(
        default="token",
        description="What the ratio is of: a token, a sequence (the product of its tokens' ratios), or the geometric "
        "mean of a sequence's ratios.",
    )
    cap: Positive = Field(default=2.0, description="Largest weight.")
    floor: NonNegative = Field(default=0.0, description="Smallest weight.")
    self_normalise: bool = Field(
        default=False, description="Divides by the mean weight of the step's tokens, or sequences."
    )

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.floor >= self.cap:
            raise ValueError(f"floor {self.floor} is not below cap {self.cap}")
        return self


class Band(Section):
    """icepop: the ratio where it lies in [low, high], else 0. mis_mask: 1 there, else 0."""

    name: Literal["icepop", "mis_mask"] = Field(
        description="Weight inside the band: the ratio (icepop) or 1 (mis_mask)."
    )
    low: NonNegative = Field(default=0.5, description="Smallest ratio old / rollout that is not given weight 0.")
    high: Positive = Field(default=5.0, description="Largest ratio old / rollout that is not given weight 0.")

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.low >= self.high:
            raise ValueError(f"low {self.low} is not below high {self.high}")
        return self


class Rejection(Section):
    """Responses on which trainer and engine disagree too much leave the loss mask before anything is counted."""

    measure: Literal["ratio", "k2", "k3"] = Field(
        default="ratio", description="What is limited: old / rollout, or a KL estimate of it, in nats."
    )
    over: Literal["mean", "sum", "max", "token"] = Field(
        default="mean",
        description="How a sequence is judged: by the mean over its tokens (of the log-ratio: the geometric mean "
        "of the ratio), the sum or the extremes. token: every token for itself.",
    )
    low: NonNegative = Field(
        default=0.0, description="Smallest ratio that is kept; a KL estimate has an upper limit only."
    )
    high: Positive = Field(description="Largest ratio, or KL estimate, that is kept.")
    keep_denominator: bool = Field(
        default=False, description="Counts rejected tokens and sequences in the denominators all the same."
    )

    @model_validator(mode="after")
    def _around_agreement(self) -> Self:
        agreement = 1.0 if self.measure == "ratio" else 0.0
        if not self.low <= agreement <= self.high:
            raise ValueError(
                f"[low, high] = [{self.low}, {self.high}] rejects perfect agreement, {self.measure} = {agreement:g}"
            )
        return self


class MismatchConfig(Section):
    """Corrects for engine and trainer giving the same token different probabilities."""

    weight: Annotated[TruncatedImportance | Band, Field(discriminator="name")] | None = Field(
        default=None, description="Weight of the policy term of every token; null: 1."
    )
    reject: Rejection | None = Field(default=None, description="Which responses are not trained on; null: none.")
