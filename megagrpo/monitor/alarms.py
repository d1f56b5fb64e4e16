"""Alarms: trainer and engine disagree in a start's first step; a run's metrics leave their healthy
range."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megagrpo.config.schema import ExperimentConfig, HealthAlarm
from megagrpo.mesh import Mesh
from megagrpo.types import Batch

_TAIL = 1e-3  # share of tokens above the 99.9th percentile


class MismatchAlarm:
    """Judges the first update's log-probabilities. is_moe: whether the model has experts."""

    def __init__(self, config: ExperimentConfig, is_moe: bool):
        self._bounds = alarm_bounds(config, is_moe)

    def judge(self, batch: Batch, logprobs: Tensor, counts: bool, mesh: Mesh) -> str:
        """Collective. Returns the alarm; "" if there is none, and in every call but the first whose
        tokens the weights of now sampled.

        logprobs [T] of the trainer, NaN where unknown. counts: whether this is the one rank of its
        replica that has all of them.
        """
        if self._bounds is None:
            return ""
        mean, tail = self._bounds
        # also of tokens that the correction rejects: a wrong engine must not be hidden by it
        judged = batch.correction.before_rejection
        if judged is None:
            judged = batch.loss_mask
        if batch.lags is not None:  # older weights differ without a fault
            judged = judged & (batch.lags == 0)
        apart = (logprobs - batch.rollout_logprobs)[judged].double().abs()
        apart = apart[~apart.isnan() & counts]
        sums = torch.stack(
            [torch.ones_like(apart).sum(), apart.sum(), (apart > tail).sum().double()]
        )
        tokens, total, beyond = torch.stack(mesh.gather_world(sums)).sum(0).tolist()
        if not tokens:
            return ""
        self._bounds = None
        if total / tokens <= mean and beyond / tokens <= _TAIL:
            return ""
        # not found here: the hooks of `bisect` do not run in a GPU engine's captured graphs
        return (
            f"ALARM: log-probabilities of trainer and engine are {total / tokens:.2g} apart in "
            f"the mean (bound {mean:g}), {beyond / tokens:.2%} of tokens by more than {tail:g} "
            f"(bound {_TAIL:.1%}); `megagrpo bisect` finds the first layer that differs (bounds: "
            "algorithm.mismatch.alarm)"
        )


def alarm_bounds(config: ExperimentConfig, is_moe: bool) -> tuple[float, float] | None:
    """Returns the bounds of the mean and of the 99.9th percentile, in nats; None without an alarm.

    The mean for experts in bfloat16 that are not replayed is the limit in slime's tests
    (train_rollout_logprob_abs_diff).
    """
    factor = config.algorithm.mismatch.alarm
    if factor is None:
        return None
    if "bfloat16" not in (config.actor.dtype, config.rollout.dtype):
        mean = 1e-3
        tail = 0.1
    elif is_moe and config.actor.routing_replay != "rollout":
        mean = 0.1
        tail = 4.0
    else:
        mean = 0.05
        tail = 1.0
    return factor * mean, factor * tail


# ---- the health of a run -----------------------------------------------------------------------

_STEPS = 3  # consecutive ones beyond a bound before the warning
_SMALL_MISMATCH = 1e-3  # nats; growth below it is rounding: the alarm's bound in float32
Values = Mapping[str, float]  # the reduced metrics of a step


class HealthWatch:
    """Notes each warning about a start's metrics once. Only for the main rank; checkpoints do not
    hold its state."""

    def __init__(self, alarms: Sequence[HealthAlarm], note: Callable[[str], None]):
        """alarms: the warnings that may come."""
        self._note = note
        self._signs = [sign for sign in _SIGNS if sign.key in alarms]  # not noted yet
        self._first: dict[str, tuple[int, float]] = {}  # by sign: step and value
        self._last = {sign.key: deque[tuple[int, float]](maxlen=_STEPS) for sign in _SIGNS}

    def see(self, step: int, values: Values) -> None:
        """Judges the metrics of one more finished step; notes new warnings."""
        if "loss/total" not in values:  # an evaluation alone
            return
        for sign in [*self._signs]:
            value = sign.value(values) if sign.value else values.get(sign.metric)
            if value is None:
                continue
            first = self._first.setdefault(sign.key, (step, value))
            last = self._last[sign.key]
            last.append((step, value))
            bound = sign.bound(sign.limit, first[1])
            beyond = [point <= bound if sign.too_low else point >= bound for _, point in last]
            if len(last) == _STEPS and all(beyond):
                self._signs.remove(sign)
                self._note(sign.warning(value, bound, first, since=last[0][0]))


@dataclass(frozen=True)
class _Sign:
    """One way in which a run is not healthy. value: the metric's own if None. bound: of the limit
    and of the value in the first step."""

    key: HealthAlarm
    limit: float
    metric: str
    advice: str
    value: Callable[[Values], float | None] | None = None
    bound: Callable[[float, float], float] = lambda limit, first: limit
    too_low: bool = False

    def warning(self, value: float, bound: float, first: tuple[int, float], since: int) -> str:
        """Returns the line about `value`; first: step and value of the start's first."""
        against = f"bound {bound:.2g}"
        if bound != self.limit:
            against = f"{first[1]:.2g} in step {first[0]}, {against}"
        return (
            f"WARNING: {self.metric} is {value:.2g} ({against}) since step {since}: {self.advice} "
            f"(log.alarms: {self.key})"
        )


def _equal_groups(values: Values) -> float:
    """Returns the fraction of groups with equal rewards, if no advantage comes from elsewhere
    (REINFORCE++, ReMax)."""
    if values.get("advantage/std", 0.0) >= 1e-6:
        return 0.0
    return values.get("group/degenerate_fraction", 0.0)


def _advantage_std(values: Values) -> float | None:
    if values.get("group/degenerate_fraction", 0.0) >= 1:
        return None
    return values.get("advantage/std")


def _clipped(values: Values) -> float:
    return sum(values.get(f"policy/clip_fraction_{side}", 0.0) for side in ("low", "high"))


def _mismatch(values: Values) -> float | None:
    """Returns the mismatch that is only numerics; None in a step that mixes it with staleness."""
    if "lag/mean" in values:
        return values.get("mismatch/logprob_abs_mean_lag_0")
    if values.get("dynamic_sampling/carried"):
        return None
    return values.get("mismatch/logprob_abs_mean")


_SIGNS = (
    _Sign(
        "degenerate_fraction",
        1.0,  # from it on nothing is learned, if advantages are 0 too
        "group/degenerate_fraction",
        "the responses of every group have equal rewards and nothing is learned; read rollouts/ "
        "(is the grader right?), raise train.group_size, take easier or harder prompts, or set "
        "algorithm.dynamic_sampling",
        _equal_groups,
    ),
    _Sign(
        "advantage_std",
        0.01,  # grpo's is near 1, and at most that of the rewards without a division by theirs
        "advantage/std",
        "hardly anything is learned; raise train.group_size or sampling.temperature, give finer "
        "rewards, or set algorithm.dynamic_sampling",
        _advantage_std,
        too_low=True,
    ),
    _Sign(
        "kl_reference",
        0.1,  # nats a token: `target_kl` of verl's adaptive KL (verl docs/examples/config)
        "policy/kl_reference",
        "the policy leaves the reference; lower actor.optimizer.lr or "
        "raise algorithm.kl.loss_coef (or reward_coef)",
    ),
    _Sign(
        "clip_fraction",
        0.3,  # a rule of thumb; GSPO clips 0.15 (arXiv 2507.18071)
        "policy/clip_fraction_low + _high",
        "an update moves too far from the sampled policy; lower actor.optimizer.lr, "
        "train.num_updates_per_step or train.num_epochs_per_step",
        _clipped,
    ),
    _Sign(
        "truncated_rise",
        0.1,  # no published value
        "response/truncated_fraction",
        "responses outgrow their limit; raise sampling.max_response_tokens, or set "
        "algorithm.reward.overlong or algorithm.mask_truncated",
        bound=lambda limit, first: first + limit,
    ),
    _Sign(
        "entropy_left",
        0.1,  # of the first step's; a drop by 73 % is usual (arXiv 2505.22617)
        "policy/entropy",
        "responses become alike and exploration ends; raise algorithm.loss.clip_ratio_high or "
        "algorithm.entropy_coef, or lower actor.optimizer.lr",
        bound=lambda limit, first: limit * first,
        too_low=True,
    ),
    _Sign(
        "mismatch_growth",
        3.0,  # times the first step's; verl's FAQ calls 0.005 normal and 0.01 a fault, of probabilities
        "mismatch/logprob_abs_mean",
        "trainer and engine drift apart; `megagrpo bisect` finds the layer, "
        "algorithm.mismatch.weight corrects",
        _mismatch,
        lambda limit, first: max(limit * first, _SMALL_MISMATCH),
    ),
    _Sign(
        "rejected_fraction",
        0.3,  # no published value
        "mismatch/rejected_fraction",
        "much of what was sampled is thrown away; `megagrpo bisect` finds the layer in which "
        "trainer and engine differ, a lower rollout.max_staleness makes samples younger",
    ),
)
