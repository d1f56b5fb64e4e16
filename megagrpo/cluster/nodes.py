"""Runs one node of a cluster: trainers under torchrun, or a part of the rollout service under Ray.

slurm/*.sbatch and launch/*_node.sh start it on every node, with the node's rank.
"""

import os
import secrets
import signal
import socket
import stat
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from megagrpo.check.rules.placement import place
from megagrpo.check.rules.subject import Nodes
from megagrpo.cluster.lock import alone_in
from megagrpo.cluster.machine import (
    interface_of_engines,
    is_finished,
    own_copy,
    refuse_what_cannot_run,
    trainer_gpus,
    trainer_variables,
    write_experiment,
)
from megagrpo.cluster.supervise import ALONE, Child, Launch, torchrun
from megagrpo.config.load import dump_config
from megagrpo.config.schema import ExperimentConfig
from megagrpo.rollout.service.addresses import LOOPBACK, interface_of
from megagrpo.system import environment
from megagrpo.system.errors import translated
from megagrpo.system.processes import last_lines, route_address

_POLL_S = 0.2
_JOIN_S = 600  # nodes of one job start at different times
_GRACE_S = 30.0
_RAY_IS_UP = b"Ray runtime started"
_OBJECT_STORE_BYTES = 80 * 2**20  # Ray's minimum: no batch passes through Ray
_WORKER_PORTS = (10002, 19999)  # Ray's default, explicit for firewall rules
_TO_TRAINERS = 99  # from Ray's port to the trainers' rendezvous port if both are on one node
_NODES_ON_A_HOST = 8  # simulated nodes of one machine with disjoint ports


@dataclass(frozen=True)
class Node:
    """This node's rank and address among the trainer nodes, or among the rollout nodes."""

    rank: int
    number: int  # of nodes
    address: str | None  # of this node; default: the address of the interface towards node 0
    first_address: str | None  # of node 0; may be unknown to a single trainer node
    first_port: int  # of node 0, for the rendezvous

    def __post_init__(self):
        if not 0 <= self.rank < self.number:
            raise ValueError(
                f"node rank {self.rank} of {self.number} nodes: ranks go from 0 to {self.number - 1}"
            )
        if self.number > 1 and not self.first_address:
            raise ValueError(
                f"{self.number} nodes need the address of node 0: give --master-addr or set MASTER_ADDR"
            )

    @cached_property
    def own_address(self) -> str:
        """The address of this node for the others. Raises ValueError for a name that means loopback
        here, because other nodes would be told, and gloo would use, this machine's interface lo."""
        named = self.address or (self.first_address if self.rank == 0 else None)
        if named and self.number == 1:
            return named
        assert self.first_address is not None, "a single trainer node needs no address"
        deadline = time.monotonic() + _JOIN_S
        while True:
            # the name of a node that only starts may not be known yet, not even to itself
            with suppress(socket.gaierror):
                towards_first = route_address(self.first_address, self.first_port)
                break
            if time.monotonic() > deadline:
                raise ValueError(
                    f"--master-addr {self.first_address}: no such name within {_JOIN_S} s"
                )
            time.sleep(_POLL_S)
        if named is None:
            return towards_first
        found = ""
        with suppress(socket.gaierror):
            found = socket.gethostbyname(named)
        if found.startswith("127.") and named not in (found, *LOOPBACK):
            raise ValueError(
                f"{named} is {found} on this node, by its hosts file, and no other node reaches "
                "that: give the address that they reach as --node-addr (NODE_ADDR)"
            )
        return named


def run_node(config: ExperimentConfig, node: Node) -> int:
    """Runs this node's ranks and engines on the same GPUs (`rollout.colocate`): `megagrpo run
    --master-addr ...`.

    Signals and statuses are as in train_node. Raises ValueError if the experiment cannot run on
    these nodes.
    """
    if not config.rollout.colocate:
        raise ValueError(
            "without rollout.colocate trainers and engines have nodes of their own: "
            "launch/rollout_node.sh and launch/torchrun_node.sh start them"
        )
    if is_finished(config):
        return 0
    gpus = trainer_gpus(config)
    refuse_what_cannot_run(config, Nodes(len(gpus) or None, node.number, 0))
    ranks = config.actor.world_size // node.number
    shared = {}
    if gpus:
        shared = {"CUDA_VISIBLE_DEVICES": ",".join(gpus[:ranks])}
    with _trainer_launch(config, "run", node, _GRACE_S) as launch:
        if node.rank == 0:
            write_experiment(config)
        needed = _start_service(launch, config, node, shared)
        node = replace(node, first_port=node.first_port + _TO_TRAINERS)
        trainers = _start_trainers(launch, config, [], node, shared)
        launch.status = launch.watch(trainers, *needed)
    return launch.status


def train_node(config: ExperimentConfig, words: list[str], node: Node) -> int:
    """Runs this node's ranks under torchrun: `megagrpo train` outside torchrun. words: of each rank's
    command line, after the experiment.

    USR1, or the first TERM or INT: all nodes save after the current step and return STOPPED. USR2:
    the service has ended, so the ranks save the finished steps and end. A second TERM, INT or USR2,
    or USR2 before the first step: ends at once. Raises ValueError if the ranks do not fit.
    """
    gpus = len(trainer_gpus(config))
    # torchrun alone would start all ranks here
    if node.number > 1 or 0 < gpus < config.actor.world_size:
        place(config, Nodes(gpus or None, node.number))
    if is_finished(config):
        return 0
    with _trainer_launch(config, "train", node) as launch:
        if node.rank == 0:
            dump_config(config, config.run_folder.config)
        launch.status = launch.watch(_start_trainers(launch, config, words, node, {}))
    return launch.status


def serve_node(config: ExperimentConfig, node: Node, ray_address: str | None) -> int:
    """Runs this node's part of the rollout service: `megagrpo serve`.

    Alone, or with the address of a running Ray cluster, it is the service. With `--master-addr` it
    is Ray, and on node 0 also the service. Then it returns the service's status on node 0; on others
    0 after a signal, 1 if Ray ended. INT, USR2 and TERM end it. In a
    Slurm job TERM does not, because Slurm pre-empts by TERM to all job steps, but the trainers' last
    step still needs engines. Raises ValueError if engines cannot load or cut the model.
    """
    from megagrpo.check.problems import refuse_for_engines

    refuse_for_engines(config)
    if node.first_address is None or ray_address is not None:
        from megagrpo.rollout.service.server import serve

        return serve(config, config.run_folder.path, ray_address)
    end = [signal.SIGINT, signal.SIGUSR2]
    unheard = [signal.SIGTERM]  # unless it ends
    if environment.get("SLURM_JOB_ID") is None:
        end += unheard
    with Launch(config.run_folder, "serve", end=end, unheard=unheard, grace_s=_GRACE_S) as launch:
        main, *needed = reversed(_start_service(launch, config, node, {}))
        return launch.watch(main, *needed)
    return 0


@contextmanager
def _trainer_launch(
    config: ExperimentConfig, command: str, node: Node, grace_s: float = 5.0
) -> Iterator[Launch]:
    """Yields the launch of this node's trainers. The first node also locks the run folder."""
    ask = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)
    ranks = "trainer"
    if node.number > 1:
        ranks += f"-{node.rank}"
    folder = config.run_folder
    with ExitStack() as stack:
        if node.rank == 0:
            stack.enter_context(alone_in(folder))
        yield stack.enter_context(
            Launch(folder, command, end=(), ask=ask, ranks=ranks, grace_s=grace_s)
        )


def _start_trainers(
    launch: Launch, config: ExperimentConfig, words: list[str], node: Node, env: dict[str, str]
) -> Child:
    ranks = config.actor.world_size // node.number
    options = torchrun(ranks, config.actor.max_restarts)
    sharing = min(ranks, len(trainer_gpus(config)))
    # the interface of rollout.host, which NCCL uses in engines; None for loopback
    towards_engines = None
    if config.rollout.host not in LOOPBACK:
        towards_engines = interface_of_engines(config)
    towards_ranks = None
    if node.number == 1:
        options += ALONE
    else:
        # Slurm's node addresses may be names
        unknown = (
            f"{node.own_address} has no IPv4 address here: give one as --node-addr (NODE_ADDR)"
        )
        with translated(unknown, socket.gaierror):
            towards_ranks = interface_of(socket.gethostbyname(node.own_address))
        # Without is_host the agent resolves host names, which may fail.
        # read_timeout is also torch's limit for the connection to node 0's store.
        options += [
            f"--nnodes={node.number}",
            "--rdzv-backend=c10d",
            f"--rdzv-conf=is_host={int(node.rank == 0)},join_timeout={_JOIN_S},read_timeout={_JOIN_S}",
            f"--rdzv-endpoint={node.first_address}:{node.first_port}",
            f"--local-addr={node.own_address}",
        ]
    env = trainer_variables(config, sharing, towards_engines or towards_ranks) | env
    if towards_ranks is not None:
        # gloo's default is the host name's address, often 127.0.0.1
        env |= environment.unless_set(GLOO_SOCKET_IFNAME=towards_ranks)
    experiment = own_copy(config, f"trainer-{node.rank}")
    return launch.start_ranks(["train", experiment, *words], options, env)


def _start_service(
    launch: Launch, config: ExperimentConfig, node: Node, env: dict[str, str]
) -> list[Child]:
    """Starts Ray on this node, and on node 0 the service. Raises ValueError if Ray does not
    start."""
    # short, since Unix socket paths end at 107 characters, and the same on every node
    private = Path(f"/tmp/mgr-{os.getuid()}-{node.first_port}")
    launch.scratch += _private_folder(private)
    env = env | _ray_environment(node)
    ray = _start_ray(launch, config, node, private / "ray", env)
    launch.scratch.append(private)
    if node.rank > 0:
        return [ray]
    address = ["--ray-address", f"{node.first_address}:{node.first_port}"]
    serve = ["serve", own_copy(config, "service"), *address]
    return [ray, launch.start(serve, "service", env)]


def _private_folder(folder: Path) -> list[Path]:
    """Makes a folder that only this user can enter, because Ray opens its folders for all users.
    Returns it if it is new: else it is of a start that was killed, or of a service that has the
    ports. Raises ValueError if it is another user's."""
    made: list[Path] = []
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
        made = [folder]
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise ValueError(
            f"{folder} must be this user's own folder, closed to others (mode 700), but belongs to "
            f"user {status.st_uid}, mode {stat.S_IMODE(status.st_mode):o}: remove it"
        )
    return made


def _ray_environment(node: Node) -> dict[str, str]:
    """Returns the environment of Ray and its drivers. Raises ValueError if several nodes have no
    common token."""
    env = {"RAY_AUTH_MODE": "token", "RAY_worker_niceness": "0"}  # engines are no background jobs
    named = environment.get("RAY_AUTH_TOKEN") or environment.get("RAY_AUTH_TOKEN_PATH")
    if named or Path(os.path.expanduser("~/.ray/auth_token")).exists():  # "~" without a home
        return env
    if node.number > 1:
        raise ValueError(
            "Ray needs a common token: set RAY_AUTH_TOKEN to one long random text on all rollout nodes"
        )
    return env | {"RAY_AUTH_TOKEN": secrets.token_hex(32)}


def _ray_command(config: ExperimentConfig, node: Node, temporary: Path) -> list[str]:
    """Returns `ray start` in the foreground with explicit ports: GCS on the first, then ten for
    each node."""
    rollout = config.rollout
    names = ["node-manager", "object-manager", "runtime-env-agent"]
    names += ["dashboard-agent-grpc", "dashboard-agent-listen", "metrics-export"]
    port = node.first_port + 10 * (1 + node.rank % _NODES_ON_A_HOST)
    options: dict[str, object] = {f"--{name}-port": port + i for i, name in enumerate(names)}
    options |= {"--min-worker-port": _WORKER_PORTS[0], "--max-worker-port": _WORKER_PORTS[1]}
    options |= {"--node-ip-address": node.own_address, "--object-store-memory": _OBJECT_STORE_BYTES}
    flags = ["--block", "--disable-usage-stats"]
    if rollout.colocate and not trainer_gpus(config):  # or Ray would fill the first node
        options["--num-cpus"] = -(-rollout.num_engines * rollout.nodes_per_engine // node.number)
    if node.rank == 0:
        options |= {"--port": node.first_port, "--ray-client-server-port": port + len(names)}
        options |= {"--temp-dir": temporary, "--include-dashboard": "false"}
        flags.append("--head")
    else:
        options["--address"] = f"{node.first_address}:{node.first_port}"
    words = [str(word) for pair in options.items() for word in pair]
    # not bin/ray, whose first line names the folder in which it was installed
    return [sys.executable, "-m", "ray.scripts.scripts", "start", *flags, *words]


def _start_ray(
    launch: Launch, config: ExperimentConfig, node: Node, temporary: Path, env: dict[str, str]
) -> Child:
    """Starts Ray on this node and returns once it runs. Raises ValueError after
    rollout.start_timeout_s.

    Retries until then, because Ray gives up after 30 s on a busy machine, and at once if the head
    does not run yet.
    """
    log = config.run_folder.log(f"ray-{node.rank}")
    limit_s = config.rollout.start_timeout_s
    deadline = time.monotonic() + limit_s
    while True:
        start = 0
        if log.exists():
            start = log.stat().st_size
        ray = launch.spawn(_ray_command(config, node, temporary), log, env)
        while ray.process.poll() is None and time.monotonic() <= deadline:
            if _RAY_IS_UP in log.read_bytes()[start:]:
                return ray
            time.sleep(_POLL_S)
        launch.end(ray)
        if time.monotonic() > deadline:
            raise ValueError(
                f"Ray did not start within {limit_s:.0f} s (rollout.start_timeout_s):\n{last_lines(log)}"
            )
