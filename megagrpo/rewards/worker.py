"""The process that runs graders: `python -m megagrpo.rewards.worker FD PRELOAD`, JSON lines on the
socket FD.

The pool ends it by SIGKILL if a grader hangs. It must not outlive the trainer, even one that was
killed: an idle worker sees its socket close, and the kernel's timer ends a hung one.
"""

import json
import math
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import astuple
from numbers import Real

from megagrpo.config.reward import GraderArgs
from megagrpo.rewards.graders.table import call_grader, load_grader, load_group_grader
from megagrpo.rewards.parts import read_parts
from megagrpo.rewards.workers import Call, Graded
from megagrpo.sandbox.calls import tried

LOADERS: dict[str, Callable[[str, GraderArgs], Callable[..., object]]] = {
    # inputs: text, answer, and the row's source and extra values; see call_grader
    "grade": load_grader,
    "group": load_group_grader,  # inputs: texts, answer, scores; returns a score for each text
}


def grade(kind: str, function: str, args: GraderArgs, inputs: Sequence[object]) -> Graded:
    """Returns scores and detail, or an error if the function raises or returns anything but finite
    numbers."""

    def called() -> object:
        loaded = LOADERS[kind](function, args)
        return call_grader(loaded, args, inputs) if kind == "grade" else loaded(*inputs, **args)

    value, raised = tried(called)
    if raised is not None:  # the outcome of this sample, not the end of the run
        return Graded("error", detail=f"{function} raised {type(raised).__name__}: {raised}")
    detail, num_texts = "", len(inputs[0]) if isinstance(inputs[0], list) else 1
    spans, tokens = (), ()
    if kind == "grade":
        if isinstance(value, tuple) and len(value) == 2:
            value, detail = value[0], str(value[1])
        read, raised = tried(lambda: read_parts(value, str(inputs[0])))
        if raised is not None:
            return Graded("error", detail=f"{function}: {raised}")
        score, spans, tokens = read
        value = [score]
    elif not isinstance(value, list) or len(value) != num_texts:
        return Graded(
            "error", detail=f"{function} returned {value!r:.80}, not a list of {num_texts} scores"
        )
    for score in value:
        if not isinstance(score, Real) or not math.isfinite(score):
            problem = f"{function} returned {score!r} ({type(score).__name__}), not a finite number"
            return Graded("error", detail=problem)
    return Graded("score", tuple(map(float, value)), detail, spans, tokens)


def main(fd: int, preload: list[Call]) -> None:
    """Answers the requests that arrive on socket `fd` until it is closed."""
    connection = socket.socket(fileno=fd)
    for kind, function, args in preload:
        LOADERS[kind](function, args)  # an import counts as start-up, not as grading time
    with connection, connection.makefile("rwb") as stream:
        stream.write(b"ready\n")
        stream.flush()
        for line in stream:
            kind, function, args, inputs, timeout_s = json.loads(line)
            # The default action of SIGALRM ends the process even inside C code that holds the
            # interpreter lock, which no thread of ours could do. It matters only if the pool, which
            # kills at timeout_s, is gone.
            signal.setitimer(signal.ITIMER_REAL, 2 * timeout_s + 5)
            graded = grade(kind, function, args, inputs)
            signal.setitimer(signal.ITIMER_REAL, 0)
            stream.write(json.dumps(astuple(graded)).encode() + b"\n")
            stream.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]), json.loads(sys.argv[2]))
