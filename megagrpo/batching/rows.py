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
    # [T] int32, of the weights that sampled; None if nothing reads them, or nothing was sampled
    versions: np.ndarray | None
    reward: float  # of its rollout
    valid: bool
    truncated: bool
    greedy_reward: float  # of the group's greedy response; NaN where there is none
    token_rewards: tuple[tuple[int, float], ...]  # as in Outcome, of its own tokens
    parts: tuple[float, ...]  # scores of its rollout, by grader
    # of this rank's layers, as in Sample; None if unknown or never read
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
    with_versions: bool,
    experts: Sequence[np.ndarray | None],
    needs: LossNeeds,
) -> list[SampleRow]:
    """Returns the rows of a group; most: samples of any group of the step.

    with_versions: keep those of the weights that sampled. experts: of each sample, if they are
    replayed. Raises ValueError if a scored response has no score of one of `needs.graders`.
    """
    greedy = group.greedy_outcome
    comparable = greedy is None or greedy.ok
    order = [sample.rollout_index for sample in group.samples]
    assert order == sorted(order), "samples come one rollout after the other"
    rows = []
    for number, (samples, outcome) in enumerate(zip(group.rollouts, group.outcomes, strict=True)):
        is_sampled = outcome.status != _DEMONSTRATION
        other: Writer = "tool" if is_sampled else "data"
        first = group.group_id * most
        start = 0  # among the response tokens of the rollout
        for sample in samples:
            end = start + len(sample.token_ids)
            prompt = group.prompt.token_ids if sample.prompt_ids is None else sample.prompt_ids
            inside = [
                (index - start, reward)
                for index, reward in outcome.token_rewards
                if start <= index < end
            ]
            row = SampleRow(
                # samples have the same with demonstrations as without
                sample_id=first + sample.index if is_sampled else -1 - group.group_id,
                rollout_id=first + number if is_sampled else -1 - group.group_id,
                group_id=group.group_id,
                prompt=prompt,
                response=sample.token_ids,
                response_mask=sample.loss_mask,
                logprobs=sample.logprobs,
                versions=sample.token_versions() if with_versions and is_sampled else None,
                reward=outcome.value if outcome.ok else 0.0,
                valid=outcome.ok and comparable,
                truncated=sample.finish_reason == "length",
                greedy_reward=greedy.value if greedy is not None and greedy.ok else math.nan,
                token_rewards=tuple(inside) if outcome.ok else (),
                parts=_scores(outcome, tuple(needs.graders)),
                routed_experts=experts[sample.index],
                images=group.prompt.images,
                weights=_weights(group.prompt, sample, other, needs.algorithm),
                teacher=sample.teacher,
            )
            rows.append(row)
            start = end
    return rows


def _weights(
    prompt: Prompt, sample: Sample, other: Writer, algorithm: AlgorithmConfig
) -> dict[str, np.ndarray]:
    """Returns the weights of a sample's tokens by component, [T] float32 each. other: who wrote the
    tokens that the policy did not sample."""
    found: dict[str, np.ndarray] = {}
    for component in algorithm.components:
        of_policy, of_other = (
            algorithm.weight_of(component, writer, prompt.source) for writer in ("policy", other)
        )
        known = component != "distillation" or sample.teacher is not None
        factor = prompt.weights.get(component, 1.0) if known else 0.0
        sampled = True if sample.loss_mask is None else sample.loss_mask
        weights = np.full(len(sample.token_ids), factor, np.float32)
        found[component] = weights * np.where(sampled, of_policy, of_other).astype(np.float32)
        found[component][: sample.shared] = 0.0
    return found


def _scores(outcome: Outcome, graders: Sequence[str]) -> tuple[float, ...]:
    """Returns the score of each grader; zeros of a response without a score."""
    if not outcome.ok:
        return (0.0,) * len(graders)
    if missing := [name for name in graders if name not in outcome.parts]:
        raise ValueError(
            f"a group has no score of {', '.join(missing)}: it was sampled before reward.graders "
            "changed; resume with the graders of its checkpoint"
        )
    return tuple(outcome.parts[name].value for name in graders)


def streams_of(rows: Sequence[SampleRow], algorithm: AlgorithmConfig) -> Streams | None:
    """Returns the components of the rows' tokens, if there are several."""
    if not algorithm.components:
        return None
    weights = {
        name: of_responses(rows, (row.weights[name] for row in rows), np.float32)
        for name in algorithm.components
    }
    if algorithm.distillation is None:
        return Streams(weights)

    def of_teachers(name: str, kind: type[np.generic], width: int | None = None) -> torch.Tensor:
        scores = (None if row.teacher is None else getattr(row.teacher, name) for row in rows)
        return of_responses(rows, scores, kind, width=width)

    streams = Streams(weights, of_teachers("logprobs", np.float32))
    if not (width := algorithm.distillation.num_candidates):
        return streams
    return replace(
        streams,
        top_ids=of_teachers("top_ids", np.int32, width),
        top_logprobs=of_teachers("top_logprobs", np.float32, width),
    )


def of_responses(
    rows: Sequence[SampleRow],
    values: Iterable[np.ndarray | None],
    kind: type[np.generic],
    default: object = 0,
    width: int | None = None,
) -> torch.Tensor:
    """Returns values of responses, [T] or [T, width], as those of all tokens, 0 on prompts; of a
    response without, the default."""
    of_token = () if width is None else (width,)
    flat = np.zeros((sum(row.length for row in rows), *of_token), kind)
    start = 0
    for row, of_row in zip(rows, values, strict=True):
        end = start + row.length
        flat[start + len(row.prompt) : end] = default if of_row is None else of_row
        start = end
    return torch.from_numpy(flat)
