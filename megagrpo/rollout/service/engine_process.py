"""Main program of an engine: SGLang's server, with the API key from the environment.

On a command line every user of the machine could read the key, and SGLang logs its arguments. The
processes that SGLang starts import this file again, so their logs do not show the key either.
"""

import ctypes
import logging
import os
import signal
import sys

from megagrpo.system import environment

_PR_SET_PDEATHSIG = 1
_KEY = environment.get(environment.API_KEY) or ""
_make_record = logging.getLogRecordFactory()


def _without_key(*args, **kwargs) -> logging.LogRecord:
    record = _make_record(*args, **kwargs)
    try:
        text = record.getMessage()
    except (
        TypeError,
        ValueError,
        KeyError,
    ):  # a wrong format string: logging would print an error and the arguments
        text = f"{record.msg} {record.args}"
    if _KEY in text:
        record.msg = text.replace(_KEY, "(the API key)")
        record.args = ()
    return record


if _KEY:
    logging.setLogRecordFactory(_without_key)


def _prepare_scores() -> None:
    """Prepares a teacher's engine, in every process that SGLang starts, by a spawn or a fork."""
    if temperature := environment.get(environment.SCORES_AT):
        from megagrpo.rollout.service import scoring

        scoring.prepare(float(temperature))


if __name__ == "__mp_main__":
    # SGLang ties its processes to the server too, but only after long imports: killed before, it
    # left orphans.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == 1:
        os._exit(1)
    _prepare_scores()


if __name__ == "__main__":
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    from megagrpo.rollout.service.engine_words import engine_words

    load_plugins()
    words = [*engine_words(sys.argv[1:]), *([f"--api-key={_KEY}"] if _KEY else [])]
    arguments = prepare_server_args(words)
    _prepare_scores()
    try:
        run_server(arguments)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)
