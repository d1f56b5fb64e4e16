"""The Ray cluster that places engines: a running one, or a private one on this machine that ends
with the service."""

import os
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import psutil
import ray

from megagrpo.config.schema import ExperimentConfig
from megagrpo.system.errors import explained
from megagrpo.system.processes import stop_tree

# for engines added later; a CPU of the private cluster is one slot for a node, GPUs are counted
_SPARE_NODES = 2
_OBJECT_STORE_BYTES = 80 * 2**20  # Ray's minimum: no batch passes through it
_PAUSE_S = 1.0  # between two attempts
_GRACE_S = 1.0  # for processes of a failed attempt

Options = dict[str, Any]  # of ray.init


class RayNotStarted(RuntimeError):
    """Raised when Ray could not be started or joined within rollout.start_timeout_s."""


@contextmanager
def in_ray_cluster(config: ExperimentConfig, address: str | None) -> Iterator[None]:
    """Connects this process to Ray inside the block; a private cluster ends with it.

    address: "host:port" of a running cluster, None for a private one. Raises RayNotStarted.
    """
    with ExitStack() as stack:
        options: Options = {
            "log_to_driver": False,
            "logging_level": "ERROR",
            "configure_logging": False,
        }
        if address is None:
            # A short path, not below TMPDIR: those of Unix sockets end at 107 characters, of which
            # Ray takes 77.
            short = tempfile.TemporaryDirectory(
                prefix="mgr-", dir="/tmp", ignore_cleanup_errors=True
            )
            folder = stack.enter_context(short)
            options |= {
                # "local": a Ray of our own, whatever else runs on this machine. It ends with this
                # process, even by SIGKILL.
                "address": "local",
                "num_cpus": config.num_servers + _SPARE_NODES,
                "object_store_memory": _OBJECT_STORE_BYTES,
                "include_dashboard": False,
                "_system_config": {"worker_niceness": 0},  # else engines have a low priority
                # Ray makes it readable and writable for all, so it lies in one that only this user
                # enters.
                "_temp_dir": f"{folder}/r",
            }
        else:
            options["address"] = address
        stack.callback(ray.shutdown)
        _connect(options, config.rollout.start_timeout_s)
        yield


def _connect(options: Options, timeout_s: float) -> None:
    """Starts or joins Ray, with retries that end within `timeout_s`. Raises RayNotStarted.

    Ray's own limit of 30 s for a start is fixed, and a busy machine may need longer.
    """
    deadline, attempts = time.monotonic() + timeout_s, 0
    while True:
        began, before = time.monotonic(), _children()
        attempts += 1
        try:
            # Ray has no type for it: "The current node timed out during startup" is an Exception
            with explained("ray.init"):
                ray.init(**options)
            return
        except ValueError as exc:
            problem = str(exc).partition(os.linesep)[0]
        # A failed start returns nothing to shut down, but leaves its processes running.
        ray.shutdown()
        for pid in _children() - before:
            stop_tree(pid, _GRACE_S)
        where = f"Ray at {options['address']}"
        remedy = "see whether it runs there"
        if options["address"] == "local":
            where = f"Ray on {socket.gethostname()}"
            remedy = "end other programs there"
        now = time.monotonic()
        if now + _PAUSE_S + (now - began) > deadline:
            raise RayNotStarted(
                f"{where} did not start in {attempts} attempt(s) within {timeout_s:.0f} s; "
                f"{remedy} or raise rollout.start_timeout_s. The last problem: {problem}"
            )
        print(f"{where} did not start, trying again ({problem})", flush=True)
        time.sleep(_PAUSE_S)


def _children() -> set[int]:
    return {process.pid for process in psutil.Process().children()}
