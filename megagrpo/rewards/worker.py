"""The process that runs graders: `python -m megagrpo.rewards.worker FD GRADER ARGS`, JSON lines on the inherited socket.

It is killed, never asked: the pool ends it by SIGKILL when a grader hangs. Nothing here may outlive the trainer, which
may itself be killed: an idle worker sees its socket close, and a hung one is ended by the kernel's timer.
"""

import json
import math
import signal
import socket
import sys
from numbers import Real

from megagrpo.rewards.graders import load_grader


def evaluate(grader: str, args: dict, text: str, answer: str) -> dict:
    """{"value": float} or {"error": text}: an exception, or a result that is no finite number."""
    try:
        value = load_grader(grader, args)(text, answer, **args)
    except Exception as exc:  # whatever a user's function raises is that sample's outcome, not the run's end
        return {"error": f"{grader} raised {type(exc).__name__}: {exc}"}
    if not isinstance(value, Real) or not math.isfinite(value):
        return {"error": f"{grader} returned {value!r} ({type(value).__name__}), not a finite number"}
    return {"value": float(value)}


def main(fd: int, grader: str, args: dict) -> None:
    connection = socket.socket(fileno=fd)
    load_grader(grader, args)  # importing counts as start-up, not as grading time
    with connection, connection.makefile("rwb") as stream:
        stream.write(b"ready\n")
        stream.flush()
        for line in stream:
            request = json.loads(line)
            # The default action of SIGALRM ends the process even inside C code that holds the interpreter lock, which no
            # thread of ours could. It only matters when the pool, which kills at timeout_s, is itself gone.
            signal.setitimer(signal.ITIMER_REAL, 2 * request["timeout_s"] + 5)
            reply = evaluate(request["grader"], request["args"], request["text"], request["answer"])
            signal.setitimer(signal.ITIMER_REAL, 0)
            stream.write(json.dumps(reply).encode() + b"\n")
            stream.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3]))
