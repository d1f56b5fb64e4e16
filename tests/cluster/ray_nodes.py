"""Ray nodes as a cluster's hosts would run them: `ray start --block` on each, and how one is lost."""

import os
import secrets
import signal
import socket
import sys
import time
from pathlib import Path
from subprocess import Popen

import psutil

from megagrpo.system.environment import child_environment
from megagrpo.system.processes import spawn, stop_tree

_START_S = 300.0
# The head asks its nodes every second; three silences are a death, and a silence lasts two seconds when packets vanish.
_HEALTH = {"initial_delay_ms": "1000", "period_ms": "1000", "timeout_ms": "2000", "failure_threshold": "3"}
_QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0", "RAY_worker_niceness": "0"}


class RayNodes:
    """A head and workers, each with one place for a node of an engine; a context manager that ends them all.

    `wrap(number, command)` makes the command run on host `number`; by default this one, where `folder` must be short.
    """

    def __init__(self, folder: Path, wrap=lambda number, command: command, host=lambda number: "127.0.0.1"):
        self._folder, self._wrap, self._host = folder, wrap, host
        self._nodes: dict[int, Popen] = {}
        self.address = ""
        self.token = {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
        }  # for the environment of who joins

    def __enter__(self) -> "RayNodes":
        return self

    def __exit__(self, *exc_info) -> None:
        for number in list(self._nodes):
            self.kill(number)

    def start(self, number: int, places: int = 1) -> None:
        """The first one started is the head."""
        host = self._host(number)
        if self._nodes:
            role = ["--address", self.address]
        else:
            with socket.socket() as probe:
                probe.bind(("", 0))
                port = probe.getsockname()[1]
            self.address = f"{host}:{port}"
            role = [
                "--head",
                "--port",
                str(port),
                "--include-dashboard",
                "false",
                "--temp-dir",
                str(self._folder / "ray"),
            ]
        command = [str(Path(sys.executable).with_name("ray")), "start", *role, "--node-ip-address", host, "--block"]
        command += [
            "--num-cpus",
            str(places),
            "--num-gpus",
            "0",
            "--object-store-memory",
            str(80 * 2**20),
            "--disable-usage-stats",
        ]
        log = self._folder / f"ray-{number}-{time.monotonic():.0f}.log"
        env = child_environment(
            _QUIET | self.token | {f"RAY_health_check_{name}": value for name, value in _HEALTH.items()}
        )
        env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
        node = self._nodes[number] = spawn(self._wrap(number, command), env, log)
        deadline = time.monotonic() + _START_S
        while "Ray runtime started" not in log.read_text():
            assert node.poll() is None and time.monotonic() < deadline, log.read_text()[-2000:]
            time.sleep(0.1)

    def pids(self, number: int) -> set[int]:
        """Of everything that runs on this node."""
        node = self._nodes[number]
        try:
            return {node.pid, *(process.pid for process in psutil.Process(node.pid).children(recursive=True))}
        except psutil.NoSuchProcess:  # it ended by itself
            return set()

    def kill(self, number: int) -> None:
        """The host is lost with everything on it, at once."""
        for pid in self.pids(number):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        node = self._nodes.pop(number)
        stop_tree(node.pid, 0.0)
        node.wait()
