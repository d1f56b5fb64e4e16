"""Both ends of a transfer: batches are packed from live parameters and unpacked into live parameters."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megagrpo.weights.wire.clock import Deadline
from megagrpo.weights.wire.group import EngineGroup, Receive, Send
from megagrpo.weights.wire.messages import Batches, Message

Turn = Callable[[], AbstractContextManager[None]]

_IN_FLIGHT = 2  # batches: one is packed or unpacked while the other is on the wire


@dataclass
class Traffic:
    """Counts what one rank sent, or several together."""

    wire_bytes: int = 0  # that left the rank, once for every receiver
    messages: int = 0
    staging_bytes: int = 0  # held at most besides the parameters, on either end
    between_bytes: int = 0  # of wire_bytes, between nodes; transport ipc alone counts them

    def add(self, other: "Traffic") -> None:
        """Adds traffic of another rank or time; its staging memory is not part of this rank's."""
        self.wire_bytes += other.wire_bytes
        self.between_bytes += other.between_bytes
        self.messages += other.messages
        self.staging_bytes = max(self.staging_bytes, other.staging_bytes)


class _Staged(NamedTuple):
    """A message on the wire. copied: whether `values` [n] have memory of their own, besides the parameters."""

    message: Message
    values: Tensor
    copied: bool


def send_batches(
    group: EngineGroup,
    batches: Batches,
    parameters: Mapping[str, Tensor],
    deadline: Deadline,
    patience_s: float,
    turn: Turn = nullcontext,
) -> Traffic:
    """Sends this rank's batches, each started inside `turn()`.

    Raises PeerLost if one is not taken within patience_s, or by the deadline of all.
    """

    def stage(message: Message) -> _Staged:
        return _Staged(message, *read_message(message, parameters))

    def begin(batch: list[_Staged]) -> list[dist.Work]:
        with turn():
            return group.start([Send(one.values, one.message.peer, one.message.tag) for one in batch])

    traffic = _move(group, batches, stage, begin, lambda staged: None, deadline, patience_s)
    traffic.wire_bytes = sum(message.num_bytes for batch in batches for message in batch)
    traffic.messages = sum(map(len, batches))
    return traffic


def receive_batches(
    group: EngineGroup, batches: Batches, parameters: Mapping[str, Tensor], deadline: Deadline, patience_s: float
) -> Traffic:
    """Writes this rank's batches into the parameters. Raises PeerLost as send_batches does."""
    device = next(iter(parameters.values())).device

    def stage(message: Message) -> _Staged:
        live = _in_place(message, parameters)
        if live is not None:
            return _Staged(message, live, copied=False)
        return _Staged(message, torch.empty(message.numel, dtype=message.dtype, device=device), copied=True)

    def finish(staged: _Staged) -> None:
        if staged.copied:
            unpack(staged.message, staged.values, parameters)

    def begin(batch: list[_Staged]) -> list[dist.Work]:
        return group.start([Receive(one.values, one.message.peer, one.message.tag) for one in batch])

    return _move(group, batches, stage, begin, finish, deadline, patience_s)


def _move(
    group: EngineGroup,
    batches: Batches,
    stage: Callable[[Message], _Staged],
    begin: Callable[[list[_Staged]], list[dist.Work]],
    finish: Callable[[_Staged], None],
    deadline: Deadline,
    patience_s: float,
) -> Traffic:
    """Puts all batches on the wire, at most _IN_FLIGHT at once; `finish` gets every message when its batch is done."""
    traffic, held = Traffic(), 0
    flying: deque[tuple[list[dist.Work], list[_Staged]]] = deque()

    def finish_first() -> int:
        works, batch = flying.popleft()
        group.wait(works, deadline.part(patience_s))
        for staged in batch:
            finish(staged)
        return _copied_bytes(batch)

    for batch in batches:
        ready = [stage(message) for message in batch]
        held += _copied_bytes(ready)
        traffic.staging_bytes = max(traffic.staging_bytes, held)
        flying.append((begin(ready), ready))
        while len(flying) >= _IN_FLIGHT:
            held -= finish_first()
    while flying:
        finish_first()
    return traffic


def _copied_bytes(batch: list[_Staged]) -> int:
    return sum(staged.values.nbytes for staged in batch if staged.copied)


def _in_place(message: Message, parameters: Mapping[str, Tensor]) -> Tensor | None:
    """Returns the live elements themselves [n], None if they must be packed or cast."""
    first = message.slices[0]
    if len(message.slices) > 1 or not first.contiguous or parameters[first.parameter].dtype != message.dtype:
        return None
    return first.view(parameters).reshape(-1)


def read_message(message: Message, parameters: Mapping[str, Tensor]) -> tuple[Tensor, bool]:
    """Returns a message's values [n] in its dtype and whether they are a copy."""
    values = _in_place(message, parameters)
    if values is not None:
        return values, False
    device = parameters[message.slices[0].parameter].device
    packed = torch.empty(message.numel, dtype=message.dtype, device=device)
    pack(message, packed, parameters)
    return packed, True


def pack(message: Message, values: Tensor, parameters: Mapping[str, Tensor]) -> None:
    """Copies the live elements of a message into values [n], which has its dtype."""
    for part, live in _parts(message, values, parameters):
        part.copy_(live)


def unpack(message: Message, values: Tensor, parameters: Mapping[str, Tensor]) -> None:
    """Copies values [n] of a message into the live elements that they belong to."""
    for part, live in _parts(message, values, parameters):
        live.copy_(part)


def _parts(message: Message, values: Tensor, parameters: Mapping[str, Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields the values of each slice of a message, and the live elements that they belong to."""
    parts = values.split([piece.numel for piece in message.slices])
    for part, piece in zip(parts, message.slices, strict=True):
        yield part.view(piece.size), piece.view(parameters)
