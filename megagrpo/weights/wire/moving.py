"""Both ends of a transfer: batches are packed from live parameters and unpacked into live parameters."""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megagrpo.weights.wire.clock import Deadline
from megagrpo.weights.wire.group import EngineGroup, Receive, Send
from megagrpo.weights.wire.messages import Batches, Message

_IN_FLIGHT = 2  # batches: one is packed or unpacked while the other is on the wire


@dataclass
class Traffic:
    """What one rank sent, or several together."""

    wire_bytes: int = 0  # that left the rank, once for every receiver
    messages: int = 0
    staging_bytes: int = 0  # held at most beside the parameters, on either end

    def add(self, other: "Traffic") -> None:
        """Adds traffic of another rank or time; its staging memory is not part of this rank's."""
        self.wire_bytes += other.wire_bytes
        self.messages += other.messages
        self.staging_bytes = max(self.staging_bytes, other.staging_bytes)


def send_batches(
    group: EngineGroup,
    batches: Batches,
    parameters: Mapping[str, Tensor],
    deadline: Deadline,
    patience_s: float,
) -> Traffic:
    """Sends this rank's batches, each message cast to its dtype.

    Raises PeerLost when one is not taken within patience_s, or by the deadline of all.
    """
    traffic = Traffic()
    flying = _Flying(group, deadline, patience_s)
    for batch in batches:
        sends = []
        for message in batch:
            values, staged = read_message(message, parameters)
            sends.append(Send(values, message.peer, message.tag))
            flying.hold(values.nbytes if staged else 0)
            traffic.wire_bytes += values.nbytes
        traffic.messages += len(batch)
        flying.start(sends, lambda: None)
    flying.finish()
    traffic.staging_bytes = flying.most_bytes
    return traffic


def receive_batches(
    group: EngineGroup,
    batches: Batches,
    parameters: Mapping[str, Tensor],
    deadline: Deadline,
    patience_s: float,
) -> Traffic:
    """Writes this rank's batches into the parameters. Raises PeerLost as send_batches does."""
    flying = _Flying(group, deadline, patience_s)
    device = next(iter(parameters.values())).device
    for batch in batches:
        receives, unpacks = [], []
        for message in batch:
            values = _in_place(message, parameters)
            if values is None:
                values = torch.empty(message.numel, dtype=message.dtype, device=device)
                unpacks.append((message, values))
                flying.hold(values.nbytes)
            receives.append(Receive(values, message.peer, message.tag))

        def write(unpacks: list[tuple[Message, Tensor]] = unpacks) -> None:
            for message, values in unpacks:
                unpack(message, values, parameters)

        flying.start(receives, write)
    flying.finish()
    return Traffic(staging_bytes=flying.most_bytes)


class _Flying:
    """Batches on the wire, at most _IN_FLIGHT of them, and what is staged for them."""

    def __init__(self, group: EngineGroup, deadline: Deadline, patience_s: float):
        self._group, self._deadline, self._patience_s = group, deadline, patience_s
        self._batches: deque[tuple[list, list, Callable[[], None], int]] = deque()
        self._next_bytes = self._bytes = 0
        self.most_bytes = 0

    def hold(self, num_bytes: int) -> None:
        """Counts what is staged for the batch that starts next."""
        self._next_bytes += num_bytes
        self.most_bytes = max(self.most_bytes, self._bytes + self._next_bytes)

    def start(self, messages: list, then: Callable[[], None]) -> None:
        """Starts a batch, and finishes earlier ones until there is room for the next one. `then` follows its end."""
        self._batches.append((self._group.start(messages), messages, then, self._next_bytes))
        self._bytes, self._next_bytes = self._bytes + self._next_bytes, 0
        while len(self._batches) >= _IN_FLIGHT:
            self._finish_one()

    def finish(self) -> None:
        """Waits for all."""
        while self._batches:
            self._finish_one()

    def _finish_one(self) -> None:
        works, _, then, num_bytes = self._batches.popleft()  # the messages hold the staged tensors until here
        self._group.wait(works, self._deadline.part(self._patience_s))
        then()
        self._bytes -= num_bytes


def _in_place(message: Message, parameters: Mapping[str, Tensor]) -> Tensor | None:
    """Returns the live elements themselves [n], None where they must be packed or cast."""
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
    _each(message, values, parameters, lambda part, live: part.copy_(live))


def unpack(message: Message, values: Tensor, parameters: Mapping[str, Tensor]) -> None:
    """Copies values [n] of a message into the live elements that they belong to."""
    _each(message, values, parameters, lambda part, live: live.copy_(part))


def _each(
    message: Message, values: Tensor, parameters: Mapping[str, Tensor], copy: Callable[[Tensor, Tensor], object]
) -> None:
    """Copies between the parts of a message [n] and the live elements that they belong to."""
    parts = values.split([live.numel for live in message.slices])
    for part, live in zip(parts, message.slices, strict=True):
        copy(part.view(live.size), live.view(parameters))
