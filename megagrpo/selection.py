"""Which groups a step trains on: those of the next prompts, or under dynamic sampling (DAPO) only those that teach something.

arXiv 2503.14476, section 3.2. Complete groups beyond the batch are kept in TrainState.surplus and come first in the next step;
they were sampled one step earlier, which the mismatch metrics and corrections see. Every decision is on all-reduced values.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import torch

from megagrpo.algo.dynamic_sampling import Selection, select_groups
from megagrpo.algo.reward_shaping import overlong_penalty
from megagrpo.config.schema import ExperimentConfig, TrainConfig
from megagrpo.data.prompts import PromptSet
from megagrpo.mesh import Mesh, RunStopped
from megagrpo.monitor.metrics import Metrics
from megagrpo.types import Prompt, RolloutGroup, TrainState

Refresh = Callable[[Sequence[str]], None]


class Source(Protocol):
    def next(
        self, step: int, prompts: Sequence[Prompt], version: int, refresh: Refresh, attempt: int
    ) -> list[RolloutGroup]: ...


def next_groups(
    source: Source,
    prompts: PromptSet,
    state: TrainState,
    config: ExperimentConfig,
    mesh: Mesh,
    refresh: Refresh,
    metrics: Metrics,
) -> list[RolloutGroup]:
    """This rank's groups of the step, their ids dense over all ranks. Moves state.data_cursor; collective over the world.

    Raises RunStopped on every rank when max_num_gen_batches batches hold too few groups whose responses differ.
    """
    wanted, options = config.train.num_prompts_per_step, config.algorithm.dynamic_sampling

    def generate(attempt: int) -> list[RolloutGroup]:
        batch = prompts.batch(state.data_cursor, wanted, config.seed)
        state.data_cursor += wanted
        return source.next(state.step, batch, state.step, refresh, attempt)

    if options is None:
        return generate(0)
    held, num_held = list(state.surplus), _total(len(state.surplus), mesh)
    carried, attempt = len(held), 0
    while len((selection := _select(held, num_held, config, mesh)).chosen) < wanted:
        if attempt == options.max_num_gen_batches:
            raise RunStopped(_too_few(held, num_held, selection, config, mesh))
        held += [replace(group, group_id=num_held + group.group_id) for group in generate(attempt)]
        num_held, attempt = num_held + wanted, attempt + 1
    state.surplus = _renumbered(held, selection.surplus)
    _measure(metrics, held, carried, attempt, selection)
    return _renumbered(held, selection.chosen)


def gather_surplus(surplus: Sequence[RolloutGroup], mesh: Mesh) -> list[RolloutGroup]:
    """On the main rank the surplus of all ranks, by group id, for a checkpoint. Collective over data-parallel ranks."""
    return sorted(
        (group for part in mesh.gather_dp_to_main(list(surplus)) for group in part), key=lambda group: group.group_id
    )


def deal_surplus(surplus: Sequence[RolloutGroup], mesh: Mesh) -> list[RolloutGroup]:
    """This rank's share of a whole surplus, whatever number of ranks gathered it."""
    first, last = (len(surplus) * place // mesh.dp_size for place in (mesh.dp_rank, mesh.dp_rank + 1))
    return list(surplus[first:last])


def _select(held: Sequence[RolloutGroup], num_held: int, config: ExperimentConfig, mesh: Mesh) -> Selection:
    algorithm = config.algorithm
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
    """Those of `groups` whose id is in `ids`, with their place there as new id."""
    place = {group_id: i for i, group_id in enumerate(ids)}
    return [replace(group, group_id=place[group.group_id]) for group in groups if group.group_id in place]


def _measure(metrics: Metrics, held: Sequence[RolloutGroup], carried: int, attempts: int, selection: Selection) -> None:
    """Groups over all ranks; the rewards are those of all that was generated, where the other metrics see the chosen alone."""
    dropped, surplus = set(selection.dropped), set(selection.surplus)
    metrics.add_sum("dynamic_sampling/generated", len(held) - carried)
    metrics.add_sum("dynamic_sampling/carried", carried)
    metrics.add_sum("dynamic_sampling/dropped", sum(group.group_id in dropped for group in held))
    metrics.add_sum("dynamic_sampling/surplus", sum(group.group_id in surplus for group in held))
    metrics.add_max("dynamic_sampling/num_gen_batches", attempts)
    values = [outcome.value for group in held[carried:] for outcome in group.outcomes if outcome.ok]
    metrics.add_mean("dynamic_sampling/generated_reward_mean", sum(values), len(values))


def _too_few(
    held: Sequence[RolloutGroup], num_held: int, selection: Selection, config: ExperimentConfig, mesh: Mesh
) -> str:
    options, wanted = config.algorithm.dynamic_sampling, config.train.num_prompts_per_step
    outcomes = [outcome for group in held for outcome in group.outcomes]
    scored, total = (_total(n, mesh) for n in (sum(outcome.ok for outcome in outcomes), len(outcomes)))
    return (
        f"dynamic sampling: {options.max_num_gen_batches} batches of {wanted} prompts (algorithm.dynamic_sampling.max_num_gen_batches) "
        f"gave {len(selection.chosen)} of {wanted} groups whose responses differ in {options.metric}; {len(selection.dropped)} of "
        f"{num_held} groups were dropped, and {total - scored} of {total} responses could not be scored. The prompts are too easy or "
        "too hard for this model: take others, raise train.group_size or max_num_gen_batches"
    )


def _total(number: int, mesh: Mesh) -> int:
    return int(mesh.reduce(torch.tensor(number, device=mesh.device), "sum"))


def rollout_metrics(metrics: Metrics, groups: Sequence[RolloutGroup], mesh: Mesh, train: TrainConfig) -> None:
    """Add response lengths, truncation and grader failures. Collective over data-parallel ranks.

    Raises RuntimeError on every rank when more than train.max_bad_fraction of the step's rewards are errors or timeouts.
    """
    samples = [sample for group in groups for sample in group.samples]
    outcomes = [outcome for group in groups for outcome in group.outcomes]
    lengths = [len(sample.token_ids) for sample in samples]
    metrics.add_mean("response/length_mean", sum(lengths), len(samples))
    metrics.add_max("response/length_max", max(lengths, default=0))
    metrics.add_mean("response/truncated_fraction", sum(s.finish_reason == "length" for s in samples), len(samples))
    masks = [
        sample.loss_mask for sample in samples if sample.loss_mask is not None
    ]  # of responses that may call a tool
    metrics.add_mean("response/tool_token_fraction", sum(mask.count(0) for mask in masks), sum(map(len, masks)))
    metrics.add_mean("response/tool_use_fraction", sum(0 in mask for mask in masks), len(masks))
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
