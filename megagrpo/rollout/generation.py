"""Requests for samples to the rollout service's router: token ids in, token ids and their
log-probabilities out."""

import asyncio
import gc
import hashlib
import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import reduce
from typing import Literal

import aiohttp
import numpy as np
import orjson

from megagrpo.config.schema import EvalConfig, ExperimentConfig, SamplingConfig
from megagrpo.families.architecture import Architecture
from megagrpo.rollout.admission import AdmissionQueue
from megagrpo.rollout.control import bearer
from megagrpo.rollout.response import Response
from megagrpo.rollout.routed_experts import WrongExperts, read_experts
from megagrpo.rollout.streaming import Answer, StreamedAnswer, events, version_number
from megagrpo.system.environment import ENGINE_HEADER

_JSON = {"Content-Type": "application/json"}
_ROUTING_KEY = "X-SMG-Routing-Key"  # sglang-router's, for its policy `manual`
_STREAM_INTERVAL = 32  # tokens of a piece: the most that a cut response loses

# engine id ("": unknown), start and end in seconds since the epoch, tokens (0: no sample)
OnRequest = Callable[[str, float, float, int], None]


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
    def of_evaluation(
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

    def body(self, seed: int, num_sampled: int) -> dict[str, object]:
        """Returns SGLang's `sampling_params` for the rest of a response that has `num_sampled`
        tokens."""
        body: dict[str, object] = {
            "temperature": self.temperature,
            "max_new_tokens": self.max_tokens - num_sampled,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "sampling_seed": seed,  # used in deterministic mode only
        }
        if self.stop_token_ids:
            body["stop_token_ids"] = list(self.stop_token_ids)
        if self.stop:
            body["stop"] = list(self.stop)
        return body


@dataclass(frozen=True)
class SentImages:
    """The images of a request. The engine puts placeholders into the short ids, and its result must
    be the prompt."""

    uris: Sequence[str]  # data URIs
    short_ids: np.ndarray  # of the prompt, one placeholder an image
    num_tokens: int  # of all images
    location: str  # the row's file:line


@dataclass(frozen=True)
class SampleRequest:
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
    routing_key: str = (
        ""  # requests with the same one go to the same engine, if the router is sticky
    )
    cache_key: Callable[[], str] | None = (
        None  # asked when it leaves: only requests with the same one share prefixes
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


@dataclass(frozen=True)
class RetryPolicy:
    """Retries with exponential back-off: base, 2 base, 4 base, ... seconds, each less up to half of
    it at random."""

    retries: int  # of one sample, after its first attempt
    request_timeout_s: float  # of one attempt
    streaming: bool = False  # a cut response continues from the tokens received
    base_s: float = 0.25  # first wait
    cap_s: float = 15.0  # longest wait

    @classmethod
    def of(cls, config: ExperimentConfig) -> "RetryPolicy":
        """Returns the policy of an experiment."""
        return cls(
            config.rollout.retries, config.rollout.request_timeout_s, config.rollout.streaming
        )

    def wait_s(self, attempt: int) -> float:
        """Returns how many seconds to wait before the next attempt; `attempt` counts those before
        it."""
        return min(self.cap_s, self.base_s * 2**attempt) * random.uniform(0.5, 1.0)


class _Refused(Exception):
    """Raised by an attempt that gave no usable sample; waiting: only because no engine is ready."""

    def __init__(self, text: str, waiting: bool = False):
        super().__init__(text)
        self.waiting = waiting


class GenerationClient:
    """Requests samples from the router, one HTTP request each. For one event loop; an async context
    manager.

    admission: requests wait there and not in an engine's queue, which would use up their time
    limit. on_request: called at the end of every attempt. experts: of the model, if engines return
    routed experts.
    """

    def __init__(
        self,
        router_url: str,
        api_key: str,
        retry: RetryPolicy,
        admission: AdmissionQueue,
        on_request: OnRequest = lambda engine, start, end, num_tokens: None,
        experts: Architecture | None = None,
    ):
        self.url, self.retry, self.on_request, self.experts = (
            f"{router_url}/generate",
            retry,
            on_request,
            experts,
        )
        self._headers, self._admission = bearer(api_key), admission
        self._attempts: set[Attempt] = set()
        self.num_retries = 0
        self.num_discarded = 0  # tokens received that belong to no sample
        self.last_problem = ""

    async def __aenter__(self) -> "GenerationClient":
        timeout = aiohttp.ClientTimeout(total=self.retry.request_timeout_s)
        self._loop = asyncio.get_running_loop()
        connector = aiohttp.TCPConnector(limit=0)
        self.http = aiohttp.ClientSession(
            timeout=timeout, connector=connector, headers=self._headers
        )
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.http.close()

    async def generate(self, request: SampleRequest) -> Response:
        """Returns one response, after as many attempts as it takes. Raises GenerationFailed.

        An attempt that found no engine ready is repeated without limit; the caller has the
        deadline.
        """
        pieces: list[Response] = []
        waits = failures = 0
        async with self._admission.admitted(request.order, request.tokens):
            while True:
                again = (
                    replace(request, routing_key="") if waits + failures else request
                )  # its engine may be lost
                attempt = Attempt(self, again, pieces)
                self._attempts.add(attempt)
                with ExitStack() as stack:
                    stack.callback(self._attempts.discard, attempt)
                    await attempt.run()
                if attempt.outcome == "done":
                    return reduce(Response.then, pieces)
                self.last_problem = attempt.problem
                self.num_retries += 1
                if attempt.outcome == "wait":
                    waits += 1
                    pause_s = self.retry.wait_s(min(waits, 3))
                else:
                    failures += 1
                    pause_s = self.retry.wait_s(failures)
                if failures > self.retry.retries:
                    raise GenerationFailed(
                        f"{self.url} gave no sample in {failures} tries of at most "
                        f"{self.retry.request_timeout_s:.0f} s (rollout.retries, "
                        "rollout.request_timeout_s); "
                        f"the last problem: {attempt.problem}"
                    )
                await asyncio.sleep(pause_s)

    def ask_again(self) -> None:
        """Abandons the present attempt of every request and starts another. May be called from any
        thread.

        A request whose engine went down with its host would otherwise wait for its whole time
        limit, and the router does not report which those are.
        """
        for attempt in set(self._attempts):
            self._loop.call_soon_threadsafe(attempt.abandon)


class Attempt:
    """One HTTP request for a response, or for the rest of one; `run` sets its outcome.

    pieces: the parts so far; `run` appends the last one ("done"), or the usable tokens of a cut
    one.
    """

    def __init__(self, client: GenerationClient, request: SampleRequest, pieces: list[Response]):
        self._client, self._request, self._pieces = client, request, pieces
        self._num_sampled = sum(len(piece.token_ids) for piece in pieces)
        self._num_unchecked = 0  # tokens of a whole answer
        self._stream = StreamedAnswer(pieces[-1].newest_version if pieces else request.version)
        self._limit = asyncio.timeout(None)
        self.engine, self.num_tokens = "", 0
        self.outcome: Literal["done", "retry", "wait"] = "retry"  # wait: no engine is ready
        self.problem = ""  # of an attempt that is not done

    def abandon(self) -> None:
        """Ends it because the host of an engine was lost, perhaps its own."""
        if not self._limit.expired():
            self._limit.reschedule(0.0)

    async def run(self) -> None:
        """Sends the request and sets `outcome`. Raises GenerationFailed for a request that is
        itself wrong."""
        start = time.time()
        try:
            async with self._limit:
                self._pieces.append(await self._last_piece())
            self.outcome = "done"
        except (_Refused, WrongExperts) as exc:
            self.problem = str(exc)
            self.outcome = "wait" if isinstance(exc, _Refused) and exc.waiting else "retry"
        except (aiohttp.ClientError, TimeoutError) as exc:
            lost = self._limit.expired()
            self.problem = (
                "the host of an engine was lost" if lost else f"{type(exc).__name__}: {exc}"
            )
            # A router that refuses connections is being restarted.
            self.outcome = (
                "wait" if lost or isinstance(exc, aiohttp.ClientConnectorError) else "retry"
            )
        finally:
            self.num_tokens = self.num_tokens or len(self._stream)
            self._keep_tokens()
            self._client.on_request(self.engine, start, time.time(), self.num_tokens)

    async def _last_piece(self) -> Response:
        request, client = self._request, self._client
        pieces = [piece.token_ids for piece in self._pieces]
        ids = np.concatenate([np.asarray(request.prompt), *pieces])
        sent = np.concatenate([request.images.short_ids, *pieces]) if request.images else ids
        data = orjson.dumps(self._body(sent), option=orjson.OPT_SERIALIZE_NUMPY)
        key = {_ROUTING_KEY: request.routing_key} if request.routing_key else {}
        async with client.http.post(client.url, data=data, headers=_JSON | key) as answer:
            self.engine = answer.headers.get(ENGINE_HEADER, "")
            if answer.status != 200:
                why = await answer.text()
                if (
                    answer.status == 400
                ):  # the request itself is wrong: another attempt would fail alike
                    raise GenerationFailed(f"{client.url} refused a request: {why[:1000]}")
                no_engine = answer.status == 503 and "no_available_workers" in why
                raise _Refused(f"status {answer.status}: {why[:500]}", waiting=no_engine)
            if client.retry.streaming:
                whole = await self._read_stream(answer.content)
                response = _checked(whole, request)
            else:
                text = await answer.read()
                with collector_paused():
                    whole = orjson.loads(text)
                    self._num_unchecked = len(whole["meta_info"].get("output_token_logprobs") or ())
                    response = _checked(whole, request)
                    self._num_unchecked = 0
        self.num_tokens = len(response.token_ids)
        _check_images(whole, request.images, ids)
        if request.experts_from is not None:
            assert client.experts is not None, (
                "requested only for models whose experts are described"
            )
            # In a thread: for a long response of a large model it takes a noticeable part of a
            # second.
            encoded, num_read = (
                whole["meta_info"].get("routed_experts"),
                len(ids) + self.num_tokens - 1,
            )
            experts = await asyncio.to_thread(read_experts, client.experts, encoded, num_read)
            response = replace(response, routed_experts=experts[request.experts_from :])
        self._stream.clear()
        return response

    def _body(self, ids: np.ndarray) -> dict[str, object]:
        sampling = self._request.params.body(self._request.seed, self._num_sampled)
        body: dict[str, object] = {
            "input_ids": ids,
            "sampling_params": sampling,
            "return_logprob": True,
        }
        if self._request.experts_from is not None:
            body["return_routed_experts"] = (
                True  # for engines without a router, which drops it: engine_process.py
            )
        if self._request.cache_key is not None:
            body["extra_key"] = self._request.cache_key()
        if self._request.images is not None:
            body |= {
                "image_data": self._request.images.uris,
                "return_prompt_token_ids": True,
            }  # dropped likewise
        if self._client.retry.streaming:
            sampling["stream_interval"] = _STREAM_INTERVAL
            body["stream"] = True
        return body

    async def _read_stream(self, content: aiohttp.StreamReader) -> Answer:
        async for chunk in events(content):
            if error := chunk.get("error"):
                if error.get("code") == 400:
                    raise GenerationFailed(
                        f"{self._client.url} refused a request: {error.get('message')}"
                    )
                raise _Refused(f"the engine ended the request: {error}")
            if (whole := self._stream.add(chunk)) is not None:
                return whole
        raise _Refused("the stream ended before the response")

    def _keep_tokens(self) -> None:
        """Appends the tokens of a cut response to `pieces`, without its end, if acceptable weights
        sampled them.

        The end may have arrived if its experts were wrong, or the attempt was abandoned while they
        were read. Nothing is kept if texts end responses: one may start in these tokens, and the
        next engine would not see it.
        """
        stream, params = self._stream, self._request.params
        versions = [version for _, version in stream.spans] + [stream.version]
        number = 0
        if stream.spans and not params.stop and all(map(self._request.accepts, versions)):
            number = max(
                min(len(stream) - stream.ended, params.max_tokens - self._num_sampled - 1), 0
            )
        self._client.num_discarded += self._num_unchecked + len(stream) - number
        if number > 0:
            newer = tuple((start, version) for start, version in stream.spans[1:] if start < number)
            token_ids, logprobs = stream.tokens()
            first_version = stream.spans[0][1]
            self._pieces.append(
                Response(token_ids[:number], logprobs[:number], "cut", first_version, newer)
            )


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pauses Python's garbage collector, which would scan Megatron often: JSON is many lists,
    without a cycle."""
    with ExitStack() as stack:
        stack.callback(gc.enable)
        gc.disable()
        yield


def _check_images(answer: Answer, images: SentImages | None, ids: np.ndarray) -> None:
    """Raises GenerationFailed unless the engine has read `ids` and as many tokens of images."""
    if images is None:
        return
    read, number = answer.get("prompt_token_ids"), answer["meta_info"].get("image_tokens")
    if number != images.num_tokens or not np.array_equal(ids, read if read is not None else []):
        raise GenerationFailed(
            f"{images.location}: the engine has read another prompt than the trainer would: "
            f"{number} tokens of images, "
            f"not {images.num_tokens}, and {len(read or ())} tokens, not {len(ids)}; its processor "
            "must be model.path's"
        )


def _checked(answer: Answer, request: SampleRequest) -> Response:
    """Returns the response of an /generate answer. Raises _Refused if it is cut off or sampled by
    other weights."""
    meta = answer["meta_info"]
    reason = meta["finish_reason"]
    if reason is None or reason["type"] not in (
        "stop",
        "length",
    ):  # "abort": the engine was paused or is ending
        raise _Refused(f"the engine ended the request: {reason}")
    texts = [(span["start"], span["version"]) for span in meta.get("weight_versions") or ()]
    texts = texts or [(0, meta["weight_version"])]
    spans = [(start, version_number(text)) for start, text in texts]
    versions = [version for _, version in spans] + [version_number(meta["weight_version"])]
    if not all(map(request.accepts, versions)):
        found = sorted({text for _, text in texts} | {meta["weight_version"]})
        needed = f"{request.version}{' or newer' if request.or_newer else ''}"
        raise _Refused(f"sampled by weights of version {found}, wanted {needed}")
    pairs = meta.get("output_token_logprobs") or []
    logprobs, token_ids = (
        np.array([pair[0] for pair in pairs]),
        np.array([pair[1] for pair in pairs]),
    )
    newer, num_cached = tuple(spans[1:]), meta.get("cached_tokens", 0)
    accepted = tuple(meta.get("spec_correct_drafts_histogram") or ())
    return Response(
        token_ids, logprobs, reason["type"], spans[0][1], newer, None, num_cached, accepted
    )
