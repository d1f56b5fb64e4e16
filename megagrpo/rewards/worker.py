"""The process that runs graders: `python -m megagrpo.rewards.worker FD PRELOAD`, JSON lines on the socket FD.

It is killed, never asked: the pool ends it by SIGKILL when a grader hangs. Nothing here may outlive the trainer, which
may itself be killed: an idle worker sees its socket close, and a hung one is ended by the kernel's timer.
"""

import json
import math
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any

from megagrpo.rewards.graders.table import load_grader, load_group_grader

LOADERS: dict[str, Callable[[str, dict[str, Any]], Callable[..., Any]]] = {
    "grade": load_grader,  # inputs: text, answer; returns a score, or (score, what to say of it)
    "group": load_group_grader,  # inputs: texts, answer, scores; returns a score for each text
}


def grade(kind: str, function: str, args: dict[str, Any], inputs: Sequence[Any]) -> dict[str, Any]:
    """Returns {"scores": floats, "detail": text}, or {"error": text} for an exception and for no finite numbers."""
    try:
        value = LOADERS[kind](function, args)(*inputs, **args)
    except Exception as exc:  # whatever a user's function raises is that sample's outcome, not the run's end
        return {"error": f"{function} raised {type(exc).__name__}: {exc}"}
    detail = ""
    if kind == "grade":
        if isinstance(value, tuple) and len(value) == 2:
            value, detail = value[0], str(value[1])
        value = [value]
    elif not isinstance(value, list) or len(value) != len(inputs[0]):
        return {"error": f"{function} returned {value!r:.80}, not a list of {len(inputs[0])} scores"}
    for score in value:
        if not isinstance(score, Real) or not math.isfinite(score):
            return {"error": f"{function} returned {score!r} ({type(score).__name__}), not a finite number"}
    return {"scores": [float(score) for score in value], "detail": detail}


def main(fd: int, preload: list[tuple[str, str, dict[str, Any]]]) -> None:
    """Grades what comes over the socket `fd` until that is closed."""
    connection = socket.socket(fileno=fd)
    for kind, function, args in preload:
        LOADERS[kind](function, args)  # importing counts as start-up, not as grading time
    with connection, connection.makefile("rwb") as stream:
        stream.write(b"ready\n")
        stream.flush()
        for line in stream:
            request = json.loads(line)
            # The default action of SIGALRM ends the process even inside C code that holds the interpreter lock, which
            # no thread of ours could do. It matters only when the pool, which kills at timeout_s, is itself gone.
            signal.setitimer(signal.ITIMER_REAL, 2 * request["timeout_s"] + 5)
            reply = grade(request["kind"], request["function"], request["args"], request["inputs"])
            signal.setitimer(signal.ITIMER_REAL, 0)
            stream.write(json.dumps(reply).encode() + b"\n")
            stream.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]), json.loads(sys.argv[2]))
