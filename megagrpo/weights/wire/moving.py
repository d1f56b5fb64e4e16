"""Both ends of a transfer, which pack batches from live parameters and unpack them into live
parameters."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megagrpo.weights.wire.changes import ALL, LastSent, changes_bytes, count_tags, write_changes
from megagrpo.weights.wire.clock import Deadline
from megagrpo.weights.wire.engine_group import EngineGroup, Receive, Send
from megagrpo.weights.wire.transfer_messages import Batches, Message

Turn = Callable[[], AbstractContextManager[None]]

_IN_FLIGHT = 2  # batches, so that one is packed or unpacked while the other travels


@dataclass
class Traffic:
    """The traffic of one rank, or of several together."""

    wire_bytes: int = 0  # sent by the rank, once for every receiver
    messages: int = 0
    staging_bytes: int = 0  # the most that either end holds besides the parameters
    between_bytes: int = 0  # the part of wire_bytes between nodes; only transport ipc counts it
    compared: int = 0  # elements that were compared with the last values (weights.delta)
    changed: int = 0  # the part of `compared` that had changed

    def add(self, other: "Traffic") -> None:
        """Adds traffic of another rank or time, and takes the larger staging memory."""
        self.wire_bytes += other.wire_bytes
        self.between_bytes += other.between_bytes
        self.messages += other.messages
        self.compared += other.compared
        self.changed += other.changed
        self.staging_bytes = max(self.staging_bytes, other.staging_bytes)


class _Staged(NamedTuple):
    """A message on the wire. copied: whether `values` have separate memory from the parameters."""

    message: Message
    values: Tensor  # [n], or the bytes of changes
    copied: bool
    num_changed: int = ALL  # elements that `values` are


def send_batches(
    group: EngineGroup,
    batches: Batches,
    parameters: Mapping[str, Tensor],
    deadline: Deadline,
    patience_s: float,
    turn: Turn = nullcontext,
    last: LastSent | None = None,
) -> Traffic:
    """Sends this rank's batches, and starts each inside `turn()`. last: to send only changes, see
    changes.py.

    Raises PeerLost if a batch is not received within patience_s, or all by the deadline.
    """
    sent = Traffic()

    def staged(message: Message) -> _Staged:
        values, copied = read_message(message, parameters)
        if last is None:
            return _Staged(message, values, copied)
        count, content = last.update(message, values, sent)
        return _Staged(message, content, copied or count != ALL, count)

    def begin(batch: list[_Staged]) -> list[dist.Work]:
        counts = []
        if last is not None:
            counts = _counts(batch)
        messages = [
            Send(staged.values, staged.message.peer, staged.message.tag)
            for staged in batch
            if staged.num_changed
        ]
        sent.wire_bytes += sum(message.values.nbytes for message in counts + messages)
        sent.messages += len(counts) + len(messages)
        with turn():
            return [work for part in (counts, messages) if part for work in group.start(part)]

    sent.staging_bytes = _move(
        group,
        batches,
        lambda batch: list(map(staged, batch)),
        begin,
        lambda staged: None,
        deadline,
        patience_s,
    )
    return sent


def receive_batches(
    group: EngineGroup,
    batches: Batches,
    parameters: Mapping[str, Tensor],
    deadline: Deadline,
    delta: bool = False,
) -> Traffic:
    """Writes this rank's batches into the parameters. delta: the senders have `last`. Raises PeerLost
    at the deadline, and not before: another link may hold up the senders as long as their patience."""
    device = next(iter(parameters.values())).device

    def stage(batch: list[Message]) -> list[_Staged]:
        counts = [ALL] * len(batch)
        if delta:
            counts = _received_counts(group, batch, device, deadline)
        return list(map(staged, batch, counts))

    def staged(message: Message, count: int) -> _Staged:
        if count != ALL:
            num_bytes = changes_bytes(count, message.numel, message.dtype)
            content = torch.empty(num_bytes, dtype=torch.uint8, device=device)
            return _Staged(message, content, copied=True, num_changed=count)
        live = _in_place(message, parameters)
        if live is not None:
            return _Staged(message, live, copied=False)
        return _Staged(
            message, torch.empty(message.numel, dtype=message.dtype, device=device), copied=True
        )

    def finish(staged: _Staged) -> None:
        if staged.num_changed > 0:
            values, copied = read_message(staged.message, parameters)
            write_changes(staged.message, staged.num_changed, staged.values, values)
            if copied:
                unpack(staged.message, values, parameters)
        elif staged.copied and staged.num_changed == ALL:
            unpack(staged.message, staged.values, parameters)

    def begin(batch: list[_Staged]) -> list[dist.Work]:
        return group.start(
            [
                Receive(staged.values, staged.message.peer, staged.message.tag)
                for staged in batch
                if staged.num_changed
            ]
        )

    return Traffic(
        staging_bytes=_move(group, batches, stage, begin, finish, deadline, deadline.seconds)
    )


def _counts(batch: list[_Staged]) -> list[Send]:
    """Returns for each peer a message with the counts of the peer's messages, int32."""
    device = batch[0].values.device
    counts = list[Send]()
    for peer, tag in count_tags([staged.message for staged in batch]).items():
        changed = [staged.num_changed for staged in batch if staged.message.peer == peer]
        counts.append(Send(torch.tensor(changed, dtype=torch.int32, device=device), peer, tag))
    return counts


def _received_counts(
    group: EngineGroup, batch: list[Message], device: torch.device, deadline: Deadline
) -> list[int]:
    """Receives the count of every message of a batch."""
    peers = [message.peer for message in batch]
    counts = {
        peer: Receive(torch.empty(peers.count(peer), dtype=torch.int32, device=device), peer, tag)
        for peer, tag in count_tags(batch).items()
    }
    group.wait(group.start(list(counts.values())), deadline)
    numbers = {peer: iter(count.values.tolist()) for peer, count in counts.items()}
    return [next(numbers[peer]) for peer in peers]


def _move(
    group: EngineGroup,
    batches: Batches,
    stage: Callable[[list[Message]], list[_Staged]],
    begin: Callable[[list[_Staged]], list[dist.Work]],
    finish: Callable[[_Staged], None],
    deadline: Deadline,
    patience_s: float,
) -> int:
    """Moves all batches, at most _IN_FLIGHT at once. Calls `finish` for every message of a batch that
    is done.

    Returns the most bytes that were staged.
    """
    held = most = 0
    flying: deque[tuple[list[dist.Work], list[_Staged]]] = deque()

    def finish_first() -> int:
        works, batch = flying.popleft()
        group.wait(works, deadline.part(patience_s))
        for staged in batch:
            finish(staged)
        return _copied_bytes(batch)

    for batch in batches:
        ready = stage(batch)
        held += _copied_bytes(ready)
        most = max(most, held)
        flying.append((begin(ready), ready))
        while len(flying) >= _IN_FLIGHT:
            held -= finish_first()
    while flying:
        finish_first()
    return most


def _copied_bytes(batch: list[_Staged]) -> int:
    return sum(staged.values.nbytes for staged in batch if staged.copied)


def _in_place(message: Message, parameters: Mapping[str, Tensor]) -> Tensor | None:
    """Returns the live elements themselves [n], None if they must be packed or cast."""
    first = message.slices[0]
    if (
        len(message.slices) > 1
        or not first.contiguous
        or parameters[first.parameter].dtype != message.dtype
    ):
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


def _parts(
    message: Message, values: Tensor, parameters: Mapping[str, Tensor]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields the values of each slice of a message, and the live elements that they belong to."""
    parts = values.split([piece.numel for piece in message.slices])
    for part, piece in zip(parts, message.slices, strict=True):
        yield part.view(piece.size), piece.view(parameters)
