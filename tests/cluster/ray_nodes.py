"""Ray nodes as a cluster's hosts would run them: `ray start --block` on each, and how one is lost."""

import os
import secrets
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from subprocess import Popen

import psutil

from megagrpo.system.environment import child_environment
from megagrpo.system.processes import spawn, stop_tree

_START_S = 300.0
# The head pings its nodes every second; three pings without an answer in two seconds are a death.
_CHECKS = {"initial_delay_ms": "1000", "period_ms": "1000", "timeout_ms": "2000", "failure_threshold": "3"}
_HEALTH = {f"RAY_health_check_{name}": value for name, value in _CHECKS.items()}
_QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0", "RAY_worker_niceness": "0"}


class RayNodes:
    """A head and workers, each with one slot for a node of an engine; a context manager that ends them all.

    `wrap(number, command)` makes the command run on host `number`; by default this one, where `folder` must be short.
    """

    def __init__(self, folder: Path, wrap=lambda number, command: command, host=lambda number: "127.0.0.1"):
        self._folder, self._wrap, self._host = folder, wrap, host
        self._nodes: dict[int, Popen] = {}
        self.address = ""
        # environment of every process that joins
        self.token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}

    def __enter__(self) -> "RayNodes":
        return self

    def __exit__(self, *exc_info) -> None:
        for number in list(self._nodes):
            self.kill(number)

    def start(self, number: int, slots: int = 1) -> None:
        """The first one started is the head."""
        host = self._host(number)
        if self._nodes:
            role = ["--address", self.address]
        else:
            with socket.socket() as probe:
                probe.bind(("", 0))
                port = probe.getsockname()[1]
            self.address = f"{host}:{port}"
            role = ["--head", f"--port={port}", "--include-dashboard=false", f"--temp-dir={self._folder}/ray"]
        command = [str(Path(sys.executable).with_name("ray")), "start", *role, f"--node-ip-address={host}", "--block"]
        command += [f"--num-cpus={slots}", "--num-gpus=0", f"--object-store-memory={80 * 2**20}"]
        command.append("--disable-usage-stats")
        log = self._folder / f"ray-{number}-{time.monotonic():.0f}.log"
        env = child_environment(_QUIET | _HEALTH | self.token)
        env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
        node = self._nodes[number] = spawn(self._wrap(number, command), env, log)
        deadline = time.monotonic() + _START_S
        while "Ray runtime started" not in log.read_text():
            assert node.poll() is None and time.monotonic() < deadline, log.read_text()[-2000:]
            time.sleep(0.1)

    def pids(self, number: int) -> set[int]:
        """Of everything that runs on this node."""
        node = self._nodes[number]
        with suppress(psutil.NoSuchProcess):  # it ended by itself
            return {node.pid, *(process.pid for process in psutil.Process(node.pid).children(recursive=True))}
        return set()

    def kill(self, number: int) -> None:
        """The host is lost with everything on it, at once."""
        for pid in self.pids(number):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        node = self._nodes.pop(number)
        stop_tree(node.pid, 0.0)
        node.wait()
