"""Plays episodes of an environment from the library `verifiers`, in the interpreter that has the
library; imports nothing from megagrpo. `PYTHON verifiers_episodes.py ENVIRONMENT [N]` prints the
(first N) tasks as rows for `data.path`.

ENVIRONMENT is a name for `verifiers.load_environment` (the classic API, to 0.2), the id of a
taskset (the API of `verifiers.v1`), or a TOML file with an [env] block for that API. With
`--serve FD` it is a worker of megagrpo/system/worker_process.py: {"base_url", "index"} ->
[reward, note].
"""

import asyncio
import ctypes
import json
import os
import signal
import socket
import sys
import tomllib
import traceback
from contextlib import nullcontext
from functools import partial
from itertools import islice

_PR_SET_PDEATHSIG = 1


class Classic:
    """An environment of the classic API; a dataset has its rows."""

    def __init__(self, vf, name):
        self.vf = vf
        self.environment = vf.load_environment(name)
        self.dataset = self.environment.get_dataset()

    def rows(self):
        """Yields (prompt, answer) of each row of the dataset."""
        for row in self.dataset:
            yield row["prompt"], str(row.get("answer", ""))

    def serving(self):
        """Returns the context of all episodes, which share nothing."""
        return nullcontext()

    async def play(self, base_url, index):
        """Returns (reward, note) of an episode. Raises RuntimeError."""
        client = self.vf.ClientConfig(
            api_base_url=base_url, api_key_var="MEGAGRPO_NO_KEY", max_retries=0, timeout=1e6
        )
        state = await self.environment.run_rollout(self.dataset[index], client, "policy", {})
        if state.get("error"):
            raise RuntimeError(f"verifiers: {state['error']}")
        # of the user's functions, which may return numpy's numbers
        return float(state["reward"]), str(state.get("stop_condition") or "")


class Tasks:
    """An environment of `verifiers.v1`; a taskset has its rows."""

    def __init__(self, env):
        import verifiers.v1 as vf
        from verifiers.v1.utils.loaders import load_environment, resolve_env_config

        self.vf = vf
        self.environment = load_environment(resolve_env_config(env))
        self.tasks = []
        self.left = iter(self.environment.taskset)

    def rows(self):
        """Yields (prompt, answer) of each task; an endless taskset is cut by the reader."""
        for task in self.environment.taskset:
            prompt = task.data.prompt
            if isinstance(prompt, str):
                prompt = [{"role": "user", "content": prompt}]
            messages = [*map(_plain, prompt or [])]
            if task.data.system_prompt:
                messages.insert(0, {"role": "system", "content": task.data.system_prompt})
            yield messages, ""

    def serving(self):
        """Returns the context of all episodes, in which their shared services run."""
        return self.environment.serving()

    async def play(self, base_url, index):
        """Returns (reward, note) of an episode: the sum of its agents' rewards. Raises
        RuntimeError."""
        self.tasks += islice(self.left, max(0, index + 1 - len(self.tasks)))
        client = self.vf.EvalClientConfig(base_url=base_url, api_key_var="MEGAGRPO_NO_KEY")
        (slot,) = self.environment.slots(self.tasks[index])
        episode = await self.environment.run_slot(
            slot, self.vf.ModelContext(model="policy", client=client)
        )
        if not episode.ok:
            errors = [
                *episode.errors,
                *(error for trace in episode.traces for error in trace.errors),
            ]
            raise RuntimeError(f"verifiers: {'; '.join(map(str, errors))}"[:2000])
        return float(sum(trace.reward for trace in episode.traces)), ""


def _plain(message):
    return message if isinstance(message, dict) else message.model_dump(exclude_none=True)


def environment_of(name):
    """Returns the environment in the API that the installed version has."""
    if name.endswith(".toml"):
        with open(name, "rb") as file:
            return Tasks(tomllib.load(file)["env"])
    import verifiers as vf

    if hasattr(vf, "load_environment"):
        return Classic(vf, name)
    return Tasks({"taskset": {"id": name}})


async def serve(name, connection):
    """Plays episodes until the socket closes."""
    running: dict[int, asyncio.Task] = {}
    reader, writer = await asyncio.open_connection(sock=connection, limit=2**28)
    writer.write(b"null\n")
    environment = environment_of(name)

    def report(number, task):
        del running[number]
        exc = asyncio.CancelledError() if task.cancelled() else task.exception()
        # traceback, because an exception may fail to make its own text
        answer = [number, None, traceback.format_exception_only(exc)[0].strip()]
        if exc is None:
            answer = [number, task.result(), None]
        writer.write(json.dumps(answer).encode() + b"\n")

    async with environment.serving():
        async for line in reader:
            number, task = json.loads(line)
            if task is True:  # whether the loop reacts
                writer.write(json.dumps([number, None, None]).encode() + b"\n")
            elif task is not None:
                running[number] = asyncio.create_task(environment.play(**task))
                running[number].add_done_callback(partial(report, number))
            elif number in running:
                running[number].cancel()


def main(name, *options):
    """Prints the rows, or serves."""
    sys.path[0] = os.getcwd()  # environments are modules of the working folder or installed ones
    if options[:1] == ("--serve",):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        asyncio.run(serve(name, socket.socket(fileno=int(options[1]))))
    else:
        output = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # the output of environments is not a row
        rows = environment_of(name).rows()
        most = int(options[0]) if options else None
        for index, (prompt, answer) in enumerate(islice(rows, most)):
            row = {"prompt": prompt, "answer": answer, "extra": {"index": index}}
            print(json.dumps(row), file=output)
        output.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
