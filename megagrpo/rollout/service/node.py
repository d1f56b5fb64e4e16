"""One node of one engine, which starts the SGLang server process on its machine and reports on it; and
this machine as the only one for engines."""

import asyncio
import os
import random
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from subprocess import Popen
from typing import Any, Protocol

from megagrpo.config.schema import ExperimentConfig
from megagrpo.rollout.service.addresses import interface_of, own_address, reachable_host
from megagrpo.rollout.service.engine_command import (
    ServerPlace,
    engine_command,
    engine_environment,
    engine_python_path,
)
from megagrpo.system.environment import (
    API_KEY,
    child_environment,
    get,
    nccl_interface,
    nccl_variables,
    unless_set,
)
from megagrpo.system.processes import namespaces, spawn, stop_tree

LOOPBACK = "net"  # the namespace: processes that share it reach each other through 127.0.0.1
_PORTS = range(20_000, 30_000)  # below the kernel's ephemeral ports, above Ray's workers
# Of one server: 8 for HTTP, then where its engine's nodes meet, and the 7 that SGLang counts from it
# for attention by data.
_SLOT = 16
_CUDA_GRACE_S = 15.0  # to release GPU memory in order
_CPU_GRACE_S = 0.5  # nothing to release; SGLang itself takes 5 s to notice the signal


def server_ports(slot: int, incarnation: int) -> tuple[list[int], list[int]]:
    """Returns the ports that a server of a run may serve HTTP at, and those where its engine's nodes
    may meet, best first.

    Servers bind them minutes after they were chosen, so that no two servers of a run on one machine
    may choose among the same. A restarted engine has another URL: requests to its previous
    incarnation must not reach it.
    """
    first = _PORTS.start + slot % (len(_PORTS) // _SLOT) * _SLOT
    return [first + (incarnation + i) % 8 for i in range(8)], [first + 8]


def free_port(bind_host: str, preferred: Sequence[int] = ()) -> int:
    """Returns a port that no process listens on. Raises ValueError if none is free.

    It is outside the ephemeral range: an engine binds it seconds later, and an outgoing connection
    could take it before then.
    """
    for port in (*preferred, *random.sample(_PORTS, 200)):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((bind_host, port))
            except OSError:
                continue
            return port
    raise ValueError(f"rollout.host {bind_host}: no free port among {len(_PORTS)}")


class EngineNode:
    """Runs one server process of one incarnation of an engine; the process ends with this one,
    however it ends.

    place: without what its machine and its start decide. cores_share: server processes that share
    the CPU cores of this machine. gpus: of the server process; None: this process's.
    """

    def __init__(
        self,
        config: ExperimentConfig,
        place: ServerPlace,
        cores_share: int,
        api_key: str,
        gpus: list[str] | None = None,
    ):
        self.config = config
        self.api_key = api_key
        self._gpus = gpus
        cores = max(1, len(os.sched_getaffinity(0)) // cores_share)
        host = own_address(config.rollout.host)
        self.place = replace(place, bind_host=host, num_cores=cores)
        self.process: Popen[bytes] | None = None

    def address(self, service_loopback: str, slot: int, incarnation: int) -> tuple[str, int, int]:
        """Returns (host, port for HTTP, port where the engine's nodes meet) of this node.

        service_loopback: of the service's process. slot: of this server among those of the run.
        Raises ValueError if the service cannot reach this node.
        """
        host = self.place.bind_host
        if host == "127.0.0.1" and namespaces(LOOPBACK) != service_loopback:
            raise ValueError(
                f"rollout.host {self.config.rollout.host} is not reachable from other machines, "
                "such as that of the service; give the name of the private interface, such as "
                "eth0, which every machine looks up for itself"
            )
        http, meeting = (free_port(host, ports) for ports in server_ports(slot, incarnation))
        return reachable_host(host), http, meeting

    def start(self, port: int, rendezvous: str, log: str) -> int:
        """Starts the server process and returns its pid. It is ready when /health answers."""
        place = replace(self.place, port=port, rendezvous=rendezvous)
        interface = interface_of(place.bind_host)
        # Between the ranks of an engine, and between them and the trainer, on the same interface as
        # everything else.
        network = {}
        if interface:
            network = nccl_interface(interface)
            network["GLOO_SOCKET_IFNAME"] = get("GLOO_SOCKET_IFNAME") or interface
        # SGLang itself would take the route to the internet, then the host's own name, which many
        # hosts files give to loopback: other nodes of an engine would wait for its messages for
        # ever.
        network["SGLANG_HOST_IP"] = get("SGLANG_HOST_IP") or reachable_host(place.bind_host)
        own = {}
        if self._gpus is not None:  # Ray sets both
            own = unless_set(OMP_NUM_THREADS="1") | {"CUDA_VISIBLE_DEVICES": ",".join(self._gpus)}
        variables = (
            own
            | engine_environment(self.config, place)
            | network
            | nccl_variables(self.config.weights.connect_timeout_s)
            | {API_KEY: self.api_key}
        )
        environment = child_environment(variables, engine_python_path(place))
        self.process = spawn(engine_command(self.config, place), environment, Path(log))
        return self.process.pid

    def exit_code(self) -> int | None:
        """Returns None while the server process runs; minus the signal's number if a signal ended
        it."""
        assert self.process is not None, "asked before its start"
        return self.process.poll()

    def stop(self) -> None:
        """Ends the server process and all its child processes."""
        if self.process is not None:
            stop_tree(self.process.pid, _CUDA_GRACE_S if self.place.cuda else _CPU_GRACE_S)
            self.process.wait()


Ask = Callable[..., Awaitable[Any]]


class EngineDied(Exception):
    """Raised with the reason when an incarnation has ended or must end."""


class NodeSilent(Exception):
    """Raised if the connection to a node is broken; perhaps for a while, and the node runs on."""


@dataclass(frozen=True)
class Placed:
    """The nodes of one incarnation of an engine.

    asks: by rank; calls a method of that EngineNode by its name. Raises EngineDied or NodeSilent
    if the node is on another machine, else what the method raises. release: forgets the nodes,
    after their `stop`.
    """

    asks: list[Ask]
    release: Callable[[], None]


class Machines(Protocol):
    """The machines of engines. num_gpus: over all of them."""

    num_gpus: float

    async def place(
        self,
        config: ExperimentConfig,
        gpus: int,
        place: ServerPlace,
        cores_share: int,
        api_key: str,
    ) -> Placed:
        """Reserves the nodes of an engine, at every start: those of the previous one may be gone.

        gpus: for each node. place: without rank. The last two as of EngineNode. Raises
        EngineDied if the nodes do not fit.
        """
        ...


class ThisMachine:
    """Server processes are children of this process, each with GPUs that no other one has."""

    def __init__(self, gpus: list[str]):
        self.num_gpus: float = len(gpus)
        self._free = dict(enumerate(gpus))

    async def place(
        self,
        config: ExperimentConfig,
        gpus: int,
        place: ServerPlace,
        cores_share: int,
        api_key: str,
    ) -> Placed:
        """Takes the first free GPUs for an engine's nodes; an engine that ends may still hold
        them. Raises EngineDied."""
        nodes = config.rollout.nodes_per_engine
        until = time.monotonic() + config.rollout.start_timeout_s
        while len(self._free) < gpus * nodes <= self.num_gpus and time.monotonic() < until:
            await asyncio.sleep(0.5)
        taken = sorted(self._free.items())[: gpus * nodes]
        if len(taken) < gpus * nodes:
            raise EngineDied(
                f"{nodes} x {gpus} GPUs for an engine: {len(taken)} of {self.num_gpus} are free on "
                "this machine. Lower rollout.num_engines or rollout.tp"
            )
        names = [name for _, name in taken]
        asks = []
        for rank in range(nodes):
            own = names[rank * gpus : (rank + 1) * gpus]
            node = EngineNode(config, replace(place, node_rank=rank), cores_share, api_key, own)
            asks.append(_ask_here(node))
        for number, _ in taken:
            del self._free[number]
        return Placed(asks, lambda: self._free.update(taken))


def _ask_here(node: EngineNode) -> Ask:
    async def ask(method: str, *arguments: object) -> object:
        call = getattr(node, method)
        if method == "stop":  # takes seconds
            return await asyncio.to_thread(call)
        return call(*arguments)  # `spawn` demands a thread that lasts

    return ask
