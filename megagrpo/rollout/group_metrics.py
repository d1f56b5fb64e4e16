"""Metrics of a step's groups: responses, rewards, graders, sources, environments and dynamic
sampling."""

import math
from collections.abc import Iterator, Sequence

import numpy as np

from megagrpo.algo.dynamic_sampling import Selection
from megagrpo.config.schema import ExperimentConfig, RewardConfig, TrainConfig
from megagrpo.data.curriculum import POOLS, GroupResult
from megagrpo.data.rows import metric_name
from megagrpo.mesh import Mesh, RunStopped
from megagrpo.monitor.metrics import Metrics
from megagrpo.rollout.agents.environments import ENDS
from megagrpo.types import Outcome, RolloutGroup, Sample


def group_metrics(
    metrics: Metrics,
    groups: Sequence[RolloutGroup],
    config: ExperimentConfig,
    sources: Sequence[str],
    mesh: Mesh,
) -> None:
    """Collective over data-parallel ranks. Adds what a step's groups show of graders, sources of
    prompts and responses; raises RunStopped as `rollout_metrics`."""
    grader_metrics(metrics, groups, config.reward)
    source_metrics(metrics, groups, sources)
    rollout_metrics(metrics, groups, mesh, config.train)


def selection_metrics(
    metrics: Metrics,
    groups: Sequence[RolloutGroup],
    num_carried: int,
    num_batches: int,
    selection: Selection,
) -> None:
    """Adds dynamic_sampling/*, in groups over all ranks.

    generated_reward_mean is over all groups generated in this step; the step's other reward metrics
    are over the chosen groups only.
    """
    dropped = set(selection.dropped)
    surplus = set(selection.surplus)
    metrics.add_sum("dynamic_sampling/generated", len(groups) - num_carried)
    metrics.add_sum("dynamic_sampling/carried", num_carried)
    metrics.add_sum("dynamic_sampling/dropped", sum(group.group_id in dropped for group in groups))
    metrics.add_sum("dynamic_sampling/surplus", sum(group.group_id in surplus for group in groups))
    metrics.add_max("dynamic_sampling/num_gen_batches", num_batches)
    values = [
        outcome.value for group in groups[num_carried:] for outcome in group.outcomes if outcome.ok
    ]
    metrics.add_mean("dynamic_sampling/generated_reward_mean", sum(values), len(values))


def grader_metrics(metrics: Metrics, groups: Sequence[RolloutGroup], reward: RewardConfig) -> None:
    """Adds, for each of several graders, the mean score before weights and the fraction of
    failures.

    Both are over the responses that the grader graded, because data.grader_key may choose one.
    """
    if not reward.has_parts:
        return
    parts = [outcome.parts for group in groups for outcome in group.outcomes]
    for name in (entry.short_name for entry in reward.entries):
        graded = [each[name] for each in parts if name in each and each[name].status != "none"]
        scores = [outcome.value for outcome in graded if outcome.ok]
        metrics.add_mean(f"grader/{name}_mean", sum(scores), len(scores))
        metrics.add_mean(f"grader/{name}_failed_fraction", len(graded) - len(scores), len(graded))


def by_source(
    groups: Sequence[RolloutGroup], sources: Sequence[str]
) -> Iterator[tuple[str, list[RolloutGroup]]]:
    """Yields the name of each source, as metrics can spell it, and its groups."""
    for source in sources:
        yield metric_name(source), [group for group in groups if group.prompt.source == source]


def source_metrics(
    metrics: Metrics, groups: Sequence[RolloutGroup], sources: Sequence[str]
) -> None:
    """Adds, for each source of prompts, its share of the groups, and its mean score and response
    length in tokens."""
    for name, members in by_source(groups, sources):
        scores = [outcome.value for group in members for outcome in group.outcomes if outcome.ok]
        lengths = [len(sample.token_ids) for group in members for sample in group.samples]
        metrics.add_mean(f"source/{name}_fraction", len(members), len(groups))
        metrics.add_mean(f"source/{name}_reward_mean", sum(scores), len(scores))
        metrics.add_mean(f"source/{name}_length_mean", sum(lengths), len(lengths))


def curriculum_metrics(metrics: Metrics, shown: Sequence[GroupResult], pools: np.ndarray) -> None:
    """Adds, for each pool, the number of rows, and the share and mean score of the groups that were
    sampled from it for this step.

    shown: this rank's results. pools: the pool of each row before the step.
    """
    shown = [result for result in shown if not math.isnan(result[3])]
    for number, pool in enumerate(POOLS):
        rewards = [mean for _, row, _, mean in shown if pools[row] == number]
        metrics.add_max(f"curriculum/{pool}_rows", int((pools == number).sum()))
        metrics.add_mean(f"curriculum/{pool}_fraction", len(rewards), len(shown))
        metrics.add_mean(f"curriculum/{pool}_reward_mean", sum(rewards), len(rewards))


def rollout_metrics(
    metrics: Metrics, groups: Sequence[RolloutGroup], mesh: Mesh, train: TrainConfig
) -> None:
    """Collective over data-parallel ranks. Adds response lengths (tokens), truncation and grader
    failures of a step.

    Raises RunStopped on every rank when more than train.max_bad_fraction of the step's rewards are
    errors or timeouts.
    """
    samples = [sample for group in groups for sample in group.samples]
    outcomes = [outcome for group in groups for outcome in group.outcomes]
    lengths = [len(sample.token_ids) for sample in samples]
    metrics.add_mean("response/length_mean", sum(lengths), len(samples))
    metrics.add_max("response/length_max", max(lengths, default=0))
    metrics.add_mean(
        "response/truncated_fraction",
        sum(s.finish_reason == "length" for s in samples),
        len(samples),
    )
    # Only responses that may call a tool have one.
    masks = [sample.loss_mask for sample in samples if sample.loss_mask is not None]
    tool_tokens = [len(mask) - int(mask.sum()) for mask in masks]
    metrics.add_mean("response/tool_token_fraction", sum(tool_tokens), sum(map(len, masks)))
    metrics.add_mean(
        "response/tool_use_fraction", sum(number > 0 for number in tool_tokens), len(masks)
    )
    turns = sum(int((mask & ~np.append(False, mask[:-1])).sum()) for mask in masks)
    metrics.add_mean("response/turns_mean", turns, len(outcomes) if masks else 0)
    _environment_metrics(metrics, samples, [outcome for outcome in outcomes if outcome.end])
    errors = [o for o in outcomes if o.status == "error"]
    timeouts = sum(o.status == "timeout" for o in outcomes)
    metrics.add_mean("reward/error_fraction", len(errors), len(outcomes))
    metrics.add_mean("reward/timeout_fraction", timeouts, len(outcomes))
    parts = mesh.gather_dp(
        (len(errors), timeouts, len(outcomes), errors[0].detail if errors else "")
    )
    bad = sum(e + t for e, t, _, _ in parts)
    total = sum(n for _, _, n, _ in parts)
    if bad > train.max_bad_fraction * total:
        detail = next((text for *_, text in parts if text), "timeouts")
        raise RunStopped(
            f"{bad} of {total} rewards of this step are errors or timeouts, more than "
            f"train.max_bad_fraction {train.max_bad_fraction}; first: {detail}"
        )


def _environment_metrics(
    metrics: Metrics, samples: Sequence[Sample], played: Sequence[Outcome]
) -> None:
    """Adds how the rollouts with an environment ended, and the tokens of policy and environment per
    rollout."""
    for end in ENDS:
        number = sum(outcome.end == end for outcome in played)
        metrics.add_mean(f"environment/{end}_fraction", number, len(played))
    policy = environment = 0
    for sample in samples:
        sampled = len(sample.token_ids)
        if sample.loss_mask is not None:
            sampled = int(sample.loss_mask.sum())
        policy += sampled
        environment += len(sample.token_ids) - sampled
        if sample.prompt_ids is not None:
            environment += len(sample.prompt_ids)
    metrics.add_mean("environment/policy_tokens_mean", policy, len(played))
    metrics.add_mean("environment/said_tokens_mean", environment, len(played))
