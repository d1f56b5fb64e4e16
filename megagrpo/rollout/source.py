"""The source of the loop's groups: each data-parallel leader samples and grades its replica's
prompts.

While leaders wait for samples, all ranks repeatedly meet in a small all-reduce: an engine that has
restarted needs the current weights, and publishing them is collective, so every rank must take part
before sampling continues. Weights are the affair of the caller, who hands `update_engines` in.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from megagrpo.config.schema import ExperimentConfig
from megagrpo.mesh import Mesh, RunStopped
from megagrpo.monitor.metrics import Metrics
from megagrpo.rollout.admission import BatchDeadline
from megagrpo.rollout.control import ServiceControl, ServiceFailed, ServiceUnreachable
from megagrpo.rollout.generation import SamplingParams
from megagrpo.rollout.jobs import SampledBatch, SamplingJob, numbered_prompts
from megagrpo.rollout.response import CacheUse
from megagrpo.rollout.sampler import Sampler
from megagrpo.rollout.teacher_scores import ScoringUse
from megagrpo.system.background import BackgroundLoop
from megagrpo.types import LOADS, Prompt, RolloutGroup

_FIRST_POLL_S = 0.02  # pause after the first meeting of all ranks
_POLL_S = 0.2  # longest pause
_LOOK_S = 1.0  # between looks at the service, and for a stop request
_UNREACHABLE_S = 30.0  # a control endpoint that is silent for longer ends the run

# Collective. Brings weights of a version to the engines whose ids the main rank gives.
UpdateEngines = Callable[[int, list[str]], object]


class EvaluationStopped(RunStopped):
    """Raised on every rank: a node received a stop request during an evaluation."""


class RolloutSource:
    """Samples groups from the service at `control`; collective over the world unless stated
    otherwise.

    sampler: this rank's, on leaders only. update_engines: collective; brings weights of a version
    to the engines of these ids. alive: called after every meeting of all ranks. A group keeps one
    id from dispatch to batch: the index of its prompt in the run, counted over all epochs (in an
    evaluation: in its prompts).
    """

    def __init__(
        self,
        config: ExperimentConfig,
        mesh: Mesh,
        control: ServiceControl,
        sampler: Sampler | None,
        update_engines: UpdateEngines,
        alive: Callable[[], None] = lambda: None,
    ):
        assert (sampler is not None) == mesh.is_leader, "leaders sample, other ranks do not"
        self._config = config
        self._mesh = mesh
        self._control = control
        self._sampler = sampler
        self._update_engines = update_engines
        self._alive = alive
        self.asked: Callable[[], bool] = lambda: False  # whether this node received a stop request
        self._last_answer = time.monotonic()
        self._next_look = self._last_answer
        self._awaited: Sequence[SampledBatch] = []
        self._loads: list[dict[str, float]] = []  # of engines, on the main rank
        self._outdated: list[str] = []  # engines that need weights, on the main rank
        self._restarts = 0  # of teachers' engines, on the main rank
        self._background = BackgroundLoop("rollout")
        # Batches sampled ahead, by number, until a step has started with them.
        self._batches: dict[int, SampledBatch] = {}
        self._restored: dict[int, RolloutGroup] = {}  # finished by an earlier start, by id

    def start(
        self,
        batch: int,
        group_ids: Sequence[int],
        prompts: Sequence[Prompt],
        version: int,
        oldest: int = 0,
    ) -> None:
        """Local. Starts to sample this rank's share of a batch, unless it is already in flight.

        Weights of `version` sample, and newer ones published meanwhile. oldest: version of the
        oldest weights whose restored groups may be used.
        """
        if batch not in self._batches:
            job = self._training(batch, version, or_newer=True)
            self._batches[batch] = self._begin(job, prompts, group_ids, oldest)

    def restore(self, ahead: list[RolloutGroup]) -> None:
        """Local. Moves the groups that `finished` returned in an earlier start out of the list;
        none is sampled again.

        Every leader has all of them.
        """
        if self._mesh.is_leader and self._config.rollout.max_staleness:
            self._restored = {group.group_id: group for group in ahead}
        ahead.clear()

    def finished(self) -> list[RolloutGroup]:
        """Local. Returns this leader's finished groups that no step has consumed; [] on other
        ranks."""
        if not self._mesh.is_leader:
            return []
        restored = self._restored.values() if self._mesh.is_main else ()
        batches = self._batches.values()
        return [
            *restored,
            *(group for batch in batches for _, group in sorted(batch.finished.copy().items())),
        ]

    def drop_consumed(self) -> None:
        """Local. Drops the groups returned by `next`: a step has started with them, and the state
        says so.

        Not earlier: if the step cannot start, a checkpoint saves them.
        """
        for number, batch in list(self._batches.items()):
            if batch.consumed:
                del self._batches[number]

    def next(
        self,
        step: int,
        prompts: Sequence[Prompt],
        version: int,
        first_id: int = 0,
        attempt: int = 0,
    ) -> list[RolloutGroup]:
        """Returns this rank's share of the groups of one step; `prompts` is the same on every rank.

        first_id: the id of the first prompt's group. attempt: counts the calls of a step, so that a
        prompt that recurs in it gets other responses. A batch that `start` started is finished, by
        weights of `version` too. Raises LeaderError on every rank.
        """
        job = self._training(step, version, attempt)
        group_ids = range(first_id, first_id + len(prompts))
        batch = self._batches.get(step) or self._begin(job, prompts, group_ids)
        groups = self._take(batch, version)
        if not self._config.algorithm.needs_greedy_response:
            return groups
        # After the others, never concurrently: one greedy request (a top-k of 1) moves SGLang's
        # whole batch to another sampling routine, which draws other tokens from the same seeds.
        job = SamplingJob(f"greedy{job.attempt}", step, version, job.params.greedy(), num_samples=1)
        greedy = self._take(self._begin(job, prompts, group_ids), version)
        return [
            replace(g, greedy=b.samples[0], greedy_outcome=b.outcomes[0])
            for g, b in zip(groups, greedy, strict=True)
        ]

    def drain(self) -> None:
        """Waits until all batches in flight are sampled and graded, or no engine can continue.

        Engines that restart meanwhile get no weights: others finish their requests, or the next
        weights do. Raises LeaderError on every rank.
        """
        self._wait(list(self._batches.values()), "drain", None)

    def evaluate(
        self, prompts: Sequence[Prompt], version: int, params: SamplingParams, num_samples: int
    ) -> list[RolloutGroup]:
        """Returns this rank's share of `num_samples` responses to each prompt, with the same seeds
        every time.

        Raises LeaderError on every rank, EvaluationStopped once `asked` is true on any.
        """
        job = SamplingJob("evaluate", 0, version, params, num_samples)
        return self._take(self._begin(job, prompts, range(len(prompts))), version)

    def close(self) -> None:
        """Local. Abandons all batches in flight."""
        self._batches.clear()
        self._background.close()

    def waiting(self) -> str:
        """Local, any thread. Returns a text about what delays this rank's samples, or ""."""
        return "" if self._sampler is None else self._sampler.waiting()

    def progress(self) -> str:
        """Local, any thread. Returns how many groups have come of those that this replica waits
        for, or ""."""
        wanted = sum(batch.share for batch in self._awaited)
        done = sum(len(batch.finished) for batch in self._awaited)
        return (
            f"{done} of {wanted} groups" + (" of this replica" if self._mesh.dp_size > 1 else "")
            if wanted
            else ""
        )

    def add_metrics(self, metrics: Metrics) -> None:
        """Local. Adds hits in engines' prefix caches and drafts' since the last call, and the load
        of engines, as the main rank saw it.
        """
        sampler = self._sampler
        of_engines = CacheUse() if sampler is None else sampler.cache_use
        of_engines.add_metrics(metrics, self._config.rollout.draft_tokens or 0)
        if self._config.teachers:
            of_teachers = ScoringUse() if sampler is None else sampler.teachers.use
            of_teachers.add_metrics(metrics)
            metrics.add_max("teachers/restarts", self._restarts)
        for name in LOADS:
            metrics.add_max(
                f"engines/{name}_max",
                max((load.get(name, 0.0) for load in self._loads), default=0.0),
            )

    def _training(
        self, step: int, version: int, attempt: int = 0, or_newer: bool = False
    ) -> SamplingJob:
        config = self._config
        label = f" batch {attempt}" if attempt else ""
        return SamplingJob(
            f"train{label}",
            step,
            version,
            SamplingParams.of(config.sampling),
            config.train.group_size,
            attempt=label,
            regrade=config.reward.group_grader is not None,
            or_newer=or_newer,
            with_experts=config.actor.routing_replay == "rollout",
        )

    def _begin(
        self, job: SamplingJob, prompts: Sequence[Prompt], group_ids: Sequence[int], oldest: int = 0
    ) -> SampledBatch:
        """Starts a leader's share in the background, without the groups that are restored."""
        mesh = self._mesh
        total = len(prompts)
        share = slice(
            total * mesh.dp_rank // mesh.dp_size, total * (mesh.dp_rank + 1) // mesh.dp_size
        )
        batch = SampledBatch(job, BatchDeadline(self._config.rollout.step_timeout_s))
        if self._sampler is None:
            return batch
        mine = numbered_prompts(prompts, group_ids)[share]
        batch.share = len(mine)
        if job.or_newer:  # started ahead
            # The other leaders' restored groups are dropped too: every leader has all of them.
            restored = {group_id: self._restored.pop(group_id, None) for group_id in group_ids}
            for each in mine:
                group = restored[each.group_id]
                scored = group is not None and group.is_scored(*self._config.scoring)
                if group is not None and scored and _fits(group, each.prompt, job, oldest):
                    batch.finished[each.group_id] = group
        missing = [each for each in mine if each.group_id not in batch.finished]
        batch.work = self._background.submit(
            self._sampler.sample_share(job, missing, batch.finished, batch.deadline)
        )
        return batch

    def _take(self, batch: SampledBatch, version: int) -> list[RolloutGroup]:
        """Waits for every leader's share of a batch; returns it on all ranks of the leader's
        replica.

        version: of the weights that engines need meanwhile.
        """
        what = f"rollout of {batch.job}"
        own: list[RolloutGroup] = []
        try:
            self._wait([batch], what, version)
        finally:
            if batch.work is not None:
                batch.work.cancel()

        def for_others() -> list[RolloutGroup]:
            assert batch.work is not None, "called on leaders only"
            batch.work.result()
            own.extend(group for _, group in sorted(batch.finished.items()))
            return list(map(for_other_ranks, own))

        groups = self._mesh.from_leader(for_others, what)
        batch.consumed = True
        return own if self._mesh.is_leader else groups

    def _wait(self, batches: Sequence[SampledBatch], what: str, version: int | None) -> None:
        """Waits with the other ranks until all batches are sampled; their deadlines run meanwhile.
        Raises LeaderError.

        version: of the weights that samples need, which are brought to the engines; a batch that
        fails ends the wait. None: engines keep their weights, failures are left to the next wait,
        and this one also ends when no engine is ready.
        """
        self._awaited = batches
        for batch in batches:
            batch.deadline.start()
        self._last_answer = self._next_look = time.monotonic()
        pause_s = _FIRST_POLL_S
        while self._meet(batches, what, version):
            time.sleep(pause_s)
            pause_s = min(_POLL_S, 1.5 * pause_s)
        for batch in batches:
            batch.deadline.stop()
        self._awaited = []

    def _meet(self, batches: Sequence[SampledBatch], what: str, version: int | None) -> bool:
        """Meets all ranks once; returns whether to wait further. Arguments and errors: see
        `_wait`."""
        error = ""
        acts = stops = False
        if version is not None:
            problems = [batch.problem for batch in batches if batch.problem]
            error = f"rank {self._mesh.rank}, {what}: {problems[0]}" if problems else ""
        unfinished = not all(batch.done for batch in batches)
        if not error and time.monotonic() >= self._next_look:
            stops = [batch.job.purpose for batch in batches] == ["evaluate"] and self.asked()
            if self._mesh.is_main:
                error, acts = self._look_at_engines(version)
            self._next_look = time.monotonic() + _LOOK_S
        waiting, failed, someone_acts, stopped = self._mesh.largest(
            unfinished, bool(error), acts, stops
        )
        self._alive()
        if stopped:
            raise EvaluationStopped
        if failed:
            self._mesh.raise_any(error)
        if not waiting or (someone_acts and version is None):
            return False
        if someone_acts and version is not None:
            engines = self._mesh.from_main(lambda: self._outdated, "name engines without weights")
            self._update_engines(version, engines)
            self._last_answer = time.monotonic()
        return True

    def _look_at_engines(self, version: int | None) -> tuple[str, bool]:
        """Returns the service's problem or "", and whether the wait must act on its engines."""
        try:
            status = self._control.healthy_status()
        except ServiceUnreachable as exc:
            silent_s = time.monotonic() - self._last_answer
            too_long = silent_s > _UNREACHABLE_S
            if version is None:  # the publish that comes next says so
                return "", too_long
            return (f"{exc} (silent for {silent_s:.0f} s)" if too_long else ""), False
        except ServiceFailed as exc:
            return str(exc), False
        self._last_answer = time.monotonic()
        engines = status.engines_of("")
        self._restarts = sum(engine.restarts for engine in status.engines if engine.teacher)
        self._loads = [engine.load for engine in engines]
        if version is None:
            return "", all(engine.state != "ready" for engine in engines)
        self._outdated = [
            engine.id
            for engine in engines
            if engine.alive and (engine.state == "stale" or engine.weight_version != version)
        ]
        return "", bool(self._outdated)


def _fits(restored: RolloutGroup, prompt: Prompt, job: SamplingJob, oldest: int) -> bool:
    """Returns whether a job would sample this group of an earlier start again; data and settings
    may have changed.

    Responses without a score are sampled again: else a repaired grader would have nothing to do.
    """
    same = (
        replace(restored.prompt, location=prompt.location) == prompt
        and len(restored.outcomes) == job.num_samples
        and all(outcome.ok for outcome in restored.outcomes)
    )
    short = all(len(sample.token_ids) <= job.params.max_tokens for sample in restored.samples)
    return same and short and restored.is_of(oldest)


def for_other_ranks(group: RolloutGroup) -> RolloutGroup:
    """Returns the group without experts and texts, for ranks that do not sample.

    They get the experts of their own layers with the batch; the leader grades and records the
    texts.
    """
    return replace(
        group,
        samples=tuple(replace(sample, routed_experts=None, text="") for sample in group.samples),
    )
