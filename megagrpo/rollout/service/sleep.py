"""Sleep of engines on the trainers' GPUs: they release their memory for the trainers, by SGLang's
endpoints.

SGLang drops the contents of released memory, except buffers: a publish restores the weights, and
the KV cache is empty. SGLang asserts that no request runs, so an engine is paused first and ends
its requests, which continue in other engines. It also asserts that only released memory is resumed,
so the service, which outlives trainers, records the released memory of every engine.
"""

import asyncio

import aiohttp

from megagrpo.rollout.control import CONTROL_TIMEOUT_S, bearer

CACHE, WEIGHTS = "kv_cache", "weights"  # SGLang's names of the two parts
# the cache comes back last, when the staging memory of the transfer is free again
_ORDER = (CACHE, WEIGHTS)
_RESUME_S = 0.75 * CONTROL_TIMEOUT_S  # the trainer, which waits for all engines, gets an answer


class SleepFailed(RuntimeError):
    """Raised when an engine refuses or does not answer: the state of its memory is unknown."""


class EngineMemory:
    """The released memory of one incarnation of an engine. `url`: of its HTTP server."""

    def __init__(self, url: str, api_key: str, limit_s: float):
        self._url = url
        self._headers = bearer(api_key)
        self._timeout = aiohttp.ClientTimeout(total=limit_s)
        self._released: set[str] = set()
        self._one_at_a_time = asyncio.Lock()  # a call of a trainer that has died may still run

    async def release(self, http: aiohttp.ClientSession) -> None:
        """Pauses sampling, ends requests with the tokens they have, and releases all memory. Raises
        SleepFailed."""
        async with self._one_at_a_time:
            if self._released == set(_ORDER):  # every rank of a run calls as it starts
                return
            await self._post(http, "pause_generation", {"mode": "retract"})
            await self._post(http, "abort_request", {"abort_all": True})
            for part in _ORDER:
                if part not in self._released:
                    await self._post(http, "release_memory_occupation", {"tags": [part]})
                    self._released.add(part)

    async def resume(self, http: aiohttp.ClientSession, part: str) -> None:
        """Allocates a part again if it was released; its contents are undefined. Raises
        SleepFailed."""
        try:
            async with asyncio.timeout(_RESUME_S), self._one_at_a_time:
                if part in self._released:
                    await self._post(http, "resume_memory_occupation", {"tags": [part]})
                    self._released.discard(part)
        except TimeoutError as exc:
            raise SleepFailed(f"{self._url} resumes no {part} within {_RESUME_S:.0f} s") from exc

    async def _post(self, http: aiohttp.ClientSession, path: str, body: dict) -> None:
        try:
            async with http.post(
                f"{self._url}/{path}", json=body, headers=self._headers, timeout=self._timeout
            ) as answer:
                if answer.status != 200:
                    raise SleepFailed(
                        f"{self._url} refuses {path}: {answer.status} {(await answer.text())[:500]}"
                    )
        except (aiohttp.ClientError, TimeoutError) as exc:
            raise SleepFailed(
                f"{self._url} does not answer {path} ({type(exc).__name__}: {exc})"
            ) from exc
