"""Ranks that live as long as the test session, and each run of them is a world of its own.

A zygote imports what ranks need, once, and forks them before it has threads or process groups. A
rank waits on a socket for (function, arguments), calls it and answers with what it returned. The
function makes its process group from a store of its own and leaves it before it returns. Whatever
goes wrong ends all ranks; the next run starts new ones.
usage of a zygote: python -m tests.dist.workers.pool SOCKET KIND
"""

import importlib
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing import connection
from pathlib import Path

from megagrpo.config.fields import Rule
from megagrpo.system import environment
from megagrpo.system.processes import dies_with_parent, spawn, stop_tree
from tests.hostcuda import build as hostcuda

REPOSITORY = Path(__file__).parents[3]
STAND_INS = REPOSITORY / "tests" / "stand_ins"
LIMIT_S = 900.0  # of one run, which may check dozens of layouts
START_S = 300.0  # until a new process answers, on a machine that is busy with other things


# folders that come first on the path of a kind's processes
FIRST_ON_PATH = {
    "megatron": [],
    # Megatron in them takes the optimizer of the stand-in for Transformer Engine
    "transformer_engine": [str(STAND_INS)],
    # models of transformers do not share a process with the trainer's shims
    "transformers": [str(REPOSITORY / "megagrpo" / "cpu" / "engine")],
    # Megatron on a CUDA device that the host pretends
    "cuda": [str(hostcuda.SITE)],
}


class RankPool:
    """Rank processes 0, 1, ... of a kind, started when a run first needs them."""

    def __init__(self, kind: str = "megatron") -> None:
        self._kind = kind
        self._zygote: subprocess.Popen | None = None
        self._connections: list[connection.Connection] = []  # of the zygote, then by rank
        self._folder: Path | None = None

    def run(self, world: int, function: Callable, *arguments: object) -> list:
        """What `function(rank, *arguments)` returns on each of `world` ranks. AssertionError with the log's end."""
        try:
            self._start(world)
            log = self._folder / "ranks.log"
            log.write_bytes(b"")
            call = pickle.dumps((function, arguments))
            for rank in self._ranks[:world]:
                rank.send(([*FIRST_ON_PATH[self._kind], *sys.path], world, call))
            return self._answers(world)
        except BaseException as exc:
            end = self._end_of_log()
            self.stop()
            if isinstance(exc, (AssertionError, EOFError, ConnectionError)):
                raise AssertionError(f"{exc!s:.3000}\n{end}") from None
            raise

    @property
    def _ranks(self) -> list[connection.Connection]:
        return self._connections[1:]

    def _start(self, world: int) -> None:
        """Start the zygote and the ranks that are missing."""
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        while len(self._connections) <= world:
            rank = len(self._connections) - 1
            address = str(self._folder / f"{rank}.socket")
            with socket.socket(socket.AF_UNIX) as server:
                server.bind(address)
                server.listen()
                server.settimeout(START_S)
                if self._zygote is None:
                    paths = [*FIRST_ON_PATH[self._kind], str(REPOSITORY)]
                    variables = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
                    cuda = self._kind == "cuda"
                    variables |= hostcuda.variables() if cuda else {"CUDA_VISIBLE_DEVICES": ""}
                    env = environment.child_environment(variables, paths)
                    module = "tests.dist.workers.pool"
                    command = [sys.executable, "-W", "ignore", "-m", module, address, self._kind]
                    self._zygote = spawn(command, env, self._folder / "ranks.log")
                else:
                    self._connections[0].send((rank, address))
                self._connections.append(connection.Connection(server.accept()[0].detach()))

    def _answers(self, world: int) -> list:
        deadline, answers = time.monotonic() + LIMIT_S, {}
        while len(answers) < world:
            waiting = {self._ranks[rank]: rank for rank in range(world) if rank not in answers}
            ready = connection.wait(list(waiting), timeout=max(deadline - time.monotonic(), 0.0))
            assert ready, f"no end after {LIMIT_S:.0f} s of ranks {sorted(waiting.values())}"
            for rank in ready:
                done, payload = rank.recv()
                assert done, f"rank {waiting[rank]} failed:\n{payload}"
                answers[waiting[rank]] = pickle.loads(payload)
        return [answers[rank] for rank in range(world)]

    def _end_of_log(self) -> str:
        log = self._folder / "ranks.log" if self._folder else None
        return "\n".join(log.read_text(errors="replace").splitlines()[-40:]) if log and log.exists() else ""

    def stop(self) -> None:
        """End every rank."""
        for link in self._connections:
            link.close()
        if self._zygote:
            stop_tree(self._zygote.pid, 0.0)
            self._zygote.wait()
        if self._folder:
            shutil.rmtree(self._folder)
        self._zygote, self._connections, self._folder = None, [], None


def run_main(rank: int, module: str, *arguments: object) -> None:
    """Run `main` of a worker module; for modules that the tests themselves do not import."""
    importlib.import_module(module).main(*arguments)


def _no_rule(*_) -> Rule:
    return Rule(when=False, because="")


def connected(address: str) -> connection.Connection:
    link = socket.socket(socket.AF_UNIX)
    link.connect(address)
    return connection.Connection(link.detach())


def fork_ranks(address: str, kind: str) -> None:
    """Import what ranks of the kind need, and fork them until the tests' side closes the connection."""
    with connected(address) as tests:
        import torch

        if kind == "transformers":
            import transformers.modeling_utils  # noqa: F401
        else:
            from megagrpo.actor.host import prepare_host

            prepare_host(transformer_engine=kind == "transformer_engine")
            import megagrpo.actor.megatron_actor  # noqa: F401  Megatron with it
        if kind == "cuda":
            # refused on a GPU for its memory, without Transformer Engine; what it computes is tested
            importlib.import_module("megagrpo.actor.megatron_config").context_rule = _no_rule
        torch.set_num_threads(1)
        arrange = dies_with_parent(os.getpid(), signal.SIGKILL)
        while True:
            try:
                rank, of_rank = tests.recv()
            except EOFError:
                return
            if os.fork() == 0:
                arrange()
                tests.close()
                # on no rank the first GPU, which threads and devices without an index begin with
                local = rank + (kind == "cuda")
                os.environ.update(RANK=str(rank), LOCAL_RANK=str(local))
                answer_calls(of_rank, rank)
                os._exit(0)


def answer_calls(address: str, rank: int) -> None:
    """Answer calls until the tests' side closes the connection."""
    import torch
    import torch.distributed as dist

    with connected(address) as tests:
        while True:
            try:
                path, world, call = tests.recv()
            except EOFError:
                return
            sys.path[:] = path
            os.environ["WORLD_SIZE"] = str(world)
            torch.set_num_threads(1)
            torch.manual_seed(0)
            try:
                function, arguments = pickle.loads(call)
                result = function(rank, *arguments)
                assert not dist.is_initialized(), "it did not leave its process group"
                tests.send((True, pickle.dumps(result)))
            except Exception:
                tests.send((False, traceback.format_exc()))


if __name__ == "__main__":
    fork_ranks(*sys.argv[1:])
