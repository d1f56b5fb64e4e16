"""The source of the loop's groups: each data-parallel leader samples and grades its replica's
prompts.

While leaders wait for samples, all ranks repeatedly meet in a small all-reduce. It tells them that
all are done, that one has failed, or that the caller must act: an engine that has restarted needs
weights, or the run is to stop. One collective hands the groups out at the end.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megagrpo.config.schema import ExperimentConfig
from megagrpo.data.curriculum import Curriculum
from megagrpo.data.images import ImageStore
from megagrpo.data.prompts import (
    PromptSet,
    describe_dropped,
    load_prompts,
    load_tokenizer,
    refuse_long_demonstration,
)
from megagrpo.data.texts import decoder, reasoning_end
from megagrpo.mesh import Mesh, RunStopped
from megagrpo.models.folder import Model
from megagrpo.monitor.metrics import Metrics
from megagrpo.monitor.rollout_log import Decode
from megagrpo.rewards.pool import RewardPool
from megagrpo.rollout.agents.answering import Answering
from megagrpo.rollout.agents.make import make_answering
from megagrpo.rollout.batches import Batches, BatchPlan, SampledBatch, StepBatches
from megagrpo.rollout.control import (
    UNREACHABLE_S,
    ServiceControl,
    ServiceFailed,
    ServiceUnreachable,
)
from megagrpo.rollout.response import CacheUse
from megagrpo.rollout.sampler import Sampler
from megagrpo.rollout.served_models import ScoringUse
from megagrpo.system.background import BackgroundLoop
from megagrpo.types import LOADS, RolloutGroup, TrainState

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_FIRST_POLL_S = 0.02  # pause after the first meeting of all ranks
_POLL_S = 0.2  # longest pause
_LOOK_S = 1.0  # between looks at the service, and for a stop request


class EvaluationStopped(RunStopped):
    """Raised on every rank: a node received a stop request during an evaluation."""


class RolloutSource:
    """Samples the batches of `batches` from the service at `control`.

    sampler: this rank's, on leaders only. alive: called after every meeting of all ranks.
    """

    def __init__(
        self,
        control: ServiceControl,
        sampler: Sampler | None,
        batches: Batches,
        alive: Callable[[], None] = lambda: None,
    ):
        self._mesh = batches.mesh
        assert (sampler is not None) == self._mesh.is_leader, "leaders sample, other ranks do not"
        self._config = batches.config
        self._control = control
        self._sampler = sampler
        self.batches = batches
        self._alive = alive
        self._last_answer = 0.0  # of the service, on the main rank
        self._next_look = 0.0  # at the service, and for a stop request
        self._awaited: Sequence[SampledBatch] = []
        self._loads: list[dict[str, float]] = []  # of engines, on the main rank
        self._outdated: list[str] = []  # engines that need weights, on the main rank
        self._restarts = 0  # of teachers' engines, on the main rank
        self._background = BackgroundLoop("rollout")

    def begin(self, plan: BatchPlan) -> SampledBatch:
        """Local. Starts to sample this rank's share of a batch, unless it is already in flight.

        Weights of the job's version sample; of a batch ahead also newer ones published meanwhile.
        """
        batch = self.batches.open(plan)
        if self._sampler is not None and batch.work is None:
            batch.work = self._background.submit(self._sampler.sample_share(batch))
        return batch

    def begin_step(self, state: TrainState, steps_left: int = 1) -> StepBatches:
        """Collective. Starts what is sampled before the step after `state` waits; returns its
        batches."""
        step = StepBatches(self.batches, state, steps_left)
        for plan in step.early():
            self.begin(plan)
        return step

    def end_step(self, step: StepBatches, metrics: Metrics) -> None:
        """Collective. Starts what is sampled while the trainers train; the step chooses its
        groups."""
        for plan in step.late():
            self.begin(plan)
        self.add_metrics(metrics)
        step.choose(metrics)

    def wait(
        self,
        batches: Sequence[SampledBatch],
        version: int | None,
        stop_requested: Callable[[], bool] = lambda: False,
    ) -> list[str]:
        """Collective. Waits until every leader's share of these batches is sampled and graded, and
        returns []; or returns the ids of engines that need weights of `version` before.

        The caller then publishes to these engines and waits again; time limits of the batches run
        meanwhile. Raises LeaderError on every rank if a batch or the service fails, and
        EvaluationStopped once stop_requested is true on any. version None: engines keep their
        weights, failures of batches are left to the next wait, and this one also ends when no
        engine is ready.
        """
        self._awaited = batches
        self._last_answer = time.monotonic()
        until = self._last_answer + self._config.rollout.step_timeout_s
        for batch in batches:
            batch.deadline = batch.deadline or until
        pause_s = _FIRST_POLL_S
        while True:
            problem = self._problem(batches)
            if version is None:  # the next wait for it says so
                problem = ""
            stops = leaves = False
            if not problem and time.monotonic() >= self._next_look:
                stops = stop_requested()
                if self._mesh.is_main:
                    problem, leaves = self._look_at_engines(version)
                self._next_look = time.monotonic() + _LOOK_S
            unfinished = not all(batch.done for batch in batches)
            waiting, failed, acts, stopped = self._mesh.largest(
                unfinished, bool(problem), leaves, stops
            )
            self._alive()
            if failed or stopped:
                for batch in batches:
                    batch.end()
            if stopped:
                raise EvaluationStopped
            if failed:
                self._mesh.raise_any(problem)
            if not waiting or acts:
                break
            time.sleep(pause_s)
            pause_s = min(_POLL_S, 1.5 * pause_s)
        if waiting and version is not None:
            return self._mesh.from_main(lambda: self._outdated, "name engines without weights")
        for batch in batches:
            batch.deadline = None
        self._awaited = []
        return []

    def take(self, batch: SampledBatch) -> list[RolloutGroup]:
        """Collective. Returns the leader's share of a batch for which all have waited, on all ranks
        of its replica."""
        own: list[RolloutGroup] = []

        def for_others() -> list[RolloutGroup]:
            assert batch.work is not None, "called on leaders only"
            batch.work.result()
            own.extend(batch.groups())
            return [group.for_other_ranks() for group in own]

        groups = self._mesh.from_leader(for_others, f"rollout of {batch.job}")
        batch.consumed = True
        return own if self._mesh.is_leader else groups

    def drain(self) -> None:
        """Collective. Waits until all batches in flight are sampled and graded, or no engine can
        continue.

        Engines that restart meanwhile get no weights: others finish their requests, or the next
        weights do. Raises LeaderError on every rank.
        """
        self.wait(list(self.batches.in_flight.values()), None)

    def close(self) -> None:
        """Local. Abandons all batches in flight."""
        self.batches.in_flight.clear()
        self._background.close()

    def waiting(self) -> str:
        """Local, any thread. Returns a text about what delays this rank's samples, or ""."""
        return "" if self._sampler is None else self._sampler.waiting()

    def progress(self) -> str:
        """Local, any thread. Returns how many groups have come of those that this replica waits
        for, or ""."""
        wanted = sum(len(batch.share) for batch in self._awaited)
        done = sum(len(batch.finished) for batch in self._awaited)
        share = " of this replica" * (self._mesh.dp_size > 1)
        return f"{done} of {wanted} groups{share}" if wanted else ""

    def add_metrics(self, metrics: Metrics) -> None:
        """Local. Adds hits in engines' prefix caches and drafts' since the last call, and the load
        of engines, as the main rank saw it.
        """
        sampler = self._sampler
        cache_use = CacheUse() if sampler is None else sampler.cache_use
        cache_use.add_metrics(metrics, self._config.rollout.draft_tokens or 0)
        if self._config.teachers:
            scoring_use = ScoringUse() if sampler is None else sampler.teachers.use
            scoring_use.add_metrics(metrics)
            metrics.add_max("teachers/restarts", self._restarts)
        for name in LOADS:
            metrics.add_max(
                f"engines/{name}_max",
                max((load.get(name, 0.0) for load in self._loads), default=0.0),
            )

    def _problem(self, batches: Sequence[SampledBatch]) -> str:
        """Ends batches of which the time is over; returns why the first failed, or ""."""
        problem = ""
        for batch in reversed(batches):
            late = batch.deadline is not None and time.monotonic() > batch.deadline
            if late and not batch.done and self._sampler is not None:
                batch.end(self._sampler.missing(batch))
            if batch.problem:
                problem = f"rank {self._mesh.rank}, rollout of {batch.job}: {batch.problem}"
        return problem

    def _look_at_engines(self, version: int | None) -> tuple[str, bool]:
        """Returns the service's problem or "", and whether the wait ends because of its engines."""
        try:
            status = self._control.healthy_status()
        except ServiceUnreachable as exc:
            silent_s = time.monotonic() - self._last_answer
            too_long = silent_s > UNREACHABLE_S
            if version is None:  # the publish that comes next says so
                return "", too_long
            return (f"{exc} (silent for {silent_s:.0f} s)" if too_long else ""), False
        except ServiceFailed as exc:
            return str(exc), False
        self._last_answer = time.monotonic()
        engines = status.engines_of("")
        self._restarts = sum(
            engine.restarts for engine in status.engines if engine.model.startswith("teacher-")
        )
        self._loads = [engine.load for engine in engines]
        if version is None:
            return "", all(engine.state != "ready" for engine in engines)
        self._outdated = [
            engine.id
            for engine in engines
            if engine.alive and (engine.state == "stale" or engine.weight_version != version)
        ]
        return "", bool(self._outdated)


@dataclass(frozen=True)
class Inputs:
    """The inputs that a run reads before it needs any other process."""

    model: Model
    tokenizer: "PreTrainedTokenizerBase"
    decode: Decode
    prompts: PromptSet
    eval_prompts: PromptSet | None
    answering: Answering
    images: ImageStore | None  # of a vision-language model
    curriculum: Curriculum | None
    dropped: Sequence[str] = ()  # a sentence for each section of which prompts were too long

    @property
    def rows(self) -> list[list[str | int]]:
        """The fingerprints of the rows of training and evaluation."""
        return [
            row
            for read in (self.prompts, self.eval_prompts)
            if read is not None
            for row in read.rows
        ]

    @classmethod
    def load(cls, config: ExperimentConfig) -> "Inputs":
        """Loads the inputs of an experiment. Raises ValueError."""
        model = Model.of(config)
        tokenizer = load_tokenizer(model)
        images = ImageStore.of(model, config.run_folder.images)
        prompts = load_prompts(config.data, tokenizer, images)
        refuse_long_demonstration(prompts.prompts, config.sampling.max_response_tokens)
        dropped = [describe_dropped(config.data, prompts)]
        eval_prompts = None
        if (held_out := config.eval_data) is not None:
            eval_prompts = load_prompts(held_out, tokenizer, images)
            dropped.append(describe_dropped(held_out, eval_prompts))
        decode = decoder(tokenizer, model, config.sampling)
        return cls(
            model=model,
            tokenizer=tokenizer,
            decode=decode,
            prompts=prompts,
            eval_prompts=eval_prompts,
            answering=make_answering(config, tokenizer),
            images=images,
            curriculum=Curriculum.of(config, prompts.prompts, prompts.mixture),
            dropped=[*filter(None, dropped)],
        )

    def add_metrics(self, metrics: Metrics) -> None:
        """Adds what environments, agents and images measured since the last call."""
        self.answering.add_metrics(metrics)
        if self.images is not None:
            self.images.add_metrics(metrics)


def open_graders(config: ExperimentConfig, tokenizer: "PreTrainedTokenizerBase") -> RewardPool:
    """Returns the graders of an experiment. Raises as RewardPool does."""
    preload = not config.sampling.rewarding
    return RewardPool(config.reward, preload, reasoning_end(config, tokenizer))


@contextmanager
def start_source(
    config: ExperimentConfig,
    mesh: Mesh,
    inputs: Inputs,
    control: ServiceControl,
    alive: Callable[[], None],
) -> Iterator[RolloutSource]:
    """Local. Yields this rank's source, with graders on leaders; ends requests and processes
    after."""
    with ExitStack() as stack:
        sampler = None
        if mesh.is_leader:
            grader = stack.enter_context(open_graders(config, inputs.tokenizer))
            stack.callback(inputs.answering.close)
            sampler = Sampler(
                config, mesh.dp_size, control, grader, inputs.decode, inputs.answering
            )
            sampler.images = inputs.images
            if config.actor.routing_replay == "rollout":
                sampler.arch = inputs.model.arch
        batches = Batches(config, mesh, inputs.prompts, inputs.curriculum)
        source = RolloutSource(control, sampler, batches, alive)
        stack.callback(source.close)
        yield source
