"""Bookkeeping of sampling: which prompts a step takes, which weights sample them, what is sampled
ahead, and what an earlier start has finished.

Nothing here asks an engine or waits: `source.py` does. With a curriculum the main rank draws rows,
and with dynamic sampling ranks choose groups together, so these methods are collective.
"""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from megagrpo.algo.dynamic_sampling import Selection
from megagrpo.config.schema import ExperimentConfig
from megagrpo.data.curriculum import Curriculum
from megagrpo.data.prompts import PromptSet
from megagrpo.mesh import Mesh
from megagrpo.monitor.metrics import Metrics
from megagrpo.rollout.generation import SamplingParams
from megagrpo.rollout.group_metrics import curriculum_metrics, selection_metrics
from megagrpo.rollout.selection import refuse_another_batch, select
from megagrpo.system.processes import return_freed_memory
from megagrpo.types import Prompt, RolloutGroup, RowResults, Sample, TrainState

# the settings that render a row, and that sample or score its group
_SCORES = re.compile(
    r"(reward|sampling|teachers)\.|model\.tokenizer|"
    r"data\.(sources\.\d+\.)?(\w+_key|source:|grader|prompt_template|system_prompt|chat_template|add_bos)"
)


@dataclass(frozen=True)
class NumberedPrompt:
    """A prompt of a batch and the id of the group that is sampled for it."""

    group_id: int
    prompt: Prompt
    repeats: int  # earlier occurrences of the prompt in the batch; part of its seeds


@dataclass(frozen=True)
class SamplingJob:
    """How all prompts of a batch are sampled."""

    purpose: str  # part of every seed
    step: int  # or the number of a batch sampled ahead; part of every seed
    version: int  # of the weights that sample
    params: SamplingParams
    num_samples: int  # responses to each prompt
    or_newer: bool = False  # weights that are published meanwhile may sample too

    def __str__(self) -> str:
        return f"{self.purpose} step {self.step}, weights {self.version}"

    @classmethod
    def training(
        cls,
        config: ExperimentConfig,
        step: int,
        version: int,
        attempt: int = 0,
        ahead: bool = False,
    ) -> "SamplingJob":
        """Returns the job of a training batch; attempt: which of the step's batches, unless it is
        sampled ahead."""
        return cls(
            f"train batch {attempt}" if attempt else "train",
            step,
            version,
            SamplingParams.of(config.sampling),
            config.train.group_size,
            or_newer=ahead,
        )

    def greedy(self) -> "SamplingJob":
        """Returns the job of one greedy response to each prompt."""
        purpose = self.purpose.replace("train", "greedy")
        return SamplingJob(purpose, self.step, self.version, self.params.greedy(), num_samples=1)

    @property
    def is_urgent(self) -> bool:
        """Returns whether trainers wait for this job only, so that its requests pass those of
        coming steps."""
        return not self.purpose.startswith("train")


@dataclass(frozen=True)
class BatchPlan:
    """A batch that is to be sampled, the same on every rank.

    A group keeps one id from here to the Batch: the index of its prompt in the run, counted over
    all epochs (in an evaluation: in its prompts).
    """

    job: SamplingJob
    prompts: Sequence[Prompt]
    first_id: int = 0  # the id of the first prompt's group
    oldest: int = 0  # version of the oldest weights whose restored groups may be used

    @classmethod
    def evaluation(
        cls, config: ExperimentConfig, prompts: Sequence[Prompt], version: int, as_trained: bool
    ) -> "BatchPlan":
        """Returns the evaluation's batch, or that of the evaluation that samples as training does;
        seeds are the same every time."""
        options = config.eval
        assert options is not None, "called only with an eval section"
        params = SamplingParams.for_evaluation(config.sampling, options, as_trained)
        num_samples = options.num_as_trained if as_trained else options.num_samples
        return cls(SamplingJob("evaluate", 0, version, params, num_samples), prompts)

    def numbered(self) -> list[NumberedPrompt]:
        """Returns the prompts with the ids of their groups."""
        seen: Counter[int] = Counter()
        numbered = []
        for group_id, prompt in enumerate(self.prompts, self.first_id):
            numbered.append(NumberedPrompt(group_id, prompt, seen[prompt.id]))
            seen[prompt.id] += 1
        return numbered


@dataclass
class SampledBatch:
    """A batch of prompts that is sampled in the background, until a step has started with it."""

    job: SamplingJob
    share: Sequence[NumberedPrompt] = ()  # this leader's; none on other ranks
    # This leader's groups by id; filled by the other thread.
    finished: dict[int, RolloutGroup] = field(default_factory=dict)
    work: "Future[None] | None" = None  # None on ranks that are not leaders
    consumed: bool = False  # returned to a step
    deadline: float | None = None  # of time.monotonic; None: no trainer waits
    failure: str = ""  # why its work was ended
    retries: Callable[[], str] = lambda: "no request has left"  # so far, in words

    @property
    def done(self) -> bool:
        """Returns whether this rank's share is complete or failed; True without one."""
        return self.work is None or self.work.done()

    @property
    def problem(self) -> str:
        """Returns why it failed, or ""."""
        if self.failure or self.work is None or not self.work.done() or self.work.cancelled():
            return self.failure
        exc = self.work.exception()
        return "" if exc is None else f"{type(exc).__name__}: {exc}"

    def end(self, failure: str = "") -> None:
        """Ends what has not finished."""
        self.failure = failure
        if self.work is not None:
            self.work.cancel()

    def groups(self) -> list[RolloutGroup]:
        """Returns this leader's groups that have finished."""
        return [group for _, group in sorted(self.finished.copy().items())]


@dataclass
class Batches:
    """The batches of a run: those in flight, and the groups that an earlier start finished."""

    config: ExperimentConfig
    mesh: Mesh
    prompts: PromptSet
    curriculum: Curriculum | None = None
    # Batches sampled ahead, by number, until a step has started with them.
    in_flight: dict[int, SampledBatch] = field(default_factory=dict)
    restored: dict[int, RolloutGroup] = field(default_factory=dict)  # by id

    def restore(self, state: TrainState, changes: Sequence[str] = ()) -> None:
        """Moves this leader's groups of those that `finished` returned in an earlier start out of
        the state; none is sampled again, unless another number of prompts a step gives a group to a
        leader that has not read it.

        changes: settings that differ from that start. If one of them renders, samples or scores, drops these
        groups and the surplus.
        """
        if any(map(_SCORES.match, changes)):
            state.ahead.clear()
            state.surplus.clear()
        if self.mesh.is_leader and self.config.rollout.max_staleness:
            wanted = self.config.train.num_prompts_per_step
            share = range(wanted)[self.mesh.share(wanted)]
            self.restored = {
                group.group_id: group
                for group in state.ahead
                # the next batch's first group has the cursor as its id
                if (group.group_id - state.data_cursor) % wanted in share
            }
        state.ahead.clear()

    def finished(self) -> list[RolloutGroup]:
        """Returns this leader's finished groups that no step has consumed; [] on other ranks."""
        sampled = (group for batch in self.in_flight.values() for group in batch.groups())
        return [*self.restored.values(), *sampled]

    def open(self, plan: BatchPlan) -> SampledBatch:
        """Returns the batch of a plan: the one in flight, or a new one with this leader's share, of
        which restored groups are finished."""
        job = plan.job
        if job.or_newer and job.step in self.in_flight:
            return self.in_flight[job.step]
        batch = SampledBatch(job)
        if self.mesh.is_leader:
            prompts = plan.numbered()
            batch.share = prompts[self.mesh.share(len(prompts))]
        if job.or_newer:
            self.in_flight[job.step] = batch
            for numbered in batch.share:
                group = self.restored.pop(numbered.group_id, None)
                if group is not None and self._fits(group, numbered.prompt, plan):
                    batch.finished[numbered.group_id] = group
        return batch

    def _fits(self, restored: RolloutGroup, prompt: Prompt, plan: BatchPlan) -> bool:
        """Returns whether a plan would sample this group of an earlier start again; data and
        settings may have changed.

        Responses without a score are sampled again: else a repaired grader would have nothing to
        do.
        """
        job = plan.job
        return (
            restored.is_scored(*self.config.scoring)
            and replace(restored.prompt, location=prompt.location) == prompt
            and len(restored.outcomes) == job.num_samples
            and all(outcome.ok for outcome in restored.outcomes)
            and all(len(s.token_ids) <= job.params.max_tokens for s in restored.samples)
            and restored.is_of(plan.oldest)
        )


class StepBatches:
    """The batches of the step after `state`, from their plans to the step's groups.

    `state` stays as it is until `finish`; only rows drawn by a curriculum are added to it.
    steps_left: this step included.
    """

    def __init__(self, batches: Batches, state: TrainState, steps_left: int = 1):
        self._batches = batches
        self._state = state
        self._steps_left = steps_left
        self._config = config = batches.config
        self._wanted = config.train.num_prompts_per_step
        self._plan: BatchPlan | None = None  # the last one that the step wanted
        self._without_greedy: list[RolloutGroup] | None = None  # its groups, until these come
        self._sampled: list[RolloutGroup] = []
        self._consumed = 0  # batches
        self._selection: Selection | None = None
        self.groups: list[RolloutGroup] = []  # this rank's, once the step has chosen them
        # A step consumes one batch at least, so a batch started at version v is consumed by version
        # v + ahead at the latest. The surplus of dynamic sampling is one step older (its
        # max_staleness is 0, or 2 and more).
        carries_surplus = config.algorithm.dynamic_sampling is not None
        self._num_ahead = max(config.rollout.max_staleness - carries_surplus, 0)

    def early(self) -> list[BatchPlan]:
        """Collective. Returns the batches to begin before the step waits for the first one, so that
        engines are never empty.

        None with greedy responses: their requests would change what others draw in the same engine.
        """
        if not self._num_ahead or self._config.algorithm.needs_greedy_response:
            return []
        return [self._batch(0), *self._ahead(1)]

    def wanted(self) -> BatchPlan | None:
        """Collective. Returns the batch that the step waits for next; None: its groups are
        complete.

        Raises RunStopped on every rank when max_num_gen_batches batches hold too few groups whose
        responses differ.
        """
        if self._plan is not None and self._without_greedy is not None:
            # After the others, never concurrently: one greedy request (a top-k of 1) moves SGLang's
            # whole batch to another sampling routine, which draws other tokens from the same seeds.
            return replace(self._plan, job=self._plan.job.greedy())
        if self._config.algorithm.dynamic_sampling is None:
            complete = self._consumed == 1
        else:
            groups = self._candidates()
            mesh = self._batches.mesh
            self._selection = select(groups, self._config, mesh)
            complete = len(self._selection.chosen) >= self._wanted
            if not complete:
                refuse_another_batch(self._consumed, groups, self._selection, self._config, mesh)
        self._plan = None if complete else self._batch(self._consumed)
        return self._plan

    def add(self, groups: list[RolloutGroup]) -> None:
        """Adds this rank's groups of the wanted batch."""
        if self._without_greedy is not None:
            groups = [
                replace(group, greedy=other.samples[0], greedy_outcome=other.outcomes[0])
                for group, other in zip(self._without_greedy, groups, strict=True)
            ]
            self._without_greedy = None
        elif self._config.algorithm.needs_greedy_response:
            self._without_greedy = groups
            return
        self._sampled += groups
        self._consumed += 1

    def late(self) -> list[BatchPlan]:
        """Collective. Returns the batches to begin when the step's groups are complete."""
        greedy = self._config.algorithm.needs_greedy_response
        return self._ahead(self._consumed) if greedy and self._num_ahead else []

    def choose(self, metrics: Metrics) -> None:
        """Collective. Sets `groups` to this rank's groups of the step."""
        selection = self._selection
        surplus = self._surplus = self._state.surplus
        self.groups = self._sampled
        if selection is not None:
            groups = self._candidates()
            selection_metrics(metrics, groups, len(surplus), self._consumed, selection)
            chosen = set(selection.chosen)
            self.groups = [group for group in groups if group.group_id in chosen]
            carried = set(selection.surplus)
            self._surplus = [group for group in groups if group.group_id in carried]
        self._curriculum = self._recorded(metrics)
        self._sampled = []  # dropped groups need no memory while the trainers train

    def forget_values(self) -> None:
        """Drops from `groups` what only their batch needs, which is most of their memory; not if a
        checkpoint may still need it."""
        if not self._num_ahead:
            for number, group in enumerate(self.groups):
                self.groups[number] = _for_record(group)
            return_freed_memory()

    def finish(self) -> None:
        """Makes `state` that after the step, and drops the batches that it has consumed.

        Not before its updates are made: until then it is that of the weights, and a checkpoint of
        the steps before holds the groups.
        """
        state, batches = self._state, self._batches
        state.step += 1
        state.data_cursor += self._consumed * self._wanted
        state.surplus = self._surplus
        state.curriculum = self._curriculum
        batches.in_flight = {
            n: batch for n, batch in batches.in_flight.items() if not batch.consumed
        }

    def _candidates(self) -> list[RolloutGroup]:
        return [*self._state.surplus, *self._sampled]

    def _batch(self, later: int, oldest: int | None = None) -> BatchPlan:
        """Collective. Returns the batch `later` batches from now.

        Batches sampled ahead are counted over the run: which step will consume one is not known
        beforehand.
        """
        state, ahead = self._state, self._num_ahead
        number = state.data_cursor // self._wanted + later
        return BatchPlan(
            SamplingJob.training(self._config, number, state.step, ahead=True)
            if ahead
            else SamplingJob.training(self._config, state.step, state.step, attempt=later),
            self._prompts(later),
            state.data_cursor + later * self._wanted,
            state.step - ahead if oldest is None else oldest,
        )

    def _ahead(self, first: int) -> list[BatchPlan]:
        """Collective. Returns the batches to be sampled ahead, beginning `first` batches from
        now."""
        number = self._num_ahead
        # A curriculum draws also those after the last step: rows do not depend on when a run was
        # meant to end.
        self._prompts(first + number - 1)
        return [
            self._batch(first + i, oldest=self._state.step + 1 + i - number)
            for i in range(min(number, self._steps_left - 1))
        ]

    def _prompts(self, later: int) -> list[Prompt]:
        """Collective. Returns the prompts of the batch `later` batches from now."""
        state = self._state
        batches = self._batches
        wanted = self._wanted
        first = later * wanted
        curriculum = batches.curriculum
        if curriculum is None:
            return batches.prompts.batch(state.data_cursor + first, wanted, self._config.seed)
        results = state.curriculum or curriculum.unseen()
        while (known := len(results.drawn)) < first + wanted:
            # by the main rank: a user's function, and arithmetic that may differ between machines
            draw = partial(
                curriculum.draw, results, state.step + 1, state.data_cursor + known, wanted
            )
            drawn = batches.mesh.from_main(draw, "draw rows")
            results = replace(results, drawn=np.append(results.drawn, drawn))
        state.curriculum = results
        return [batches.prompts.prompts[row] for row in results.drawn[first : first + wanted]]

    def _recorded(self, metrics: Metrics) -> RowResults | None:
        """Collective over data-parallel ranks. Returns the curriculum's state after the step."""
        state = self._state
        curriculum = self._batches.curriculum
        results = state.curriculum
        if curriculum is None or results is None:
            return None
        own = curriculum.shown(results, state.data_cursor, self._sampled)
        curriculum_metrics(metrics, own, curriculum.pools(results))
        shown = self._batches.mesh.gather_dp(own)
        consumed = self._consumed * self._wanted
        return curriculum.recorded(results, shown, state.step + 1, consumed)


def _for_record(group: RolloutGroup) -> RolloutGroup:
    """Returns the group without log-probabilities, experts and candidates of the samples' tokens,
    and without their ids if the record has no turns."""
    has_turns = any(outcome.end for outcome in group.outcomes)

    def recorded(sample: Sample) -> Sample:
        # a view of the ids would keep all arrays of the engine's answer
        ids = np.broadcast_to(np.int32(0), len(sample.token_ids))
        if has_turns:
            ids = sample.token_ids.copy()
        teacher = sample.teacher and replace(sample.teacher, top_ids=None, top_logprobs=None)
        return replace(
            sample, token_ids=ids, logprobs=np.empty(0), routed_experts=None, teacher=teacher
        )

    return replace(group, samples=tuple(map(recorded, group.samples)))
