"""Transport `broadcast`: rank 0 broadcasts whole tensors to SGLang's
/update_weights_from_distributed.

Each engine has groups of its own (rank 0 and the engine's ranks), so one that dies touches no
other's transfer. Buckets are on the wire to all engines at once, one bucket at a time; while the
engines load one, the next is gathered and sent.
"""

import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor

from megagrpo.system import environment
from megagrpo.weights.copies.record import Copy, Specs
from megagrpo.weights.engines.client import EngineConnection, EngineDown
from megagrpo.weights.engines.fleet import EngineFleet
from megagrpo.weights.transports.gather_plan import GatherPlan, gather_to_main, make_gather_plan
from megagrpo.weights.transports.protocol import TrainerWeights
from megagrpo.weights.wire.clock import Deadline, PhaseTimer
from megagrpo.weights.wire.group import EngineGroup, GroupLimits, PeerLost, join_group
from megagrpo.weights.wire.mailbox import listening_store
from megagrpo.weights.wire.moving import Traffic

_HELD = 4  # buckets that rank 0 holds at most, see gather_buckets
_IN_FLIGHT = 2  # calls that an engine has not answered
# tensors of this size are sent as they lie; smaller ones are packed, on both sides
_ALONE_BYTES = 1 << 20


class BroadcastTransport:
    """Gathers whole HF tensors on rank 0, which broadcasts them to each engine's ranks."""

    past_loader = False

    def __init__(self, weights: TrainerWeights):
        self._weights = weights
        self._together: set[tuple[str, ...]] = set()  # see EngineConnection
        self._plan = broadcast_plan(weights.copies, weights.specs, weights.bucket_bytes)
        self._lines: dict[str, _Line] = {}  # by engine id; rank 0 only

    def transfer(self, version: int, engines: EngineFleet, timer: PhaseTimer) -> Traffic:
        """Collective. See Transport."""
        weights = self._weights
        self._follow(engines)
        traffic = Traffic()

        def send(buckets: Iterator[dict[str, Tensor]]) -> None:
            # Read when a group is made: NCCL's watchdog would end this trainer when an engine dies
            # in a broadcast. One block around all threads: they share the environment.
            with environment.temporarily("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0"):
                engines.each(self._join)
            engines.each(EngineConnection.begin)
            packed_bytes = 0
            for bucket in timer.waiting(buckets, "gather"):
                values, body = _packed(bucket)
                engines.each(partial(self._send_bucket, values=values, body=body))
                receivers = sum(engine.tp for engine in engines.alive)
                traffic.wire_bytes += sum(part.nbytes for part in values) * receivers
                traffic.messages += len(values) * receivers
                packed_bytes = max(
                    packed_bytes,
                    sum(part.nbytes for part in values) if "load_format" in body else 0,
                )
            traffic.staging_bytes += packed_bytes
            engines.each(lambda engine: self._lines[engine.id].wait_for_answers())
            engines.each(EngineConnection.end)

        what = "broadcast weights to engines"
        gather_to_main(self._plan, weights.parameters(), weights.mesh, send, what, traffic)
        return traffic

    def drop(self, engine: EngineConnection) -> None:
        """Aborts the engine's groups."""
        if line := self._lines.pop(engine.id, None):
            line.close()

    def leave(self, engine: EngineConnection) -> None:
        """Makes the engine destroy its end of the groups."""
        for group in self._lines[engine.id].groups if engine.id in self._lines else ():
            engine.post("/destroy_weights_update_group", {"group_name": group.name})

    def _follow(self, engines: EngineFleet) -> None:
        """Collective. Rebuilds the plan if it splits tensors that an engine's loader requires in
        one call."""
        weights = self._weights
        wanted = weights.mesh.from_main(
            lambda: set().union(*(engine.together for engine in engines.alive)),
            "learn which tensors belong together",
        )
        if wanted - self._together:
            self._together |= wanted
            self._plan = broadcast_plan(
                weights.copies, weights.specs, weights.bucket_bytes, sorted(self._together)
            )

    def _join(self, engine: EngineConnection) -> None:
        """Makes the groups of rank 0 and the engine's ranks, unless they exist; all wait for
        all."""
        if engine.id not in self._lines:
            self._lines[engine.id] = _Line(engine)
            for _ in range(_IN_FLIGHT):
                self._lines[engine.id].join(self._weights.mesh.device, self._weights.limits)

    def _send_bucket(self, engine: EngineConnection, values: Sequence[Tensor], body: dict) -> None:
        """Broadcasts `values`, contiguous tensors, which `body` describes to the engine."""
        self._lines[engine.id].send(values, body)


class _Line:
    """Rank 0's end of the groups with one engine, and the calls that it has not answered.

    Buckets take turns between the groups, because two calls may reach the engine in either order:
    each names its group.
    """

    def __init__(self, engine: EngineConnection):
        self.groups: deque[EngineGroup] = deque()  # the next bucket's first
        self._engine = engine
        self._answers = deque[Future]()
        self._pool = ThreadPoolExecutor(_IN_FLIGHT)

    def join(self, device: torch.device, limits: GroupLimits) -> None:
        """Makes one more group. Raises EngineDown, EngineRefused."""
        engine = self._engine
        # an engine outlives trainers, and refuses a name that it has seen
        name = f"weights-{uuid.uuid4().hex}"
        # the wait for an engine's ranks cannot be cut short when it refuses or dies
        # SGLang makes the engine's end, with NCCL's own number of thread blocks
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
            group = join_group(store, name, 0, 1 + engine.tp, device, engine.address, limits)
            group.set_timeout(engine.deadline.seconds)
            self.groups.append(group)

        what = f"the {engine.tp} ranks of {engine} to join group {name}"
        self._together("/init_weights_update_group", body, engine.deadline.left, join, what)
        self.wait_for_answers()

    def send(self, values: Sequence[Tensor], body: dict) -> None:
        """Broadcasts `values`. Returns when they are out, perhaps before the engine has loaded
        them."""
        self.wait_for_answers(_IN_FLIGHT - 1)
        group = self.groups[0]
        patience = self._engine.patience
        self.groups.rotate(-1)
        self._together(
            "/update_weights_from_distributed",
            body | {"group_name": group.name},
            patience,
            lambda: group.wait([group.broadcast(part) for part in values], Deadline(patience)),
            f"{self._engine} to take {body['names'][0]} ...",
        )

    def wait_for_answers(self, but: int = 0) -> None:
        """Waits until all calls but the last `but` are answered. Raises EngineDown,
        EngineRefused."""
        while len(self._answers) > but or (self._answers and self._answers[0].done()):
            self._answers.popleft().result()

    def close(self) -> None:
        """Ends the groups; a wait in them raises."""
        self._abort()
        self._pool.shutdown(wait=False)

    def _abort(self) -> None:
        for group in self.groups:
            group.abort()

    def _together(
        self, path: str, body: dict, timeout_s: float, ours: Callable[[], None], what: str
    ) -> None:
        """Runs our half of a collective while the engine's ranks run theirs, started by POST
        `path`.

        If one half fails, the other is ended. Raises the engine's error, or EngineDown if only ours
        failed.
        """
        theirs = self._pool.submit(self._engine.post, path, body, timeout_s)
        theirs.add_done_callback(lambda answer: self._abort() if answer.exception() else None)
        self._answers.append(theirs)
        try:
            ours()
        except PeerLost as exc:
            self._engine.close()
            self._abort()
            self.wait_for_answers()  # the engine's own reason is the better one
            raise EngineDown(f"rank 0 waits for {what}: {exc}") from exc


def broadcast_plan(
    everyone: list[list[Copy]],
    specs: Specs,
    bucket_bytes: int,
    together: Sequence[tuple[str, ...]] = (),
) -> GatherPlan:
    """Returns the buckets that are gathered and broadcast; rank 0 holds _HELD of them, together
    `bucket_bytes`."""
    return make_gather_plan(everyone, specs, bucket_bytes // _HELD, together)


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
