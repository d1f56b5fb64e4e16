"""One node of a cluster: its trainers under torchrun, or its part of the rollout service under Ray.

slurm/*.sbatch and launch/*_node.sh start one of these on every node and tell it its place.
"""

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import psutil

from megagrpo import environment
from megagrpo.cluster.machine import alone_in, write_resolved
from megagrpo.cluster.supervise import (
    Ended,
    Signals,
    end_all,
    first_report,
    ignore_signals,
    last_lines,
    start,
    stopped,
    torchrun,
    watch,
)
from megagrpo.config.schema import ExperimentConfig
from megagrpo.processes import spawn
from megagrpo.stop_request import STOP_FILE, StopRequest

_POLL_S = 0.2
_JOIN_S = 600  # nodes of one job start at different times
_GRACE_S = 30.0
_RAY_IS_UP = b"Ray runtime started"
_OBJECT_STORE_BYTES = 80 * 2**20  # no batch passes through Ray: its least
_WORKER_PORTS = (10002, 19999)  # Ray's own default, said for those who write firewall rules
_NODES_ON_A_HOST = 8  # that many pretended nodes of one machine do not take each other's ports


@dataclass(frozen=True)
class Node:
    """This node's place among the trainer nodes, or among the rollout nodes."""

    rank: int
    number: int  # of nodes
    address: str | None  # under which the others reach this one; default: that of the interface towards the first
    first_address: str | None  # of node 0; may be unknown to a single trainer node
    first_port: int  # of node 0, where the nodes meet

    def __post_init__(self):
        if not 0 <= self.rank < self.number:
            raise ValueError(f"node rank {self.rank} is none of {self.number} nodes, which are numbered from 0")
        if self.number > 1 and not self.first_address:
            raise ValueError(f"{self.number} nodes, but where is node 0? Give --master-addr or set MASTER_ADDR")

    @property
    def own_address(self) -> str:
        if self.address or self.rank == 0:
            return self.address or self.first_address
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((self.first_address, self.first_port))  # a datagram socket: chooses a route, sends nothing
            return probe.getsockname()[0]


def train_node(config: ExperimentConfig, arguments: list[str], node: Node) -> int:
    """`megagrpo train` outside torchrun: this node's ranks under torchrun, which starts each with `arguments`.

    USR1, or the first TERM: all nodes save after the present step and return STOPPED. INT, USR2, a second TERM: end at once.
    ValueError when actor.world_size does not divide over the nodes.
    """
    world = config.actor.world_size
    if world % node.number:
        raise ValueError(f"actor.world_size {world} ranks do not divide over {node.number} nodes")
    with alone_in(Path(config.output_dir)) if node.rank == 0 else nullcontext():
        return _train_ranks(config, arguments, node)


def _train_ranks(config: ExperimentConfig, arguments: list[str], node: Node) -> int:
    run_dir = Path(config.output_dir)
    if node.rank == 0:
        write_resolved(config, run_dir)
    name = "trainer" if node.number == 1 else f"trainer-{node.rank}"
    log, stop_file = run_dir / "logs" / f"{name}.log", run_dir / "logs" / f"{name}.stop_request"
    options, env = (
        torchrun(config.actor.world_size // node.number, config.actor.max_restarts),
        {STOP_FILE: str(stop_file)},
    )
    if node.number > 1:
        options, env = options + _meeting(node), env | _between_nodes(node)
    else:
        options.append("--standalone")
    children: list[subprocess.Popen] = []
    with Signals((signal.SIGINT, signal.SIGUSR2), (signal.SIGUSR1, signal.SIGTERM), StopRequest(stop_file)) as request:
        try:
            status = watch(start(["train", *arguments], log, children, options, env), log, first_report)
            return stopped(request) if status == 0 and request.granted() else status
        except Ended as exc:
            print(f"megagrpo train: {exc}; stopping", file=sys.stderr)
            return exc.status
        finally:
            ignore_signals()
            end_all(children)


def _meeting(node: Node) -> list[str]:
    # Said outright: an agent that has to find out whether it is the host looks up names, which need not resolve.
    host = f"is_host={str(node.rank == 0).lower()},join_timeout={_JOIN_S}"
    place = ["--rdzv-endpoint", f"{node.first_address}:{node.first_port}", "--local-addr", node.own_address]
    return ["--nnodes", str(node.number), "--rdzv-backend", "c10d", "--rdzv-conf", host, *place]


def _between_nodes(node: Node) -> dict[str, str]:
    """Environment of ranks that talk to other nodes."""
    own = socket.gethostbyname(node.own_address)  # Slurm's node addresses may be names
    mine = [name for name, addresses in psutil.net_if_addrs().items() if any(a.address == own for a in addresses)]
    if (
        mine and environment.get("GLOO_SOCKET_IFNAME") is None
    ):  # gloo would take what the host's name resolves to, often 127.0.0.1
        return {"GLOO_SOCKET_IFNAME": mine[0]}
    return {}


def serve_node(config: ExperimentConfig, arguments: list[str], node: Node) -> int:
    """`megagrpo serve --master-addr ...`: Ray on this node, and on node 0 the service, started with `arguments`.

    Returns the service's status on node 0; elsewhere 0 when told to end, 1 when Ray ended. INT, USR2 and TERM end it; in a Slurm
    job TERM does not.
    """
    log = Path(config.output_dir) / "logs" / f"ray-{node.rank}.log"
    temporary = Path(f"/tmp/mgr-{os.getuid()}-{node.first_port}")  # short: Unix socket paths end at 107 characters
    children: list[subprocess.Popen] = []
    with Signals(end=(signal.SIGINT, signal.SIGUSR2, signal.SIGTERM)):
        try:
            if environment.get("SLURM_JOB_ID"):
                # Where Slurm pre-empts by TERM, it says so to every step, and the trainers' last one still needs the engines.
                signal.signal(signal.SIGTERM, lambda *_: None)
            env = _ray_environment(node)
            ray = _start_ray(config, node, temporary, env, log, children)
            if node.rank > 0:
                return watch(ray, log)
            address = ["--ray-address", f"{node.first_address}:{node.first_port}"]
            service = start(["serve", *arguments, *address], log.with_name("service.log"), children, env=env)
            return watch(service, log.with_name("service.log"), last_lines, ray, log)
        except Ended:
            return 0
        finally:
            ignore_signals()
            end_all(children, _GRACE_S)
            shutil.rmtree(temporary, ignore_errors=True)


def _ray_environment(node: Node) -> dict[str, str]:
    """Of `ray start` and of who joins it. ValueError when several nodes have no common token."""
    env = {"RAY_AUTH_MODE": "token", "RAY_worker_niceness": "0"}  # an engine is no background job
    if (
        any(environment.get(name) for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"))
        or (Path.home() / ".ray" / "auth_token").exists()
    ):
        return env
    if node.number > 1:
        raise ValueError("who may join Ray? Set RAY_AUTH_TOKEN to the same long random text on every rollout node")
    return env | {"RAY_AUTH_TOKEN": secrets.token_hex(32)}


def _ray_command(node: Node, temporary: Path) -> list[str]:
    """`ray start` in the foreground, with every port given: GCS on the first, then ten for each node."""
    names = (
        "node-manager",
        "object-manager",
        "runtime-env-agent",
        "dashboard-agent-grpc",
        "dashboard-agent-listen",
        "metrics-export",
    )
    own = node.first_port + 10 * (1 + node.rank % _NODES_ON_A_HOST)
    options = {f"--{name}-port": own + i for i, name in enumerate(names)}
    options |= {"--min-worker-port": _WORKER_PORTS[0], "--max-worker-port": _WORKER_PORTS[1]}
    options |= {"--node-ip-address": node.own_address, "--object-store-memory": _OBJECT_STORE_BYTES}
    flags = ["--block", "--disable-usage-stats"]
    if node.rank == 0:
        options |= {"--port": node.first_port, "--ray-client-server-port": own + len(names)}
        options |= {"--temp-dir": temporary, "--include-dashboard": "false"}
        flags.append("--head")
    else:
        options["--address"] = f"{node.first_address}:{node.first_port}"
    return [
        str(Path(sys.executable).with_name("ray")),
        "start",
        *flags,
        *(str(word) for pair in options.items() for word in pair),
    ]


def _start_ray(
    config: ExperimentConfig,
    node: Node,
    temporary: Path,
    env: dict[str, str],
    log: Path,
    children: list[subprocess.Popen],
) -> subprocess.Popen:
    """Returns when Ray runs on this node. ValueError after rollout.start_timeout_s: Ray itself gives up on a busy machine after
    30 s, and at once when the head is not there yet, so that it is started again until then."""
    deadline = time.monotonic() + config.rollout.start_timeout_s
    while True:
        before = log.stat().st_size if log.exists() else 0
        ray = spawn(_ray_command(node, temporary), environment.child_environment(env), log, signal.SIGTERM)
        children.append(ray)
        while ray.poll() is None:
            if _RAY_IS_UP in log.read_bytes()[before:]:
                return ray
            if time.monotonic() > deadline:
                break
            time.sleep(_POLL_S)
        end_all(children, _GRACE_S)
        children.clear()
        if time.monotonic() > deadline:
            raise ValueError(
                f"no Ray here after {config.rollout.start_timeout_s:.0f} s (rollout.start_timeout_s):\n{last_lines(log)}"
            )
