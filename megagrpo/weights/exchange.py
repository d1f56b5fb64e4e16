"""publish: put the actor's weights into every engine, and prove it before anybody samples from them.

For every engine, always in this order: pause -> begin -> transfer -> end -> verify digests of the live parameters -> set
version -> continue -> mark ready. Only rank 0 talks to engines, in one thread each; what fails there is raised on every rank.
An engine that dies on the way is reported, waited for and updated again; the others are not held up by its restart.
"""

import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megagrpo.config.schema import ExperimentConfig
from megagrpo.mesh import Mesh
from megagrpo.run_folder import RunFolder
from megagrpo.types import EngineInfo
from megagrpo.weights.digest import slice_digest
from megagrpo.weights.engine_client import Deadline, EngineConnection, EngineDown
from megagrpo.weights.mailbox import Mailbox, address_towards
from megagrpo.weights.plan import gather_buckets, gather_copies, make_gather_plan, share_out
from megagrpo.weights.record import Copy, Specs
from megagrpo.weights.transport_broadcast import BroadcastTransport
from megagrpo.weights.transport_disk import DiskTransport

T = TypeVar("T")
_TRANSPORTS = {"disk": DiskTransport, "broadcast": BroadcastTransport}
_USABLE = {"ready", "stale"}  # states of engines that answer
_POLL_S = 0.5
_MISMATCHES_SHOWN = 10


class Source(Protocol):
    """The actor as the exchange sees it."""

    copies: list[Copy]  # this rank's, recorded from its load_hf
    hf_specs: Specs  # what is published: name -> shape and dtype in the checkpoint

    def parameters(self) -> Mapping[str, Tensor]: ...  # live, under the names in `copies`


class Control(Protocol):
    """The rollout service as the exchange sees it; used on rank 0 only, from several threads."""

    api_key: str

    def engines(self) -> list[EngineInfo]: ...

    def begin_update(self, engine_id: str, incarnation: int) -> bool: ...  # False: it died meanwhile

    def mark_ready(self, engine_id: str, incarnation: int, weight_version: int) -> bool: ...  # False: it died meanwhile

    def report_lost(self, engine_id: str, incarnation: int) -> None: ...


class Exchange:
    """Collective over all trainer ranks: construction, publish, verify, close."""

    def __init__(self, config: ExperimentConfig, mesh: Mesh, source: Source, control: Control, run_dir: Path):
        self._config, self._mesh, self._source, self._control = config, mesh, source, control
        self._dtype = getattr(torch, config.rollout.dtype)
        everyone = gather_copies(source.copies, mesh)
        bucket_bytes = int(config.weights.bucket_mb * 2**20)
        self._plan = make_gather_plan(everyone, source.hf_specs, self._dtype, bucket_bytes)
        shares = share_out(everyone, source.hf_specs, on_main=False)
        self._own = {name: [copy for rank, copy in parts if rank == mesh.rank] for name, parts in shares.items()}
        self._slices: dict[tuple, int] = {}  # (HF tensor, box) -> place in the digest vector; the same on every rank
        self._parts: list[list[Copy]] = []  # by place: what this rank holds of it
        self._transport = _TRANSPORTS[config.weights.transport](
            RunFolder(run_dir).weights, Path(config.model.path), self._dtype, mesh.device
        )
        self._engines: dict[str, EngineConnection] = {}  # rank 0 only, as all below
        self._lost: dict[str, EngineDown] = {}  # engines that died in this publish and are not back
        self._mailbox: Mailbox | None = None  # opened towards the first engine

    def publish(self, version: int, only: list[str] | None = None) -> dict[str, float]:
        """Update all usable engines, or those in `only`, to the source's present weights, called `version`.

        Returns seconds per phase (connect, gather, transfer, digest, verify, restart, total) and bytes, the same on every rank.
        Raises LeaderError on every rank: digests differ, an engine refuses, or one does not come back within weights.timeout_s.
        """
        timings, deadline = _Timings(), Deadline(self._config.weights.timeout_s)
        todo = self._mesh.from_main(lambda: self._choose(only, deadline), "find engines")
        while todo:
            with timings("connect"):
                self._connect(todo, deadline, writing=True)
            self._transfer(version, todo, timings)
            with timings("digest"):
                expected = self._expected()
            with timings("verify"):
                self._mesh.from_main(
                    lambda todo=todo, expected=expected: self._finish(version, todo, expected), "verify weights"
                )
            with timings("restart"):
                todo = self._mesh.from_main(
                    lambda: self._wait_for_lost(version, deadline), "wait for engines that died"
                )
        return self._mesh.from_main(lambda: timings.result() | {"bytes": float(self._plan.num_bytes)}, "report timings")

    def verify(self, only: list[str] | None = None) -> None:
        """Compare the live parameters of the engines with the source's. Raises LeaderError naming what differs."""
        deadline = Deadline(self._config.weights.timeout_s)
        ids = self._mesh.from_main(lambda: self._choose(only, deadline), "find engines")
        self._connect(ids, deadline, writing=False)
        expected = self._expected()

        def check():
            self._each(ids, lambda engine: self._check(engine, expected))
            self._each(ids, lambda engine: engine.post("/continue_generation"))

        self._mesh.from_main(check, "verify weights")

    def waiting(self) -> str:
        """Which engines have not answered which call, "" for none. From any thread."""
        return ", ".join(
            f"{engine} to answer {engine.asked}" for engine in list(self._engines.values()) if engine.asked
        )

    def close(self) -> None:
        """Leave the engines' groups. The engines stay as they are; one that is gone is no error."""
        for engine in self._engines.values():
            try:
                engine.leave()
            except RuntimeError:
                engine.close()
        self._engines.clear()

    # What follows runs on every rank.

    def _connect(self, ids: list[str], deadline: Deadline, writing: bool) -> None:
        """Pause the engines and learn what new ones copy; every rank then knows which slices to digest."""
        known = set(self._slices)
        new = self._mesh.from_main(lambda: self._open(ids, deadline, writing, known), "connect to engines")
        for hf, box in new:
            self._slices[hf, box] = len(self._parts)
            parts = [(copy, copy.box.intersect(box)) for copy in self._own[hf]]
            self._parts.append([copy.restrict(common) for copy, common in parts if common is not None])

    def _transfer(self, version: int, ids: list[str], timings: "_Timings") -> None:
        buckets = timings.waiting(gather_buckets(self._plan, self._source.parameters(), self._mesh), "gather")
        error = ""
        with timings("transfer"):
            if self._mesh.is_main:
                try:
                    self._transport.send(version, buckets, lambda work: self._each(ids, work))
                except Exception as exc:
                    traceback.print_exc()
                    error = f"rank 0, {self._config.weights.transport} weights to engines: {type(exc).__name__}: {exc}"
            for _ in buckets:  # the other ranks' part, and what a failure on rank 0 left: nobody may hang in a send
                pass
            self._mesh.raise_any(error)

    def _expected(self) -> Tensor:
        """[number of slices] int64: digest of what each slice must hold, summed over the ranks' parts of it."""
        parameters, shapes = self._source.parameters(), self._plan.shapes
        total = torch.zeros(len(self._parts), dtype=torch.int64, device=self._mesh.device)
        for place, parts in enumerate(self._parts):
            for part in parts:
                total[place] += slice_digest(part.view(parameters).to(self._dtype), part.box, shapes[part.hf])
        if self._mesh.world_size > 1:
            dist.all_reduce(total)
        return total.cpu()

    # What follows runs on rank 0.

    def _choose(self, only: list[str] | None, deadline: Deadline) -> list[str]:
        """Usable engines, after waiting until the service has as many as it must."""
        self._lost.clear()
        while True:
            infos = self._control.engines()
            usable = [info.id for info in infos if info.state in _USABLE]
            wanted = self._config.rollout.min_healthy_engines
            if (
                len(usable) >= wanted
            ):  # of `only`, those that died or were drained meanwhile get their weights when they come back
                return [id for id in usable if only is None or id in only]
            if deadline.over:
                states = {info.id: info.state for info in infos}
                raise TimeoutError(
                    f"rank 0 waited {deadline.seconds:.0f} s for {wanted} usable engines; states: {states}"
                )
            time.sleep(_POLL_S)

    def _open(self, ids: list[str], deadline: Deadline, writing: bool, known: set) -> list[tuple]:
        infos = {info.id: info for info in self._control.engines()}
        for id in self._engines.keys() - infos.keys():  # drained
            self._engines.pop(id).close()
        ids[:] = [id for id in ids if id in infos]
        for id in ids:
            engine = self._engines.get(id)
            if engine is None or engine.incarnation != infos[id].incarnation:
                if engine is not None:
                    engine.close()
                self._engines[id] = self._new_engine(infos[id])
            # Half of what is left: an engine that hangs must leave time to restart it.
            self._engines[id].deadline = Deadline(deadline.left / 2)

        def open_one(engine: EngineConnection) -> None:
            if writing and not self._control.begin_update(engine.id, engine.incarnation):
                raise EngineDown(f"{engine} died before it could be updated")
            engine.pause()
            if not engine.slices:
                engine.end_abandoned_update()
                engine.record(self._source.hf_specs)

        self._each(ids, open_one)
        new = {
            (s.hf, s.box): None for id in ids if id not in self._lost for rank in self._engines[id].slices for s in rank
        }
        return [key for key in new if key not in known]

    def _new_engine(self, info: EngineInfo) -> EngineConnection:
        rollout = self._config.rollout
        if self._mailbox is None:
            self._mailbox = Mailbox(address_towards(info.url), self._config.weights.timeout_s)
        return EngineConnection(info, rollout.tp, self._mailbox, self._control.api_key, rollout.health_timeout_s)

    def _finish(self, version: int, ids: list[str], expected: Tensor) -> None:
        def finish(engine: EngineConnection) -> None:
            engine.post("/flush_cache", timeout_s=engine.patience)  # keys and values of the old weights
            self._check(engine, expected)
            engine.resume(version)
            if not self._control.mark_ready(engine.id, engine.incarnation, version):
                raise EngineDown(f"{engine} died after it was verified")

        self._each(ids, finish)

    def _check(self, engine: EngineConnection, expected: Tensor) -> None:
        """Raise RuntimeError naming the engine, the parameters and the slices that differ from the trainers' weights."""
        digests, problems = engine.digests(self._dtype)
        for rank, (slices, found) in enumerate(zip(engine.slices, digests, strict=True)):
            assert len(slices) == len(found), (len(slices), len(found))
            for part, digest in zip(slices, found, strict=True):
                if digest != int(expected[self._slices[part.hf, part.box]]):
                    problems.append(
                        f"{engine} rank {rank}: parameter {part.parameter} does not hold HF tensor {part.hf} {part.box}"
                    )
        if problems:
            shown = "\n".join(problems[:_MISMATCHES_SHOWN])
            raise RuntimeError(f"live weights differ from the trainers' in {len(problems)} places:\n{shown}")

    def _each(self, ids: list[str], work: Callable[[EngineConnection], None]) -> None:
        """Run `work` for every engine that is alive, in threads. Engines that die are set aside; other failures are raised."""
        alive = [self._engines[id] for id in ids if id not in self._lost]
        if not alive:
            return
        errors = []
        with ThreadPoolExecutor(len(alive)) as pool:
            for engine, done in [(engine, pool.submit(work, engine)) for engine in alive]:
                try:
                    done.result()
                except EngineDown as exc:
                    self._lost[engine.id] = exc
                    self._control.report_lost(engine.id, engine.incarnation)
                    engine.close()
                except Exception as exc:
                    errors.append(exc)
        if errors:
            raise errors[0] if len(errors) == 1 else RuntimeError("\n".join(map(repr, errors)))

    def _wait_for_lost(self, version: int, deadline: Deadline) -> list[str]:
        """What is left to update before the service has as many engines of this version as it must: none, as a rule.

        Engines that died in this publish come back with their old weights. With enough others nobody waits for them: the
        rollout refreshes them. Else the ids of those that are back.
        """
        wanted = self._config.rollout.min_healthy_engines
        while self._lost:
            infos = {info.id: info for info in self._control.engines()}
            if sum(info.state == "ready" for info in infos.values()) >= wanted:
                break
            if deadline.over:
                states = {id: f"{info.state}, incarnation {info.incarnation}" for id, info in infos.items()}
                raise TimeoutError(
                    f"rank 0 waited {deadline.seconds:.0f} s (weights.timeout_s) for {wanted} engines to restart and take version "
                    f"{version}: {states}; they died because: {'; '.join(map(str, self._lost.values()))}"
                )
            back = [info.id for info in infos.values() if info.state == "stale"]
            if back:
                self._lost.clear()
                return back
            time.sleep(_POLL_S)
        self._lost.clear()
        return []


class _Timings:
    """Seconds per phase, summed over rounds."""

    def __init__(self):
        self._start = time.monotonic()
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.monotonic()
        try:
            yield
        finally:
            self._seconds[phase] = self._seconds.get(phase, 0.0) + time.monotonic() - start

    def waiting(self, items: Iterator[T], phase: str) -> Iterator[T]:
        """The same items; the time until each comes counts as `phase`."""
        while True:
            with self(phase):
                item = next(items, None)
            if item is None:
                return
            yield item

    def result(self) -> dict[str, float]:
        seconds = dict.fromkeys(("connect", "gather", "transfer", "digest", "verify", "restart"), 0.0) | self._seconds
        seconds["transfer"] -= seconds["gather"]  # buckets are gathered while the transfer runs
        return seconds | {"total": time.monotonic() - self._start}
