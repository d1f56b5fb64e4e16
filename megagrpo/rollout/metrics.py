"""Metrics of a step's groups: responses, rewards, graders, sources, environments, and what dynamic
sampling chose."""

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

    generated_reward_mean is over all groups generated in this step; a step's other rewards are of
    the chosen ones only.
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
    """Adds, for each of several graders, its mean score before weights and the fraction of its
    failures.

    Both are over the responses that it graded: data.grader_key may choose among the graders.
    """
    parts = [outcome.parts for group in groups for outcome in group.outcomes]
    for name in [entry.short_name for entry in reward.entries] if reward.has_parts else ():
        of_grader = [outcomes[name] for outcomes in parts if name in outcomes]
        scores = [outcome.value for outcome in of_grader if outcome.ok]
        metrics.add_mean(f"grader/{name}_mean", sum(scores), len(scores))
        metrics.add_mean(
            f"grader/{name}_failed_fraction", len(of_grader) - len(scores), len(of_grader)
        )


def by_source(
    groups: Sequence[RolloutGroup], sources: Sequence[str]
) -> Iterator[tuple[str, list[RolloutGroup]]]:
    """Yields the name of each source, as metrics can spell it, and its groups."""
    for source in sources:
        yield (
            metric_name(source),
            [group for group in groups if group.prompt.source == source],
        )


def source_metrics(
    metrics: Metrics, groups: Sequence[RolloutGroup], sources: Sequence[str]
) -> None:
    """Adds, for each source of prompts, its share of the groups, and its mean score and response
    length in tokens."""
    for name, of_source in by_source(groups, sources):
        scores = [outcome.value for group in of_source for outcome in group.outcomes if outcome.ok]
        lengths = [len(sample.token_ids) for group in of_source for sample in group.samples]
        metrics.add_mean(f"source/{name}_fraction", len(of_source), len(groups))
        metrics.add_mean(f"source/{name}_reward_mean", sum(scores), len(scores))
        metrics.add_mean(f"source/{name}_length_mean", sum(lengths), len(lengths))


def curriculum_metrics(metrics: Metrics, shown: Sequence[GroupResult], pools: np.ndarray) -> None:
    """Adds, for each pool of rows, their number, and the share and mean score of the groups of its
    rows that were sampled for this step.

    shown: this rank's. pools: of each row before the step.
    """
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
    of_tools = [len(mask) - int(mask.sum()) for mask in masks]
    metrics.add_mean("response/tool_token_fraction", sum(of_tools), sum(map(len, masks)))
    metrics.add_mean(
        "response/tool_use_fraction", sum(number > 0 for number in of_tools), len(masks)
    )
    turns = sum(int((mask & ~np.append(False, mask[:-1])).sum()) for mask in masks)
    metrics.add_mean("response/turns_mean", turns, len(outcomes) if masks else 0)
    _environment_metrics(metrics, samples, [outcome for outcome in outcomes if outcome.end])
    errors = [o for o in outcomes if o.status == "error"]
    timeouts = [o for o in outcomes if o.status == "timeout"]
    metrics.add_mean("reward/error_fraction", len(errors), len(outcomes))
    metrics.add_mean("reward/timeout_fraction", len(timeouts), len(outcomes))
    parts = mesh.gather_dp(
        (len(errors), len(timeouts), len(outcomes), errors[0].detail if errors else "")
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
    """Adds what ended the rollouts with an environment, and the tokens of policy and environment in
    one of them."""
    for end in ENDS:
        metrics.add_mean(
            f"environment/{end}_fraction",
            sum(outcome.end == end for outcome in played),
            len(played),
        )
    own = sum(len(s.token_ids) if s.loss_mask is None else int(s.loss_mask.sum()) for s in samples)
    said = (
        sum(len(s.token_ids) + (0 if s.prompt_ids is None else len(s.prompt_ids)) for s in samples)
        - own
    )
    metrics.add_mean("environment/policy_tokens_mean", own, len(played))
    metrics.add_mean("environment/said_tokens_mean", said, len(played))
