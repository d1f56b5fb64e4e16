"""Requests for samples to the rollout service's router: token ids in, token ids and their log-probabilities out."""

import asyncio
import gc
import hashlib
import json
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import reduce
from itertools import pairwise
from typing import Any, ClassVar

import aiohttp
import numpy as np
import orjson

from megagrpo.config.schema import ExperimentConfig, SamplingConfig
from megagrpo.rollout.background import Turnstile
from megagrpo.rollout.control import bearer
from megagrpo.rollout.routed_experts import RoutedExperts, WrongExperts
from megagrpo.rollout.streaming import StreamedAnswer, events
from megagrpo.system.environment import ENGINE_HEADER
from megagrpo.types import WithArrays

_JSON = {"Content-Type": "application/json"}
_STREAM_INTERVAL = 32  # tokens of a piece: what a cut response loses at most

# engine id ("": unknown), start and end in seconds since the epoch, tokens (0: no sample)
OnRequest = Callable[[str, float, float, int], None]


class GenerationFailed(RuntimeError):
    """Raised when a sample did not come within its retries or its deadline."""


@dataclass(frozen=True)
class SamplingParams:
    """Says how one response is drawn."""

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

    def greedy(self) -> "SamplingParams":
        """Returns the same limits and stops without randomness."""
        return replace(self, temperature=0.0, top_p=1.0, top_k=-1)


@dataclass(frozen=True, eq=False)
class Response(WithArrays):
    """Holds T token ids as sampled, the one that ended the response included."""

    _types: ClassVar[dict[str, type]] = {"token_ids": np.int32, "logprobs": np.float32}

    token_ids: np.ndarray  # [T] int32
    logprobs: np.ndarray  # [T] float32, the engine's, of each token, in nats, after temperature
    finish_reason: str  # "stop" | "length"
    weight_version: int  # of the weights that sampled its first token
    newer: tuple[tuple[int, int], ...] = ()  # as in Sample
    routed_experts: np.ndarray | None = None  # [tokens, layers with experts, k], from the first token asked for on

    @property
    def newest_version(self) -> int:
        """Returns that of the weights that sampled its last token."""
        return self.newer[-1][1] if self.newer else self.weight_version

    def then(self, rest: "Response") -> "Response":
        """Returns this one, which was cut, with what another request added to it.

        That has read all of this one again, and tells the experts of the whole.
        """
        at = len(self.token_ids)
        spans = [(0, self.weight_version), *self.newer, (at, rest.weight_version)]
        spans += [(at + start, version) for start, version in rest.newer]
        newer = tuple(now for before, now in pairwise(spans) if before[1] != now[1])
        token_ids, logprobs = (
            np.concatenate(pair) for pair in ((self.token_ids, rest.token_ids), (self.logprobs, rest.logprobs))
        )
        return Response(token_ids, logprobs, rest.finish_reason, self.weight_version, newer, rest.routed_experts)


def sample_seed(run_seed: int, purpose: str, step: int, prompt_id: int, index: int) -> int:
    """Returns 63 bits that depend on the arguments alone: not on the process, the engine or the order of arrival.

    purpose: what the sample is for ("train", "greedy", "evaluate", ...). index: of the sample within its group.
    """
    key = json.dumps([run_seed, purpose, step, prompt_id, index]).encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") >> 1


@dataclass(frozen=True)
class RetryPolicy:
    """Retries with exponential back-off: base, 2 base, 4 base, ... seconds, each less up to half of it at random."""

    retries: int  # of one sample, after its first attempt
    request_timeout_s: float  # of one attempt
    streaming: bool = False  # a response that is cut goes on from the tokens that came
    base_s: float = 0.25  # first wait
    cap_s: float = 15.0  # longest wait

    @classmethod
    def of(cls, config: ExperimentConfig) -> "RetryPolicy":
        """Returns the policy of an experiment."""
        return cls(config.rollout.retries, config.rollout.request_timeout_s, config.rollout.streaming)

    def wait_s(self, attempt: int) -> float:
        """Returns how many seconds to wait before the next attempt; `attempt` counts those before it."""
        return min(self.cap_s, self.base_s * 2**attempt) * random.uniform(0.5, 1.0)


class _Refused(Exception):
    """Raised by an attempt that gave no usable sample.

    `waiting`: no engine is ready, which is no fault of the request.
    """

    def __init__(self, text: str, waiting: bool = False):
        super().__init__(text)
        self.waiting = waiting


class GenerationClient:
    """Asks the router for samples, one request each. Belongs to one event loop; use as an async context manager.

    turnstile: requests wait there and not in an engine's queue, where they would use up their time limit. on_request:
    is told of every attempt when it ends. experts: how engines tell those that they chose, where anybody asks.
    """

    def __init__(
        self,
        router_url: str,
        api_key: str,
        retry: RetryPolicy,
        turnstile: Turnstile,
        on_request: OnRequest = lambda engine, start, end, num_tokens: None,
        experts: RoutedExperts | None = None,
    ):
        self._experts = experts
        self._url, self._headers, self._retry = f"{router_url}/generate", bearer(api_key), retry
        self._on_request = on_request
        self._turnstile = turnstile
        self._attempts: set[asyncio.Task] = set()
        self.num_retries = 0
        self.num_discarded = 0  # tokens that came and are of no sample
        self.last_problem = ""

    async def __aenter__(self) -> "GenerationClient":
        timeout = aiohttp.ClientTimeout(total=self._retry.request_timeout_s)
        self._loop = asyncio.get_running_loop()
        self._http = aiohttp.ClientSession(
            timeout=timeout, connector=aiohttp.TCPConnector(limit=0), headers=self._headers
        )
        return self

    async def __aexit__(self, *exc_info) -> None:
        await self._http.close()

    async def generate(
        self,
        prompt: np.ndarray,
        params: SamplingParams,
        seed: int,
        weight_version: int,
        or_newer: bool = False,
        *,
        experts_from: int | None = None,
        order: tuple[float, ...] = (),
        tokens: Callable[[], float] = lambda: 0.0,
    ) -> Response:
        """Returns one response to ids `prompt` [T] by weights of exactly `weight_version`. Raises GenerationFailed.

        or_newer: by such or newer weights, which may change in the middle of it. experts_from: the token of the prompt
        from which on the experts come with it; after a change of weights those of the new ones, which read all tokens
        again. order, tokens: see Turnstile. Failed
        attempts are repeated with back-off, and where responses are streamed go on from the tokens that came. Time
        without any ready engine or without the router (one is being restarted) does not count against the retries; the
        caller's deadline bounds it.
        """
        caller = asyncio.current_task()
        assert caller is not None
        failures = waits = 0
        pieces: list[Response] = []  # of the attempts that were cut
        async with self._turnstile.passing(order, tokens):
            while True:
                versions = weight_version, or_newer
                attempt = asyncio.create_task(self._attempt(prompt, params, seed, versions, pieces, experts_from))
                self._attempts.add(attempt)
                try:
                    rest = await attempt
                    return reduce(Response.then, [*pieces, rest])
                except asyncio.CancelledError:
                    if caller.cancelling():  # not the attempt alone
                        attempt.cancel()
                        raise
                    problem, waiting = "the host of an engine was lost", True
                except _Refused as exc:
                    problem, waiting = str(exc), exc.waiting
                except (aiohttp.ClientError, TimeoutError) as exc:
                    # No router there: it is being started again.
                    problem, waiting = f"{type(exc).__name__}: {exc}", isinstance(exc, aiohttp.ClientConnectorError)
                finally:
                    self._attempts.discard(attempt)
                self.last_problem = problem
                self.num_retries += 1
                waits, failures = (waits + 1, failures) if waiting else (waits, failures + 1)
                if failures > self._retry.retries:
                    raise GenerationFailed(
                        f"{self._url} gave no sample in {failures} tries of at most "
                        f"{self._retry.request_timeout_s:.0f} s (rollout.retries, rollout.request_timeout_s); "
                        f"the last problem: {problem}"
                    )
                await asyncio.sleep(self._retry.wait_s(min(waits, 3) if waiting else failures))

    def ask_again(self) -> None:
        """Abandons the present attempt of every request and makes another. In any thread.

        A request whose engine went down with its host would otherwise wait for its whole time limit, and the router
        does not tell which those are.
        """
        self._loop.call_soon_threadsafe(lambda: [attempt.cancel() for attempt in self._attempts])

    async def _attempt(
        self,
        prompt: np.ndarray,
        params: SamplingParams,
        seed: int,
        versions: tuple[int, bool],
        pieces: list[Response],
        experts_from: int | None,
    ) -> Response:
        """Returns what is missing after `pieces`; adds to them what came, where it fails."""
        ids = np.concatenate([prompt, *(piece.token_ids for piece in pieces)]) if pieces else prompt
        sampling = _sampling_body(params, seed)
        sampling["max_new_tokens"] -= sum(len(piece.token_ids) for piece in pieces)
        body = {"input_ids": ids, "sampling_params": sampling, "return_logprob": True}
        if experts_from is not None:
            body["return_routed_experts"] = True  # for who asks an engine; the router drops it, see engine_process.py
        if self._retry.streaming:
            sampling["stream_interval"] = _STREAM_INTERVAL
            body["stream"] = True
        data = orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
        engine, start, num_tokens = "", time.time(), 0
        stream = StreamedAnswer(pieces[-1].newest_version if pieces else versions[0])
        try:
            async with self._http.post(self._url, data=data, headers=_JSON) as answer:
                engine = answer.headers.get(ENGINE_HEADER, "")
                if answer.status == 400:  # the request itself is wrong: trying again would say the same
                    raise GenerationFailed(f"{self._url} refused a request: {(await answer.text())[:1000]}")
                if answer.status != 200:
                    why = (await answer.text())[:500]
                    no_engine = answer.status == 503 and "no_available_workers" in why
                    raise _Refused(f"status {answer.status}: {why}", waiting=no_engine)
                if self._retry.streaming:
                    found = await self._read_stream(answer.content, stream)
                    response = self._checked(found, versions)
                else:
                    text = await answer.read()
                    with collector_paused():
                        found = orjson.loads(text)
                        response = self._checked(found, versions)
                num_tokens = len(response.token_ids)
                if experts_from is not None:
                    # in a thread: of a long response of a large model it takes a noticeable part of a second
                    told, num_read = found["meta_info"].get("routed_experts"), len(ids) + num_tokens - 1
                    experts = await asyncio.to_thread(self._read_experts, told, num_read)
                    response = replace(response, routed_experts=experts[experts_from:])
                stream.clear()
                return response
        finally:
            num_tokens = num_tokens or len(stream)
            self._keep(stream, params, versions, pieces)
            self._on_request(engine, start, time.time(), num_tokens)

    async def _read_stream(self, content: aiohttp.StreamReader, stream: StreamedAnswer) -> dict[str, Any]:
        async for chunk in events(content):
            if "error" in chunk:
                error = chunk["error"]
                if error.get("code") == 400:
                    raise GenerationFailed(f"{self._url} refused a request: {error.get('message')}")
                raise _Refused(f"the engine ended the request: {error}")
            if (whole := stream.add(chunk)) is not None:
                return whole
        raise _Refused("the stream ended before the response")

    def _read_experts(self, text: str | None, num_tokens: int) -> np.ndarray:
        assert self._experts is not None, "asked for by those alone who know the model's experts"
        try:
            return self._experts.read(text, num_tokens)
        except WrongExperts as exc:  # another engine may tell them
            raise _Refused(str(exc)) from exc

    def _checked(self, answer: dict[str, Any], versions: tuple[int, bool]) -> Response:
        try:
            return _read_response(answer, *versions)
        except _Refused:
            if not self._retry.streaming:
                self.num_discarded += len(answer["meta_info"].get("output_token_logprobs") or ())
            raise

    def _keep(
        self, stream: StreamedAnswer, params: SamplingParams, versions: tuple[int, bool], pieces: list[Response]
    ) -> None:
        """Adds what came of a cut response to `pieces`, but for its end, where weights that may sample it did.

        The end may have come where experts were told wrongly, or the attempt was abandoned while they were read.
        Nothing is added where texts end responses: one may begin in what came, and the next engine would not see it.
        """
        oldest, or_newer = versions
        spans = stream.spans()
        left = params.max_tokens - sum(len(piece.token_ids) for piece in pieces) - 1
        number = 0 if params.stop or not spans else max(min(len(stream) - stream.ended, left), 0)
        sampled_by = [at for _, at in spans] + ([int(stream.version)] if stream.version.isdigit() else [oldest - 1])
        if any(at < oldest if or_newer else at != oldest for at in sampled_by):
            number = 0
        self.num_discarded += len(stream) - number
        if number > 0:
            newer = tuple((start, version) for start, version in spans[1:] if start < number)
            token_ids, logprobs = stream.tokens()
            pieces.append(Response(token_ids[:number], logprobs[:number], "cut", spans[0][1], newer))


@contextmanager
def collector_paused() -> Iterator[None]:
    """Keeps Python's garbage collector from looking at the inside's many small lists, and each time at all of Megatron.

    Nothing in JSON refers to itself, so that reference counts free it.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _sampling_body(params: SamplingParams, seed: int) -> dict[str, Any]:
    body: dict[str, Any] = {
        "temperature": params.temperature,
        "max_new_tokens": params.max_tokens,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "sampling_seed": seed,  # heeded in deterministic mode only
    }
    if params.stop_token_ids:
        body["stop_token_ids"] = list(params.stop_token_ids)
    if params.stop:
        body["stop"] = list(params.stop)
    return body


def _read_response(answer: dict[str, Any], weight_version: int, or_newer: bool = False) -> Response:
    """Checks and unpacks what /generate answers. Raises _Refused when it is cut off or sampled by other weights."""
    meta = answer["meta_info"]
    reason = meta["finish_reason"]["type"]
    if reason not in ("stop", "length"):  # "abort": the engine was paused or is going down
        raise _Refused(f"the engine ended the request: {meta['finish_reason']}")
    spans = meta.get("weight_versions") or [{"version": meta["weight_version"], "start": 0}]
    found = {span["version"] for span in spans} | {meta["weight_version"]}
    known = {int(version) for version in found if version.isdigit()}
    if len(known) < len(found) or min(known) < weight_version or (not or_newer and known != {weight_version}):
        wanted = f"{weight_version}{' or newer' if or_newer else ''}"
        raise _Refused(f"sampled by weights of version {sorted(found)}, wanted {wanted}")
    logprobs, token_ids, *_ = list(zip(*meta["output_token_logprobs"], strict=True)) or [(), ()]
    newer = tuple((span["start"], int(span["version"])) for span in spans[1:])
    return Response(np.array(token_ids), np.array(logprobs), reason, int(spans[0]["version"]), newer)
