"""The choice of the groups that a step trains on, and what is measured of them before any tensor is built.

Without dynamic sampling they are the groups of the next prompts. With it (DAPO, arXiv 2503.14476, section 3.2) they are
the next groups that teach something. Complete groups beyond the batch are the surplus: they come first in the next
step, sampled one step earlier, which the mismatch metrics and corrections see. Every decision is on all-reduced values.
"""

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch

from megagrpo.algo.dynamic_sampling import Selection, select_groups
from megagrpo.algo.reward_shaping import overlong_penalty
from megagrpo.config.schema import ExperimentConfig, RewardConfig, TrainConfig
from megagrpo.data.prompts import PromptSet
from megagrpo.mesh import Mesh, RunStopped
from megagrpo.monitor.metrics import Metrics
from megagrpo.types import Prompt, Refresh, RolloutGroup, TrainState


class GroupSource(Protocol):
    """Samples and grades responses, as rollout/source.py does."""

    def next(
        self, step: int, prompts: Sequence[Prompt], version: int, refresh: Refresh, attempt: int
    ) -> list[RolloutGroup]:
        """Collective. Returns this rank's share of the groups; a group's id is its prompt's place in `prompts`."""
        ...

    def begin(
        self, batch: int, places: Sequence[int], prompts: Sequence[Prompt], version: int, oldest: int = 0
    ) -> None:
        """Begins to sample what `next` will ask for as step `batch`, or `first`; does nothing where that has begun."""
        ...

    def first(
        self, wanted: int, must: AbstractSet[int], version: int, refresh: Refresh
    ) -> tuple[list[int], list[RolloutGroup]]:
        """Collective. Returns the places of the groups that are finished first, and this rank's share of them."""
        ...

    def newly_discarded(self) -> int:
        """Returns the tokens that came to this rank since the last call, and are of no sample."""
        ...


@dataclass(frozen=True)
class StepGroups:
    """Holds what one step takes from the source, and where the next one goes on."""

    groups: list[RolloutGroup]  # this rank's, ids dense over all ranks: 0 .. num_prompts_per_step - 1
    data_cursor: int  # prompts consumed so far, over all epochs
    surplus: list[RolloutGroup]  # this rank's groups for the next step, ids dense over all ranks
    deferred: list[tuple[int, int]] = field(default_factory=list)  # as in TrainState


def next_groups(
    source: GroupSource,
    prompts: PromptSet,
    state: TrainState,
    config: ExperimentConfig,
    mesh: Mesh,
    refresh: Refresh,
    metrics: Metrics,
    steps_left: int = 1,
) -> StepGroups:
    """Collective. Returns this rank's groups of the step that `state` is about to take; `state` stays as it is.

    With rollout.max_staleness it first begins the batches of coming steps, of which there are `steps_left` with this
    one. Raises RunStopped on every rank when max_num_gen_batches batches hold too few groups whose responses differ.
    """
    if config.rollout.extra_groups or state.deferred:
        return _first_groups(source, prompts, state, config, refresh, metrics, steps_left)
    wanted, cursor = config.train.num_prompts_per_step, state.data_cursor
    options, algorithm = config.algorithm.dynamic_sampling, config.algorithm
    now = cursor // wanted  # batches are counted over the run: which step will take one is not known beforehand
    # A step takes one batch at least, so that what is begun at version v is taken by version v + ahead at the latest.
    # What dynamic sampling leaves over is trained on one step later (its max_staleness is 0, or 2 and more).
    ahead = max(config.rollout.max_staleness - (options is not None), 0)

    def places(later: int) -> range:
        return range(cursor + later * wanted, cursor + (later + 1) * wanted)

    def batch(later: int) -> list[Prompt]:
        return prompts.batch(places(later).start, wanted, config.seed)

    def begin(first: int) -> None:
        """Begins a batch for each of the next `ahead` steps, the first of them the one `first` after this step's."""
        for number in range(min(ahead, steps_left - 1)):
            later, oldest = first + number, state.step + 1 + number - ahead
            source.begin(now + later, places(later), batch(later), state.step, oldest)

    def generate(attempt: int) -> list[RolloutGroup]:
        if not ahead:
            return source.next(state.step, batch(attempt), state.step, refresh, attempt)
        source.begin(now + attempt, places(attempt), batch(attempt), state.step, oldest=state.step - ahead)
        return source.next(now + attempt, batch(attempt), state.step, refresh, 0)

    if ahead and not algorithm.needs_greedy_response:  # before it waits for the first: engines are never empty
        source.begin(now, places(0), batch(0), state.step, oldest=state.step - ahead)
        begin(1)
    if options is None:
        groups, num_taken, surplus = generate(0), 1, state.surplus
    else:
        groups, num_taken, surplus = _choose(generate, state.surplus, config, mesh, metrics)
    if algorithm.needs_greedy_response:  # greedy requests would change what others draw beside them
        begin(num_taken)
    return StepGroups(groups, cursor + num_taken * wanted, surplus)


def _first_groups(
    source: GroupSource,
    prompts: PromptSet,
    state: TrainState,
    config: ExperimentConfig,
    refresh: Refresh,
    metrics: Metrics,
    steps_left: int,
) -> StepGroups:
    """Collective. Returns the groups that are finished first of rollout.extra_groups more than the step takes.

    Those that were left behind are among them, and are waited for where that was max_deferrals times. At the end of the
    run nothing is left behind.
    """
    wanted, limit = config.train.num_prompts_per_step, config.rollout.max_deferrals
    times = dict(state.deferred)
    open_places = min(wanted + config.rollout.extra_groups, wanted * steps_left)
    end = state.data_cursor + max(open_places - len(times), 0)
    places = [*times, *range(state.data_cursor, end)]
    source.begin(
        state.step,
        places,
        [prompts.batch(place, 1, config.seed)[0] for place in places],
        state.step,
        oldest=state.step - config.rollout.max_lag,
    )
    must = {place for place, deferrals in times.items() if deferrals >= limit}
    taken, groups = source.first(wanted, must, state.step, refresh)
    # How much longer those are that were left behind tells how short the others would have been without them.
    for kind, was_left in (("on_time", False), ("deferred", True)):
        samples = [sample for g in groups if (taken[g.group_id] in times) == was_left for sample in g.samples]
        tokens = sum(len(sample.token_ids) for sample in samples)
        metrics.add_mean(f"extra_groups/length_{kind}_mean", tokens, len(samples))
    metrics.add_mean("extra_groups/deferrals_mean", sum(times.get(taken[g.group_id], 0) for g in groups), len(groups))
    metrics.add_sum("extra_groups/discarded_tokens", source.newly_discarded())
    left = [(place, times.get(place, 0) + 1) for place in places if place not in set(taken)]
    metrics.add_max("extra_groups/left_behind", len(left))
    return StepGroups(groups, end, state.surplus, left)


def _choose(
    generate: Callable[[int], list[RolloutGroup]],
    carried: Sequence[RolloutGroup],
    config: ExperimentConfig,
    mesh: Mesh,
    metrics: Metrics,
) -> tuple[list[RolloutGroup], int, list[RolloutGroup]]:
    """Collective. Dynamic sampling: returns this rank's chosen groups, the batches that it took, and the surplus.

    generate: this rank's groups of a further batch, counted from 0.
    """
    options, wanted = config.algorithm.dynamic_sampling, config.train.num_prompts_per_step
    assert options is not None
    held, num_held = list(carried), _sum(len(carried), mesh)
    attempt = 0
    while len((selection := _select(held, num_held, config, mesh)).chosen) < wanted:
        if attempt == options.max_num_gen_batches:
            raise RunStopped(_too_few_groups(held, num_held, selection, config, mesh))
        held += [replace(group, group_id=num_held + group.group_id) for group in generate(attempt)]
        num_held, attempt = num_held + wanted, attempt + 1
    _measure_selection(metrics, held, len(carried), attempt, selection)
    return _renumbered(held, selection.chosen), attempt, _renumbered(held, selection.surplus)


def gather_surplus(surplus: Sequence[RolloutGroup], mesh: Mesh) -> list[RolloutGroup]:
    """Collective over data-parallel ranks.

    Returns all ranks' surplus by group id on the main rank, for a checkpoint.
    """
    everyone = [group for part in mesh.gather_dp_to_main(list(surplus)) for group in part]
    return sorted(everyone, key=lambda group: group.group_id)


def deal_surplus(surplus: Sequence[RolloutGroup], mesh: Mesh) -> list[RolloutGroup]:
    """Returns this rank's share of a whole surplus, whatever number of ranks gathered it."""
    first, last = (len(surplus) * place // mesh.dp_size for place in (mesh.dp_rank, mesh.dp_rank + 1))
    return list(surplus[first:last])


def _select(held: Sequence[RolloutGroup], num_held: int, config: ExperimentConfig, mesh: Mesh) -> Selection:
    """Collective over data-parallel ranks. Sorts the groups of all ranks into chosen, surplus and dropped."""
    algorithm = config.algorithm
    assert algorithm.dynamic_sampling is not None
    rows = [(group, *pair) for group in held for pair in zip(group.samples, group.outcomes, strict=True)]
    metric = torch.tensor([outcome.value if outcome.ok else 0.0 for *_, outcome in rows], dtype=torch.float64)
    if algorithm.dynamic_sampling.metric == "shaped_reward":
        metric = metric * algorithm.reward.scale + algorithm.reward.shift
        lengths = torch.tensor([len(sample.token_ids) for _, sample, _ in rows], dtype=torch.int64)
        metric += overlong_penalty(lengths, config.sampling.max_response_tokens, algorithm.reward.overlong)
    ids = torch.tensor([group.group_id for group, *_ in rows], dtype=torch.int64)
    valid = torch.tensor(
        [outcome.ok and (g.greedy_outcome is None or g.greedy_outcome.ok) for g, _, outcome in rows], dtype=torch.bool
    )
    metric, ids, valid = (tensor.to(mesh.device) for tensor in (metric, ids, valid))
    return select_groups(metric, ids, num_held, valid, config.train.num_prompts_per_step, mesh.reduce)


def _renumbered(groups: Sequence[RolloutGroup], ids: Sequence[int]) -> list[RolloutGroup]:
    """Returns those of `groups` whose id is in `ids`, with their place there as their new id."""
    place = {group_id: i for i, group_id in enumerate(ids)}
    return [replace(group, group_id=place[group.group_id]) for group in groups if group.group_id in place]


def _measure_selection(
    metrics: Metrics, held: Sequence[RolloutGroup], num_carried: int, num_batches: int, selection: Selection
) -> None:
    """Adds dynamic_sampling/*, in groups over all ranks.

    generated_reward_mean is over all that was generated in this step; the other rewards of a step are of the chosen
    alone.
    """
    dropped, surplus = set(selection.dropped), set(selection.surplus)
    metrics.add_sum("dynamic_sampling/generated", len(held) - num_carried)
    metrics.add_sum("dynamic_sampling/carried", num_carried)
    metrics.add_sum("dynamic_sampling/dropped", sum(group.group_id in dropped for group in held))
    metrics.add_sum("dynamic_sampling/surplus", sum(group.group_id in surplus for group in held))
    metrics.add_max("dynamic_sampling/num_gen_batches", num_batches)
    values = [outcome.value for group in held[num_carried:] for outcome in group.outcomes if outcome.ok]
    metrics.add_mean("dynamic_sampling/generated_reward_mean", sum(values), len(values))


def _too_few_groups(
    held: Sequence[RolloutGroup], num_held: int, selection: Selection, config: ExperimentConfig, mesh: Mesh
) -> str:
    """Collective over data-parallel ranks.

    Returns the message for the end of a run that finds too little to learn from.
    """
    options, wanted = config.algorithm.dynamic_sampling, config.train.num_prompts_per_step
    assert options is not None
    outcomes = [outcome for group in held for outcome in group.outcomes]
    scored, total = (_sum(n, mesh) for n in (sum(outcome.ok for outcome in outcomes), len(outcomes)))
    return (
        f"dynamic sampling: {options.max_num_gen_batches} batches of {wanted} prompts "
        f"(algorithm.dynamic_sampling.max_num_gen_batches) gave {len(selection.chosen)} of {wanted} groups whose "
        f"responses differ in {options.metric}; {len(selection.dropped)} of {num_held} groups were dropped, and "
        f"{total - scored} of {total} responses could not be scored. The prompts are too easy or too hard for this "
        "model: take others, raise train.group_size or max_num_gen_batches"
    )


def _sum(number: int, mesh: Mesh) -> int:
    """Collective over data-parallel ranks."""
    return int(mesh.reduce(torch.tensor(number, device=mesh.device), "sum"))


def grader_metrics(metrics: Metrics, groups: Sequence[RolloutGroup], reward: RewardConfig) -> None:
    """Adds, for each of several graders, the mean of its scores before weights, and the fraction that it failed on.

    Both are over the responses that it graded: data.grader_key may choose among the graders.
    """
    parts = [outcome.parts for group in groups for outcome in group.outcomes]
    for name in [entry.short_name for entry in reward.entries] if reward.has_parts else ():
        of_grader = [outcomes[name] for outcomes in parts if name in outcomes]
        scores = [outcome.value for outcome in of_grader if outcome.ok]
        metrics.add_mean(f"grader/{name}_mean", sum(scores), len(scores))
        metrics.add_mean(f"grader/{name}_failed_fraction", len(of_grader) - len(scores), len(of_grader))


def rollout_metrics(metrics: Metrics, groups: Sequence[RolloutGroup], mesh: Mesh, train: TrainConfig) -> None:
    """Collective over data-parallel ranks. Adds response lengths (tokens), truncation and grader failures of a step.

    Raises RunStopped on every rank when more than train.max_bad_fraction of the step's rewards are errors or timeouts.
    """
    samples = [sample for group in groups for sample in group.samples]
    outcomes = [outcome for group in groups for outcome in group.outcomes]
    lengths = [len(sample.token_ids) for sample in samples]
    metrics.add_mean("response/length_mean", sum(lengths), len(samples))
    metrics.add_max("response/length_max", max(lengths, default=0))
    metrics.add_mean("response/truncated_fraction", sum(s.finish_reason == "length" for s in samples), len(samples))
    # Only responses that may call a tool have one.
    masks = [sample.loss_mask for sample in samples if sample.loss_mask is not None]
    of_tools = [len(mask) - int(mask.sum()) for mask in masks]
    metrics.add_mean("response/tool_token_fraction", sum(of_tools), sum(map(len, masks)))
    metrics.add_mean("response/tool_use_fraction", sum(number > 0 for number in of_tools), len(masks))
    errors = [o for o in outcomes if o.status == "error"]
    timeouts = [o for o in outcomes if o.status == "timeout"]
    metrics.add_mean("reward/error_fraction", len(errors), len(samples))
    metrics.add_mean("reward/timeout_fraction", len(timeouts), len(samples))
    parts = mesh.gather_dp((len(errors), len(timeouts), len(samples), errors[0].detail if errors else ""))
    bad, total = sum(e + t for e, t, _, _ in parts), sum(n for _, _, n, _ in parts)
    if bad > train.max_bad_fraction * total:
        detail = next((text for *_, text in parts if text), "timeouts")
        raise RunStopped(
            f"{bad} of {total} rewards of this step are errors or timeouts, more than train.max_bad_fraction "
            f"{train.max_bad_fraction}; first: {detail}"
        )
