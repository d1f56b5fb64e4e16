"""Through process groups: rank 0 broadcasts flattened buckets to stock /update_weights_from_distributed.

Each engine has a group of its own (rank 0 and the engine's ranks), so one that dies touches no other's transfer.
Buckets are in flight to all engines at once, one bucket at a time.
"""

import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor

from megagrpo import environment
from megagrpo.weights.clock import Deadline, PhaseTimer
from megagrpo.weights.engine_client import EngineConnection, EngineDown
from megagrpo.weights.engine_fleet import EngineFleet
from megagrpo.weights.group import EngineGroup, join_group
from megagrpo.weights.mailbox import listening_store
from megagrpo.weights.moving import Traffic
from megagrpo.weights.plan import gather_to_main, gather_traffic, make_gather_plan
from megagrpo.weights.transport import TrainerWeights

_JOIN_S = 60.0  # the wait for an engine's ranks cannot be cut short when it refuses or dies


class BroadcastTransport:
    """Gathers whole HF tensors on rank 0, which broadcasts them to each engine's ranks."""

    past_loader = False

    def __init__(self, weights: TrainerWeights):
        self._weights = weights
        self._plan = make_gather_plan(weights.copies, weights.specs, weights.dtype, weights.bucket_bytes)
        self._groups: dict[str, EngineGroup] = {}  # by engine id; rank 0 only

    def transfer(self, version: int, engines: EngineFleet, timer: PhaseTimer) -> Traffic:
        """Collective. See Transport."""
        traffic = gather_traffic(self._plan, self._weights.mesh)

        def send(buckets: Iterator[dict[str, Tensor]]) -> None:
            # Read when a group is made: NCCL's watchdog would end this trainer when an engine dies in a broadcast.
            # Without it `wait` raises. One block around all threads: they share the environment.
            with environment.temporarily("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0"):
                engines.each(self._join)
            engines.each(EngineConnection.begin)
            for bucket in timer.waiting(buckets, "gather"):
                flat = torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in bucket.values()])
                body = {
                    "names": list(bucket),
                    "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in bucket.values()],
                    "shapes": [list(tensor.shape) for tensor in bucket.values()],
                    "load_format": "flattened_bucket",
                    "flush_cache": False,
                }
                engines.each(partial(self._send_bucket, flat=flat, body=body))
                traffic.wire_bytes += flat.nbytes * sum(engine.tp for engine in engines.alive)
                traffic.messages += sum(engine.tp for engine in engines.alive)
            engines.each(EngineConnection.end)

        weights = self._weights
        gather_to_main(self._plan, weights.parameters(), weights.mesh, send, "broadcast weights to engines")
        return traffic

    def drop(self, engine: EngineConnection) -> None:
        """Aborts the engine's group."""
        group = self._groups.pop(engine.id, None)
        if group is not None:
            group.abort()

    def leave(self, engine: EngineConnection) -> None:
        """Makes the engine destroy its end of the group."""
        if engine.id in self._groups:
            engine.post("/destroy_weights_update_group", {"group_name": self._groups[engine.id].name})

    def _join(self, engine: EngineConnection) -> None:
        """Makes the group of rank 0 and the engine's ranks, unless there is one; all wait until all have come."""
        if engine.id in self._groups:
            return
        name = f"weights-{uuid.uuid4().hex}"  # an engine outlives trainers, and refuses a name that it has seen
        device = self._weights.mesh.device
        store = listening_store(engine.address, min(_JOIN_S, engine.deadline.seconds))
        body = {
            "master_address": engine.address,
            "master_port": store.port,
            "rank_offset": 1,
            "world_size": 1 + engine.tp,
            "group_name": name,
            "backend": "nccl" if device.type == "cuda" else "gloo",
        }

        def join() -> None:
            timeout_s = store.timeout.total_seconds()  # type: ignore[attr-defined]  # missing in torch's type stubs
            group = join_group(store, name, 0, 1 + engine.tp, device, engine.address, timeout_s)
            group.set_timeout(engine.deadline.seconds)
            self._groups[engine.id] = group

        what = f"the {engine.tp} ranks of {engine} to join group {name}"
        self._together(engine, "/init_weights_update_group", body, engine.deadline.left, join, what)

    def _send_bucket(self, engine: EngineConnection, flat: Tensor, body: dict) -> None:
        """Broadcasts `flat`, uint8 [bytes of the bucket], which `body` describes to the engine."""
        group, patience = self._groups[engine.id], engine.patience
        self._together(
            engine,
            "/update_weights_from_distributed",
            body | {"group_name": group.name},
            patience,
            lambda: group.wait([group.broadcast(flat)], Deadline(patience)),
            f"{engine} to take {body['names'][0]} ...",
        )

    def _together(
        self, engine: EngineConnection, path: str, body: dict, timeout_s: float, ours: Callable[[], None], what: str
    ) -> None:
        """Runs our half of a collective while the engine's ranks run theirs, which POST `path` starts.

        When one half fails, the other is told to end. Raises the engine's own error, or EngineDown when ours failed
        alone.
        """
        with ThreadPoolExecutor(1) as pool:
            theirs = pool.submit(engine.post, path, body, timeout_s)
            theirs.add_done_callback(lambda answer: self.drop(engine) if answer.exception() else None)
            try:
                ours()
            except RuntimeError as exc:
                engine.close()
                self.drop(engine)
                theirs.result()  # the engine's own reason is the better one
                raise EngineDown(f"rank 0 waits for {what}: {exc}") from exc
            theirs.result()
