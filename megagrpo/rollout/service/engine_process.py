"""Main program of an engine: SGLang's server, with the API key from the environment.

On a command line every user of the machine could read the key, and SGLang logs its arguments. The
processes that SGLang starts import this file again, so their logs do not show the key either.
"""

import ctypes
import inspect
import logging
import os
import signal
import sys
from pathlib import Path

from megagrpo.families.table import read_description
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

if __name__ == "__mp_main__":
    # SGLang ties its processes to the server too, but only after long imports: killed before, it
    # left orphans.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == 1:
        os._exit(1)


class NamesEngine:
    """ASGI middleware that adds the engine's id to the headers of every response."""

    def __init__(self, app):
        self._app = app
        self._header = (
            environment.ENGINE_HEADER.lower().encode(),
            (environment.get(environment.ENGINE) or "").encode(),
        )

    async def __call__(self, scope, receive, send):
        async def send_named(message):
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), self._header]}
            await send(message)

        await self._app(scope, receive, send_named)


def set_default(request, name: str) -> None:
    """Makes True the default of a request's field, because the router drops it.

    request: SGLang's class of requests, before FastAPI has read its defaults.
    """
    request.__dataclass_fields__[name].default = True
    parameters = inspect.signature(request.__init__).parameters.values()
    names = [p.name for p in parameters if p.default is not inspect.Parameter.empty]
    defaults = list(request.__init__.__defaults__)
    defaults[names.index(name)] = True
    request.__init__.__defaults__ = tuple(defaults)


if __name__ == "__main__":
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    load_plugins()
    arguments = prepare_server_args([*sys.argv[1:], *([f"--api-key={_KEY}"] if _KEY else [])])
    from sglang.srt.managers.io_struct import GenerateReqInput

    if arguments.enable_return_routed_experts:
        set_default(GenerateReqInput, "return_routed_experts")
    if "vision_config" in read_description(Path(arguments.model_path) / "config.json"):
        set_default(GenerateReqInput, "return_prompt_token_ids")
    from sglang.srt.entrypoints.http_server import app  # only now: plugins change its modules

    app.add_middleware(NamesEngine)
    try:
        run_server(arguments)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)
