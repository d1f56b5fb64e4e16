"""Samples and grades one leader's share of the prompts, in an event loop of a background thread."""

import asyncio
import itertools
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from megagrpo.config.schema import ExperimentConfig
from megagrpo.data.images import ImageStore
from megagrpo.models.architecture import Architecture
from megagrpo.rewards.part_rewards import ResponseTokens
from megagrpo.rewards.pool import RewardPool
from megagrpo.rollout.admission import AdmissionQueue, ResponseLengths
from megagrpo.rollout.agents.answering import Answering, NoAnswer, RolloutTask, SamplePart
from megagrpo.rollout.batches import NumberedPrompt, SampledBatch, SamplingJob
from megagrpo.rollout.control import UNREACHABLE_S, ServiceControl, ServiceUnreachable
from megagrpo.rollout.engine_choice import Affinity, Engines
from megagrpo.rollout.generation import (
    GenerationClient,
    GenerationFailed,
    SampleRequest,
    SentImages,
    sample_seed,
)
from megagrpo.rollout.response import CacheKey, CacheUse, Response, SampleTurn
from megagrpo.rollout.served_models import EngineJudge, OpenTeachers, ServedEngines, Teachers
from megagrpo.system.background import end_tasks
from megagrpo.types import Outcome, Prompt, RolloutGroup, Sample

T = TypeVar("T")
_LOOK_S = 2.0  # between questions to a service that does not answer
_LONG = 8192  # tokens of a response that is decoded in a thread
_OPEN = 512  # rollouts at once, or as many as the engines take requests: an agent's is a process


@dataclass(frozen=True, eq=False)
class _Rollout:
    """Holds the common part of a rollout's requests."""

    client: GenerationClient
    job: SamplingJob
    of: NumberedPrompt
    index: int  # within its group
    order: tuple[float, ...]  # see AdmissionQueue
    affinity: Affinity
    teachers: OpenTeachers

    @property
    def purpose(self) -> str:
        """Returns the purpose of its seeds; that of a prompt's second occurrence in a batch is
        another one."""
        return (
            f"{self.job.purpose} again {self.of.repeats}" if self.of.repeats else self.job.purpose
        )


class Sampler:
    """Requests a leader's samples from the engines and their outcomes from its grader. Coroutines
    are of one loop.

    Requests leave in the order of the data when engines have room, by rollout.max_running_requests
    and the tokens of their caches. Urgent jobs (evaluations) go before batches sampled ahead, then
    later turns before first turns. num_leaders: leaders that share the engines. decode: token ids
    of a response -> the text that is graded, without special tokens.
    """

    def __init__(
        self,
        config: ExperimentConfig,
        num_leaders: int,
        control: ServiceControl,
        grader: RewardPool,
        decode: Callable[[np.ndarray], str],
        answering: Answering | None = None,
    ):
        self._config = config
        self._grader = grader
        self._decode = decode
        self._answering: Answering = answering or NoAnswer()
        self._pending: dict[_Rollout, str] = {}  # what each waits for
        self._open = AdmissionQueue()  # of rollouts, in the same order
        self.lengths = ResponseLengths(config.sampling.max_response_tokens)
        self._admitting = asyncio.Lock()
        self._beginning = asyncio.Lock()
        self._silent = ""  # why the service gives no answer to this leader
        self._engines = ServedEngines(config, "", Engines.from_service(control), num_leaders)
        self._job_numbers = itertools.count()
        self.cache_use = CacheUse()
        # of a vision-language model; set before the first request
        self.images: ImageStore | None = None
        self.arch: Architecture | None = None  # set if the experts of each token are recorded
        self.teachers = Teachers(config, num_leaders, control)
        self._judges = {
            name: EngineJudge(config, name, num_leaders, control)
            for name, judge in config.reward.judges.items()
            if judge.path
        }
        for name, judge in self._judges.items():
            grader.connect(name, judge)

    def waiting(self) -> str:
        """Returns what this rank's samples wait for, or "". May be called from any thread."""
        by_owner: dict[str, list[int]] = {}
        for rollout, owner in dict(self._pending).items():
            by_owner.setdefault(owner, []).append(rollout.of.prompt.id)
        return self._silent or ", ".join(
            f"{len(ids)} sample(s) of {owner} (prompts {list(dict.fromkeys(ids))[:10]})"
            for owner, ids in by_owner.items()
        )

    async def sample_share(self, batch: SampledBatch) -> None:
        """Samples the groups of the batch's share that are missing, and adds each to `finished` when
        it is complete."""
        job, finished = batch.job, batch.finished
        share = [prompt for prompt in batch.share if prompt.group_id not in finished]
        job_number = next(self._job_numbers)
        self.cache_use.newest = max(self.cache_use.newest, job.version)
        # one job after the other, so that requests of the first leave first
        async with self._admitting:
            await self._count_engines()
        async with (
            self._engines.client(self.arch) as client,
            self.teachers.opened() as teachers,
        ):
            batch.retries = lambda: (
                f"{client.num_retries} retries, the last because of: "
                f"{client.last_problem or 'nothing'}{teachers.problems()}"
                f"{''.join(judge.client.problem for judge in self._judges.values())}"
            )
            clients = (client, teachers)
            await all_of(
                [self._sample_group(clients, job, prompt, finished, job_number) for prompt in share]
            )

    def missing(self, batch: SampledBatch) -> str:
        """Returns which groups of a batch have not come in time, and what they wait for. May be
        called from any thread."""
        late = [n.prompt.id for n in batch.share if n.group_id not in batch.finished]
        return (
            f"{len(late)} of {len(batch.share)} groups did not come within "
            f"{self._config.rollout.step_timeout_s:.0f} s (rollout.step_timeout_s): prompts "
            f"{late[:10]}; they wait for {self.waiting()}; {batch.retries()}"
        )

    async def _count_engines(self) -> None:
        """Sets the limits of requests in flight to this leader's share of the engines. Raises
        ServiceUnreachable if the service is silent for longer than UNREACHABLE_S: the main rank may
        reach it, and this one not."""
        until = time.monotonic() + UNREACHABLE_S
        while True:
            try:
                await self._engines.count()
                await self.teachers.count_engines()
                break
            except ServiceUnreachable as exc:
                self._silent = str(exc)
                if time.monotonic() > until:
                    raise
            await asyncio.sleep(_LOOK_S)
        self._silent = ""
        self._open.limit = max(_OPEN, self._engines.admission.limit)
        self._open.admit()

    async def _sample_group(
        self,
        clients: tuple[GenerationClient, OpenTeachers],
        job: SamplingJob,
        of: NumberedPrompt,
        finished: dict[int, RolloutGroup],
        job_number: int,
    ) -> None:
        async with self._beginning:
            # requests of groups before it leave, before its own are prepared
            await asyncio.sleep(0)
        order = (float(not job.is_urgent), float(job_number))
        group = self._config.rollout.engine_choice == "group"
        shared = Affinity() if group else None
        client, teachers = clients
        rollouts = [
            _Rollout(client, job, of, index, order, shared or Affinity(), teachers)
            for index in range(job.num_samples)
        ]
        answers = await all_of([self._sample(rollout) for rollout in rollouts])
        of_rollouts, outcomes = zip(*answers, strict=True)
        samples = numbered(of_rollouts)
        if not job.is_urgent and self._config.reward.group_grader is not None:
            texts = [sample.text for sample in samples]
            regraded = await asyncio.wrap_future(
                self._grader.submit_group(of.prompt, texts, outcomes)
            )
            outcomes = tuple(regraded)
        finished[of.group_id] = RolloutGroup(of.group_id, of.prompt, samples, outcomes)

    async def _sample(self, rollout: _Rollout) -> tuple[list[Sample], Outcome]:
        prompt = rollout.of.prompt
        self._pending[rollout] = self._answering.waited_for
        try:
            async with self._open.admitted(rollout.order):
                parts, outcome = await self._answering.rollout(self._task(rollout))
            samples = [await self._sample_of(rollout, part) for part in parts]
            scoring = asyncio.create_task(self._scored(rollout, samples, parts))
            try:
                if not outcome.status:
                    (sample,) = samples
                    self._pending[rollout] = "the grader"
                    tokens = ResponseTokens(sample.token_ids, sample.loss_mask, self._decode)
                    grading = self._grader.submit(prompt, sample.text, tokens)
                    outcome = replace(await asyncio.wrap_future(grading), end=outcome.end)
                self._pending[rollout] = "its teachers"
                return await scoring, outcome
            finally:
                await end_tasks([scoring])
        finally:
            del self._pending[rollout]

    async def _scored(
        self, rollout: _Rollout, samples: list[Sample], parts: Sequence[SamplePart]
    ) -> list[Sample]:
        """Returns samples to train on with their teachers' scores; 0 for a tool's tokens."""
        prompt = rollout.of.prompt
        if rollout.job.is_urgent or not self.teachers.of(prompt):
            return samples

        async def scored(sample: Sample, part: SamplePart) -> Sample:
            context = prompt.token_ids if sample.prompt_ids is None else sample.prompt_ids
            top_ids = part.response.top_ids
            scores = await rollout.teachers.score(prompt, context, sample.token_ids, top_ids)
            mask = sample.loss_mask
            if mask is not None:
                scores = replace(scores, logprobs=np.where(mask, scores.logprobs, 0))
            return replace(sample, teacher=replace(scores, loss=self.teachers.loss))

        return await all_of([scored(*pair) for pair in zip(samples, parts, strict=True)])

    def _task(self, rollout: _Rollout) -> RolloutTask:
        job, of = rollout.job, rollout.of

        def seed_of(whose: str) -> int:
            purpose = f"{whose} {job.purpose} {of.repeats}"
            return sample_seed(self._config.seed, purpose, job.step, of.prompt.id, 0)

        return RolloutTask(
            of.prompt,
            seed_of,
            self._turns(rollout),
            job.params.max_tokens,
            self._decode,
        )

    def _turns(self, rollout: _Rollout) -> SampleTurn:
        """Returns a function that samples the turns of one rollout, each with a seed of its own."""
        job, prompt, index = rollout.job, rollout.of.prompt, rollout.index
        key = (
            CacheKey(self.cache_use) if self._config.rollout.prefix_cache == "by_version" else None
        )
        stops = job.params.stop_token_ids
        if self.images is not None:
            # A sampled placeholder ends the response: an engine that got it again would look for
            # its image.
            stops += (self.images.image_token, self.images.video_token)

        async def turn(number: int, context: np.ndarray, max_tokens: int, known: int) -> Response:
            purpose = f"{rollout.purpose} turn {number}" if number else rollout.purpose
            request = SampleRequest(
                context,
                replace(job.params, max_tokens=max_tokens, stop_token_ids=stops),
                sample_seed(self._config.seed, purpose, job.step, prompt.id, index),
                job.version,
                job.or_newer,
                experts_from=None if job.is_urgent or self.arch is None else known,
                order=(rollout.order[0], float(not number), *rollout.order[1:]),
                tokens=lambda: len(context) + min(self.lengths.occupied(), max_tokens),
                images=self._sent_images(prompt),
                affinity=rollout.affinity,
                cache_key=key,
                top_k=0 if job.is_urgent else self.teachers.num_candidates,
            )
            response = await rollout.client.generate(request)
            self.cache_use.count(len(context), response, key)
            return response

        return turn

    def _sent_images(self, prompt: Prompt) -> SentImages | None:
        if not prompt.images:
            return None
        assert self.images is not None and prompt.short_ids is not None, (
            "the prompts were loaded with a store"
        )
        if self._config.sampling.several_turns:
            raise GenerationFailed(
                f"{prompt.location}: environments and agents continue prompts of text only"
            )
        uris = [self.images.uri(image.key) for image in prompt.images]
        number = sum(self.images.tokens(image.grid) for image in prompt.images)
        return SentImages(uris, prompt.short_ids, number, prompt.location)

    async def _sample_of(self, rollout: _Rollout, part: SamplePart) -> Sample:
        response = part.response
        ids = response.token_ids
        long = len(ids) > _LONG
        text = await asyncio.to_thread(self._decode, ids) if long else self._decode(ids)
        if not rollout.job.is_urgent:
            self.lengths.add(len(ids))
        return Sample(
            index=rollout.index,
            token_ids=ids,
            logprobs=response.logprobs,
            finish_reason=response.finish_reason,
            weight_version=response.weight_version,
            newer=response.newer,
            text=text,
            loss_mask=part.loss_mask,
            routed_experts=part.routed_experts,
            prompt_ids=part.prompt_ids,
            shared=part.shared,
        )


async def all_of(work: Sequence[Coroutine[object, object, T]]) -> list[T]:
    """Returns the results of all; ends the others when one fails, and all when it is cancelled."""
    tasks = list(map(asyncio.create_task, work))
    try:
        # shielded: a task that is cancelled once, in the end, can close what it has opened
        return await asyncio.shield(asyncio.gather(*tasks))
    finally:
        await end_tasks(tasks)


def numbered(of_rollouts: Sequence[Sequence[Sample]]) -> tuple[Sample, ...]:
    """Returns the samples of a group's rollouts, numbered; with one sample each, rollouts have no
    number."""
    if all(len(samples) == 1 for samples in of_rollouts):
        return tuple(itertools.chain(*of_rollouts))
    pairs = [(rollout, sample) for rollout, samples in enumerate(of_rollouts) for sample in samples]
    return tuple(
        replace(sample, index=index, rollout=rollout)
        for index, (rollout, sample) in enumerate(pairs)
    )
