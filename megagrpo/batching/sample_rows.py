"""Samples on their way from a replica's groups to the rank that trains on them: one row each."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from megagrpo.config.algorithm import AlgorithmConfig
from megagrpo.config.objective.streams import Writer
from megagrpo.types import (
    ImageRef,
    Outcome,
    Prompt,
    RolloutGroup,
    Sample,
    Streams,
    TeacherScores,
)

_DEMONSTRATION = "demonstration"  # status of a rollout that the data has written


class LossNeeds(NamedTuple):
    """What decides which parts of a batch the experiment's loss needs."""

    algorithm: AlgorithmConfig = AlgorithmConfig()  # its components
    graders: Mapping[str, float] = {}  # weights of those whose scores the estimator reads
    candidates: bool = True  # whether this rank reads distillation's k tokens per position


NO_NEEDS = LossNeeds()


@dataclass(frozen=True)
class SampleRow:
    """Holds one sample on its way to the rank that trains on it. T response tokens."""

    sample_id: int
    rollout_id: int  # in the order of sample ids
    group_id: int
    prompt: np.ndarray  # int32 ids
    response: np.ndarray  # [T] int32
    response_mask: np.ndarray | None  # [T] bool, False on tokens of a tool; None: all were sampled
    logprobs: np.ndarray  # [T] float32, by the engine
    # [T] int32, trained version minus sampling version; None if nothing reads them, or nothing was
    # sampled
    lags: np.ndarray | None
    reward: float  # of its rollout
    valid: bool
    truncated: bool
    greedy_reward: float  # of the group's greedy response; NaN where there is none
    token_rewards: tuple[tuple[int, float], ...]  # as in Outcome, only this sample's tokens
    parts: tuple[float, ...]  # scores of its rollout, by grader
    # for this rank's layers, as in Sample; None if unknown or never read
    routed_experts: np.ndarray | None
    images: tuple[ImageRef, ...]  # of its prompt
    weights: dict[str, np.ndarray]  # by component of the loss: [T] float32; {}: rl alone
    teacher: TeacherScores | None

    @property
    def length(self) -> int:
        """Tokens of prompt and response."""
        return len(self.prompt) + len(self.response)


def with_demonstration(group: RolloutGroup) -> RolloutGroup:
    """Returns the group with its row's demonstration as one more rollout: no reward, no statistic,
    and no token of rl counts it."""
    ids = group.prompt.demonstration
    if ids is None:
        return group
    sample = Sample(
        index=len(group.samples),
        rollout=len(group.outcomes),
        token_ids=ids,
        logprobs=np.zeros(len(ids)),
        finish_reason="stop",
        weight_version=0,
        text="",
        loss_mask=np.zeros(len(ids)),
    )
    outcomes = (*group.outcomes, Outcome(_DEMONSTRATION))
    return replace(group, samples=(*group.samples, sample), outcomes=outcomes)


def rows_of(
    group: RolloutGroup,
    most: int,
    trained_version: int | None,
    experts: Sequence[np.ndarray | None],
    needs: LossNeeds,
) -> list[SampleRow]:
    """Returns the rows of a group; most: the largest number of samples in a group of the step.

    trained_version: None if lags are not needed. experts: those of each sample, if they are
    replayed. Raises ValueError if a scored response has no score from one of `needs.graders`.
    """
    greedy = group.greedy_outcome
    greedy_reward = greedy.value if greedy is not None and greedy.ok else math.nan
    order = [sample.rollout_index for sample in group.samples]
    assert order == sorted(order), "samples come one rollout after the other"
    rows = []
    for number, (samples, outcome) in enumerate(zip(group.rollouts, group.outcomes, strict=True)):
        is_sampled = outcome.status != _DEMONSTRATION
        first = group.group_id * most
        start = 0  # among the response tokens of the rollout
        for sample in samples:
            end = start + len(sample.token_ids)
            lags = None
            if trained_version is not None and is_sampled:
                lags = trained_version - sample.token_versions()
            teacher = sample.teacher
            if teacher is not None and not needs.candidates:
                teacher = replace(teacher, top_ids=None, top_logprobs=None)
            token_rewards = (
                (index - start, reward)
                for index, reward in outcome.token_rewards
                if outcome.ok and start <= index < end
            )
            row = SampleRow(
                # samples have the same with demonstrations as without
                sample_id=first + sample.index if is_sampled else -1 - group.group_id,
                rollout_id=first + number if is_sampled else -1 - group.group_id,
                group_id=group.group_id,
                prompt=group.prompt.token_ids if sample.prompt_ids is None else sample.prompt_ids,
                response=sample.token_ids,
                response_mask=sample.loss_mask,
                logprobs=sample.logprobs,
                lags=lags,
                reward=outcome.value if outcome.ok else 0.0,
                valid=outcome.ok and (greedy is None or greedy.ok),
                truncated=sample.finish_reason == "length",
                greedy_reward=greedy_reward,
                token_rewards=tuple(token_rewards),
                parts=_scores(outcome, tuple(needs.graders)),
                routed_experts=experts[sample.index],
                images=group.prompt.images,
                weights=_weights(
                    group.prompt, sample, "tool" if is_sampled else "data", needs.algorithm
                ),
                teacher=teacher,
            )
            rows.append(row)
            start = end
    return rows


def _weights(
    prompt: Prompt, sample: Sample, other: Writer, algorithm: AlgorithmConfig
) -> dict[str, np.ndarray]:
    """Returns the weights of a sample's tokens by component, [T] float32 each. other: who wrote the
    tokens that the policy did not sample."""
    weights: dict[str, np.ndarray] = {}
    for component in algorithm.components:
        policy_weight = algorithm.weight_of(component, "policy", prompt.source)
        other_weight = algorithm.weight_of(component, other, prompt.source)
        factor = prompt.weights.get(component, 1.0)
        if component == "distillation" and sample.teacher is None:
            factor = 0.0
        factors = np.full(len(sample.token_ids), factor, np.float32)
        sampled = sample.loss_mask is None or sample.loss_mask
        weights[component] = factors * np.where(sampled, policy_weight, other_weight).astype(
            np.float32
        )
        weights[component][: sample.shared] = 0.0
    return weights


def _scores(outcome: Outcome, graders: Sequence[str]) -> tuple[float, ...]:
    """Returns the score of each grader; zeros for a response without a score."""
    if not outcome.ok:
        return (0.0,) * len(graders)
    missing = [name for name in graders if name not in outcome.parts]
    if missing:
        raise ValueError(
            f"a group has no score of {', '.join(missing)}: it was sampled before reward.graders "
            "changed; resume with the graders of its checkpoint"
        )
    return tuple(outcome.parts[name].value for name in graders)


def streams_of(rows: Sequence[SampleRow], needs: LossNeeds) -> Streams | None:
    """Returns the components of the rows' tokens, if there are several."""
    algorithm = needs.algorithm
    if not algorithm.components:
        return None
    weights = {
        name: response_values(rows, (row.weights[name] for row in rows), np.float32)
        for name in algorithm.components
    }
    if algorithm.distillation is None:
        return Streams(weights)

    def scores(name: str, kind: type[np.generic], *width: int) -> torch.Tensor:
        return response_values(
            rows, (getattr(row.teacher, name, None) for row in rows), kind, width=width
        )

    streams = Streams(weights, scores("logprobs", np.float32))
    width = algorithm.distillation.num_candidates
    if not width or not needs.candidates:
        return streams
    return replace(
        streams,
        top_ids=scores("top_ids", np.int32, width),
        top_logprobs=scores("top_logprobs", np.float32, width),
    )


def response_values(
    rows: Sequence[SampleRow],
    values: Iterable[np.ndarray | None],
    kind: type[np.generic],
    default: object = 0,
    width: tuple[int, ...] = (),
) -> torch.Tensor:
    """Returns values of responses, [T, *width], for all tokens: 0 on prompts, the default for a
    response without values."""
    flat = np.zeros((sum(row.length for row in rows), *width), kind)
    start = 0
    for row, row_values in zip(rows, values, strict=True):
        end = start + row.length
        flat[start + len(row.prompt) : end] = default if row_values is None else row_values
        start = end
    return torch.from_numpy(flat)
