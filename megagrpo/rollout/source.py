"""The source of the loop's groups: each data-parallel leader samples and grades its replica's share of the prompts.

While leaders wait for samples, all ranks keep meeting in a small all-reduce: an engine that died and came back needs
the current weights, publishing is collective, and so every rank must take part before the samples can go on.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist

from megagrpo.config.schema import ExperimentConfig
from megagrpo.families.table import read_architecture
from megagrpo.mesh import Mesh
from megagrpo.rollout.background import BackgroundLoop, Turnstile
from megagrpo.rollout.control import ServiceControl, ServiceFailed, ServiceUnreachable
from megagrpo.rollout.generation import (
    GenerationClient,
    GenerationFailed,
    OnRequest,
    Response,
    RetryPolicy,
    SamplingParams,
    sample_seed,
)
from megagrpo.rollout.jobs import BegunBatch, PromptSlot, SamplingJob, prompt_slots
from megagrpo.rollout.routed_experts import RoutedExperts, without_experts
from megagrpo.rollout.tools import Tool, respond_with_tool
from megagrpo.types import EngineInfo, Outcome, Prompt, Refresh, RolloutGroup, Sample

_NOTHING = np.zeros(0, np.int32)
_FIRST_POLL_S, _POLL_S = 0.02, 0.2  # pause between two meetings of all ranks
_UNREACHABLE_S = 30.0  # a control endpoint that is silent for longer ends the run


class OutcomeSource(Protocol):
    """Grades responses in the background, as rewards/pool.py does."""

    def submit(self, prompt: Prompt, text: str) -> Future[Outcome]:
        """Returns the outcome of `text` as a response to `prompt`, once it is known."""
        ...

    def submit_group(self, prompt: Prompt, texts: Sequence[str], outcomes: Sequence[Outcome]) -> Future[list[Outcome]]:
        """Returns the outcomes of a whole group after its group grader; asked only where there is one."""
        ...


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
        self._config, self._mesh, self._control, self._grader, self._decode = config, mesh, control, grader, decode
        self._tool, self._alive, self._on_request = tool, alive, on_request
        self._pending: dict[tuple[int, int, int], str] = {}  # (group, prompt, sample) -> who has it
        replays = config.actor.routing_replay == "rollout"
        self._experts = RoutedExperts.of(read_architecture(config.model.path)) if replays else None
        self._retry = RetryPolicy.of(config)
        self._last_answer = time.monotonic()
        self._lost_hosts = 0  # of the service, as far as this rank's requests know
        self._background, self._turnstile = BackgroundLoop(), Turnstile()
        self._clients: set[GenerationClient] = set()  # of what is sampled in the background
        self._begun: dict[int, BegunBatch] = {}  # by number, until `next` takes it
        self._held: dict[int, RolloutGroup] = {}  # finished by an earlier start, by place in the run

    def begin(self, batch: int, prompts: Sequence[Prompt], version: int) -> None:
        """Begins to sample this rank's share of a batch, for which `next` asks later; does nothing where it has begun.

        Weights of `version` sample, and the newer ones that are published before the end. Batches are counted over the
        run.
        """
        if batch in self._begun:
            return
        first = batch * len(prompts)
        held = {place: self._held.pop(first + place, None) for place in range(len(prompts))}
        finished = {place: replace(group, group_id=place) for place, group in held.items() if group is not None}
        self._begun[batch] = self._start(self._training(batch, version, 0, or_newer=True), prompts, finished)

    def hold(self, ahead: list[RolloutGroup]) -> None:
        """Takes, out of the list, what `finished` returned in an earlier start: `begin` samples none of it again."""
        self._held = {group.group_id: group for group in ahead}
        ahead.clear()

    def finished(self) -> list[RolloutGroup]:
        """Returns the finished groups of this leader whose batches were not taken, ids counted over the run's prompts.

        On other ranks []. Those that are still being sampled are left out.
        """
        return [
            replace(group, group_id=number * batch.num_groups + place)
            for number, batch in self._begun.items()
            if self._mesh.is_leader
            for place, group in sorted(batch.finished.copy().items())
        ]

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
        batch = self._begun.pop(step) if step in self._begun else self._start(job, prompts)
        groups = self._collect(job, batch, refresh)
        if not self._config.algorithm.needs_greedy_response:
            return groups
        # After the others and not among them: one greedy request (a top-k of 1) moves SGLang's whole batch to another
        # sampling routine, which draws other tokens from the same seeds.
        job = SamplingJob(f"greedy{job.again}", step, version, job.params.greedy(), num_samples=1)
        greedy = self._collect(job, self._start(job, prompts), refresh)
        return [
            replace(g, greedy=b.samples[0], greedy_outcome=b.outcomes[0]) for g, b in zip(groups, greedy, strict=True)
        ]

    def drain(self) -> None:
        """Collective. Waits until what was begun has been sampled and graded.

        Engines that start again meanwhile cannot be given the weights that they had: others finish what they were
        asked. Where none is left it returns, and the weights published next go on. Raises LeaderError on every rank.
        """
        pause_s = _FIRST_POLL_S
        while True:
            error, num_ready = "", 1
            if self._mesh.is_main:
                error, num_ready = self._count_ready()
            unfinished = any(not batch.done for batch in self._begun.values())
            waiting, failed, none_ready = self._agree(unfinished, bool(error), num_ready == 0)
            self._alive()
            if failed:
                self._mesh.raise_any(error)
            if not waiting or none_ready:
                return
            time.sleep(pause_s)
            pause_s = min(_POLL_S, 1.5 * pause_s)

    def _count_ready(self) -> tuple[str, int]:
        try:
            return "", sum(engine.state == "ready" for engine in self._control.healthy_status().engines)
        except ServiceUnreachable:
            return "", 1  # `next` has patience with it, and a limit
        except ServiceFailed as exc:
            return str(exc), 0

    def close(self) -> None:
        """Gives up what was begun."""
        self._begun.clear()
        self._background.close()

    def _training(self, step: int, version: int, attempt: int, or_newer: bool = False) -> SamplingJob:
        again = f" batch {attempt}" if attempt else ""
        params, size = SamplingParams.of(self._config.sampling), self._config.train.group_size
        regrade = self._config.reward.group_grader is not None
        experts = self._experts is not None
        return SamplingJob(f"train{again}", step, version, params, size, again, regrade, or_newer, experts)

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
        self, job: SamplingJob, prompts: Sequence[Prompt], finished: dict[int, RolloutGroup] | None = None
    ) -> BegunBatch:
        """Begins a leader's share in the background; other ranks wait for theirs. `finished`: not sampled again."""
        mesh, total = self._mesh, len(prompts)
        first, last = total * mesh.dp_rank // mesh.dp_size, total * (mesh.dp_rank + 1) // mesh.dp_size
        batch = BegunBatch(total, finished or {})
        if mesh.is_leader:
            share = prompt_slots(prompts)[first:last]
            batch.work = self._background.submit(self._sample_share(job, share, batch.finished))
        return batch

    def _collect(self, job: SamplingJob, batch: BegunBatch, refresh: Refresh) -> list[RolloutGroup]:
        """Collective. Waits for every leader's share of a job and gives it to the leader's replica.

        Experts stay with the leader: who trains gets those of its own layers with the batch.
        """
        work = batch.work
        try:
            self._wait(work, job, refresh)
        finally:
            if work is not None:
                work.cancel()

        def result() -> list[RolloutGroup]:
            assert work is not None, "asked of leaders only"
            return [without_experts(group) for group in work.result()] if job.with_experts else work.result()

        groups = self._mesh.from_leader(result, f"rollout of {job}")
        return groups if work is None else work.result()

    def _wait(self, work: "Future[list[RolloutGroup]] | None", job: SamplingJob, refresh: Refresh) -> None:
        """Meets the other ranks until every leader is done, and refreshes engines together with them.

        Raises LeaderError.
        """
        self._last_answer = time.monotonic()
        pause_s = _FIRST_POLL_S
        while True:
            error, lost_hosts = "", 0
            stale: list[str] = []
            done = work is None or work.done()
            if done and work is not None and (exc := work.exception()) is not None:
                error = f"rank {self._mesh.rank}, rollout of {job}: {type(exc).__name__}: {exc}"
            elif self._mesh.is_main:
                error, stale, lost_hosts = self._look_at_engines(job.version)
            waiting, failed, num_stale, lost_hosts = self._agree(not done, bool(error), len(stale), lost_hosts)
            self._alive()
            if failed:
                self._mesh.raise_any(error)
            if not waiting:
                return
            if lost_hosts > self._lost_hosts:
                self._lost_hosts = lost_hosts
                for client in set(self._clients):
                    client.ask_again()
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

    def _agree(self, *values: int) -> list[int]:
        """Collective. Returns the largest of each value over all ranks."""
        if self._mesh.world_size == 1:
            return [int(value) for value in values]
        tensor = torch.tensor([int(value) for value in values])  # over gloo: a poll is nothing for a GPU to wait for
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return tensor.tolist()

    async def _sample_share(
        self, job: SamplingJob, share: list[PromptSlot], finished: dict[int, RolloutGroup]
    ) -> list[RolloutGroup]:
        """Returns all groups of this leader, in order, and adds each to `finished` (by place) when it comes.

        Raises GenerationFailed, which names what is missing at the deadline.
        """
        rollout = self._config.rollout
        status = self._control.status()
        self._turnstile.limit = max(1, len(status.engines) * rollout.max_running_requests // self._mesh.dp_size)
        self._turnstile.admit()
        async with GenerationClient(
            status.router, self._control.api_key, self._retry, self._turnstile, self._on_request, self._experts
        ) as client:
            self._clients.add(client)
            missing = [slot for slot in share if slot.group_id not in finished]
            tasks = [asyncio.create_task(self._sample_group(client, job, slot, finished)) for slot in missing]
            try:
                async with asyncio.timeout(rollout.step_timeout_s):
                    await asyncio.gather(*tasks)
                return [finished[slot.group_id] for slot in share]
            except TimeoutError:
                late = [slot.prompt.id for slot in share if slot.group_id not in finished]
                raise GenerationFailed(
                    f"{len(late)} of {len(share)} groups did not come within {rollout.step_timeout_s:.0f} s "
                    f"(rollout.step_timeout_s): prompts {late[:10]}; {client.num_retries} retries, "
                    f"the last because of: {client.last_problem or 'nothing, the engines are slow'}"
                ) from None
            finally:
                self._clients.discard(client)
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _sample_group(
        self, client: GenerationClient, job: SamplingJob, slot: PromptSlot, finished: dict[int, RolloutGroup]
    ) -> None:
        answers = await asyncio.gather(*(self._sample(client, job, slot, index) for index in range(job.num_samples)))
        samples, outcomes = zip(*answers, strict=True)
        if job.regrade:
            assert self._grader is not None, "leaders alone sample"
            texts = [sample.text for sample in samples]
            regraded = await asyncio.wrap_future(self._grader.submit_group(slot.prompt, texts, outcomes))
            outcomes = tuple(regraded)
        finished[slot.group_id] = RolloutGroup(slot.group_id, slot.prompt, samples, outcomes)

    def waiting(self) -> str:
        """Returns what this rank's samples wait for at present, "" for nothing. May be called from any thread."""
        by_owner: dict[str, list[int]] = {}
        for (_, prompt, _), owner in sorted(dict(self._pending).items()):
            by_owner.setdefault(owner, []).append(prompt)
        return ", ".join(
            f"{len(ids)} sample(s) of {owner} (prompts {list(dict.fromkeys(ids))[:10]})"
            for owner, ids in by_owner.items()
        )

    async def _sample(
        self, client: GenerationClient, job: SamplingJob, slot: PromptSlot, index: int
    ) -> tuple[Sample, Outcome]:
        assert self._grader is not None, "leaders alone sample"
        key = slot.group_id, slot.prompt.id, index
        self._pending[key] = "the engines"
        try:
            sample = await self._respond(client, job, slot, index)
            self._pending[key] = "the grader"
            return sample, await asyncio.wrap_future(self._grader.submit(slot.prompt, sample.text))
        finally:
            del self._pending[key]

    async def _respond(self, client: GenerationClient, job: SamplingJob, slot: PromptSlot, index: int) -> Sample:
        prompt, purpose_of_all = slot.prompt, f"{job.purpose} again {slot.again}" if slot.again else job.purpose
        num_read = 0  # tokens whose experts are here

        async def turn(number: int, so_far: np.ndarray, stops: tuple[int, ...]) -> Response:
            nonlocal num_read
            purpose = f"{purpose_of_all} turn {number}" if number else purpose_of_all
            seed = sample_seed(self._config.seed, purpose, job.step, prompt.id, index)
            params = replace(
                job.params,
                max_tokens=job.params.max_tokens - len(so_far),
                stop_token_ids=job.params.stop_token_ids + stops,
            )
            ids, experts_from = np.concatenate([prompt.token_ids, so_far]), num_read if job.with_experts else None
            response = await client.generate(ids, params, seed, job.version, job.or_newer, experts_from)
            num_read += 0 if response.routed_experts is None else len(response.routed_experts)
            return response

        if self._tool is None:
            response, loss_mask = await turn(0, _NOTHING, ()), None
        else:
            response, loss_mask = await respond_with_tool(turn, self._tool, self._decode, job.params.max_tokens)
        return Sample(
            index=index,
            token_ids=response.token_ids,
            logprobs=response.logprobs,
            finish_reason=response.finish_reason,
            weight_version=response.weight_version,
            newer=response.newer,
            text=self._decode(response.token_ids),
            loss_mask=loss_mask,
            routed_experts=response.routed_experts,
        )


def _needs_weights(engine: EngineInfo, version: int) -> bool:
    return engine.alive and (engine.state == "stale" or engine.weight_version != version)
