"""Runs one node of a cluster: its trainers under torchrun, or its part of the rollout service under Ray.

slurm/*.sbatch and launch/*_node.sh start one of these on every node and tell it its place.
"""

import os
import secrets
import signal
import socket
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from megagrpo.cluster.machine import alone_in
from megagrpo.cluster.supervise import Child, Launch, last_lines, torchrun
from megagrpo.cluster.variables import interface_of_engines, of_trainers
from megagrpo.config.load import dump_config
from megagrpo.config.schema import ExperimentConfig
from megagrpo.rollout.service.addresses import LOOPBACK, interface_of
from megagrpo.system import environment
from megagrpo.system.run_folder import RunFolder

_ONE_MACHINE = "rollout.colocate: engines share GPUs with the trainers of one machine so far: `megagrpo run`"
_POLL_S = 0.2
_JOIN_S = 600  # nodes of one job start at different times
_GRACE_S = 30.0
_RAY_IS_UP = b"Ray runtime started"
_OBJECT_STORE_BYTES = 80 * 2**20  # no batch passes through Ray: its least
_WORKER_PORTS = (10002, 19999)  # Ray's own default, given explicitly for those who write firewall rules
_NODES_ON_A_HOST = 8  # so many pretended nodes of one machine do not take each other's ports


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
        """The address under which the others reach this node."""
        if self.address:
            return self.address
        assert self.first_address is not None, "a single trainer node meets nobody"
        if self.rank == 0:
            return self.first_address
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((self.first_address, self.first_port))  # a datagram socket: chooses a route, sends nothing
            return probe.getsockname()[0]


def train_node(config: ExperimentConfig, arguments: list[str], node: Node) -> int:
    """Runs this node's ranks under torchrun, which starts each with `arguments`: `megagrpo train` outside torchrun.

    USR1, or the first TERM: all nodes save after the present step and return STOPPED. INT, USR2, a second TERM: end at
    once. ValueError when actor.world_size does not divide over the nodes, or engines are colocated.
    """
    world = config.actor.world_size
    if config.rollout.colocate:
        raise ValueError(_ONE_MACHINE)
    if world % node.number:
        raise ValueError(f"actor.world_size {world} ranks do not divide over {node.number} nodes")
    folder = RunFolder(Path(config.output_dir))
    with alone_in(folder) if node.rank == 0 else nullcontext():
        if node.rank == 0:
            dump_config(config, folder.config)
        options = torchrun(world // node.number, config.actor.max_restarts)
        if node.number > 1:
            options += _meeting(node)
            env = _between_nodes(config, node)
        else:
            options.append("--standalone")
            env = of_trainers(config, _interface_towards_engines(config))
        name = "trainer" if node.number == 1 else f"trainer-{node.rank}"
        end, ask = (signal.SIGINT, signal.SIGUSR2), (signal.SIGUSR1, signal.SIGTERM)
        with Launch(folder, "train", end=end, ask=ask, ranks=name) as launch:
            return launch.watch(launch.start_ranks(["train", *arguments], options, env))
        return launch.status


def _meeting(node: Node) -> list[str]:
    # Given explicitly: an agent that has to find out whether it is the host looks up names, which need not resolve.
    host = f"is_host={str(node.rank == 0).lower()},join_timeout={_JOIN_S}"
    place = ["--rdzv-endpoint", f"{node.first_address}:{node.first_port}", "--local-addr", node.own_address]
    return ["--nnodes", str(node.number), "--rdzv-backend", "c10d", "--rdzv-conf", host, *place]


def _between_nodes(config: ExperimentConfig, node: Node) -> dict[str, str]:
    """Returns the environment of ranks that talk to other nodes."""
    own = interface_of(socket.gethostbyname(node.own_address))  # Slurm's node addresses may be names
    env = of_trainers(config, _interface_towards_engines(config) or own)
    if own is not None and environment.get("GLOO_SOCKET_IFNAME") is None:
        env["GLOO_SOCKET_IFNAME"] = own  # gloo would take what the host's name resolves to, often 127.0.0.1
    return env


def _interface_towards_engines(config: ExperimentConfig) -> str | None:
    """Returns the interface of rollout.host, which engines tell NCCL to use on their machines; None for a loopback."""
    return None if config.rollout.host in LOOPBACK else interface_of_engines(config)


def serve_node(config: ExperimentConfig, arguments: list[str], node: Node) -> int:
    """Runs Ray on this node, and on node 0 the service, started with `arguments`: `megagrpo serve --master-addr ...`.

    Returns the service's status on node 0; elsewhere 0 when told to end, 1 when Ray ended. INT, USR2 and TERM end it;
    in a Slurm job TERM does not: where Slurm pre-empts by TERM, it tells every step, and the trainers' last one still
    needs the engines.
    """
    if config.rollout.colocate:
        raise ValueError(_ONE_MACHINE)
    folder = RunFolder(Path(config.output_dir))
    temporary = Path(f"/tmp/mgr-{os.getuid()}-{node.first_port}")  # short: Unix socket paths end at 107 characters
    end, unheard = [signal.SIGINT, signal.SIGUSR2], [signal.SIGTERM]
    if environment.get("SLURM_JOB_ID") is None:
        end, unheard = end + unheard, []
    with Launch(folder, "serve", end=end, unheard=unheard, grace_s=_GRACE_S, scratch=temporary) as launch:
        env = _ray_environment(node)
        ray = _start_ray(launch, config, node, temporary, env)
        if node.rank > 0:
            return launch.watch(ray)
        address = ["--ray-address", f"{node.first_address}:{node.first_port}"]
        return launch.watch(launch.start(["serve", *arguments, *address], "service", env), needed=ray)
    return 0


def _ray_environment(node: Node) -> dict[str, str]:
    """Returns the environment of `ray start` and of what joins it. ValueError when nodes have no common token."""
    env = {"RAY_AUTH_MODE": "token", "RAY_worker_niceness": "0"}  # an engine is no background job
    named = environment.get("RAY_AUTH_TOKEN") or environment.get("RAY_AUTH_TOKEN_PATH")
    if named or (Path.home() / ".ray" / "auth_token").exists():
        return env
    if node.number > 1:
        raise ValueError("who may join Ray? Set RAY_AUTH_TOKEN to the same long random text on every rollout node")
    return env | {"RAY_AUTH_TOKEN": secrets.token_hex(32)}


def _ray_command(node: Node, temporary: Path) -> list[str]:
    """Returns `ray start` in the foreground, with every port given: GCS on the first, then ten for each node."""
    names = (
        "node-manager",
        "object-manager",
        "runtime-env-agent",
        "dashboard-agent-grpc",
        "dashboard-agent-listen",
        "metrics-export",
    )
    own = node.first_port + 10 * (1 + node.rank % _NODES_ON_A_HOST)
    options: dict[str, object] = {f"--{name}-port": own + i for i, name in enumerate(names)}
    options |= {"--min-worker-port": _WORKER_PORTS[0], "--max-worker-port": _WORKER_PORTS[1]}
    options |= {"--node-ip-address": node.own_address, "--object-store-memory": _OBJECT_STORE_BYTES}
    flags = ["--block", "--disable-usage-stats"]
    if node.rank == 0:
        options |= {"--port": node.first_port, "--ray-client-server-port": own + len(names)}
        options |= {"--temp-dir": temporary, "--include-dashboard": "false"}
        flags.append("--head")
    else:
        options["--address"] = f"{node.first_address}:{node.first_port}"
    words = [str(word) for pair in options.items() for word in pair]
    return [str(Path(sys.executable).with_name("ray")), "start", *flags, *words]


def _start_ray(launch: Launch, config: ExperimentConfig, node: Node, temporary: Path, env: dict[str, str]) -> Child:
    """Returns when Ray runs on this node. ValueError after rollout.start_timeout_s.

    Until then it is started again: Ray itself gives up on a busy machine after 30 s, and at once when the head is not
    there yet.
    """
    log = RunFolder(Path(config.output_dir)).log(f"ray-{node.rank}")
    limit_s = config.rollout.start_timeout_s
    deadline = time.monotonic() + limit_s
    while True:
        before = log.stat().st_size if log.exists() else 0
        ray = launch.spawn(_ray_command(node, temporary), log, env)
        while ray.process.poll() is None and time.monotonic() <= deadline:
            if _RAY_IS_UP in log.read_bytes()[before:]:
                return ray
            time.sleep(_POLL_S)
        launch.end(ray)
        if time.monotonic() > deadline:
            raise ValueError(f"no Ray here after {limit_s:.0f} s (rollout.start_timeout_s):\n{last_lines(log)}")
