"""Grades responses with the graders of the experiment, and the scores of a group with its group
grader."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace

from megagrpo.config.reward import GraderConfig, RewardConfig
from megagrpo.rewards.graders.functions import (
    BUILT_IN,
    check_grader,
    load_group_grader,
    machine_problem,
)
from megagrpo.rewards.graders.http import HttpGrader
from megagrpo.rewards.graders.judge import JudgeGrader
from megagrpo.rewards.part_rewards import ResponseTokens
from megagrpo.rewards.services import ServiceGrader
from megagrpo.rewards.workers import Call, Graded, GraderWorkers
from megagrpo.system.background import BackgroundLoop
from megagrpo.types import Outcome, Prompt

_SERVICE_GRADERS: dict[str, Callable[..., ServiceGrader]] = {
    "http": HttpGrader,
    "judge": JudgeGrader,
}
# they read only the answer behind the reasoning; others, the user's own among them, a whole response
_OF_ANSWERS = {*BUILT_IN, "judge"} - {"format"}


class RewardPool(AbstractContextManager["RewardPool"]):
    """Runs graders in `config.workers` processes and calls reward services, until its block ends or
    `close`.

    preload: whether processes start and import the experiment's graders at once, not with the first
    response. reasoning_end: see Prompt.answer_in. Raises ValueError if a grader is unknown, cannot
    be imported, rejects its arguments or, with preload, cannot run on this machine, and WorkerError
    if a worker process does not start.
    """

    def __init__(self, config: RewardConfig, preload: bool = True, reasoning_end: str = ""):
        self._config = config
        self._reasoning_end = reasoning_end
        self._checked: set[str] = set()
        self._services: dict[str, ServiceGrader] = {}
        for entry in config.entries:
            check_grader(entry.grader, entry.args)
            if preload:
                _refuse_machine(entry)
            if entry.grader in _SERVICE_GRADERS:
                self._services[entry.short_name] = _SERVICE_GRADERS[entry.grader](entry.args)
        calls: list[Call] = [
            ("grade", e.grader, e.args) for e in config.entries if e.grader not in _SERVICE_GRADERS
        ]
        if config.group_grader is not None:
            load_group_grader(config.group_grader, {**config.group_args})
            calls.append(("group", config.group_grader, {**config.group_args}))
        self._loop = BackgroundLoop("rewards")
        preloaded = calls if preload else []
        self._workers = GraderWorkers(config.workers, preloaded, config.timeout_s)
        if preloaded:
            with ExitStack() as failure:
                failure.callback(self.close)
                self._loop.submit(self._workers.start()).result()
                failure.pop_all()

    def submit(
        self, prompt: Prompt, text: str, tokens: ResponseTokens | None = None
    ) -> Future[Outcome]:
        """Returns a future of one response's outcome: the weighted sum of the graders' scores, or
        the first error among them. A grader that returns None adds nothing; if all do, that is one.

        tokens: the response's tokens, for graders that reward parts of it; None: only the sum of
        such rewards is known. `prompt.grader`, if set, is the only grader: one of `reward.graders`,
        or any other without arguments. Raises ValueError if it cannot be loaded.
        """
        return self._loop.submit(self._combined(self._entries_for(prompt), prompt, text, tokens))

    def submit_group(
        self, prompt: Prompt, texts: Sequence[str], outcomes: Sequence[Outcome]
    ) -> Future[list[Outcome]]:
        """Returns a future of the group's outcomes after its group grader, which gets only
        responses with a score.

        If the group grader fails, all these responses get its error. Without a group grader, or if
        no response has a score, the outcomes are unchanged.
        """
        return self._loop.submit(self._regraded(prompt, texts, outcomes))

    def connect(self, name: str, judge: ServiceGrader) -> None:
        """Takes a judge with a path, which asks its engines; before the first response."""
        self._services[name] = judge

    def close(self) -> None:
        """Ends every worker process and request; responses in flight get an error outcome."""
        self._workers.close()
        self._loop.close(*(service.close for service in self._services.values()))

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _entries_for(self, prompt: Prompt) -> Sequence[GraderConfig]:
        entries = self._config.entries
        name = prompt.grader
        if name is None:
            return entries
        named = [entry for entry in entries if name in (entry.short_name, entry.grader)]
        if named:
            return named[:1]
        entry = GraderConfig(grader=name)
        if name not in self._checked:
            check_grader(name, {})
            _refuse_machine(entry)
            self._checked.add(name)
        return [entry]

    async def _graded(self, entry: GraderConfig, prompt: Prompt, text: str) -> Graded:
        if entry.grader in _OF_ANSWERS:
            text = prompt.answer_in(text, self._reasoning_end)
        if entry.grader in _SERVICE_GRADERS:
            return await self._services[entry.short_name].outcome(prompt, text)
        is_chat = bool(prompt.messages)
        inputs = (text, prompt.answer, prompt.source, prompt.extra, prompt.question, is_chat)
        return await self._workers.grade(("grade", entry.grader, dict(entry.args)), inputs)

    async def _combined(
        self,
        entries: Sequence[GraderConfig],
        prompt: Prompt,
        text: str,
        tokens: ResponseTokens | None,
    ) -> Outcome:
        outcomes: list[Outcome] = []
        token_rewards: list[tuple[int, float]] = []
        graded_by = await _all([self._graded(entry, prompt, text) for entry in entries])
        scored = any(graded.status == "score" for graded in graded_by)
        for entry, graded in zip(entries, graded_by, strict=True):
            outcome = _outcome(graded)
            if outcome.status == "none" and not scored:
                outcome = replace(outcome, status="error")
            if tokens is not None and outcome.ok:
                try:
                    token_rewards += tokens.rewards(graded.spans, graded.tokens, entry.weight)
                except ValueError as exc:
                    outcome = Outcome("error", detail=f"{entry.grader}: {exc}")
            outcomes.append(outcome)
        parts = {}
        if self._config.has_parts:
            parts = {entry.short_name: part for entry, part in zip(entries, outcomes, strict=True)}
        failures = [part for part in outcomes if part.status not in ("score", "none")]
        if failures:
            return replace(failures[0], parts=parts)
        if not parts:
            return replace(outcomes[0], token_rewards=tuple(sorted(token_rewards)))
        value = sum(
            entry.weight * part.value for entry, part in zip(entries, outcomes, strict=True)
        )
        detail = "; ".join(filter(None, (part.detail for part in outcomes)))
        return Outcome("score", value, detail, parts, tuple(sorted(token_rewards)))

    async def _regraded(
        self, prompt: Prompt, texts: Sequence[str], outcomes: Sequence[Outcome]
    ) -> list[Outcome]:
        name = self._config.group_grader
        out = list(outcomes)
        valid = [i for i, outcome in enumerate(outcomes) if outcome.ok]
        if name is None or not valid:
            return out
        inputs = ([texts[i] for i in valid], prompt.answer, [outcomes[i].value for i in valid])
        call: Call = ("group", name, {**self._config.group_args})
        (graded,) = await _all([self._workers.grade(call, inputs)])
        for index, i in enumerate(valid):
            score = graded.scores[index] if graded.status == "score" else 0.0
            detail = graded.detail or out[i].detail
            out[i] = replace(
                out[i], status=graded.status, value=score, detail=detail, token_rewards=()
            )
        return out


def _refuse_machine(entry: GraderConfig) -> None:
    problem = machine_problem(entry.grader, entry.args)
    if problem:
        raise ValueError(f"grader {entry.grader}: {problem}")


def _outcome(graded: Graded) -> Outcome:
    parts = sum(reward for _, reward in graded.spans) + sum(graded.tokens)
    return Outcome(graded.status, sum(graded.scores[:1]) + parts, graded.detail)


async def _all(grading: Sequence[Coroutine[object, None, Graded]]) -> list[Graded]:
    """Returns all results; they are errors if the pool is closed meanwhile."""
    try:
        return await asyncio.gather(*grading)
    except asyncio.CancelledError:
        return [Graded("error", detail="the reward pool was closed")] * len(grading)
