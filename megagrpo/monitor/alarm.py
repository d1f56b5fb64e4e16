"""Alarm of a start's first step: trainer and engine disagree about the same tokens under the same weights."""

import torch
from torch import Tensor

from megagrpo.config.schema import ExperimentConfig
from megagrpo.mesh import Mesh
from megagrpo.types import Batch

_TAIL = 1e-3  # share of tokens above the 99.9th percentile


class MismatchAlarm:
    """Judges the first update's log-probabilities. is_moe: whether the model has experts."""

    def __init__(self, config: ExperimentConfig, is_moe: bool):
        self._bounds = alarm_bounds(config, is_moe)

    def judge(self, batch: Batch, logprobs: Tensor, counts: bool, mesh: Mesh) -> str:
        """Collective. Returns the alarm, "" without one and for every call but the first.

        logprobs [T] of the trainer, NaN where unknown. counts: whether this rank is its replica's one with all of them.
        """
        if self._bounds is None:
            return ""
        (mean, tail), self._bounds = self._bounds, None
        apart = (logprobs - batch.rollout_logprobs)[batch.loss_mask].double().abs()
        apart = apart[~apart.isnan()] if counts else apart[:0]
        sums = torch.stack([torch.ones_like(apart).sum(), apart.sum(), (apart > tail).sum().double()])
        tokens, total, beyond = mesh.total(sums).tolist()
        if not tokens or (total / tokens <= mean and beyond / tokens <= _TAIL):
            return ""
        # not found here: the hooks of `bisect` do not run in a GPU engine's captured graphs
        return (
            f"ALARM: log-probabilities of trainer and engine are {total / tokens:.2g} apart in the mean (bound "
            f"{mean:g}), {beyond / tokens:.2%} of tokens by more than {tail:g} (bound {_TAIL:.1%}); "
            "`megagrpo bisect` finds the first layer that differs (bounds: algorithm.mismatch.alarm)"
        )


def alarm_bounds(config: ExperimentConfig, is_moe: bool) -> tuple[float, float] | None:
    """Returns the bounds of the mean and of the 99.9th percentile, in nats; None without an alarm.

    In bfloat16 with experts chosen anew the mean is the limit of slime's own tests (train_rollout_logprob_abs_diff).
    """
    given = config.algorithm.mismatch.alarm
    if given is None:
        return None
    if "bfloat16" not in (config.actor.dtype, config.rollout.dtype):
        mean, tail = 1e-3, 0.1
    elif is_moe and config.actor.routing_replay != "rollout":
        mean, tail = 0.1, 4.0
    else:
        mean, tail = 0.05, 1.0
    return given.mean or mean, given.tail or tail
