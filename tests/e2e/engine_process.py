"""SGLang engines as child processes, and plain objects that stand for the rollout service around them."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import httpx

from megagrpo.config.rollout import engine_number
from megagrpo.config.schema import ExperimentConfig
from megagrpo.rollout.service.engine_command import ServerPlace, engine_command, engine_environment, engine_python_path
from megagrpo.rollout.service.node import free_port
from megagrpo.system.environment import API_KEY, child_environment
from megagrpo.types import EngineInfo

START_S = 240


def engine_info(url: str, state: str, incarnation: int, id: str = "e0") -> EngineInfo:
    restarts = max(0, incarnation - 1)
    return EngineInfo(id, url, state, None, incarnation, restarts, pid=0, reason="")


class OneEngine:
    """Starts, kills and restarts one engine; has the methods of the service's control that the exchange uses.

    An engine over several nodes has a server process for each, all on this machine.
    """

    api_key = "of one engine"

    def __init__(
        self,
        config: ExperimentConfig,
        folder: Path,
        python_path: Sequence[str] = (),
        id: str = "e0",
        words: Sequence[str] = (),
    ):
        """words: more of the engine's command line."""
        self.config, self.folder, self.python_path = config, folder, python_path
        self.words = words
        self.info = engine_info("", "starting", 0, id)
        self.ready_calls: list[tuple] = []
        self.lost: list[str] = []
        self.processes: list[subprocess.Popen] = []  # by node

    @property
    def process(self) -> subprocess.Popen:
        """The server that answers HTTP."""
        return self.processes[0]

    def start(self) -> "OneEngine":
        self.begin_start()
        return self.finish_start()

    def begin_start(self) -> None:
        """Start the processes; several engines start at once when `finish_start` is called later."""
        nodes = self.config.rollout.nodes_per_engine
        *self.ports, meeting = free_ports(nodes + 1)
        self.logs = [self.folder / f"{self.info.id}-{self.info.incarnation}.node-{rank}.log" for rank in range(nodes)]
        self.processes = []
        for rank, (port, log) in enumerate(zip(self.ports, self.logs, strict=True)):
            where = "127.0.0.1", port, f"127.0.0.1:{meeting}"
            number = engine_number(self.info.id)
            place = ServerPlace(rank, *where, cuda=False, num_cores=os.cpu_count(), engine=number)
            variables = engine_environment(self.config, place) | {API_KEY: self.api_key}
            env = child_environment(variables, engine_python_path(place) + list(self.python_path))
            with log.open("wb") as output:
                streams = {"stdout": output, "stderr": output, "stdin": subprocess.DEVNULL}
                command = [*engine_command(self.config, place), *self.words]
                self.processes.append(subprocess.Popen(command, env=env, start_new_session=True, **streams))

    def finish_start(self) -> "OneEngine":
        """Wait until it answers; one that ends at once is started again, as the service does: a port may be taken."""
        try:
            return self._wait_for_answer()
        except RuntimeError as failure:
            print(f"started once more: {failure}")
            self.begin_start()
            return self._wait_for_answer()

    def _wait_for_answer(self) -> "OneEngine":
        url, end = f"http://127.0.0.1:{self.ports[0]}", time.monotonic() + START_S
        while True:
            with suppress(httpx.HTTPError):
                if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                    break
            if any(process.poll() is not None for process in self.processes) or time.monotonic() > end:
                self.stop()
                ends = "\n".join(log.read_text(errors="replace")[-3000:] for log in self.logs)
                raise RuntimeError(f"the engine did not start:\n{ends}")
            time.sleep(0.3)
        self.info = engine_info(url, "stale", self.info.incarnation + 1, self.info.id)
        return self

    def stop(self) -> None:
        """Kill the whole process group of every node, as lost hosts would."""
        for process in self.processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    # What the exchange calls.

    def engines(self) -> list[EngineInfo]:
        return [self.info]

    def report(self, event: str, engines: Mapping[str, int], weight_version: int = 0) -> set[str]:
        ended = {name for name, incarnation in engines.items() if incarnation != self.info.incarnation}
        match event:
            case "ready":
                self.ready_calls += [(*engine, weight_version) for engine in engines.items()]
                self.info = replace(self.info, state="ready")
            case "lost":
                self.lost += engines
                self.info = replace(self.info, state="starting")
                self.stop()
                self.start()
        return ended


@contextmanager
def started_engines(
    config: ExperimentConfig, folder: Path, paths: Sequence[str] = (), words: Sequence[str] = ()
) -> Iterator[list[OneEngine]]:
    """All engines of an experiment, started together; the end of the block kills them."""
    engines = [OneEngine(config, folder, paths, f"e{number}", words) for number in range(config.rollout.num_engines)]
    try:
        for engine in engines:
            engine.begin_start()
        yield [engine.finish_start() for engine in engines]
    finally:
        for engine in engines:
            engine.stop()


class ListedEngines:
    """Engines that another process started, as the exchange asks for them; none may be lost."""

    api_key = OneEngine.api_key

    def __init__(self, infos: Sequence[EngineInfo]):
        self.infos = {info.id: info for info in infos}

    def engines(self) -> list[EngineInfo]:
        return list(self.infos.values())

    def report(self, event: str, engines: Mapping[str, int], weight_version: int = 0) -> set[str]:
        assert event != "lost", engines
        for name in engines if event == "ready" else ():
            self.infos[name] = replace(self.infos[name], state="ready", weight_version=weight_version)
        return set()


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on, all different, and where no connection takes one that the engine counts from it."""
    ports: set[int] = set()
    while len(ports) < count:
        ports.add(free_port("127.0.0.1"))
    return list(ports)
