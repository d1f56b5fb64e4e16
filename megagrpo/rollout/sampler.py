"""Samples and grades one leader's share of the prompts, in an event loop beside the main thread."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Protocol

import numpy as np

from megagrpo.config.schema import ExperimentConfig
from megagrpo.families.table import read_architecture
from megagrpo.rollout.background import Patience, Turnstile
from megagrpo.rollout.control import ServiceControl, ServiceStatus, engine_cache_tokens
from megagrpo.rollout.generation import (
    GenerationClient,
    GenerationFailed,
    OnRequest,
    Response,
    RetryPolicy,
    sample_seed,
)
from megagrpo.rollout.jobs import PromptSlot, SamplingJob
from megagrpo.rollout.lengths import ResponseLengths
from megagrpo.rollout.routed_experts import RoutedExperts
from megagrpo.rollout.tools import Tool, respond_with_tool
from megagrpo.types import Outcome, Prompt, RolloutGroup, Sample

_NOTHING = np.zeros(0, np.int32)
_BESIDE = 1.1  # tokens on their way for each that the caches hold: an engine has the next request when one ends


class OutcomeSource(Protocol):
    """Grades responses in the background, as rewards/pool.py does."""

    def submit(self, prompt: Prompt, text: str) -> Future[Outcome]:
        """Returns the outcome of `text` as a response to `prompt`, once it is known."""
        ...

    def submit_group(self, prompt: Prompt, texts: Sequence[str], outcomes: Sequence[Outcome]) -> Future[list[Outcome]]:
        """Returns the outcomes of a whole group after its group grader; asked only where there is one."""
        ...


class Sampler:
    """Asks the engines for a leader's samples, and its grader for their outcomes. Coroutines are of one event loop.

    Requests leave as engines get free: by rollout.max_running_requests and by the tokens of their caches, in the order
    of rollout.order. What trainers wait for (an evaluation) passes what is sampled ahead; a later turn of a response
    passes first ones. num_leaders: who share the engines. decode, tool and on_request: see RolloutSource.
    """

    def __init__(
        self,
        config: ExperimentConfig,
        num_leaders: int,
        control: ServiceControl,
        grader: OutcomeSource,
        decode: Callable[[np.ndarray], str],
        tool: Tool | None,
        on_request: OnRequest,
    ):
        self._config, self._num_leaders, self._control = config, num_leaders, control
        self._grader, self._decode, self._tool, self._on_request = grader, decode, tool, on_request
        self._pending: dict[tuple[str, int, int, int], str] = {}  # (job, group, prompt, sample) -> who has it
        replays = config.actor.routing_replay == "rollout"
        self._experts = RoutedExperts.of(read_architecture(config.model.path)) if replays else None
        self._retry = RetryPolicy.of(config)
        self._turnstile = Turnstile()
        self._lengths = ResponseLengths(config.sampling.max_response_tokens)
        self._cache_tokens: dict[tuple[str, int], int | None] = {}  # by engine and incarnation; None: it does not say
        self._num_jobs, self._looking = 0, asyncio.Lock()
        self._discarded_before = 0  # tokens, by clients of jobs that ended
        self._clients: set[GenerationClient] = set()

    def ask_again(self) -> None:
        """Abandons the present attempt of every request and makes another. In any thread."""
        for client in set(self._clients):
            client.ask_again()

    @property
    def num_discarded(self) -> int:
        """Returns the tokens that came so far and are of no sample. In any thread."""
        return self._discarded_before + sum(client.num_discarded for client in list(self._clients))

    def waiting(self) -> str:
        """Returns what this rank's samples wait for at present, "" for nothing. In any thread."""
        by_owner: dict[str, list[int]] = {}
        for (*_, prompt, _), owner in sorted(dict(self._pending).items()):
            by_owner.setdefault(owner, []).append(prompt)
        return ", ".join(
            f"{len(ids)} sample(s) of {owner} (prompts {list(dict.fromkeys(ids))[:10]})"
            for owner, ids in by_owner.items()
        )

    async def sample_share(
        self, job: SamplingJob, share: list[PromptSlot], finished: dict[int, RolloutGroup], patience: Patience
    ) -> None:
        """Samples the groups of `share`, and adds each to `finished` (by place) when it comes.

        Raises GenerationFailed, which names what is missing at the end of the patience.
        """
        place_in_line, limit_s = self._num_jobs, self._config.rollout.step_timeout_s
        self._num_jobs += 1
        async with self._looking:  # one job after the other, so that requests of the first come first
            # In a thread: a service that is slow to answer must not hold up the samples of other jobs.
            status = await asyncio.to_thread(self._control.status)
            await self._admit(status)
        async with GenerationClient(
            status.router, self._control.api_key, self._retry, self._turnstile, self._on_request, self._experts
        ) as client:
            self._clients.add(client)
            tasks = [
                asyncio.create_task(self._sample_group(client, job, slot, finished, place_in_line)) for slot in share
            ]
            try:
                async with patience:
                    await asyncio.gather(*tasks)
            except TimeoutError:
                late = [slot.prompt.id for slot, task in zip(share, tasks, strict=True) if task.cancelled()]
                raise GenerationFailed(
                    f"{len(late)} of {len(share)} groups did not come within {limit_s:.0f} s "
                    f"(rollout.step_timeout_s): prompts {late[:10]}; {client.num_retries} retries, "
                    f"the last because of: {client.last_problem or 'nothing, the engines are slow'}"
                ) from None
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                self._clients.discard(client)
                self._discarded_before += client.num_discarded

    async def _admit(self, status: ServiceStatus) -> None:
        """Lets as many requests leave as this leader's share of the engines takes."""
        for engine in status.engines:
            known = (engine.id, engine.incarnation)
            if engine.state == "ready" and known not in self._cache_tokens:
                self._cache_tokens[known] = await asyncio.to_thread(
                    engine_cache_tokens, engine.url, self._control.api_key
                )
        number, sizes = len(status.engines), [tokens for tokens in self._cache_tokens.values() if tokens]
        self._turnstile.limit = max(1, number * self._config.rollout.max_running_requests // self._num_leaders)
        if sizes:
            self._turnstile.tokens = _BESIDE * number * sum(sizes) / len(sizes) / self._num_leaders
        self._turnstile.admit()

    async def _sample_group(
        self,
        client: GenerationClient,
        job: SamplingJob,
        slot: PromptSlot,
        finished: dict[int, RolloutGroup],
        place_in_line: int,
    ) -> None:
        order = (float(not job.waited_for), float(place_in_line), self._order(slot.prompt))
        answers = await asyncio.gather(
            *(self._sample(client, job, slot, index, order) for index in range(job.num_samples))
        )
        samples, outcomes = zip(*answers, strict=True)
        if job.regrade:
            texts = [sample.text for sample in samples]
            regraded = await asyncio.wrap_future(self._grader.submit_group(slot.prompt, texts, outcomes))
            outcomes = tuple(regraded)
        finished[slot.group_id] = RolloutGroup(slot.group_id, slot.prompt, samples, outcomes)

    def _order(self, prompt: Prompt) -> float:
        match self._config.rollout.order:
            case "long_prompts_first":
                return -float(len(prompt.token_ids))
            case "shortest_expected_first":
                return self._lengths.expected(prompt.id)
        return 0.0

    async def _sample(
        self, client: GenerationClient, job: SamplingJob, slot: PromptSlot, index: int, order: tuple[float, ...]
    ) -> tuple[Sample, Outcome]:
        # of the job too: an evaluation, and a later batch, may have the same prompt at the same place
        key = str(job), slot.group_id, slot.prompt.id, index
        self._pending[key] = "the engines"
        try:
            sample = await self._respond(client, job, slot, index, order)
            self._pending[key] = "the grader"
            return sample, await asyncio.wrap_future(self._grader.submit(slot.prompt, sample.text))
        finally:
            del self._pending[key]

    async def _respond(
        self, client: GenerationClient, job: SamplingJob, slot: PromptSlot, index: int, order: tuple[float, ...]
    ) -> Sample:
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
            ids = np.concatenate([prompt.token_ids, so_far])
            urgency = (0.0, *order[1:]) if number else order

            def held() -> float:
                return len(ids) + min(self._lengths.held(), params.max_tokens)

            experts_from = num_read if job.with_experts else None
            response = await client.generate(
                ids, params, seed, job.version, job.or_newer, experts_from=experts_from, order=urgency, tokens=held
            )
            num_read += 0 if response.routed_experts is None else len(response.routed_experts)
            return response

        if self._tool is None:
            response, loss_mask = await turn(0, _NOTHING, ()), None
        else:
            response, loss_mask = await respond_with_tool(turn, self._tool, self._decode, job.params.max_tokens)
        if not job.waited_for:
            self._lengths.add(prompt.id, len(response.token_ids))
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
