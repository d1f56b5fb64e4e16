"""The source of the loop's groups: each data-parallel leader samples and grades its replica's share of the prompts.

While leaders wait for samples, all ranks keep meeting in a small all-reduce: an engine that died and came back needs
the current weights, publishing is collective, and so every rank must take part before the samples can go on.
"""

import time
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from functools import partial

import numpy as np
import torch
import torch.distributed as dist

from megagrpo.config.schema import ExperimentConfig
from megagrpo.mesh import Mesh
from megagrpo.rollout.background import BackgroundLoop, Patience
from megagrpo.rollout.control import ServiceControl, ServiceFailed, ServiceUnreachable
from megagrpo.rollout.generation import OnRequest, SamplingParams
from megagrpo.rollout.jobs import BegunBatch, SamplingJob, prompt_slots
from megagrpo.rollout.routed_experts import for_other_ranks
from megagrpo.rollout.sampler import OutcomeSource, Sampler
from megagrpo.rollout.tools import Tool
from megagrpo.types import EngineInfo, Prompt, Refresh, RolloutGroup

_FIRST_POLL_S, _POLL_S = 0.02, 0.2  # pause between two meetings of all ranks
_UNREACHABLE_S = 30.0  # a control endpoint that is silent for longer ends the run


class RolloutSource:
    """Samples on-policy groups from the service at `control`. `next` and `evaluate` are collective over the world.

    grader: grades responses; used on leaders only. decode: token ids of a response -> the text that is graded, without
    special tokens. alive: called whenever all ranks have met while they wait. on_request: see GenerationClient.
    """

    def __init__(
        self,
        config: ExperimentConfig,
        mesh: Mesh,
        control: ServiceControl,
        grader: OutcomeSource | None,
        decode: Callable[[np.ndarray], str],
        *,
        tool: Tool | None = None,
        alive: Callable[[], None] = lambda: None,
        on_request: OnRequest = lambda engine, start, end, num_tokens: None,
    ):
        assert grader is not None or not mesh.is_leader, "a leader grades"
        self._config, self._mesh, self._control, self._alive = config, mesh, control, alive
        self._with_experts = config.actor.routing_replay == "rollout"
        self._sampler: Sampler | None = None
        if mesh.is_leader and grader is not None:
            self._sampler = Sampler(config, mesh.dp_size, control, grader, decode, tool, on_request)
        self._last_answer = time.monotonic()
        self._discarded = 0  # tokens, as `newly_discarded` has told
        self._lost_hosts = 0  # of the service, as far as this rank's requests know
        self._background = BackgroundLoop()
        self._begun: dict[int, BegunBatch] = {}  # by number, until a step has begun with all of its groups
        self._held: dict[int, RolloutGroup] = {}  # finished by an earlier start, by place in the run

    def begin(
        self, batch: int, places: Sequence[int], prompts: Sequence[Prompt], version: int, oldest: int = 0
    ) -> None:
        """Begins to sample this rank's share of a batch, whose groups are asked for later; nothing where it has begun.

        Weights of `version` sample, and the newer ones that are published before the end. places: of its prompts in the
        run, each of which is sampled once. oldest: version of the weights that may have sampled what `hold` was given.
        """
        begun = {place for other in self._begun.values() for place in other.places}
        new = [index for index, place in enumerate(places) if place not in begun]
        if batch in self._begun or not new:
            return
        job = self._training(batch, version, 0, or_newer=True)
        self._begun[batch] = self._start(job, [prompts[i] for i in new], [places[i] for i in new], oldest)

    def hold(self, ahead: list[RolloutGroup]) -> None:
        """Takes, out of the list, what `finished` returned in an earlier start: `begin` samples none of it again."""
        if self._mesh.is_leader and self._config.rollout.max_lag:
            self._held = {group.group_id: group for group in ahead}
        ahead.clear()

    def finished(self) -> list[RolloutGroup]:
        """Returns the finished groups of this leader that no step has begun with, ids counted over the run's prompts.

        On other ranks []. Those that are still being sampled are left out.
        """
        if not self._mesh.is_leader:
            return []
        held = self._held.values() if self._mesh.is_main else ()  # every leader has all of them
        begun = [
            replace(group, group_id=batch.places[index])
            for batch in self._begun.values()
            for index, group in sorted(batch.finished.copy().items())
        ]
        return [*held, *begun]

    def forget_taken(self) -> None:
        """Forgets the groups that `next` and `first` returned: a step has begun with them, and the run's state says so.

        Not before: where the step cannot begin, a checkpoint has them.
        """
        for number, batch in list(self._begun.items()):
            for index, place in enumerate(batch.places):
                if place in batch.taken:
                    batch.finished.pop(index, None)
            if batch.taken.issuperset(batch.places):
                del self._begun[number]

    def next(
        self, step: int, prompts: Sequence[Prompt], version: int, refresh: Refresh, attempt: int = 0
    ) -> list[RolloutGroup]:
        """Collective. Returns this rank's share of the groups of one step; `prompts` is the same on every rank.

        A group's id is its prompt's place in `prompts`. attempt: counts the calls of a step, so that a prompt that
        comes again in it gets other responses. refresh: called on all ranks together, with engine ids, whenever engines
        hold other weights than `version`. What `begin` has begun is finished, by that version too. Raises LeaderError
        on every rank.
        """
        job = self._training(step, version, attempt)
        batch = self._begun.get(step) or self._start(job, prompts)
        groups = self._collect(job, batch, refresh)
        batch.taken.update(batch.places)
        if not self._config.algorithm.needs_greedy_response:
            return groups
        # After the others and not among them: one greedy request (a top-k of 1) moves SGLang's whole batch to another
        # sampling routine, which draws other tokens from the same seeds.
        job = SamplingJob(f"greedy{job.again}", step, version, job.params.greedy(), num_samples=1)
        greedy = self._collect(job, self._start(job, prompts), refresh)
        return [
            replace(g, greedy=b.samples[0], greedy_outcome=b.outcomes[0]) for g, b in zip(groups, greedy, strict=True)
        ]

    def first(
        self, wanted: int, must: AbstractSet[int], version: int, refresh: Refresh
    ) -> tuple[list[int], list[RolloutGroup]]:
        """Collective. Returns the places of the `wanted` groups of what was begun that are finished first, ascending.

        And this rank's share of the groups; a group's id is its number among those. must: places that are waited for.
        The rest goes on. Whole groups alone. version, refresh: see `next`. Raises LeaderError on every rank.
        """
        begun = list(self._begun.values())
        open_places = {place for batch in begun for place in batch.places if place not in batch.taken}
        assert wanted <= len(open_places), "begun before they are waited for"
        for batch in begun:
            batch.patience.begin()

        def enough() -> bool:
            mine = set(self._ready()) if self._mesh.is_leader else set()
            total, musts = self._agree(len(mine), len(mine & must), op=dist.ReduceOp.SUM)
            return total >= wanted and musts == len(must)

        self._wait(enough, begun, f"step {version}, weights {version}", version, refresh)
        for batch in begun:
            batch.patience.end()
        of_replica = self._mesh.from_leader(lambda: sorted(self._ready()), "naming finished groups")
        everyone = [place for part in self._mesh.gather_dp(of_replica) for place in part]
        # More may have come since. The oldest of them go first, however short the others are.
        chosen = sorted(sorted(everyone, key=lambda place: (place not in must, place))[:wanted])

        def take() -> list[RolloutGroup]:
            ready = self._ready()
            return [replace(ready[place], group_id=i) for i, place in enumerate(chosen) if place in ready]

        mine = self._from_leader(take, "taking groups")
        for batch in begun:
            batch.taken.update(set(chosen).intersection(batch.places))
        return chosen, mine

    def _ready(self) -> dict[int, RolloutGroup]:
        """Returns this leader's finished groups that were not taken, by place in the run."""
        return {place: group for batch in self._begun.values() for place, group in batch.ready.items()}

    def drain(self) -> None:
        """Collective. Waits until what was begun has been sampled and graded.

        Engines that start again meanwhile cannot be given the weights that they had: others finish what they were
        asked. Where none is left it returns, and the weights published next go on. Raises LeaderError on every rank.
        """
        pause_s = _FIRST_POLL_S
        for batch in self._begun.values():
            batch.patience.begin()
        while True:
            error, num_ready, lost_hosts = "", 1, 0
            if self._mesh.is_main:
                error, num_ready, lost_hosts = self._count_ready()
            unfinished = any(not batch.done for batch in self._begun.values())
            waiting, failed, none_ready, lost_hosts = self._agree(unfinished, bool(error), num_ready == 0, lost_hosts)
            self._alive()
            if failed:
                self._mesh.raise_any(error)
            if not waiting or none_ready:
                break
            self._ask_lost_hosts_again(lost_hosts)
            time.sleep(pause_s)
            pause_s = min(_POLL_S, 1.5 * pause_s)
        for batch in self._begun.values():
            batch.patience.end()

    def _count_ready(self) -> tuple[str, int, int]:
        try:
            status = self._control.healthy_status()
        except ServiceUnreachable:
            return "", 1, 0  # `next` has patience with it, and a limit
        except ServiceFailed as exc:
            return str(exc), 0, 0
        return "", sum(engine.state == "ready" for engine in status.engines), status.lost_hosts

    def _ask_lost_hosts_again(self, lost_hosts: int) -> None:
        if lost_hosts > self._lost_hosts:
            self._lost_hosts = lost_hosts
            if self._sampler is not None:
                self._sampler.ask_again()

    def close(self) -> None:
        """Gives up what was begun."""
        self._begun.clear()
        self._background.close()

    def waiting(self) -> str:
        """Returns what this rank's samples wait for at present, "" for nothing. May be called from any thread."""
        return "" if self._sampler is None else self._sampler.waiting()

    def newly_discarded(self) -> int:
        """Returns the tokens that came to this rank since the last call, and are of no sample."""
        before, self._discarded = self._discarded, 0 if self._sampler is None else self._sampler.num_discarded
        return self._discarded - before

    def _training(self, step: int, version: int, attempt: int, or_newer: bool = False) -> SamplingJob:
        again = f" batch {attempt}" if attempt else ""
        params, size = SamplingParams.of(self._config.sampling), self._config.train.group_size
        regrade = self._config.reward.group_grader is not None
        return SamplingJob(f"train{again}", step, version, params, size, again, regrade, or_newer, self._with_experts)

    def evaluate(
        self,
        prompts: Sequence[Prompt],
        version: int,
        temperature: float,
        num_samples: int,
        max_tokens: int,
        refresh: Refresh,
    ) -> list[RolloutGroup]:
        """Collective. Returns this rank's share of `num_samples` responses to each prompt, with the same seeds always.

        max_tokens: limit of a response. Raises LeaderError on every rank.
        """
        stops = SamplingParams.of(self._config.sampling)
        params = SamplingParams(temperature, max_tokens, stop_token_ids=stops.stop_token_ids, stop=stops.stop)
        job = SamplingJob("evaluate", 0, version, params, num_samples)
        return self._collect(job, self._start(job, prompts), refresh)

    def _start(
        self, job: SamplingJob, prompts: Sequence[Prompt], places: Sequence[int] = (), oldest: int = 0
    ) -> BegunBatch:
        """Begins a leader's share in the background; other ranks wait for theirs. What is held is not sampled again."""
        mesh, total = self._mesh, len(prompts)
        first, last = total * mesh.dp_rank // mesh.dp_size, total * (mesh.dp_rank + 1) // mesh.dp_size
        batch = BegunBatch(list(places), {}, Patience(self._config.rollout.step_timeout_s))
        if self._sampler is not None:
            share = prompt_slots(prompts)[first:last]
            for index, place in enumerate(places):
                found = self._held.pop(place, None)  # of other leaders' shares too: all have all of it
                if found is not None and first <= index < last and _fits(found, prompts[index], job, oldest):
                    batch.finished[index] = replace(found, group_id=index)
            missing = [slot for slot in share if slot.group_id not in batch.finished]
            work = self._sampler.sample_share(job, missing, batch.finished, batch.patience)
            batch.work = self._background.submit(work)
        return batch

    def _collect(self, job: SamplingJob, batch: BegunBatch, refresh: Refresh) -> list[RolloutGroup]:
        """Collective. Waits for every leader's share of a job and gives it to the leader's replica."""
        work = batch.work
        batch.patience.begin()
        try:
            self._wait(lambda: batch.done, [batch], str(job), job.version, refresh)
        finally:
            if work is not None:
                work.cancel()

        def result() -> list[RolloutGroup]:
            assert work is not None, "asked of leaders only"
            work.result()
            return [group for _, group in sorted(batch.finished.items())]

        return self._from_leader(result, f"rollout of {job}")

    def _from_leader(self, make: Callable[[], list[RolloutGroup]], what: str) -> list[RolloutGroup]:
        """Collective. Returns the groups that a replica's leader has, on its other ranks `for_other_ranks`."""
        own: list[RolloutGroup] = []

        def for_others() -> list[RolloutGroup]:
            own.extend(make())
            return list(map(for_other_ranks, own))

        groups = self._mesh.from_leader(for_others, what)
        return own if self._mesh.is_leader else groups

    def _wait(
        self, done: Callable[[], bool], batches: Sequence[BegunBatch], job: str, version: int, refresh: Refresh
    ) -> None:
        """Meets the other ranks until all are done, and refreshes engines together with them. Raises LeaderError.

        done: asked at every meeting, and may be one itself. batches: those whose failure ends the wait.
        """
        self._last_answer = time.monotonic()
        pause_s = _FIRST_POLL_S
        while True:
            error, lost_hosts = "", 0
            stale: list[str] = []
            enough = done()
            if problem := next((batch.problem for batch in batches if batch.problem), ""):
                error = f"rank {self._mesh.rank}, rollout of {job}: {problem}"
            elif self._mesh.is_main:
                error, stale, lost_hosts = self._look_at_engines(version)
            waiting, failed, num_stale, lost_hosts = self._agree(not enough, bool(error), len(stale), lost_hosts)
            self._alive()
            if failed:
                self._mesh.raise_any(error)
            if not waiting:
                return
            self._ask_lost_hosts_again(lost_hosts)
            if num_stale:
                refresh(self._mesh.from_main(partial(list, stale), "naming stale engines"))
                self._last_answer = time.monotonic()
            time.sleep(pause_s)
            pause_s = min(_POLL_S, 1.5 * pause_s)

    def _look_at_engines(self, version: int) -> tuple[str, list[str], int]:
        """Returns what is wrong with the service, which live engines hold other weights, and the hosts lost so far."""
        try:
            status = self._control.healthy_status()
        except ServiceUnreachable as exc:
            silent_s = time.monotonic() - self._last_answer
            return (f"{exc} (silent for {silent_s:.0f} s)" if silent_s > _UNREACHABLE_S else ""), [], 0
        except ServiceFailed as exc:
            return str(exc), [], 0
        self._last_answer = time.monotonic()
        return "", [engine.id for engine in status.engines if _needs_weights(engine, version)], status.lost_hosts

    def _agree(self, *values: int, op: dist.ReduceOp.RedOpType = dist.ReduceOp.MAX) -> list[int]:
        """Collective. Returns each value reduced over all ranks: the largest, or their sum."""
        if self._mesh.world_size == 1:
            return [int(value) for value in values]
        tensor = torch.tensor([int(value) for value in values])  # over gloo: a poll is nothing for a GPU to wait for
        dist.all_reduce(tensor, op)
        return tensor.tolist()


def _needs_weights(engine: EngineInfo, version: int) -> bool:
    return engine.alive and (engine.state == "stale" or engine.weight_version != version)


def _fits(held: RolloutGroup, prompt: Prompt, job: SamplingJob, oldest: int) -> bool:
    """Tells whether a group of an earlier start is what a job would sample; data and settings may have changed.

    What could not be graded is sampled again: else a grader that is mended would find nothing to do.
    """
    same = (
        replace(held.prompt, place=prompt.place) == prompt
        and len(held.samples) == job.num_samples
        and all(o.ok for o in held.outcomes)
    )
    return same and all(
        sample.weight_version >= oldest and len(sample.token_ids) <= job.params.max_tokens for sample in held.samples
    )
