"""Selects the groups that a step trains on.

Without dynamic sampling they are the groups of the next prompts. With it (DAPO, arXiv 2503.14476,
section 3.2) they are the next groups whose rewards differ. Complete groups beyond the batch are the
surplus: they come first in the next step, sampled one step earlier, which the mismatch metrics and
corrections see. Every decision is on all-reduced values.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from megagrpo.algo.dynamic_sampling import Selection, select_groups
from megagrpo.algo.reward_shaping import overlong_penalty
from megagrpo.config.schema import ExperimentConfig
from megagrpo.data.curriculum import Curriculum
from megagrpo.data.prompts import PromptSet
from megagrpo.mesh import Mesh, RunStopped
from megagrpo.monitor.metrics import Metrics
from megagrpo.rollout.group_metrics import curriculum_metrics, selection_metrics
from megagrpo.rollout.source import RolloutSource
from megagrpo.types import Prompt, RolloutGroup, RowResults, TrainState


@dataclass(frozen=True)
class StepGroups:
    """The groups of one step, and where the next one continues."""

    groups: list[RolloutGroup]  # this rank's
    data_cursor: int  # prompts consumed so far, over all epochs
    surplus: list[RolloutGroup]  # this rank's groups for the next step
    curriculum: RowResults | None = None  # of the next step


@dataclass(frozen=True)
class GroupChoice:
    """Chooses the groups of each step from those that `source` samples of `prompts`."""

    source: RolloutSource
    prompts: PromptSet
    config: ExperimentConfig
    mesh: Mesh
    curriculum: Curriculum | None = None

    def next_groups(self, state: TrainState, metrics: Metrics, steps_left: int = 1) -> StepGroups:
        """Collective. Returns this rank's groups of the step after `state`, which stays as it is;
        only rows drawn by a curriculum are added to it.

        With rollout.max_staleness it first starts the batches of coming steps; steps_left: this
        step included. Raises RunStopped on every rank when max_num_gen_batches batches hold too few
        groups whose responses differ.
        """
        algorithm = self.config.algorithm
        source = self.source
        wanted = self.config.train.num_prompts_per_step
        cursor = state.data_cursor
        ahead = self._num_ahead
        generated: list[RolloutGroup] = []

        def generate(attempt: int) -> list[RolloutGroup]:
            prompts = self._prompts(state, attempt)
            first_id = cursor + attempt * wanted
            if ahead:
                self._start(state, attempt, oldest=state.step - ahead)
                found = source.next(cursor // wanted + attempt, prompts, state.step, first_id)
            else:
                found = source.next(state.step, prompts, state.step, first_id, attempt)
            generated.extend(found)
            return found

        # Before it waits for the first batch: engines are never empty. But greedy requests would
        # change what others draw in the same engine.
        if ahead and not algorithm.needs_greedy_response:
            self._start(state, 0, oldest=state.step - ahead)
            self._start_ahead(state, 1, steps_left)
        if algorithm.dynamic_sampling is None:
            groups = generate(0)
            num_consumed = 1
            surplus = state.surplus
        else:
            groups, num_consumed, surplus = self._choose(generate, state.surplus, metrics)
        if algorithm.needs_greedy_response:
            self._start_ahead(state, num_consumed, steps_left)
        source.add_metrics(metrics)
        consumed = num_consumed * wanted
        results = self._recorded(state, generated, consumed, metrics)
        return StepGroups(groups, cursor + consumed, surplus, results)

    @property
    def _num_ahead(self) -> int:
        """Returns the batches that are sampled ahead.

        A step consumes one batch at least, so a batch started at version v is consumed by version
        v + ahead at the latest. The surplus of dynamic sampling is one step older (its
        max_staleness is 0, or 2 and more).
        """
        staleness = self.config.rollout.max_staleness
        carries_surplus = self.config.algorithm.dynamic_sampling is not None
        return max(staleness - carries_surplus, 0)

    def _prompts(self, state: TrainState, later: int) -> list[Prompt]:
        """Collective. Returns the prompts of the batch `later` batches from now."""
        wanted = self.config.train.num_prompts_per_step
        first = later * wanted
        curriculum = self.curriculum
        if curriculum is None:
            return self.prompts.batch(state.data_cursor + first, wanted, self.config.seed)
        results = state.curriculum or curriculum.unseen()
        while (known := len(results.drawn)) < first + wanted:
            # by the main rank: a user's function, and arithmetic that may differ between machines
            draw = partial(
                curriculum.draw, results, state.step + 1, state.data_cursor + known, wanted
            )
            drawn = self.mesh.from_main(draw, "draw rows")
            results = replace(results, drawn=np.append(results.drawn, drawn))
        state.curriculum = results
        return [self.prompts.prompts[row] for row in results.drawn[first : first + wanted]]

    def _recorded(
        self, state: TrainState, generated: Sequence[RolloutGroup], consumed: int, metrics: Metrics
    ) -> RowResults | None:
        """Collective over data-parallel ranks. Returns the curriculum's state after the step, in
        which all ranks generated these groups."""
        curriculum, results = self.curriculum, state.curriculum
        if curriculum is None or results is None:
            return None
        own = curriculum.shown(results, state.data_cursor, generated)
        curriculum_metrics(metrics, own, curriculum.pools(results))
        shown = self.mesh.gather_dp(own)
        return curriculum.recorded(results, shown, state.step + 1, consumed)

    def _start(self, state: TrainState, later: int, oldest: int) -> None:
        """Starts a batch. They are counted over the run: which step will consume one is not known
        beforehand."""
        wanted = self.config.train.num_prompts_per_step
        number = state.data_cursor // wanted + later
        first_id = state.data_cursor + later * wanted
        group_ids = range(first_id, first_id + wanted)
        self.source.start(number, group_ids, self._prompts(state, later), state.step, oldest)

    def _start_ahead(self, state: TrainState, first: int, steps_left: int) -> None:
        """Starts the batches to be sampled ahead, beginning `first` batches from now."""
        # A curriculum draws also those after the last step: rows do not depend on when a run was
        # meant to end.
        self._prompts(state, first + self._num_ahead - 1)
        for number in range(min(self._num_ahead, steps_left - 1)):
            self._start(state, first + number, state.step + 1 + number - self._num_ahead)

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
        options = self.config.algorithm.dynamic_sampling
        wanted = self.config.train.num_prompts_per_step
        assert options is not None
        groups = list(carried)
        attempt = 0
        while len((selection := self._select(groups)).chosen) < wanted:
            if attempt == options.max_num_gen_batches:
                raise RunStopped(_too_few_groups(groups, selection, self.config, self.mesh))
            groups += generate(attempt)
            attempt += 1
        selection_metrics(metrics, groups, len(carried), attempt, selection)
        chosen = set(selection.chosen)
        surplus = set(selection.surplus)
        return (
            [g for g in groups if g.group_id in chosen],
            attempt,
            [g for g in groups if g.group_id in surplus],
        )

    def _select(self, groups: Sequence[RolloutGroup]) -> Selection:
        """Collective over data-parallel ranks. Returns the chosen, surplus and dropped ids of all
        ranks' groups."""
        algorithm = self.config.algorithm
        mesh = self.mesh
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
                [max(len(s.token_ids) for s in of) for _, of, _ in rows], dtype=torch.int64
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
        keeps = algorithm.dynamic_sampling.load_filter()
        sizes = (len(all_ids), valid, wanted)
        by_index = select_groups(metric, indices, *sizes, mesh.reduce, keeps)
        parts = (by_index.chosen, by_index.surplus, by_index.dropped)
        return Selection(*([all_ids[i] for i in part] for part in parts))


def _too_few_groups(
    groups: Sequence[RolloutGroup], selection: Selection, config: ExperimentConfig, mesh: Mesh
) -> str:
    """Collective over data-parallel ranks. Returns the error of a step with too few groups to learn
    from."""
    options = config.algorithm.dynamic_sampling
    wanted = config.train.num_prompts_per_step
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
        f"{wanted} groups whose {options.what_is_kept}; {len(selection.dropped)} of {num_groups} "
        f"groups were dropped, and {total - scored} of {total} responses could not be scored. "
        "The prompts are too easy or too hard for this model: take others, raise "
        "train.group_size or max_num_gen_batches"
    )
