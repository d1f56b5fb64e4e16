"""Reward steps between the grader and the advantage: the fields of each.

To add one: write its Section here and name it among the bases of RewardShapingConfig, then write
its function and its row in REWARD_STEPS of algo/reward_shaping.py, whose order is the order of
operations. tests/unit/test_algo_config.py finds a step without a row.
"""

from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator

from megagrpo.config.fields import (
    NonNegativeFloat,
    NonNegativeInt,
    Number,
    PositiveFloat,
    Rule,
    Section,
)

Scope = Literal["none", "group", "batch", "running"]
EPS = 1e-6


class RewardStep(Section):
    """Holds the fields of one step; at their defaults the step leaves every reward as it is."""

    # whether remax's greedy rewards take this step too
    reaches_greedy_baseline: ClassVar[bool] = False


class OverlongShaping(Section):
    """DAPO's soft length penalty, arXiv 2503.14476: 0 up to max_response_tokens - buffer_tokens,
    then linear down to -factor. Tokens of tools and environments count too."""

    buffer_tokens: NonNegativeInt | None = None
    """Tokens over which the penalty grows. Default: a fifth of max_response_tokens, as in the
    paper. 0: off."""
    factor: NonNegativeFloat = 1.0
    """Penalty for the longest response, in units of the reward."""

    def buffer(self, max_response_tokens: int) -> int:
        """Returns the length of the buffer, in tokens."""
        return max_response_tokens // 5 if self.buffer_tokens is None else self.buffer_tokens


class RewardScaling(RewardStep):
    """r -> scale r + shift."""

    reaches_greedy_baseline = True

    scale: PositiveFloat = 1.0
    """Factor for every reward, greedy baselines too."""
    shift: Number = 0.0
    """Constant to add after the scale, to greedy baselines too."""


def _unless_off(overlong: OverlongShaping | None) -> OverlongShaping | None:
    return overlong if overlong and overlong.factor and overlong.buffer_tokens != 0 else None


class RewardOverlong(RewardStep):
    """Charge long responses."""

    overlong: Annotated[OverlongShaping | None, AfterValidator(_unless_off)] = None


class RewardNormalization(RewardStep):
    """r -> (r - mean) / (std + eps), with the sample's std."""

    mean: Scope = "none"
    """Responses whose mean is subtracted."""
    std: Scope = "none"
    """Responses whose standard deviation, around their own mean, is the divisor."""
    eps: PositiveFloat = EPS
    """Constant to add to the standard deviation, in units of the reward."""


class RewardClip(RewardStep):
    """Limit the reward's magnitude."""

    clip: PositiveFloat | None = None
    """Limit rewards to [-clip, clip]."""


# pydantic lists the fields of the last base first
class RewardShapingConfig(RewardClip, RewardNormalization, RewardOverlong, RewardScaling):
    """Steps from the grader's reward to the advantage's input, in this order. `overlong` comes
    after `shift`."""

    def problems(self) -> list[Rule]:
        unread = self.std == "none" and self.eps != EPS
        return [Rule(unread, "eps is added to a std, and std is none", "remove one of them")]

    @property
    def formula(self) -> str:
        """The reward that the advantage sees, as AlgorithmConfig.formula writes it."""
        scale = f"{self.scale:g} " if self.scale != 1 else ""
        text = (
            f"{scale}reward"
            + (f" {self.shift:+g}" if self.shift else "")
            + (" - overlong" if self.overlong else "")
        )
        if (self.mean, self.std) != ("none", "none"):
            mean = f" - mean of {self.mean}" if self.mean != "none" else ""
            text = f"({text}{mean})" + (
                f" / (std of {self.std} + eps)" if self.std != "none" else ""
            )
        return f"{text} in [-{self.clip:g}, {self.clip:g}]" if self.clip else text

    @property
    def normalizes_by_group(self) -> bool:
        """Returns whether the group's mean or standard deviation enters the rewards."""
        return "group" in (self.mean, self.std)

    def turned_on(self, besides_greedy: bool = False) -> list[str]:
        """The fields that are not at their defaults; besides_greedy: of steps that remax's greedy
        rewards do not take."""
        return [
            name
            for step in REWARD_STEP_CONFIGS
            if not (besides_greedy and step.reaches_greedy_baseline)
            for name, field in step.model_fields.items()
            if getattr(self, name) != field.default
        ]


REWARD_STEP_CONFIGS: tuple[type[RewardStep], ...] = tuple(
    base for base in RewardShapingConfig.__bases__ if issubclass(base, RewardStep)
)
