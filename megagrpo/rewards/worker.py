"""The process that runs graders: `python -m megagrpo.rewards.worker FD PRELOAD`."""

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import astuple
from functools import cache
from numbers import Real

from megagrpo.config.reward import GraderArgs
from megagrpo.rewards.graders.functions import (
    GraderFunction,
    call_grader,
    load_grader,
    load_group_grader,
)
from megagrpo.rewards.part_rewards import read_parts
from megagrpo.rewards.workers import Call, Graded
from megagrpo.system.worker_process import Value, answer_calls, attempted

LOADERS = {
    # inputs: text, answer, and the row's source and extra values; see call_grader
    "grade": load_grader,
    "group": load_group_grader,  # inputs: texts, answer, scores; returns a score for each text
}


@cache
def loaded_grader(kind: str, function: str, args: str) -> GraderFunction:
    """Loads a grader once: its module may be large, and keeps its state. args: as JSON."""
    return LOADERS[kind](function, json.loads(args))


def grade(kind: str, function: str, args: GraderArgs, inputs: Sequence[Value]) -> Graded:
    """Returns scores and detail, or an error if the function raises or does not return finite
    numbers."""

    def called() -> object:
        loaded = loaded_grader(kind, function, json.dumps(args))
        if kind == "grade":
            return call_grader(loaded, args, inputs)
        return loaded(*inputs, **args)

    value, raised = attempted(called)
    if raised is not None:  # the outcome of this sample, not the end of the run
        return Graded("error", detail=f"{function} raised {type(raised).__name__}: {raised}")
    detail = ""
    num_texts = len(inputs[0])
    parts: list = []  # rewards of spans and of tokens
    if kind == "grade":
        if value is None:
            return Graded("none", detail=f"{function} returned None, no score")
        if isinstance(value, tuple) and len(value) == 2:
            value, detail = value[0], str(value[1])
        read, raised = attempted(lambda: read_parts(value, inputs[0]))
        if read is None:
            return Graded("error", detail=f"{function}: {raised}")
        score, *parts = read
        value = [score]
    elif not isinstance(value, list) or len(value) != num_texts:
        return Graded(
            "error", detail=f"{function} returned {value!r:.80}, not a list of {num_texts} scores"
        )
    for score in value:
        if not isinstance(score, Real) or not math.isfinite(score):
            problem = f"{function} returned {score!r} ({type(score).__name__}), not a finite number"
            return Graded("error", detail=problem)
    return Graded("score", tuple(map(float, value)), detail, *parts)


def main(fd: int, preload: list[Call]) -> None:
    """Answers the calls that arrive on socket `fd` until it is closed; one without inputs only loads
    its grader."""

    def answer(message: Sequence) -> Sequence:
        kind, function, args, *inputs = message
        if inputs:
            return astuple(grade(*message))
        loaded_grader(kind, function, json.dumps(args))
        return ()

    for call in preload:
        answer(call)  # counts as start-up, not as grading time
    answer_calls(fd, answer)


if __name__ == "__main__":
    main(int(sys.argv[1]), json.loads(sys.argv[2]))
