"""Transport `broadcast`: rank 0 broadcasts whole tensors to SGLang's
/update_weights_from_distributed.

Each engine has separate groups with rank 0, so an engine that dies does not affect the transfer to
another. A bucket travels to all engines at once, and while the engines load it, the next bucket is
gathered and sent.
"""

import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor

from megagrpo.weights.engines.client import EngineConnection, EngineDown
from megagrpo.weights.engines.fleet import EngineFleet
from megagrpo.weights.transports.gather_plan import GatherPlan, gather_to_main, make_gather_plan
from megagrpo.weights.transports.protocol import TrainerWeights
from megagrpo.weights.wire.clock import Deadline, PhaseTimer
from megagrpo.weights.wire.engine_group import (
    EngineGroup,
    GroupLimits,
    PeerLost,
    join_group,
    without_watchdog,
)
from megagrpo.weights.wire.mailbox import listening_store
from megagrpo.weights.wire.moving import Traffic

_IN_FLIGHT = 2  # unanswered calls of an engine
_ALONE_BYTES = 1 << 20  # smaller tensors are packed for the transfer


class BroadcastTransport:
    """Gathers whole HF tensors on rank 0, which broadcasts them to each engine's ranks."""

    past_loader = False

    def __init__(self, weights: TrainerWeights):
        self._weights = weights
        self._mesh = weights.mesh
        self._together: set[tuple[str, ...]] = set()  # see EngineConnection
        self._plan = self._make_plan()
        self._lines: dict[str, _Line] = {}  # by engine id; rank 0 only

    def transfer(self, version: int, engines: EngineFleet, timer: PhaseTimer) -> Traffic:
        """Collective. See Transport."""
        weights = self._weights
        self._follow(engines)
        traffic = Traffic()

        def send(buckets: Iterator[dict[str, Tensor]]) -> None:
            with without_watchdog():  # see join_group
                engines.for_each(self._join)
            engines.for_each(EngineConnection.begin)
            packed_bytes = 0
            for bucket in timer.waiting(buckets, "gather"):
                values, body = _packed(bucket)
                engines.for_each(partial(self._send_bucket, values=values, body=body))
                receivers = sum(engine.tp for engine in engines.alive)
                traffic.wire_bytes += sum(part.nbytes for part in values) * receivers
                traffic.messages += len(values) * receivers
                if "load_format" in body:
                    packed_bytes = max(packed_bytes, values[0].nbytes)
            traffic.staging_bytes += packed_bytes
            engines.for_each(lambda engine: self._lines[engine.id].wait_for_answers())
            engines.for_each(EngineConnection.end)

        action = "broadcast weights to engines"
        gather_to_main(self._plan, weights.parameters(), weights.mesh, send, action, traffic)
        return traffic

    def drop(self, engine: EngineConnection) -> None:
        """Aborts the engine's groups."""
        if line := self._lines.pop(engine.id, None):
            line.close()

    def leave(self, engine: EngineConnection) -> None:
        """Makes the engine destroy its end of the groups."""
        if line := self._lines.get(engine.id):
            for group in line.groups:
                engine.post("/destroy_weights_update_group", {"group_name": group.name})

    def _follow(self, engines: EngineFleet) -> None:
        """Collective. Rebuilds the plan if it splits tensors that an engine's loader needs in one
        call."""
        together = self._mesh.from_main(
            lambda: set().union(*(engine.together for engine in engines.alive)),
            "learn which tensors belong together",
        )
        if together - self._together:
            self._together |= together
            self._plan = self._make_plan()

    def _make_plan(self) -> GatherPlan:
        weights = self._weights
        return make_gather_plan(
            weights.copies, weights.specs, weights.bucket_bytes, sorted(self._together)
        )

    def _join(self, engine: EngineConnection) -> None:
        """Makes the groups of rank 0 and the engine's ranks, unless they exist. All ranks meet."""
        if engine.id not in self._lines:
            self._lines[engine.id] = _Line(engine)
            for _ in range(_IN_FLIGHT):
                self._lines[engine.id].join(self._mesh.device, self._weights.limits)

    def _send_bucket(self, engine: EngineConnection, values: Sequence[Tensor], body: dict) -> None:
        """Broadcasts `values`, contiguous tensors, which `body` describes to the engine."""
        self._lines[engine.id].send(values, body)


class _Line:
    """Rank 0's end of the groups with one engine, and the engine's unanswered calls.

    Buckets take turns between the groups, because two calls may reach the engine in either order.
    Each call names its group.
    """

    def __init__(self, engine: EngineConnection):
        self.groups: deque[EngineGroup] = deque()  # the next bucket's first
        self._engine = engine
        self._answers = deque[Future]()
        self._pool = ThreadPoolExecutor(_IN_FLIGHT)

    def join(self, device: torch.device, limits: GroupLimits) -> None:
        """Makes one more group. Raises EngineDown, EngineRefused."""
        engine = self._engine
        # an engine outlives trainers, and refuses a known name
        name = f"weights-{uuid.uuid4().hex}"
        # join_s, because the wait for an engine's ranks cannot be cut short if the engine dies;
        # max_ctas, because SGLang makes the engine's end with NCCL's own number of thread blocks
        limits = limits._replace(join_s=min(limits.join_s, engine.deadline.seconds), max_ctas=None)
        store = listening_store(engine.address, limits.join_s)
        body = {
            "master_address": engine.address,
            "master_port": store.port,
            "rank_offset": 1,
            "world_size": 1 + engine.tp,
            "group_name": name,
            "backend": "nccl" if device.type == "cuda" else "gloo",
        }

        def join() -> None:
            size = 1 + engine.tp
            self.groups.append(join_group(store, name, 0, size, device, engine.address, limits))

        joining = f"the {engine.tp} ranks of {engine} to join group {name}"
        self._together("/init_weights_update_group", body, engine.deadline.left, join, joining)
        self.wait_for_answers()

    def send(self, values: Sequence[Tensor], body: dict) -> None:
        """Broadcasts `values`. Returns when they are sent; the engine may still load them."""
        self.wait_for_answers(_IN_FLIGHT - 1)
        group = self.groups[0]
        patience = self._engine.patience
        self.groups.rotate(-1)

        def broadcast() -> None:
            group.set_timeout(patience)
            group.wait([group.broadcast(part) for part in values], Deadline(patience))

        self._together(
            "/update_weights_from_distributed",
            body | {"group_name": group.name},
            patience,
            broadcast,
            f"{self._engine} to take {body['names'][0]} ...",
        )

    def wait_for_answers(self, but: int = 0) -> None:
        """Waits until all calls but the last `but` are answered. Raises EngineDown,
        EngineRefused."""
        while len(self._answers) > but or (self._answers and self._answers[0].done()):
            self._answers.popleft().result()

    def close(self) -> None:
        """Ends the groups. A wait in them raises."""
        self._abort()
        self._pool.shutdown(wait=False)

    def _abort(self) -> None:
        for group in self.groups:
            group.abort()

    def _together(
        self, path: str, body: dict, timeout_s: float, ours: Callable[[], None], event: str
    ) -> None:
        """Runs our half of a collective while the engine's ranks run theirs, started by POST
        `path`.

        If one half fails, the other is ended. Raises the engine's error, or EngineDown if only ours
        failed. event: the awaited one, for the message.
        """
        theirs = self._pool.submit(self._engine.post, path, body, timeout_s)
        theirs.add_done_callback(lambda answer: self._abort() if answer.exception() else None)
        self._answers.append(theirs)
        try:
            ours()
        except PeerLost as exc:
            self._engine.close()
            self._abort()
            self.wait_for_answers()  # the engine's own reason is better
            raise EngineDown(f"rank 0 waits for {event}: {exc}") from exc


def _packed(bucket: dict[str, Tensor]) -> tuple[list[Tensor], dict]:
    """Returns the contiguous tensors of a bucket, and the engine's request to receive them."""
    values = list(bucket.values())
    body = {
        "names": list(bucket),
        "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in values],
        "shapes": [list(tensor.shape) for tensor in values],
        "flush_cache": False,
    }
    large = sum(tensor.nbytes for tensor in values) >= _ALONE_BYTES * len(values)
    if large and values[0].dtype != torch.float8_e4m3fn:  # gloo has no FP8
        return values, body
    flat = torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in values])
    return [flat], body | {"load_format": "flattened_bucket"}
