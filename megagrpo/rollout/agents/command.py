"""An agent that is a command: the endpoint in its environment, the row on its standard input, the reward as its last
line of standard output.
"""

import asyncio
import json
import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, suppress

from megagrpo.system.environment import API_KEY, child_environment
from megagrpo.system.explained import explained
from megagrpo.system.processes import dies_with_parent, stop_tree

_KEPT = 2**16  # bytes of its output: the last ones
_PIECE = 2**14


async def run_command(base_url: str, key: str, row: Mapping[str, object], command: Sequence[str]) -> object:
    """Returns the JSON of the last line that the command prints. Raises RuntimeError if it fails, ValueError if that
    is none. Cancelled, it ends the command and everything that this started.
    """
    root = base_url.removesuffix("/v1")
    given = {"MEGAGRPO_BASE_URL": base_url, "MEGAGRPO_KEY": key, "OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": key}
    given |= {"ANTHROPIC_BASE_URL": root, "ANTHROPIC_API_KEY": key}
    own = ("PYTHONPATH", API_KEY)  # its interpreter may be another one; the engines are not its business
    process = await asyncio.create_subprocess_exec(
        *command,
        env={name: value for name, value in child_environment(given).items() if name not in own},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,
        preexec_fn=dies_with_parent(os.getpid(), signal.SIGKILL),
    )
    assert process.stdin is not None and process.stdout is not None, "pipes"
    async with AsyncExitStack() as stack:
        stack.push_async_callback(asyncio.to_thread, stop_tree, process.pid, 0.0)  # what it left behind, too
        with suppress(BrokenPipeError, ConnectionResetError):  # it need not read
            process.stdin.write(json.dumps(row).encode() + b"\n")
            await process.stdin.drain()
            process.stdin.close()
        output = b""
        while piece := await process.stdout.read(_PIECE):
            output = (output + piece)[-_KEPT:]
        code = await process.wait()
    if code:
        raise RuntimeError(f"{command[0]} ended with exit code {code}")
    last = (output.decode(errors="replace").strip().splitlines() or [""])[-1]
    with explained(f"the last line that {command[0]} printed is no reward in JSON: {last!r:.200}"):
        return json.loads(last)
