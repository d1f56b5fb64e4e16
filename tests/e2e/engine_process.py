"""One SGLang engine as a child process, and a plain object that stands for the rollout service around it."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import httpx

from megagrpo.config.schema import ExperimentConfig
from megagrpo.environment import API_KEY, child_environment
from megagrpo.rollout.service.engine_command import ServerPlace, engine_command, engine_environment, engine_python_path
from megagrpo.types import EngineInfo

START_S = 240


def engine_info(url: str, state: str, incarnation: int) -> EngineInfo:
    return EngineInfo(
        id="e0",
        url=url,
        state=state,
        weight_version=None,
        incarnation=incarnation,
        restarts=max(0, incarnation - 1),
        pid=0,
        reason="",
    )


class OneEngine:
    """Starts, kills and restarts one engine; has the methods of the service's control that the exchange uses."""

    api_key = "of one engine"

    def __init__(self, config: ExperimentConfig, folder: Path, python_path: Sequence[str] = ()):
        self.config, self.folder, self.python_path = config, folder, python_path
        self.info = engine_info("", "starting", 0)
        self.ready_calls: list[tuple] = []
        self.lost: list[str] = []
        self.process: subprocess.Popen | None = None

    def start(self) -> "OneEngine":
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        place = ServerPlace(0, "127.0.0.1", port, f"127.0.0.1:{port + 1}", cuda=False, num_cores=os.cpu_count())
        variables = engine_environment(self.config, place) | {API_KEY: self.api_key}
        env = child_environment(variables, engine_python_path(place) + list(self.python_path))
        self.log = self.folder / f"engine-{self.info.incarnation}.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                engine_command(self.config, place),
                env=env,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        url, end = f"http://127.0.0.1:{port}", time.monotonic() + START_S
        while True:
            try:
                if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                    break
            except httpx.HTTPError:
                pass
            if self.process.poll() is not None or time.monotonic() > end:
                self.stop()
                raise RuntimeError(f"the engine did not start:\n{self.log.read_text()[-3000:]}")
            time.sleep(0.3)
        self.info = engine_info(url, "stale", self.info.incarnation + 1)
        return self

    def stop(self) -> None:
        """Kill the whole process group, as a lost host would."""
        if self.process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    # What the exchange calls.

    def engines(self) -> list[EngineInfo]:
        return [self.info]

    def mark_ready(self, engine_id: str, incarnation: int, weight_version: int) -> bool:
        self.ready_calls.append((engine_id, incarnation, weight_version))
        self.info = replace(self.info, state="ready")
        return True

    def begin_update(self, engine_id: str, incarnation: int) -> bool:
        return incarnation == self.info.incarnation

    def report_lost(self, engine_id: str, incarnation: int) -> None:
        self.lost.append(engine_id)
        self.info = replace(self.info, state="starting")
        self.stop()
        self.start()
