"""One node of one engine: a Ray actor that starts the SGLang server process on its machine and says how it is doing."""

import os
import random
import socket
from pathlib import Path

import ray

from megagrpo.config import ExperimentConfig
from megagrpo.environment import child_environment
from megagrpo.processes import spawn, stop_tree
from megagrpo.rollout.engine import Place, engine_command, engine_environment, engine_python_path

_PORTS = range(20_000, 30_000)  # below the kernel's ephemeral ports, above Ray's workers
_LOOPBACK = ("127.0.0.1", "localhost")
_CUDA_GRACE_S = 15.0  # to give memory back in order
_CPU_GRACE_S = 0.5  # nothing to give back; SGLang alone would take 5 s to notice the signal


def reachable_host(bind_host: str) -> str:
    """The name under which others reach a service of this machine that listens on `bind_host`."""
    return bind_host if bind_host in _LOOPBACK else ray.util.get_node_ip_address()


def free_port(bind_host: str) -> int:
    """A port that nobody listens on. Not from the ephemeral range: an engine binds it seconds later, and by then some
    outgoing connection could have it."""
    for port in random.sample(_PORTS, 200):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((bind_host, port))
            except OSError:
                continue
            return port
    raise ValueError(f"rollout.host {bind_host}: no free port among {len(_PORTS)}; is that an address of this machine?")


@ray.remote
class EngineNode:
    """Lives as long as one incarnation of its engine; the server process dies with it, whatever ends it."""

    def __init__(self, config: ExperimentConfig, node_rank: int, cuda: bool, cores_share: int):
        self.config, self.node_rank, self.cuda = config, node_rank, cuda
        self.num_cores = max(1, len(os.sched_getaffinity(0)) // cores_share)
        self.process = None

    def address(self) -> tuple[str, int, int]:
        """(host, port for HTTP, port for the engine's nodes to meet) of this node."""
        host = self.config.rollout.host
        return reachable_host(host), free_port(host), free_port(host)

    def start(self, port: int, rendezvous: str, log: str) -> int:
        """Start the server process and return its pid. It is up when /health answers."""
        place = Place(self.node_rank, self.config.rollout.host, port, rendezvous, self.cuda, self.num_cores)
        environment = child_environment(engine_environment(self.config, place), engine_python_path(place))
        self.process = spawn(engine_command(self.config, place), environment, Path(log))
        return self.process.pid

    def exit_code(self) -> int | None:
        """None while the server process runs; minus the signal that ended it, as in subprocess."""
        return self.process.poll()

    def stop(self) -> None:
        if self.process is not None:
            stop_tree(self.process.pid, _CUDA_GRACE_S if self.cuda else _CPU_GRACE_S)
            self.process.wait()
