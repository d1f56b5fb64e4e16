"""Selects the groups that a step trains on, and measures them.

Without dynamic sampling they are the groups of the next prompts. With it (DAPO, arXiv 2503.14476,
section 3.2) they are the next groups whose rewards differ. Complete groups beyond the batch are the
surplus: they come first in the next step, sampled one step earlier, which the mismatch metrics and
corrections see. Every decision is on all-reduced values.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megagrpo.algo.dynamic_sampling import Selection, select_groups
from megagrpo.algo.reward_shaping import overlong_penalty
from megagrpo.config.schema import ExperimentConfig, RewardConfig, TrainConfig
from megagrpo.data.prompts import PromptSet
from megagrpo.mesh import Mesh, RunStopped
from megagrpo.monitor.metrics import Metrics
from megagrpo.rollout.agents.environments import ENDS
from megagrpo.rollout.source import RolloutSource
from megagrpo.types import Outcome, Prompt, RolloutGroup, Sample, TrainState


@dataclass(frozen=True)
class StepGroups:
    """The groups of one step, and where the next one continues."""

    groups: list[RolloutGroup]  # this rank's
    data_cursor: int  # prompts consumed so far, over all epochs
    surplus: list[RolloutGroup]  # this rank's groups for the next step


@dataclass(frozen=True)
class GroupChoice:
    """Chooses the groups of each step from those that `source` samples of `prompts`."""

    source: RolloutSource
    prompts: PromptSet
    config: ExperimentConfig
    mesh: Mesh

    def next_groups(self, state: TrainState, metrics: Metrics, steps_left: int = 1) -> StepGroups:
        """Collective. Returns this rank's groups of the step after `state`, which stays as it is.

        With rollout.max_staleness it first starts the batches of coming steps; steps_left: this
        step included. Raises RunStopped on every rank when max_num_gen_batches batches hold too few
        groups whose responses differ.
        """
        config, source, wanted = self.config, self.source, self.config.train.num_prompts_per_step
        options, algorithm = config.algorithm.dynamic_sampling, config.algorithm
        # Batches are counted over the run: which step will consume one is not known beforehand.
        cursor, now = state.data_cursor, state.data_cursor // wanted
        # A step consumes one batch at least, so a batch started at version v is consumed by version
        # v + ahead at the latest. The surplus of dynamic sampling is one step older (its
        # max_staleness is 0, or 2 and more).
        ahead = max(config.rollout.max_staleness - (options is not None), 0)

        def batch(later: int) -> list[Prompt]:
            return self.prompts.batch(cursor + later * wanted, wanted, config.seed)

        def start(later: int, oldest: int) -> None:
            first_id = cursor + later * wanted
            source.start(
                now + later, range(first_id, first_id + wanted), batch(later), state.step, oldest
            )

        def start_ahead(first: int) -> None:
            """Starts sampling the next `ahead` batches, beginning `first` batches from now."""
            for number in range(min(ahead, steps_left - 1)):
                start(first + number, state.step + 1 + number - ahead)

        def generate(attempt: int) -> list[RolloutGroup]:
            first_id = cursor + attempt * wanted
            if not ahead:
                return source.next(state.step, batch(attempt), state.step, first_id, attempt)
            start(attempt, state.step - ahead)
            return source.next(now + attempt, batch(attempt), state.step, first_id, 0)

        if (
            ahead and not algorithm.needs_greedy_response
        ):  # before it waits for the first: engines are never empty
            start(0, state.step - ahead)
            start_ahead(1)
        if options is None:
            groups, num_consumed, surplus = generate(0), 1, state.surplus
        else:
            groups, num_consumed, surplus = self._choose(generate, state.surplus, metrics)
        if (
            algorithm.needs_greedy_response
        ):  # greedy requests would change what others draw in the same engine
            start_ahead(num_consumed)
        source.add_metrics(metrics)
        return StepGroups(groups, cursor + num_consumed * wanted, surplus)

    def _choose(
        self,
        generate: Callable[[int], list[RolloutGroup]],
        carried: Sequence[RolloutGroup],
        metrics: Metrics,
    ) -> tuple[list[RolloutGroup], int, list[RolloutGroup]]:
        """Collective. Dynamic sampling: returns this rank's chosen groups, the batches consumed,
        and the surplus.

        generate: this rank's groups of a further batch, counted from 0.
        """
        options, wanted = (
            self.config.algorithm.dynamic_sampling,
            self.config.train.num_prompts_per_step,
        )
        assert options is not None
        groups, attempt = list(carried), 0
        while len((selection := self._select(groups)).chosen) < wanted:
            if attempt == options.max_num_gen_batches:
                raise RunStopped(_too_few_groups(groups, selection, self.config, self.mesh))
            groups += generate(attempt)
            attempt += 1
        _measure_selection(metrics, groups, len(carried), attempt, selection)
        chosen, surplus = set(selection.chosen), set(selection.surplus)
        return (
            [g for g in groups if g.group_id in chosen],
            attempt,
            [g for g in groups if g.group_id in surplus],
        )

    def _select(self, groups: Sequence[RolloutGroup]) -> Selection:
        """Collective over data-parallel ranks. Returns the chosen, surplus and dropped ids of all
        ranks' groups."""
        algorithm, mesh = self.config.algorithm, self.mesh
        assert algorithm.dynamic_sampling is not None
        # Ascending, so groups carried over from the step before come first.
        all_ids = sorted(
            group_id for part in mesh.gather_dp([g.group_id for g in groups]) for group_id in part
        )
        index = {group_id: i for i, group_id in enumerate(all_ids)}
        rows = [
            (group, *pair)
            for group in groups
            for pair in zip(group.rollouts, group.outcomes, strict=True)
        ]
        metric = torch.tensor(
            [outcome.value if outcome.ok else 0.0 for *_, outcome in rows], dtype=torch.float64
        )
        if algorithm.dynamic_sampling.metric == "shaped_reward":
            metric = metric * algorithm.reward.scale + algorithm.reward.shift
            lengths = torch.tensor(
                [sum(len(s.token_ids) for s in of) for _, of, _ in rows], dtype=torch.int64
            )
            metric += overlong_penalty(
                lengths, self.config.sampling.max_response_tokens, algorithm.reward.overlong
            )
        indices = torch.tensor([index[group.group_id] for group, *_ in rows], dtype=torch.int64)
        valid = torch.tensor(
            [o.ok and (g.greedy_outcome is None or g.greedy_outcome.ok) for g, _, o in rows],
            dtype=torch.bool,
        )
        metric, indices, valid = (tensor.to(mesh.device) for tensor in (metric, indices, valid))
        wanted = self.config.train.num_prompts_per_step
        by_index = select_groups(metric, indices, len(all_ids), valid, wanted, mesh.reduce)
        parts = (by_index.chosen, by_index.surplus, by_index.dropped)
        return Selection(*([all_ids[i] for i in part] for part in parts))


def gather_surplus(surplus: Sequence[RolloutGroup], mesh: Mesh) -> list[RolloutGroup]:
    """Collective over data-parallel ranks. Returns all ranks' surplus by id, on the main rank, for
    a checkpoint."""
    everyone = [group for part in mesh.gather_dp_to_main(list(surplus)) for group in part]
    return sorted(everyone, key=lambda group: group.group_id)


def deal_surplus(surplus: Sequence[RolloutGroup], mesh: Mesh) -> list[RolloutGroup]:
    """Returns this rank's share of a whole surplus, for any number of ranks."""
    first, last = (len(surplus) * rank // mesh.dp_size for rank in (mesh.dp_rank, mesh.dp_rank + 1))
    return list(surplus[first:last])


def _measure_selection(
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
    dropped, surplus = set(selection.dropped), set(selection.surplus)
    metrics.add_sum("dynamic_sampling/generated", len(groups) - num_carried)
    metrics.add_sum("dynamic_sampling/carried", num_carried)
    metrics.add_sum("dynamic_sampling/dropped", sum(group.group_id in dropped for group in groups))
    metrics.add_sum("dynamic_sampling/surplus", sum(group.group_id in surplus for group in groups))
    metrics.add_max("dynamic_sampling/num_gen_batches", num_batches)
    values = [
        outcome.value for group in groups[num_carried:] for outcome in group.outcomes if outcome.ok
    ]
    metrics.add_mean("dynamic_sampling/generated_reward_mean", sum(values), len(values))


def _too_few_groups(
    groups: Sequence[RolloutGroup], selection: Selection, config: ExperimentConfig, mesh: Mesh
) -> str:
    """Collective over data-parallel ranks. Returns the error of a step with too few groups to learn
    from."""
    options, wanted = config.algorithm.dynamic_sampling, config.train.num_prompts_per_step
    assert options is not None
    outcomes = [outcome for group in groups for outcome in group.outcomes]
    num_groups = len(selection.chosen) + len(selection.surplus) + len(selection.dropped)
    counts = torch.tensor(
        [sum(outcome.ok for outcome in outcomes), len(outcomes)], device=mesh.device
    )
    scored, total = mesh.reduce(counts, "sum").tolist()
    return (
        f"dynamic sampling: {options.max_num_gen_batches} batches of {wanted} prompts "
        f"(algorithm.dynamic_sampling.max_num_gen_batches) gave {len(selection.chosen)} of "
        f"{wanted} groups whose "
        f"responses differ in {options.metric}; {len(selection.dropped)} of {num_groups} groups "
        "were dropped, and "
        f"{total - scored} of {total} responses could not be scored. The prompts are too easy or "
        "too hard for this "
        "model: take others, raise train.group_size or max_num_gen_batches"
    )


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
            re.sub(r"[^a-z0-9_]", "_", source.lower()),
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
    bad, total = sum(e + t for e, t, _, _ in parts), sum(n for _, _, n, _ in parts)
    if bad > train.max_bad_fraction * total:
        detail = next((text for *_, text in parts if text), "timeouts")
        raise RunStopped(
            f"{bad} of {total} rewards of this step are errors or timeouts, more than "
            "train.max_bad_fraction "
            f"{train.max_bad_fraction}; first: {detail}"
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
