"""Grader `http`: posts batches of responses to a user's reward service, which answers with scores in the same order.

Request: {"samples": [{"prompt": text, "response": text, "answer": text}, ...]}. Answer: {"scores": [number, ...]}.
"""

import asyncio
import math
from functools import partial

from megagrpo.config.reward import GraderArgs, HttpOptions
from megagrpo.rewards.services import ServiceClient, ServiceError
from megagrpo.rewards.workers import Graded
from megagrpo.types import Prompt


class HttpGrader:
    """Collects responses into batches for the service; see ServiceGrader."""

    def __init__(self, args: GraderArgs):
        self._options = HttpOptions.model_validate(args)
        self._client = ServiceClient("http", self._options)
        self._waiting: list[tuple[dict[str, str], asyncio.Future[float]]] = []
        self._requests: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """Ends all requests and closes all connections."""
        for task in self._requests:
            task.cancel()
        await asyncio.gather(*self._requests, return_exceptions=True)
        await self._client.close()

    async def grade(self, prompt: Prompt, text: str) -> Graded:
        """Returns the service's score of one response. Raises ServiceError or TimeoutError."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[float] = loop.create_future()
        self._waiting.append(({"prompt": prompt.text, "response": text, "answer": prompt.answer}, future))
        if len(self._waiting) >= self._options.batch_size:
            self._send()
        elif len(self._waiting) == 1:
            loop.call_later(self._options.batch_wait_s, self._send)
        return Graded("score", (await future,))

    def _send(self) -> None:
        """Posts the waiting responses; there may be none if a full batch left early."""
        batch, self._waiting = self._waiting, []
        if batch:
            task = asyncio.get_running_loop().create_task(self._ask(batch))
            self._requests.add(task)
            task.add_done_callback(self._requests.discard)
            task.add_done_callback(partial(_pass_on_failure, [future for _, future in batch]))

    async def _ask(self, batch: list[tuple[dict[str, str], "asyncio.Future[float]"]]) -> None:
        samples, futures = zip(*batch, strict=True)
        scores = self._scores(await self._client.post({"samples": list(samples)}), len(batch))
        for future, score in zip(futures, scores, strict=True):
            if future.done():  # cancelled
                continue
            if isinstance(score, bool | int | float) and math.isfinite(score):
                future.set_result(float(score))
            else:
                future.set_exception(
                    ServiceError(f"{self._client.place} gave the score {score!r:.60}, not a finite number")
                )

    def _scores(self, answer: object, num: int) -> list[object]:
        if not isinstance(answer, dict) or not isinstance(answer.get("scores"), list):
            raise ServiceError(f'{self._client.place} answered {answer!r:.100}, not {{"scores": [...]}}')
        if len(answer["scores"]) != num:
            raise ServiceError(f"{self._client.place} gave {len(answer['scores'])} scores for {num} responses")
        return answer["scores"]


def _pass_on_failure(futures: "list[asyncio.Future[float]]", request: "asyncio.Task[None]") -> None:
    """Raises the request's exception in each caller that waits for its score."""
    if not request.cancelled() and (failure := request.exception()) is not None:
        for future in futures:
            if not future.done():
                future.set_exception(failure)
