"""The process that runs graders: `python -m megagrpo.rewards.worker FD GRADER ARGS`, JSON lines on the socket FD.

It is killed, never asked: the pool ends it by SIGKILL when a grader hangs. Nothing here may outlive the trainer, which
may itself be killed: an idle worker sees its socket close, and a hung one is ended by the kernel's timer.
"""

import json
import math
import signal
import socket
import sys
from numbers import Real
from typing import Any

from megagrpo.rewards.graders import load_grader


def grade(grader: str, args: dict[str, Any], text: str, answer: str) -> dict[str, Any]:
    """Returns {"value": float}, or {"error": text} for an exception and for a result that is no finite number."""
    try:
        value = load_grader(grader, args)(text, answer, **args)
    except Exception as exc:  # whatever a user's function raises is that sample's outcome, not the run's end
        return {"error": f"{grader} raised {type(exc).__name__}: {exc}"}
    if not isinstance(value, Real) or not math.isfinite(value):
        return {"error": f"{grader} returned {value!r} ({type(value).__name__}), not a finite number"}
    return {"value": float(value)}


def main(fd: int, grader: str, args: dict[str, Any]) -> None:
    """Grades what comes over the socket `fd` until that is closed."""
    connection = socket.socket(fileno=fd)
    load_grader(grader, args)  # importing counts as start-up, not as grading time
    with connection, connection.makefile("rwb") as stream:
        stream.write(b"ready\n")
        stream.flush()
        for line in stream:
            request = json.loads(line)
            # The default action of SIGALRM ends the process even inside C code that holds the interpreter lock, which
            # no thread of ours could do. It matters only when the pool, which kills at timeout_s, is itself gone.
            signal.setitimer(signal.ITIMER_REAL, 2 * request["timeout_s"] + 5)
            reply = grade(request["grader"], request["args"], request["text"], request["answer"])
            signal.setitimer(signal.ITIMER_REAL, 0)
            stream.write(json.dumps(reply).encode() + b"\n")
            stream.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3]))
