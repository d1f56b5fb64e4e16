"""Grader `judge`: a model behind any OpenAI-compatible /v1/chat/completions endpoint, or engines of
the run.

The judge reads the policy's response, which can try to talk it into a good score. Nothing here
prevents that.
"""

import math
import re
from contextlib import suppress
from pathlib import Path

from megagrpo.config.reward import GraderArgs, JudgeOptions
from megagrpo.rewards.services import ServiceError, ServiceGrader
from megagrpo.rewards.workers import Graded
from megagrpo.system.errors import explained
from megagrpo.types import Prompt

_FIELDS = re.compile(r"\{(prompt|response|answer)\}")


def read_template(path: str) -> str:
    """Returns the judge's prompt template. Raises ValueError if the file is missing, not text, or
    lacks {response}."""
    with explained(f"grader judge: prompt_file {path} cannot be read"):
        text = Path(path).read_text(encoding="utf-8")
    if "{response}" not in text:
        raise ValueError(
            f"grader judge: prompt_file {path} has no {{response}}: the "
            "judge would not see the response"
        )
    return text


def render(template: str, prompt: str, response: str, answer: str) -> str:
    """Returns the template with the three texts, filled in one pass: {answer} inside a response
    stays as it is."""
    texts = {"prompt": prompt, "response": response, "answer": answer}
    return _FIELDS.sub(lambda match: texts[match[1]], template)


class JudgeGrader(ServiceGrader):
    """Sends each response to the judge; see ServiceGrader. One with a path asks its engines, see
    EngineJudge. Raises ValueError for an unusable template."""

    def __init__(self, args: GraderArgs | JudgeOptions):
        self._options = JudgeOptions.model_validate(args)
        self._template = read_template(self._options.prompt_file)
        self._pattern = re.compile(self._options.pattern)
        super().__init__("judge", self._options.url or f"{self._options.path}", self._options)

    async def grade(self, prompt: Prompt, text: str) -> Graded:
        """Returns the score in the judge's reply and the end of that reply. Raises ServiceError or
        TimeoutError."""
        options = self._options
        content = render(self._template, prompt.transcript, text, prompt.answer)
        messages = [{"role": "user", "content": content}]
        if options.system is not None:
            messages.insert(0, {"role": "system", "content": options.system})
        body: dict[str, object] = {
            "model": options.model or "default",  # engines have one model
            "messages": messages,
            "temperature": options.temperature,
            "max_tokens": options.max_tokens,
            **options.body,
        }
        reply = self._reply(await self.post(body))
        return Graded("score", (self._score(reply),), reply[-200:])

    def _reply(self, answer: object) -> str:
        """Returns the judge's words, without its reasoning: a score in a draft is none."""
        match answer:
            case {"choices": [{"finish_reason": "length"}, *_]}:
                tokens = self._options.body.get("max_tokens", self._options.max_tokens)
                raise ServiceError(
                    f"{self.location}: its reply was cut at args.max_tokens {tokens}; raise that"
                )
            case {"choices": [{"message": {"content": str(text)}}, *_]}:
                words = text.rpartition("</think>")[2]
                if "<think>" in words:
                    raise ServiceError(
                        f"{self.location}: its reasoning has no end: {text[-100:]!r}"
                    )
                return words
        raise ServiceError(f"{self.location} answered {answer!r:.100}, which is no chat completion")

    def _score(self, reply: str) -> float:
        word = ([None] + [match[1] for match in self._pattern.finditer(reply)])[-1]
        if word is None:
            raise ServiceError(
                f"{self.location}: nothing in its reply matches the pattern: {reply[-100:]!r}"
            )
        scores = self._options.scores
        if scores and word not in scores:
            raise ServiceError(
                f"{self.location}: its score {word!r:.60} is not one of {', '.join(scores)}"
            )
        with suppress(ValueError):
            score = float(scores[word] if scores else word.replace(",", ""))
            if math.isfinite(score):
                return score
        raise ServiceError(f"{self.location}: its score {word!r:.60} is not a finite number")
