"""Requests for samples to the engines: token ids in, token ids and their log-probabilities out."""

import asyncio
import hashlib
import json
import random
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Generic, TypeVar

import aiohttp
import msgspec
import numpy as np
import orjson

from megagrpo.config.schema import EvalConfig, ExperimentConfig, SamplingConfig
from megagrpo.models.architecture import Architecture
from megagrpo.rollout.admission import AdmissionQueue
from megagrpo.rollout.answer_arrays import (
    PACKED,
    WrongExperts,
    is_packed,
    read_answer,
    read_experts,
    read_lists,
    read_pairs,
)
from megagrpo.rollout.control import bearer
from megagrpo.rollout.engine_choice import Affinity, Engines
from megagrpo.rollout.response import Answer, Meta, Response, version_number
from megagrpo.system.errors import translated

_JSON = "application/json"
_HEADERS = {"Content-Type": _JSON, "Accept": f"{PACKED}, {_JSON}"}  # other servers answer in JSON
# Raised while reading something that is not an answer of /generate.
_NO_ANSWER = (ValueError, KeyError, TypeError, IndexError, msgspec.DecodeError)
_LONG = 2**17  # bytes of an answer that is read in a thread
_SPARED = 7  # tokens by which SGLang ends a response before the model's last position
# Below the 5 s after which an engine closes an idle connection: it might do so when a request has
# just left, and requests for samples are not repeated unseen.
_KEEP_ALIVE_S = 2.0


class GenerationFailed(RuntimeError):
    """Raised if a sample did not arrive within its retries or its deadline."""


@dataclass(frozen=True)
class SamplingParams:
    """The sampling parameters of one response."""

    temperature: float  # 0: greedy
    max_tokens: int  # of the response
    top_p: float = 1.0
    top_k: int = -1  # -1: all tokens
    stop_token_ids: tuple[int, ...] = ()  # each ends the response and is part of it
    stop: tuple[str, ...] = ()  # texts that end the response

    @classmethod
    def of(cls, sampling: SamplingConfig) -> "SamplingParams":
        """Returns the parameters of training samples."""
        return cls(
            temperature=sampling.temperature,
            max_tokens=sampling.max_response_tokens,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            stop_token_ids=tuple(sampling.stop_token_ids),
            stop=tuple(sampling.stop),
        )

    @classmethod
    def for_evaluation(
        cls, sampling: SamplingConfig, config: EvalConfig, as_trained: bool
    ) -> "SamplingParams":
        """Returns the parameters of an evaluation's samples; as_trained: drawn as in training."""
        params = cls.of(sampling)
        params = replace(params, max_tokens=config.max_response_tokens or params.max_tokens)
        if as_trained:
            return params
        return replace(
            params, temperature=config.temperature, top_p=config.top_p, top_k=config.top_k
        )

    def greedy(self) -> "SamplingParams":
        """Returns the same limits and stops without randomness."""
        return replace(self, temperature=0.0, top_p=1.0, top_k=-1)

    def body(self, seed: int) -> dict[str, object]:
        """Returns SGLang's `sampling_params`."""
        body: dict[str, object] = {
            "temperature": self.temperature,
            "max_new_tokens": self.max_tokens,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "sampling_seed": seed,  # used in deterministic mode only
        }
        if self.stop_token_ids:
            body["stop_token_ids"] = list(self.stop_token_ids)
        if self.stop:
            body["stop"] = list(self.stop)
            # SGLang looks for stops in as many tokens as its tokenizer would write them with, or as
            # the longest match of a pattern has characters; a model may write one with a token a byte
            text = max(self.stop, key=lambda text: len(text.encode()))
            body["stop_regex"] = f"{re.escape(text)}.{{0,{len(text.encode())}}}"
        return body


@dataclass(frozen=True)
class SentImages:
    """The images of a request. The engine puts placeholders into the short ids, and its result must
    be the prompt."""

    uris: Sequence[str]  # data URIs
    short_ids: np.ndarray  # of the prompt, one placeholder an image
    num_tokens: int  # of all images
    location: str  # the row's file:line


class UnusableAnswer(Exception):
    """Raised by an attempt that gave no usable answer."""


class EngineGone(UnusableAnswer):
    """Raised by an attempt whose engine has ended: it does not count."""


T_co = TypeVar("T_co", covariant=True)


class EngineRequest(ABC, Generic[T_co]):
    """A request to any engine that may answer it."""

    path: ClassVar[str] = "/generate"

    tokens: Callable[[], float]  # see AdmissionQueue
    order: tuple[float, ...] = ()  # likewise
    affinity: Affinity | None = None  # shared by requests that go to the same engine

    @abstractmethod
    def body(self) -> dict[str, object]:
        """Returns the request as SGLang takes it; called when it leaves."""

    @abstractmethod
    def read(self, text: bytes, arch: Architecture | None) -> T_co:
        """Reads an answer. Raises UnusableAnswer and WrongExperts if another attempt may be better,
        else GenerationFailed."""


@dataclass(frozen=True)
class SampleRequest(EngineRequest[Response]):
    """A request for one response to a prompt.

    or_newer: weights that are published meanwhile may sample too. experts_from: the first token
    whose experts are returned; None: no experts. order, tokens: see AdmissionQueue.
    """

    prompt: Sequence[int] | np.ndarray  # token ids
    params: SamplingParams
    seed: int  # of 63 bits: the same seed and weights give the same response in deterministic mode
    version: int = 0  # of the weights that must sample
    or_newer: bool = False
    experts_from: int | None = None
    order: tuple[float, ...] = ()
    tokens: Callable[[], float] = lambda: 0.0
    images: SentImages | None = None
    affinity: Affinity | None = None
    # called when the request leaves: only requests with the same key share prefixes
    cache_key: Callable[[], str] | None = None
    top_k: int = 0  # most probable tokens of each position that are returned

    def body(self) -> dict[str, object]:
        """Returns the request as SGLang takes it."""
        body: dict[str, object] = {
            "input_ids": self.images.short_ids if self.images else np.asarray(self.prompt),
            "sampling_params": self.params.body(self.seed),
            "return_logprob": True,
        }
        if self.experts_from is not None:
            body["return_routed_experts"] = True
        if self.cache_key is not None:
            body["extra_key"] = self.cache_key()
        if self.top_k:
            body["top_logprobs_num"] = self.top_k
        if self.images is not None:
            body["image_data"] = self.images.uris
            body["return_prompt_token_ids"] = True
        return body

    def read(self, text: bytes, arch: Architecture | None) -> Response:
        """Returns the response of an answer's text. Raises as EngineRequest says: UnusableAnswer
        also for a proxy's page and a truncated answer."""
        ids = np.asarray(self.prompt)
        with unreadable(text):
            answer, arrays = read_answer(text)
            response = _checked(answer, arrays, self)
        _check_images(answer, self.images, ids)
        if self.experts_from is None:
            return response
        assert arch is not None, "requested only for models whose experts are described"
        routed = answer["meta_info"].get("routed_experts", b"")
        experts = read_experts(arch, routed, len(ids) + len(response.token_ids) - 1, arrays)
        # a view, also of the ids, would keep the answer's experts, for a later turn those of all
        # before
        return replace(
            response,
            token_ids=response.token_ids.copy(),
            logprobs=response.logprobs.copy(),
            routed_experts=experts[self.experts_from :].copy(),
        )

    def accepts(self, version: int) -> bool:
        """Returns whether weights of this version may sample the response."""
        return version == self.version or (self.or_newer and version > self.version)


def sample_seed(run_seed: int, purpose: str, step: int, prompt_id: int, index: int) -> int:
    """Returns 63 bits that depend only on the arguments, not on the process, the engine or the
    order of arrival.

    purpose: "train", "greedy", "evaluate" and so on. index: of the sample within its group.
    """
    key = json.dumps([run_seed, purpose, step, prompt_id, index]).encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") >> 1


_RETRIES = 8  # of one sample


@dataclass(frozen=True)
class RetryPolicy:
    """Retries with exponential back-off: base, 2 base, 4 base, ... seconds, each randomly reduced
    by up to half."""

    retries: int  # of one sample, after its first attempt
    request_timeout_s: float  # of one attempt
    base_s: float = 0.25  # first wait
    cap_s: float = 15.0  # longest wait

    @classmethod
    def of(cls, config: ExperimentConfig) -> "RetryPolicy":
        """Returns the policy of an experiment."""
        return cls(_RETRIES, config.rollout.request_timeout_s)

    def wait_s(self, attempt: int) -> float:
        """Returns the seconds to wait before the next attempt; `attempt` counts earlier ones."""
        return min(self.cap_s, self.base_s * 2**attempt) * random.uniform(0.5, 1.0)


class GenerationClient:
    """Requests samples from engines, one HTTP request each. For one event loop; an async context
    manager.

    admission: requests wait there and not in an engine's queue, which would use up their time
    limit. experts: the model's architecture, if engines return routed experts. model: the served
    model of the engines; "": they sample.
    """

    def __init__(
        self,
        engines: Engines,
        retry: RetryPolicy,
        admission: AdmissionQueue,
        experts: Architecture | None = None,
        model: str = "",
    ):
        self.engines = engines
        self.retry = retry
        self.experts = experts
        self._admission = admission
        self._model = model
        self._result, self._no_engine = "sample", "no engine has verified weights"
        if model:
            self._result, self._no_engine = f"answer of {model}", f"no engine of {model} is up"
        self.num_retries = 0
        self.last_problem = ""

    @property
    def problem(self) -> str:
        """The last problem of requests to a served model, for a list; "" if there was none."""
        because = f"{self.num_retries} retries, the last because of: {self.last_problem}"
        return f"; {self._model}: {because}" if self.last_problem else ""

    async def __aenter__(self) -> "GenerationClient":
        self.http = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=self.retry.request_timeout_s),
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S),
            headers=bearer(self.engines.api_key),
        )
        self._watch = asyncio.create_task(self.engines.watch())
        self.readers = ThreadPoolExecutor(2, "answers")  # more would hold more of them at once
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._watch.cancel()
        with suppress(asyncio.CancelledError):
            await self._watch
        self.readers.shutdown(wait=False, cancel_futures=True)
        await self.http.close()

    async def generate(self, request: EngineRequest[T_co]) -> T_co:
        """Returns the result of a request, after as many attempts as it takes. Raises
        GenerationFailed.

        An attempt that finds no engine is repeated without limit; the caller has the deadline.
        """
        waits = failures = 0
        failed = ""  # URL of the engine of the last attempt
        async with self._admission.admitted(request.order, request.tokens):
            while True:
                problem = self._no_engine
                is_gone = True
                engine = await self.engines.choose(request.affinity, avoid=failed)
                if engine is not None:
                    failed = engine.url
                    try:
                        return await self._attempt(failed, request)
                    except (UnusableAnswer, WrongExperts) as exc:
                        problem = f"{engine.id} at {failed}: {exc}"
                        is_gone = isinstance(exc, EngineGone)
                self.last_problem = problem
                self.num_retries += 1
                waits += is_gone
                failures += not is_gone
                if failures > self.retry.retries:
                    raise GenerationFailed(
                        f"engines gave no {self._result} in {failures} tries of at most "
                        f"{self.retry.request_timeout_s:.0f} s (rollout.request_timeout_s); the "
                        f"last problem: {self.last_problem}"
                    )
                tries = min(waits, 3) if is_gone else failures
                await asyncio.sleep(self.retry.wait_s(tries))

    async def _attempt(self, url: str, request: EngineRequest[T_co]) -> T_co:
        """Returns the result of the engine at `url`. Raises UnusableAnswer and WrongExperts, and
        GenerationFailed for a request that is itself wrong."""
        limit = asyncio.timeout(None)

        def abandon() -> None:
            if not limit.expired():
                limit.reschedule(0.0)

        try:
            async with limit:
                with self.engines.in_flight(url, abandon):
                    return await self._response(url, request)
        except (aiohttp.ClientError, TimeoutError) as exc:
            if limit.expired():
                raise EngineGone("it has ended") from exc
            # One that refuses connections has ended, and the service has not noticed yet.
            refuses = isinstance(exc, aiohttp.ClientConnectorError)
            kind = EngineGone if refuses else UnusableAnswer
            raise kind(f"{type(exc).__name__}: {exc}") from exc

    async def _response(self, url: str, request: EngineRequest[T_co]) -> T_co:
        data = orjson.dumps(request.body(), option=orjson.OPT_SERIALIZE_NUMPY)
        url += request.path
        async with self.http.post(url, data=data, headers=_HEADERS) as answer:
            if answer.status != 200:
                why = await answer.text(errors="replace")
                # the request itself is wrong: another attempt would fail alike
                if answer.status == 400:
                    raise GenerationFailed(f"{url} refused a request: {why[:1000]}")
                raise UnusableAnswer(f"status {answer.status}: {why[:500]}")
            text = await answer.read()
        read = partial(request.read, text, self.experts)
        if len(text) < _LONG or (is_packed(text) and self.experts is None):
            return read()
        return await asyncio.get_running_loop().run_in_executor(self.readers, read)


def unreadable(text: bytes) -> AbstractContextManager[None]:
    """Raises UnusableAnswer for errors inside the block, which reads an answer of /generate."""
    return translated(f"in its answer {text[:200]!r}", *_NO_ANSWER, raised=UnusableAnswer)


def _check_images(answer: Answer, images: SentImages | None, ids: np.ndarray) -> None:
    """Raises GenerationFailed unless the engine has read `ids` and the same number of image
    tokens."""
    if images is None:
        return
    read, number = answer.get("prompt_token_ids") or [], answer["meta_info"].get("image_tokens")
    if number != images.num_tokens or not np.array_equal(ids, read):
        raise GenerationFailed(
            f"{images.location}: the engine has read another prompt than the trainer would: "
            f"{number} tokens of images, not {images.num_tokens}, and {len(read)} tokens, not "
            f"{len(ids)}; its processor must be model.path's"
        )


def _checked(answer: Answer, arrays: memoryview, request: SampleRequest) -> Response:
    """Returns the response in an answer. Raises UnusableAnswer if it is cut off or sampled by other
    weights, and GenerationFailed if the engine has no room for a longer one."""
    meta = answer["meta_info"]
    reason = end_of_request(meta)
    texts = [(span["start"], span["version"]) for span in meta.get("weight_versions") or ()]
    texts = texts or [(0, meta["weight_version"])]
    spans = [(start, version_number(text)) for start, text in texts]
    versions = [version for _, version in spans] + [version_number(meta["weight_version"])]
    if not all(map(request.accepts, versions)):
        sampled_by = sorted({text for _, text in texts} | {meta["weight_version"]})
        needed = f"{request.version}{' or newer' * request.or_newer}"
        raise UnusableAnswer(f"sampled by weights of version {sampled_by}, wanted {needed}")
    token_ids, logprobs = read_pairs(meta.get("output_token_logprobs", b"[]"), arrays)
    if not np.isfinite(logprobs).all():
        raise UnusableAnswer("log-probabilities that are not finite")
    most = request.params.max_tokens
    if reason == "length" and len(token_ids) + _SPARED < most:
        raise GenerationFailed(
            f"the engine cut a response after {len(token_ids)} of {most} tokens: its caches hold no "
            "longer sample; raise rollout.mem_fraction, rollout.tp or "
            "rollout.sglang.max_total_tokens, or lower sampling.max_response_tokens"
        )
    response = Response(
        token_ids,
        logprobs,
        reason,
        spans[0][1],
        tuple(spans[1:]),
        num_cached=meta.get("cached_tokens", 0),
        accepted=tuple(meta.get("spec_correct_drafts_histogram") or ()),
    )
    if not request.top_k:
        return response
    lists = meta.get("output_top_logprobs", b"[]")
    top_ids, _ = read_lists(lists, request.top_k, arrays=arrays)
    if len(top_ids) != len(token_ids):
        raise UnusableAnswer(f"top tokens of {len(top_ids)} positions for {len(token_ids)} tokens")
    return replace(response, top_ids=top_ids)


def end_of_request(meta: Meta) -> str:
    """Returns how a request ended, stop or length. Raises UnusableAnswer for anything else: the
    engine was paused or is ending."""
    reason = meta["finish_reason"]
    if reason is None or reason["type"] not in ("stop", "length"):
        raise UnusableAnswer(f"the engine ended the request: {reason}")
    return str(reason["type"])
