"""Grades responses with the graders of the experiment, and the scores of a group with its group grader."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import replace
from typing import TypeVar

from megagrpo.config.reward import GraderArgs, GraderConfig, RewardConfig
from megagrpo.rewards.graders.http import HttpGrader
from megagrpo.rewards.graders.judge import JudgeGrader
from megagrpo.rewards.graders.table import SERVICES, check_grader, load_group_grader
from megagrpo.rewards.services import ServiceGrader, graded
from megagrpo.rewards.workers import Call, Graded, WorkerPool
from megagrpo.system.background import BackgroundLoop
from megagrpo.types import Outcome, Prompt

_T = TypeVar("_T")
_SERVICE_GRADERS: dict[str, Callable[[GraderArgs], ServiceGrader]] = {"http": HttpGrader, "judge": JudgeGrader}
assert set(_SERVICE_GRADERS) == set(SERVICES)


class RewardPool:
    """Runs graders in `config.workers` processes and calls reward services. Use as a context manager, or call `close`.

    Raises ValueError if a grader is unknown, cannot be imported or rejects its arguments, and WorkerError if a worker
    process does not start.
    """

    def __init__(self, config: RewardConfig):
        self._config = config
        self._checked: set[str] = set()
        self._services: dict[str, ServiceGrader] = {}
        for entry in config.entries:
            check_grader(entry.grader, entry.args)
            if entry.grader in SERVICES:
                self._services[entry.short_name] = _SERVICE_GRADERS[entry.grader](entry.args)
        preload: list[Call] = [("grade", e.grader, e.args) for e in config.entries if e.grader not in SERVICES]
        if config.group_grader is not None:
            load_group_grader(config.group_grader, {**config.group_args})
            preload.append(("group", config.group_grader, {**config.group_args}))
        with ExitStack() as stack:
            self._workers: WorkerPool | None = None
            self._stack = stack
            if preload:
                self._worker_pool(preload)
            self._loop = BackgroundLoop("reward services")
            stack.callback(self._loop.close, *(service.close for service in self._services.values()))
            self._stack = stack.pop_all()

    def submit(self, prompt: Prompt, text: str) -> Future[Outcome]:
        """Returns a future of one response's outcome: the weighted sum of its parts, or the first error among them.

        `prompt.grader`, if set, is the only grader: one of `reward.graders`, or any other without arguments. Raises
        ValueError if it cannot be loaded.
        """
        entries = self._entries_for(prompt)
        started = [self._start(entry, prompt, text) for entry in entries]
        return _when_all(started, lambda graded: self._combined(entries, graded))

    def submit_group(self, prompt: Prompt, texts: Sequence[str], outcomes: Sequence[Outcome]) -> Future[list[Outcome]]:
        """Returns a future of the group's outcomes after its group grader, which gets only responses with a score.

        If the group grader fails, all these responses get its error. Without a group grader, or if no response has a
        score, the outcomes are unchanged.
        """
        name, valid = self._config.group_grader, [i for i, outcome in enumerate(outcomes) if outcome.ok]
        if name is None or not valid:
            unchanged: Future[list[Outcome]] = Future()
            unchanged.set_result(list(outcomes))
            return unchanged
        inputs = ([texts[i] for i in valid], prompt.answer, [outcomes[i].value for i in valid])
        started = self._worker_pool().submit(("group", name, {**self._config.group_args}), inputs)

        def regraded(answers: list[Graded]) -> list[Outcome]:
            (graded,) = answers
            out = list(outcomes)
            for index, i in enumerate(valid):
                score = graded.scores[index] if graded.status == "score" else 0.0
                detail = graded.detail or out[i].detail
                out[i] = replace(out[i], status=graded.status, value=score, detail=detail)
            return out

        return _when_all([started], regraded)

    def close(self) -> None:
        """Ends every worker process and request; responses in flight get an error outcome."""
        self._stack.close()

    def __enter__(self) -> "RewardPool":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _entries_for(self, prompt: Prompt) -> Sequence[GraderConfig]:
        entries, name = self._config.entries, prompt.grader
        if name is None:
            return entries
        for entry in entries:
            if name in (entry.short_name, entry.grader):
                return [entry]
        if name not in self._checked:
            check_grader(name, {})
            self._checked.add(name)
        return [GraderConfig(grader=name)]

    def _worker_pool(self, preload: Sequence[Call] = ()) -> WorkerPool:
        """Returns the pool of processes; it starts with the first grader that is not a service."""
        if self._workers is None:
            self._workers = self._stack.enter_context(WorkerPool(self._config.workers, preload, self._config.timeout_s))
        return self._workers

    def _start(self, entry: GraderConfig, prompt: Prompt, text: str) -> Future[Graded]:
        if entry.short_name in self._services:
            return self._loop.submit(graded(self._services[entry.short_name].grade(prompt, text)))
        return self._worker_pool().submit(("grade", entry.grader, dict(entry.args)), (text, prompt.answer))

    def _combined(self, entries: Sequence[GraderConfig], graded: Sequence[Graded]) -> Outcome:
        outcomes = [Outcome(g.status, g.scores[0] if g.scores else 0.0, g.detail) for g in graded]
        parts = {entry.short_name: part for entry, part in zip(entries, outcomes, strict=True)}
        bad = next((part for part in outcomes if not part.ok), None)
        if not self._config.has_parts:
            return outcomes[0]
        if bad is not None:
            return replace(bad, parts=parts)
        value = sum(entry.weight * part.value for entry, part in zip(entries, outcomes, strict=True))
        return Outcome("score", value, "; ".join(filter(None, (part.detail for part in outcomes))), parts)


def _when_all(started: Sequence[Future[Graded]], combine: Callable[[list[Graded]], _T]) -> Future[_T]:
    """Returns a future of `combine` of all results. Cancelling it cancels the parts that have not started."""
    combined: Future[_T] = Future()
    lock, left = threading.Lock(), len(started)

    def on_part_done(_: Future[Graded]) -> None:
        nonlocal left
        with lock:
            left -= 1
            last = left == 0
        if last and combined.set_running_or_notify_cancel():
            try:
                combined.set_result(combine([future.result() for future in started]))
            except Exception as exc:  # the caller of result() gets it
                combined.set_exception(exc)

    def cancel_parts(future: Future[_T]) -> None:
        if future.cancelled():
            for part in started:
                part.cancel()

    combined.add_done_callback(cancel_parts)
    for future in started:
        future.add_done_callback(on_part_done)
    return combined
