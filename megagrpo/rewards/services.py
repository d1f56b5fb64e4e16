"""The graders that are services: HTTP with a deadline, retries and bounded concurrency."""

import asyncio
import json
import random
import time
from abc import ABC, abstractmethod

import httpx

from megagrpo.config.reward import ServiceOptions
from megagrpo.rewards.workers import Graded
from megagrpo.system import environment
from megagrpo.types import Prompt

_BASE_S, _CAP_S = 0.25, 15.0  # first and longest wait before another attempt
_TRY_AGAIN = (408, 425, 429)  # a timeout, too early, too many requests
_LARGEST_ANSWER = 16 * 2**20  # bytes


class ServiceError(RuntimeError):
    """Raised if a service gave no usable answer; the message names the service."""


class RequestRefused(ServiceError):
    """Raised if a service refuses a request, which it would refuse again."""


class Refusal(Exception):
    """Raised by an attempt that is worth a retry: the reason, and the least seconds to wait."""


class ServiceGrader(ABC):
    """Grades by posting JSON to one URL. Belongs to one event loop.

    Raises ValueError if the environment variable of the key is not set. The key never appears in a
    message or log.
    """

    def __init__(self, name: str, url: str, options: ServiceOptions):
        self._service = options
        self._url = url
        self.location = f"grader {name} at {url.partition('?')[0]}"
        headers = {"Content-Type": "application/json"}
        if key := environment.secret(options.api_key_env, f"grader {name}"):
            headers["Authorization"] = f"Bearer {key}"
        # no proxies of the environment, but its certificates
        self._http = httpx.AsyncClient(
            verify=httpx.create_ssl_context(),
            timeout=None,
            limits=httpx.Limits(),  # none but _slots
            trust_env=False,
            headers=headers,
        )
        self._slots = asyncio.Semaphore(options.concurrency)

    @abstractmethod
    async def grade(self, prompt: Prompt, text: str) -> Graded:
        """Returns the outcome of one response. Raises ServiceError or TimeoutError."""

    async def outcome(self, prompt: Prompt, text: str) -> Graded:
        """Returns the outcome of one response, an error or a timeout if the service fails."""
        try:
            return await self.grade(prompt, text)
        except ServiceError as exc:
            return Graded("error", detail=str(exc))
        except TimeoutError as exc:
            return Graded("timeout", detail=str(exc))

    async def close(self) -> None:
        """Closes all connections."""
        await self._http.aclose()

    async def post(self, body: dict[str, object]) -> object:
        """Returns the JSON of the service's answer.

        Raises RequestRefused, ServiceError if the answer is not JSON, TimeoutError `timeout_s`
        after the request got its slot.
        """
        problem, retries, timeout_s = "", self._service.retries, self._service.timeout_s
        try:
            async with self._slots, asyncio.timeout(timeout_s):
                deadline = time.monotonic() + timeout_s
                for attempt in range(retries + 1):
                    wait_s = min(_CAP_S, _BASE_S * 2**attempt) * random.uniform(0.5, 1.0)
                    try:
                        return await self._attempt(body)
                    except (httpx.HTTPError, httpx.InvalidURL) as exc:
                        problem = f"{type(exc).__name__}: {exc}"
                    except Refusal as exc:
                        problem, wait_s = exc.args[0], max(wait_s, exc.args[1])
                    if attempt < retries:
                        if time.monotonic() + wait_s > deadline:
                            raise TimeoutError
                        await asyncio.sleep(wait_s)
        except TimeoutError:
            if problem:
                problem = f"; the last problem: {problem}"
            message = f"{self.location} gave no score in {timeout_s:g} s{problem}"
            raise TimeoutError(message) from None
        raise ServiceError(
            f"{self.location} failed {retries + 1} times; the last problem: {problem}"
        )

    async def _attempt(self, body: dict[str, object]) -> object:
        async with self._http.stream(
            "POST", self._url, content=json.dumps(body).encode()
        ) as answer:
            data = bytearray()
            async for chunk in answer.aiter_bytes():
                data += chunk
                if len(data) > _LARGEST_ANSWER:
                    raise ServiceError(
                        f"{self.location} answered more than {_LARGEST_ANSWER >> 20} MiB"
                    )
        excerpt = bytes(data[:200]).decode(errors="replace")
        if answer.status_code in _TRY_AGAIN or answer.status_code >= 500:
            after_s = _retry_after_s(answer)
            asks = f" (Retry-After: {after_s:g} s)" if after_s else ""
            raise Refusal(f"status {answer.status_code}{asks}: {excerpt}", after_s)
        if answer.status_code != 200:
            raise RequestRefused(
                f"{self.location} refused a request with status {answer.status_code}: {excerpt}"
            )
        try:
            return json.loads(data)
        except (ValueError, RecursionError) as exc:  # also bytes that are no text
            raise ServiceError(
                f"{self.location} answered something else than JSON: {excerpt!r}"
            ) from exc


def _retry_after_s(answer: httpx.Response) -> float:
    """Returns the seconds of a Retry-After header; 0 if it is missing or a date."""
    text = answer.headers.get("retry-after", "")
    return float(text) if text.isdecimal() else 0.0
