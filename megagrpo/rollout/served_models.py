"""Requests to models that are not trained: to the teachers of rows for log-probabilities of
responses, and to judges whose engines the run starts for replies."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import orjson

from megagrpo.config.schema import ExperimentConfig
from megagrpo.models.architecture import Architecture
from megagrpo.rewards.graders.judge import JudgeGrader
from megagrpo.rewards.services import ServiceError
from megagrpo.rollout.admission import AdmissionQueue
from megagrpo.rollout.answer_arrays import read_answer, read_lists, read_pairs
from megagrpo.rollout.control import ServiceControl, ServiceUnreachable
from megagrpo.rollout.engine_choice import LOOK_S, Engines
from megagrpo.rollout.generation import (
    EngineRequest,
    GenerationClient,
    GenerationFailed,
    RetryPolicy,
    UnusableAnswer,
    end_of_request,
    unreadable,
)
from megagrpo.system import environment
from megagrpo.types import EngineInfo, Prompt, TeacherScores

if TYPE_CHECKING:  # it pulls in torch
    from megagrpo.monitor.metrics import Metrics


@dataclass(frozen=True)
class ScoreRequest(EngineRequest[TeacherScores]):
    """A request for the log-probabilities of a response, T tokens, and of k more tokens at each
    position."""

    ids: np.ndarray  # of prompt and response
    length: int  # T
    top_k: int = 0  # most probable tokens of the teacher
    candidates: np.ndarray | None = None  # [T, k] int32, the tokens instead

    def tokens(self) -> float:
        """See AdmissionQueue."""
        return float(len(self.ids))

    def body(self) -> dict[str, object]:
        """Returns the request as SGLang takes it."""
        body: dict[str, object] = {
            "input_ids": self.ids,
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": len(self.ids) - self.length - 1,
        }
        if self.candidates is not None:  # see service/engine_process.py
            body["token_ids_logprob"] = self.candidates.reshape(-1)
        elif self.top_k:
            body["top_logprobs_num"] = self.top_k
        return body

    def read(self, text: bytes, arch: Architecture | None) -> TeacherScores:
        """Returns the scores in an answer's text. Raises UnusableAnswer if they do not fit the
        response."""
        with unreadable(text):
            answer, arrays = read_answer(text)
            meta = answer["meta_info"]
            end_of_request(meta)
            # the first is null, that of the token before the response
            logprobs = read_pairs(meta.get("input_token_logprobs", b"[]"), arrays)[1][1:]
            ids = top = None
            if self.candidates is not None:
                k = self.candidates.shape[1]
                lists = meta.get("input_token_ids_logprobs", b"[]")
                _, top = read_lists(lists, k, 1, arrays)
                ids = self.candidates
            elif self.top_k:
                lists = meta.get("input_top_logprobs", b"[]")
                ids, top = read_lists(lists, self.top_k, 1, arrays)
            lengths = {len(array) for array in (logprobs, ids, top) if array is not None}
            if lengths != {self.length} or not np.isfinite(logprobs).all():
                raise UnusableAnswer(
                    f"log-probabilities of {lengths} tokens, or none, of {self.length}"
                )
        return TeacherScores(logprobs, ids, top)


class ServedEngines:
    """The engines of one served model, or with the name "" those that sample. Coroutines run in one
    loop.

    num_leaders: leaders that share the engines.
    """

    def __init__(self, config: ExperimentConfig, name: str, engines: Engines, num_leaders: int):
        self._config, self._name = config, name
        self._engines = engines
        self._num_leaders = num_leaders
        self.admission = AdmissionQueue()

    async def count(self, older_than_s: float = 0.0) -> None:
        """Sets the limits of requests in flight to this leader's share of the engines, after a look
        unless the last is younger. Raises ServiceUnreachable."""
        await self._engines.look(older_than_s)
        at_once = self._config.rollout.max_running_requests
        self.admission.share(self._engines.listed, at_once, self._num_leaders)

    def client(self, experts: Architecture | None = None) -> GenerationClient:
        """Returns a client of the engines, to be entered. experts: see GenerationClient."""
        retry = RetryPolicy.of(self._config)
        return GenerationClient(self._engines, retry, self.admission, experts, self._name)


class Teachers:
    """The teachers of an experiment, for one leader. Coroutines run in one loop.

    num_leaders: leaders that share the engines.
    """

    def __init__(self, config: ExperimentConfig, num_leaders: int, control: ServiceControl):
        self._config = config
        _, self.loss, top_k, _ = config.scoring
        # tokens of each position, the policy's or the teacher's most probable, that are also scored
        self.num_candidates, self.top_k = 0, top_k
        if self.loss == "student_topk":
            self.num_candidates, self.top_k = top_k, 0
        self._engines: dict[str, ServedEngines] = {}
        for name, teacher in config.teachers.items():
            model = f"teacher-{name}"
            engines = Engines.from_service(control, model)
            if teacher.url is not None:
                key = environment.secret(teacher.api_key_env, f"teachers.{name}")
                engines = Engines(partial(_elsewhere, model, teacher.url), key)
            self._engines[name] = ServedEngines(config, model, engines, num_leaders)
        self.use = ScoringUse()  # since the last step

    def of(self, prompt: Prompt) -> Sequence[tuple[str, float]]:
        """Returns names and weights of the teachers that score responses to a prompt."""
        if self._config.data.teacher_key is not None:
            return prompt.teachers
        return [(name, 1.0) for name in self._config.teachers]

    async def count_engines(self) -> None:
        """Sets the limits of requests in flight to this leader's share of the teachers' engines.
        Raises ServiceUnreachable."""
        for engines in self._engines.values():
            await engines.count()

    @asynccontextmanager
    async def opened(self) -> "AsyncIterator[OpenTeachers]":
        """Yields the teachers with connections."""
        clients = {name: engines.client() for name, engines in self._engines.items()}
        async with AsyncExitStack() as stack:
            stack.callback(self._count_retries, clients.values())
            for client in clients.values():
                await stack.enter_async_context(client)
            yield OpenTeachers(self, clients)

    def _count_retries(self, clients: Iterable[GenerationClient]) -> None:
        self.use.retries += sum(client.num_retries for client in clients)


class OpenTeachers:
    """Connections to all teachers."""

    def __init__(self, teachers: Teachers, clients: dict[str, GenerationClient]):
        self._teachers = teachers
        self._clients = clients

    def problems(self) -> str:
        """Returns the last problem of each teacher that had one."""
        return "".join(client.problem for client in self._clients.values())

    async def score(
        self, prompt: Prompt, context: np.ndarray, ids: np.ndarray, top_ids: np.ndarray | None
    ) -> TeacherScores:
        """Returns the scores of a response `ids` [T] to `context`; top_ids: the policy's most
        probable tokens, [T, k]. Raises GenerationFailed."""
        teachers = self._teachers
        if not len(ids):
            k = teachers.num_candidates or teachers.top_k
            return TeacherScores(np.zeros(0), *([np.zeros((0, k))] * 2 if k else ()))
        weights = teachers.of(prompt)
        sequence = np.concatenate([context, ids])
        began = time.monotonic()
        scores = await asyncio.gather(
            *(
                self._clients[name].generate(
                    ScoreRequest(sequence, len(ids), teachers.top_k, top_ids)
                )
                for name, _ in weights
            )
        )
        teachers.use.count(time.monotonic() - began, len(ids))
        return mixture([weight for _, weight in weights], scores)


def mixture(weights: Sequence[float], scores: Sequence[TeacherScores]) -> TeacherScores:
    """Returns log sum_i w_i p_i of the sampled tokens, and of candidates that all teachers
    scored."""
    if len(scores) == 1:
        return scores[0]

    def mixed(logprobs: Sequence[np.ndarray]) -> np.ndarray:
        pairs = zip(weights, logprobs, strict=True)
        terms = [np.log(weight) + values.astype(np.float64) for weight, values in pairs]
        return np.logaddexp.reduce(terms).astype(np.float32)

    result = TeacherScores(mixed([score.logprobs for score in scores]), scores[0].top_ids)
    top = [score.top_logprobs for score in scores if score.top_logprobs is not None]
    return replace(result, top_logprobs=mixed(top)) if top else result


@dataclass
class ScoringUse:
    """Counts requests since the last `add_metrics`."""

    seconds: float = 0.0
    samples: int = 0
    tokens: int = 0  # of their responses
    retries: int = 0

    def count(self, seconds: float, tokens: int) -> None:
        """Counts a response and the seconds that its scores took."""
        self.seconds += seconds
        self.samples += 1
        self.tokens += tokens

    def add_metrics(self, metrics: "Metrics") -> None:
        """Adds the counts, and resets them."""
        metrics.add_mean("teachers/score_s_mean", self.seconds, self.samples)
        metrics.add_sum("teachers/score_s_sum", self.seconds)
        metrics.add_sum("teachers/tokens", self.tokens)
        metrics.add_sum("teachers/retries", self.retries)
        self.seconds, self.samples, self.tokens, self.retries = 0.0, 0, 0, 0


@dataclass(frozen=True)
class ChatRequest(EngineRequest[object]):
    """A request for a chat completion."""

    chat: dict[str, object]
    path = "/v1/chat/completions"

    def tokens(self) -> float:
        """See AdmissionQueue, which only counts such requests."""
        return 0.0

    def body(self) -> dict[str, object]:
        """Returns the request as SGLang takes it."""
        return self.chat

    def read(self, text: bytes, arch: Architecture | None) -> object:
        """Returns the answer's JSON. Raises UnusableAnswer if it is none."""
        with unreadable(text):
            return orjson.loads(text)


class EngineJudge(JudgeGrader):
    """A judge whose engines the run starts."""

    def __init__(
        self, config: ExperimentConfig, name: str, num_leaders: int, control: ServiceControl
    ):
        super().__init__(config.reward.judges[name])
        model = f"judge-{config.reward.first_judge(name)}"
        engines = Engines.from_service(control, model)
        self._engines = ServedEngines(config, model, engines, num_leaders)
        self.client = self._engines.client()
        self._is_open = False

    async def post(self, body: dict[str, object]) -> object:
        """Returns the JSON of an engine's answer; waits while none is up. Raises ServiceError."""
        with suppress(ServiceUnreachable):  # the wait for samples reports it
            await self._engines.count(LOOK_S)
        if not self._is_open:
            self._is_open = True
            await self.client.__aenter__()  # which does not wait
        try:
            return await self.client.generate(ChatRequest(body))
        except GenerationFailed as exc:
            raise ServiceError(str(exc)) from exc

    async def close(self) -> None:
        """Closes all connections."""
        await super().close()
        if self._is_open:
            await self.client.__aexit__()


def _elsewhere(model: str, url: str) -> list[EngineInfo]:
    """Returns the one server of a teacher that the service did not start."""
    server = EngineInfo(
        id=model,
        url=url.rstrip("/"),
        state="ready",
        weight_version=None,
        incarnation=0,
        restarts=0,
        pid=0,
        reason="",
        serves=True,
        model=model,
    )
    return [server]
