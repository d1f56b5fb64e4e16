"""The exchange: sends the actor's weights to every engine and verifies them before any sample.

For every engine, always in this order: pause -> begin -> transfer -> end -> verify digests of the
live parameters -> set version -> continue -> mark ready. Only rank 0 calls engines, in one thread
each; a failure there is raised on every rank. An engine that dies during an update is reported,
restarted and updated again. One that hangs delays the others by at most a quarter of the remaining
time (EngineConnection.patience).
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from math import prod
from pathlib import Path

import numpy as np
import torch

from megagrpo.config.schema import ExperimentConfig
from megagrpo.mesh import Mesh
from megagrpo.system.run_folder import RunFolder
from megagrpo.weights.actor_weights import ActorWeights
from megagrpo.weights.copies.recorder import Copy
from megagrpo.weights.engines.client import EngineConnection
from megagrpo.weights.engines.fleet import EngineFleet, EngineRegistry
from megagrpo.weights.expected_digests import ExpectedDigests
from megagrpo.weights.quantized import format_table, quantized
from megagrpo.weights.transports.broadcast import BroadcastTransport
from megagrpo.weights.transports.disk import DiskTransport
from megagrpo.weights.transports.gather_plan import gather_copies, published_specs
from megagrpo.weights.transports.ipc import IpcTransport
from megagrpo.weights.transports.protocol import TrainerWeights, Transport
from megagrpo.weights.transports.reshard import ReshardTransport
from megagrpo.weights.wire.clock import Deadline, PhaseTimer
from megagrpo.weights.wire.engine_group import GroupLimits
from megagrpo.weights.wire.moving import Traffic

TRANSPORTS: dict[str, Callable[[TrainerWeights], Transport]] = {
    "disk": DiskTransport,
    "broadcast": BroadcastTransport,
    "reshard": ReshardTransport,
    "ipc": IpcTransport,
}
_PHASES = ("connect", "plan", "gather", "transfer", "digest", "verify", "restart")
_MISMATCHES_SHOWN = 10
WEIGHTS_DIFFER = "live weights differ from the trainers'"  # start of the error message


class Exchange:
    """Publishes the actor's weights. Collective: construction, publish, verify."""

    def __init__(
        self,
        config: ExperimentConfig,
        mesh: Mesh,
        weights: ActorWeights,
        registry: EngineRegistry,
        run_dir: Path,
    ):
        self._config = config
        self._mesh = mesh
        self._ids: list[str] = []  # of the engines to update; on the main rank
        # by kind and rank of an engine: of its slices among the digests
        self._numbers: list[list[np.ndarray]] = []
        if config.rollout.quantization is not None:
            published = quantized(weights, mesh)
            if mesh.is_main:
                print(*format_table(weights, published), sep="\n", flush=True)
            weights = published
        self._weights = weights
        dtype = getattr(torch, config.rollout.dtype)
        specs = published_specs(weights.hf_specs, dtype, weights.fixed_dtypes)
        trainers = TrainerWeights(
            mesh=mesh,
            specs=specs,
            copies=gather_copies(weights.copies, mesh),
            parameters=weights.parameters,
            dtype=dtype,
            bucket_bytes=config.weights.bucket_bytes,
            num_engines=config.rollout.num_engines,
            folder=RunFolder(run_dir).weights,
            checkpoint=Path(config.model.path),
            limits=GroupLimits(config.weights.connect_timeout_s),
            delta=config.weights.delta,
        )
        self._num_bytes = sum(prod(shape) * dtype.itemsize for shape, dtype in specs.values())
        self._digests = ExpectedDigests(trainers)
        self._transport = TRANSPORTS[config.weights.transport](trainers)
        patience_s = config.rollout.patience_s(mesh.device.type == "cuda")
        self._fleet = EngineFleet(config, registry, specs, self._transport, patience_s)

    def publish(self, version: int, engines: list[str] | None = None) -> dict[str, float]:
        """Collective. Updates all usable engines, or those of these ids, to the actor's present
        weights, called `version`.

        Returns, the same on every rank: rank 0's seconds per phase (_PHASES, total), the model's
        bytes, and the Traffic of all ranks together. Raises LeaderError on every rank: digests
        differ, an engine refuses, or one does not come back within weights.timeout_s.
        """
        timer = PhaseTimer()
        deadline = Deadline(self._config.weights.timeout_s)
        traffic = Traffic()
        more = self._next(lambda: self._fleet.choose(deadline, engines), "find engines")
        with self._weights.merged():
            while more:
                more = self._update(version, deadline, timer, traffic)
        seconds = self._mesh.from_main(lambda: timer.seconds(*_PHASES), "report timings")
        total = Traffic()
        for part in self._mesh.gather_world(traffic):
            total.add(part)
        return (
            seconds
            | {"bytes": float(self._num_bytes)}
            | {k: float(v) for k, v in asdict(total).items()}
        )

    def verify(self) -> None:
        """Collective. Compares the engines' live parameters with the actor's. LeaderError names
        what differs."""
        deadline = Deadline(self._config.weights.timeout_s)
        self._next(lambda: self._fleet.choose(deadline), "find engines")
        self._open(deadline, writing=False)
        with self._weights.merged():
            expected = self._digests.total(self._digests.local())

        def check_all() -> None:
            self._fleet.for_each(lambda engine: self._check(engine, expected, flush=False))
            self._fleet.for_each(lambda engine: engine.post("/continue_generation"))

        self._mesh.from_main(check_all, "verify weights")

    def waiting(self) -> str:
        """Returns which engines have not answered which call, "" for none. Runs in any thread."""
        return self._fleet.waiting()

    def close(self) -> None:
        """Local. Disconnects from the engines, which keep their weights; an engine that has ended
        is no error."""
        self._fleet.close()

    def _next(self, find: Callable[[], list[str]], what: str) -> bool:
        """Collective. Makes the main rank's `find` the engines to update; returns whether there are
        any. Others need no ids: a sum of flags is cheaper than an object."""

        def keep() -> None:
            self._ids = find()

        self._mesh.from_main(keep, what)
        return self._mesh.any_true(bool(self._ids))

    def _update(
        self, version: int, deadline: Deadline, timer: PhaseTimer, traffic: Traffic
    ) -> bool:
        """Collective. Updates the engines of `_next`. Returns whether some died, came back and are
        still needed."""
        with timer("connect"):
            self._open(deadline, writing=True)  # pause
        self._fleet.limit()
        with timer("transfer"), ThreadPoolExecutor(1) as pool:
            digesting = pool.submit(self._digests.local)  # concurrently with the transfer
            # begin -> transfer -> end
            traffic.add(self._transport.transfer(version, self._fleet, timer))
        with timer("digest"):
            expected = self._digests.total(
                self._mesh.result_everywhere(digesting, "digest weights")
            )
        with timer("verify"):
            self._mesh.from_main(
                lambda: self._fleet.admit(version, lambda engine: self._verify(engine, expected)),
                "verify weights",
            )
        with timer("restart"):
            return self._next(
                lambda: self._fleet.wait_for_lost(version, deadline), "wait for engines that died"
            )

    def _open(self, deadline: Deadline, writing: bool) -> None:
        """Collective. Pauses the engines; every rank learns the copy lists of a new kind, for
        digests and transfers."""

        def open_and_sort() -> list[list[list[Copy]]] | None:
            self._fleet.open(self._ids, deadline, writing)
            return self._fleet.sort() or None  # which is not sent

        for kind in self._mesh.from_main(open_and_sort, "connect to engines") or ():
            self._fleet.kinds.append(kind)
            self._numbers.append(self._digests.add(kind))

    def _verify(self, engine: EngineConnection, expected: np.ndarray) -> None:
        """As `_check`; the engine empties its caches unless they go by version. Rank 0 only."""
        by_version = self._config.rollout.prefix_cache == "by_version"
        self._check(engine, expected, flush=not (by_version and engine.emptied))
        engine.emptied = True

    def _check(self, engine: EngineConnection, expected: np.ndarray, flush: bool) -> None:
        """Raises RuntimeError naming the engine, the parameters and the slices that differ from the
        actor's weights."""
        digests, problems = engine.digests(flush)
        for rank, (copies, numbers) in enumerate(
            zip(self._fleet.kinds[engine.kind], self._numbers[engine.kind], strict=True)
        ):
            problems += [
                f"{engine} rank {rank}: parameter {copies[k].parameter} does not hold HF "
                f"tensor {copies[k].source}"
                for k in np.flatnonzero(digests[rank] != expected[numbers])
            ]
        if problems:
            shown = "\n".join(problems[:_MISMATCHES_SHOWN])
            raise RuntimeError(f"{WEIGHTS_DIFFER} in {len(problems)} places:\n{shown}")
