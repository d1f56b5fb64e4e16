"""What of a message has changed since it was sent last: positions and values of elements, if these are fewer bytes.

A sender counts, for every message of a batch, the elements that follow. A message of which `count` elements follow
travels as that many int32 positions and as many values; one with count 0 not at all; one with ALL as all its values.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from megagrpo.weights.wire.messages import Message

ALL = -1
_POSITION = torch.int32
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element


class LastSent:
    """The values that one rank has sent last on one link, in host memory.

    It holds as long as the link: an engine that starts again gets all.
    """

    def __init__(self) -> None:
        self._bits: dict[tuple[int, int], Tensor] = {}  # [n], by peer and tag of a message
        self.compared = self.changed = 0  # elements, since the last `counted`

    def update(self, message: Message, values: Tensor) -> tuple[int, Tensor]:
        """Returns count and content of a message whose values [n] are sent now: those, or changes as uint8 [bytes]."""
        bits, key = _bits(values), (message.peer, message.tag)
        last = self._bits.get(key)
        if last is None:
            self._bits[key] = bits.to("cpu", copy=True)
            return ALL, values
        positions = (bits != last.to(bits.device)).nonzero()[:, 0]
        count = len(positions)
        self.compared += message.numel
        self.changed += count
        if changes_bytes(count, message.dtype) >= message.num_bytes:
            last.copy_(bits)
            return ALL, values
        changed = bits[positions]
        last[positions.cpu()] = changed.cpu()
        return count, torch.cat([positions.to(_POSITION).view(torch.uint8), changed.view(torch.uint8)])

    def counted(self) -> tuple[int, int]:
        """Returns how many elements were compared, and how many of them had changed, since the last call."""
        found, self.compared, self.changed = (self.compared, self.changed), 0, 0
        return found


def changes_bytes(count: int, dtype: torch.dtype) -> int:
    """Returns the bytes of `count` changed elements."""
    return count * (_POSITION.itemsize + dtype.itemsize)


def write_changes(message: Message, count: int, content: Tensor, values: Tensor) -> None:
    """Writes changed elements, uint8 [bytes], over the values [n] of a message as it was received before."""
    positions, changed = content.split([count * _POSITION.itemsize, count * message.dtype.itemsize])
    bits = _bits(values)
    bits[positions.view(_POSITION).long()] = changed.view(bits.dtype)


def count_tags(batch: list[Message]) -> Mapping[int, int]:
    """Returns, by peer, the tag of the counts of its messages in a batch, which no message has."""
    first: dict[int, int] = {}
    for message in batch:
        first.setdefault(message.peer, _FIRST_COUNT_TAG + message.tag)
    return first


_FIRST_COUNT_TAG = 1 << 24  # no link has so many messages


def _bits(values: Tensor) -> Tensor:
    """Returns values as integers: equal bits are equal, of NaN and of -0.0 too."""
    return values.detach().view(_BITS[values.itemsize])
