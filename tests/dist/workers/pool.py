"""Ranks that live as long as the test session: they import torch and Megatron once, and each run is
a world of its own.

A rank is a process that waits on a socket for (function, arguments), calls it and answers with what
it returned. The function makes its process group from a store of its own and leaves it before it
returns. Whatever goes wrong ends all ranks; the next run starts new ones.
usage of a rank: python -m tests.dist.workers.pool SOCKET [STAND_INS]
"""

import importlib
import os
import pickle
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing import connection
from pathlib import Path

from megagrpo.system import environment
from megagrpo.system.processes import spawn, stop_tree

REPOSITORY = Path(__file__).parents[3]
STAND_INS = REPOSITORY / "tests" / "stand_ins"
LIMIT_S = 900.0  # of one run, which may check dozens of layouts
START_S = 300.0  # until a new process answers, on a machine that is busy with other things


class RankPool:
    """Rank processes 0, 1, ..., started when a run first needs them.

    transformer_engine: they find the stand-in for it, and Megatron in them takes its optimizer.
    """

    def __init__(self, transformer_engine: bool = False) -> None:
        self._stand_ins = [str(STAND_INS)] if transformer_engine else []
        self._processes: list[subprocess.Popen] = []
        self._connections: list[connection.Connection] = []  # by rank
        self._folder: Path | None = None

    def run(self, world: int, function: Callable, *arguments: object) -> list:
        """What `function(rank, *arguments)` returns on each of `world` ranks. AssertionError with
        the log's end."""
        try:
            self._start(world)
            log = self._folder / "ranks.log"
            log.write_bytes(b"")
            call = pickle.dumps((function, arguments))
            for rank in self._connections[:world]:
                rank.send(([*self._stand_ins, *sys.path], world, call))
            return self._answers(world)
        except BaseException as exc:
            end = self._end_of_log()
            self.stop()
            if isinstance(exc, (AssertionError, EOFError, ConnectionError)):
                raise AssertionError(f"{exc!s:.3000}\n{end}") from None
            raise

    def _start(self, world: int) -> None:
        """Start the ranks that are missing; they import torch when they have answered, all at
        once."""
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        for rank in range(len(self._processes), world):
            address = str(self._folder / f"rank-{rank}.socket")
            with socket.socket(socket.AF_UNIX) as server:
                server.bind(address)
                server.listen()
                server.settimeout(START_S)
                place = {
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "OMP_NUM_THREADS": "1",
                    "CUDA_VISIBLE_DEVICES": "",
                }
                paths = [*self._stand_ins, str(REPOSITORY)]
                env = environment.child_environment(place | {"PYTHONUNBUFFERED": "1"}, paths)
                command = [
                    sys.executable,
                    "-W",
                    "ignore",
                    "-m",
                    "tests.dist.workers.pool",
                    address,
                    *self._stand_ins,
                ]
                self._processes.append(spawn(command, env, self._folder / "ranks.log"))
                self._connections.append(connection.Connection(server.accept()[0].detach()))

    def _answers(self, world: int) -> list:
        deadline, answers = time.monotonic() + LIMIT_S, {}
        while len(answers) < world:
            waiting = {
                self._connections[rank]: rank for rank in range(world) if rank not in answers
            }
            ready = connection.wait(list(waiting), timeout=max(deadline - time.monotonic(), 0.0))
            assert ready, f"no end after {LIMIT_S:.0f} s of ranks {sorted(waiting.values())}"
            for rank in ready:
                done, payload = rank.recv()
                assert done, f"rank {waiting[rank]} failed:\n{payload}"
                answers[waiting[rank]] = pickle.loads(payload)
        return [answers[rank] for rank in range(world)]

    def _end_of_log(self) -> str:
        log = self._folder / "ranks.log" if self._folder else None
        return (
            "\n".join(log.read_text(errors="replace").splitlines()[-40:])
            if log and log.exists()
            else ""
        )

    def stop(self) -> None:
        """End every rank."""
        for link in self._connections:
            link.close()
        for process in self._processes:
            stop_tree(process.pid, 0.0)
            process.wait()
        if self._folder:
            shutil.rmtree(self._folder)
        self._processes, self._connections, self._folder = [], [], None


def run_main(rank: int, module: str, folder: Path) -> None:
    """Run a worker module's `main(folder)`; for modules that the tests themselves do not import."""
    importlib.import_module(module).main(folder)


def serve(address: str, transformer_engine: bool) -> None:
    """Answer calls until the tests' side closes the connection."""
    link = socket.socket(socket.AF_UNIX)
    link.connect(address)
    with connection.Connection(link.detach()) as tests:
        import torch
        import torch.distributed as dist

        from megagrpo.actor.host import prepare_host

        prepare_host(transformer_engine=transformer_engine)  # before a function imports Megatron
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
                result = function(int(os.environ["RANK"]), *arguments)
                assert not dist.is_initialized(), "it did not leave its process group"
                tests.send((True, pickle.dumps(result)))
            except Exception:
                tests.send((False, traceback.format_exc()))


if __name__ == "__main__":
    serve(sys.argv[1], transformer_engine=len(sys.argv) > 2)
