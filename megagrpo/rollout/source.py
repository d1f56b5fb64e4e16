"""Where the loop gets its groups: each data-parallel leader samples and grades its replica's share of the step's prompts.

While leaders wait for samples, all ranks keep meeting in a small all-reduce: an engine that died and came back needs the
current weights, publishing is collective, and so every rank must be there to take part before the samples can go on.
"""

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.distributed as dist

from megagrpo.config.schema import ExperimentConfig
from megagrpo.mesh import Mesh
from megagrpo.rollout.control import ServiceControl, ServiceUnreachable
from megagrpo.rollout.generation import (
    GenerationClient,
    GenerationFailed,
    Response,
    RetryPolicy,
    SamplingParams,
    sample_seed,
)
from megagrpo.rollout.tools import Tool, respond_with_tool
from megagrpo.types import EngineInfo, Outcome, Prompt, RolloutGroup, Sample

Refresh = Callable[[list[str]], None]
_FIRST_POLL_S, _POLL_S = 0.02, 0.2
_UNREACHABLE_S = 30.0  # a control endpoint that is silent for longer ends the run
_CANCEL_S = 10.0


class Grader(Protocol):
    def submit(self, prompt: Prompt, text: str) -> Future[Outcome]: ...


class RolloutSource:
    """On-policy groups from the service at `control`. Every method is collective over the world.

    `decode` turns response token ids into the text that is graded, special tokens left out. `grader` is used on leaders only.
    `alive` is called whenever all ranks have met while they wait.
    """

    def __init__(
        self,
        config: ExperimentConfig,
        mesh: Mesh,
        control: ServiceControl,
        grader: Grader | None,
        decode: Callable[[Sequence[int]], str],
        tool: Tool | None = None,
        alive: Callable[[], None] = lambda: None,
    ):
        assert grader is not None or not mesh.is_leader, "a leader grades"
        self._config, self._mesh, self._control, self._grader, self._decode = config, mesh, control, grader, decode
        self._tool, self._alive = tool, alive
        self._pending: dict[tuple[int, int, int], str] = {}  # (group, prompt, sample) -> who has it
        self._retry = RetryPolicy.of(config)
        self._last_answer = time.monotonic()
        self._lost_hosts = 0  # of the service, as far as this rank's requests know
        self._client: GenerationClient | None = None  # in the thread that samples

    def next(
        self, step: int, prompts: Sequence[Prompt], version: int, refresh: Refresh, attempt: int = 0
    ) -> list[RolloutGroup]:
        """This rank's share of the groups of one step; `prompts` is the same on every rank.

        A group's id is its prompt's place in `prompts`. `attempt` counts the calls of a step: a prompt that comes again in it
        gets other responses. `refresh(engine_ids)` is called on all ranks together whenever engines hold other weights than
        `version`: it publishes to them and marks them ready. Raises LeaderError on every rank.
        """
        params = SamplingParams.of(self._config.sampling)
        again = f" batch {attempt}" if attempt else ""
        groups = self._collect(
            _Job(f"train{again}", step, version, params, self._config.train.group_size), prompts, refresh
        )
        if not self._config.algorithm.needs_greedy_response:
            return groups
        # After the others and not among them: one greedy request (a top-k of 1) moves SGLang's whole batch to another sampling
        # routine, which draws other tokens from the same seeds.
        greedy = self._collect(_Job(f"greedy{again}", step, version, params.greedy(), 1), prompts, refresh)
        return [
            replace(g, greedy=b.samples[0], greedy_outcome=b.outcomes[0]) for g, b in zip(groups, greedy, strict=True)
        ]

    def evaluate(
        self,
        prompts: Sequence[Prompt],
        version: int,
        temperature: float,
        num_samples: int,
        max_tokens: int,
        refresh: Refresh,
    ) -> list[RolloutGroup]:
        """This rank's share of `num_samples` responses to each prompt, with the same seeds at every evaluation."""
        stops = SamplingParams.of(self._config.sampling)
        params = SamplingParams(temperature, max_tokens, stop_token_ids=stops.stop_token_ids, stop=stops.stop)
        return self._collect(_Job("evaluate", 0, version, params, num_samples), prompts, refresh)

    def _collect(self, job: "_Job", prompts: Sequence[Prompt], refresh: Refresh) -> list[RolloutGroup]:
        mesh, total = self._mesh, len(prompts)
        first, last = total * mesh.dp_rank // mesh.dp_size, total * (mesh.dp_rank + 1) // mesh.dp_size
        share = _places(prompts)[first:last]
        work = _Background(lambda: self._sample_share(job, share)) if mesh.is_leader else None
        try:
            self._wait(work, job, refresh)
        except BaseException:
            if work is not None:
                work.cancel()
            raise
        return mesh.from_leader(lambda: work.future.result(), f"rollout of {job}")

    def _wait(self, work: "_Background | None", job: "_Job", refresh: Refresh) -> None:
        """Meet the other ranks until every leader is done; refresh engines together on the way. Raises LeaderError."""
        self._last_answer = time.monotonic()
        pause_s = _FIRST_POLL_S
        while True:
            error, stale, lost_hosts = "", [], 0
            done = work is None or work.future.done()
            if done and work is not None and (exc := work.future.exception()) is not None:
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
                if work is not None:
                    work.soon(lambda: self._client and self._client.ask_again())
            if num_stale:
                refresh(self._from_main(stale))
                self._last_answer = time.monotonic()
            time.sleep(pause_s)
            pause_s = min(_POLL_S, 1.5 * pause_s)

    def _look_at_engines(self, version: int) -> tuple[str, list[str], int]:
        """On the main rank: (what is wrong with the service, engines that live with other weights, hosts lost so far)."""
        try:
            status = self._control.healthy_status()
        except ServiceUnreachable as exc:
            silent_s = time.monotonic() - self._last_answer
            return (f"{exc} (silent for {silent_s:.0f} s)" if silent_s > _UNREACHABLE_S else ""), [], 0
        except RuntimeError as exc:  # ServiceFailed: it says why
            return str(exc), [], 0
        self._last_answer = time.monotonic()
        return "", [engine.id for engine in status.engines if _needs_weights(engine, version)], status.lost_hosts

    def _agree(self, *values: int) -> list[int]:
        """The largest of each value over the world."""
        if self._mesh.world_size == 1:
            return [int(value) for value in values]
        tensor = torch.tensor([int(value) for value in values], device=self._mesh.device)
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return tensor.tolist()

    def _from_main(self, engine_ids: list[str]) -> list[str]:
        if self._mesh.world_size == 1:
            return engine_ids
        box = [engine_ids]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    async def _sample_share(self, job: "_Job", share: list["_Place"]) -> list[RolloutGroup]:
        """All groups of this leader, in order. Raises GenerationFailed, also at the deadline, naming what is missing."""
        rollout = self._config.rollout
        status = self._control.status()
        in_flight = max(1, len(status.engines) * rollout.max_running_requests // self._mesh.dp_size)
        async with GenerationClient(status.router, self._control.api_key, self._retry, in_flight) as client:
            self._client = client
            tasks = [asyncio.create_task(self._sample_group(client, job, place)) for place in share]
            try:
                async with asyncio.timeout(rollout.step_timeout_s):
                    return list(await asyncio.gather(*tasks))
            except TimeoutError:
                missing = [
                    at.prompt.id for task, at in zip(tasks, share, strict=True) if not task.done() or task.cancelled()
                ]
                raise GenerationFailed(
                    f"{len(missing)} of {len(share)} groups did not come within {rollout.step_timeout_s:.0f} s "
                    f"(rollout.step_timeout_s): prompts {missing[:10]}; {client.num_retries} retries, "
                    f"the last because of: {client.last_problem or 'nothing, the engines are slow'}"
                ) from None
            finally:
                self._client = None
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _sample_group(self, client: GenerationClient, job: "_Job", place: "_Place") -> RolloutGroup:
        answers = await asyncio.gather(*(self._sample(client, job, place, index) for index in range(job.num_samples)))
        samples, outcomes = zip(*answers, strict=True)
        return RolloutGroup(place.group_id, place.prompt, samples, outcomes)

    def waiting(self) -> str:
        """What this rank's samples wait for at present, "" for nothing. From any thread."""
        by_owner: dict[str, list[int]] = {}
        for (_, prompt, _), owner in sorted(dict(self._pending).items()):
            by_owner.setdefault(owner, []).append(prompt)
        return ", ".join(
            f"{len(ids)} sample(s) of {owner} (prompts {list(dict.fromkeys(ids))[:10]})"
            for owner, ids in by_owner.items()
        )

    async def _sample(
        self, client: GenerationClient, job: "_Job", place: "_Place", index: int
    ) -> tuple[Sample, Outcome]:
        key = place.group_id, place.prompt.id, index
        self._pending[key] = "the engines"
        try:
            sample = await self._respond(client, job, place, index)
            self._pending[key] = "the grader"
            return sample, await asyncio.wrap_future(self._grader.submit(place.prompt, sample.text))
        finally:
            del self._pending[key]

    async def _respond(self, client: GenerationClient, job: "_Job", place: "_Place", index: int) -> Sample:
        prompt, purpose_of_all = place.prompt, f"{job.purpose} again {place.again}" if place.again else job.purpose

        def turn(number: int, so_far: tuple[int, ...], stops: tuple[int, ...]) -> Awaitable[Response]:
            purpose = f"{purpose_of_all} turn {number}" if number else purpose_of_all
            seed = sample_seed(self._config.seed, purpose, job.step, prompt.id, index)
            params = replace(
                job.params,
                max_tokens=job.params.max_tokens - len(so_far),
                stop_token_ids=job.params.stop_token_ids + stops,
            )
            return client.generate(prompt.token_ids + so_far, params, seed, job.version)

        if self._tool is None:
            response, loss_mask = await turn(0, (), ()), None
        else:
            response, loss_mask = await respond_with_tool(turn, self._tool, self._decode, job.params.max_tokens)
        text = self._decode(response.token_ids)
        return Sample(
            index, response.token_ids, response.logprobs, response.finish_reason, job.version, text, loss_mask
        )


@dataclass(frozen=True)
class _Place:
    """One group to sample."""

    group_id: int
    prompt: Prompt
    again: int  # how often the prompt has come before in the same batch; part of its seeds


def _places(prompts: Sequence[Prompt]) -> list[_Place]:
    seen: Counter[int] = Counter()
    found = []
    for group_id, prompt in enumerate(prompts):
        found.append(_Place(group_id, prompt, seen[prompt.id]))
        seen[prompt.id] += 1
    return found


@dataclass(frozen=True)
class _Job:
    """What to sample: the same for every prompt of one call."""

    purpose: str  # part of every seed
    step: int
    version: int
    params: SamplingParams
    num_samples: int

    def __str__(self) -> str:
        return f"{self.purpose} step {self.step}, weights {self.version}"


class _Background:
    """A coroutine in an event loop of its own thread, so that this thread can take part in collectives meanwhile."""

    def __init__(self, make: Callable):
        self.future: Future = Future()
        self._loop = asyncio.new_event_loop()
        self._task = self._loop.create_task(make())
        self._thread = threading.Thread(target=self._run, daemon=True, name="rollout")
        self._thread.start()

    def _run(self) -> None:
        try:
            self.future.set_result(self._loop.run_until_complete(self._task))
        except BaseException as exc:  # handed over to the thread that asks for the result
            self.future.set_exception(exc)
        finally:
            self._loop.close()

    def soon(self, call: Callable[[], object]) -> None:
        """Run `call` in the coroutine's thread, between two of its steps; nothing when it has ended."""
        with suppress(RuntimeError):  # its loop was closed a moment ago
            self._loop.call_soon_threadsafe(call)

    def cancel(self) -> None:
        self.soon(self._task.cancel)
        self._thread.join(_CANCEL_S)


def _needs_weights(engine: EngineInfo, version: int) -> bool:
    return engine.alive and (engine.state == "stale" or engine.weight_version != version)
