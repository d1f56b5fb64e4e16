"""Grader `http`: posts batches of responses to a user's reward service, which answers with scores
in the same order.

Request: {"samples": [{"prompt": text, "response": text, "answer": text}, ...]}. Answer: {"scores":
[number, ...]}.
"""

import asyncio
import sys
from contextlib import suppress

from megagrpo.config.reward import GraderArgs, HttpOptions
from megagrpo.rewards.services import RequestRefused, ServiceError, ServiceGrader
from megagrpo.rewards.workers import Graded
from megagrpo.types import Prompt


class HttpGrader(ServiceGrader):
    """Collects responses into batches for the service; see ServiceGrader."""

    def __init__(self, args: GraderArgs):
        self._options = HttpOptions.model_validate(args)
        super().__init__("http", self._options.url, self._options)
        self._samples: list[dict[str, str]] = []  # of the batch that waits for more responses

    async def grade(self, prompt: Prompt, text: str) -> Graded:
        """Returns the service's score of one response. Raises ServiceError or TimeoutError."""
        if not self._samples:
            self._full = asyncio.Event()
            self._request = asyncio.create_task(self._scores(self._samples, self._full))
        request = self._request
        index = len(self._samples)
        self._samples.append({"prompt": prompt.text, "response": text, "answer": prompt.answer})
        if len(self._samples) == self._options.batch_size:
            self._full.set()
            self._samples = []
        # a caller that gives up does not end the others' request
        score = (await asyncio.shield(request))[index]
        if isinstance(score, Exception):
            raise score
        if not isinstance(score, bool | int | float) or not abs(score) <= sys.float_info.max:
            raise ServiceError(f"{self.location} gave the score {score!r:.60}, not a finite number")
        return Graded("score", (float(score),))

    async def _scores(self, samples: list[dict[str, str]], full: asyncio.Event) -> list[object]:
        """Waits until the batch is full, or for batch_wait_s seconds; returns the service's scores.

        If the service refuses a batch, each response is sent again alone, so that one unreadable
        text does not cost the others their scores. An exception takes the place of a missing score.
        """
        with suppress(TimeoutError):
            await asyncio.wait_for(full.wait(), self._options.batch_wait_s)
        if self._samples is samples:
            self._samples = []
        try:
            return await self._scores_of(samples)
        except RequestRefused:
            if len(samples) == 1:
                raise
        alone = [self._scores_of([sample]) for sample in samples]
        answers = await asyncio.gather(*alone, return_exceptions=True)
        return [score[0] if isinstance(score, list) else score for score in answers]

    async def _scores_of(self, samples: list[dict[str, str]]) -> list[object]:
        answer = await self.post({"samples": samples})
        if not isinstance(answer, dict) or not isinstance(answer.get("scores"), list):
            raise ServiceError(f'{self.location} answered {answer!r:.100}, not {{"scores": [...]}}')
        if len(answer["scores"]) != len(samples):
            raise ServiceError(
                f"{self.location} gave {len(answer['scores'])} scores for {len(samples)} responses"
            )
        return answer["scores"]
