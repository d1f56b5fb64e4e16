"""What of a message has changed since it was sent last: values and places of elements, if these are
fewer bytes.

A sender counts, for every message of a batch, the elements that follow. A message of n elements of
which `count` have changed travels as that many values, then int32 positions or a mask of n bits,
the shorter of the two; one with count 0 not at all; one with ALL as all its values.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from megagrpo.weights.wire.messages import Message

ALL = -1
_FIRST_COUNT_TAG = 1 << 24  # no link has so many messages
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
        """Returns count and content of a message whose values [n] are sent now: those, or changes
        as uint8 [bytes]."""
        bits = _bits(values)
        key = (message.peer, message.tag)
        last = self._bits.get(key)
        if last is None:
            self._bits[key] = bits.to("cpu", copy=True)
            return ALL, values
        differs = bits != last.to(bits.device)
        positions = differs.nonzero()[:, 0]
        count = len(positions)
        self.compared += message.numel
        self.changed += count
        if changes_bytes(count, message.numel, message.dtype) >= message.num_bytes:
            last.copy_(bits)
            return ALL, values
        changed = bits[positions]
        last[positions.cpu()] = changed.cpu()
        listed = _is_listed(count, message.numel)
        places = positions.to(_POSITION).view(torch.uint8) if listed else _packed(differs)
        return count, torch.cat([changed.view(torch.uint8), places])

    def counted(self) -> tuple[int, int]:
        """Returns how many elements were compared, and how many of them had changed, since the last
        call."""
        found = (self.compared, self.changed)
        self.compared = 0
        self.changed = 0
        return found


def changes_bytes(count: int, numel: int, dtype: torch.dtype) -> int:
    """Returns the bytes of `count` changed elements of `numel`."""
    return count * dtype.itemsize + (
        count * _POSITION.itemsize if _is_listed(count, numel) else _mask_bytes(numel)
    )


def write_changes(message: Message, count: int, content: Tensor, values: Tensor) -> None:
    """Writes changed elements, uint8 [bytes], over the values [n] of a message as it was received
    before."""
    bits = _bits(values)
    split = count * message.dtype.itemsize
    changed = content[:split].view(bits.dtype)
    places = content[split:].clone()  # whose memory begins anywhere
    listed = _is_listed(count, message.numel)
    bits[places.view(_POSITION).long() if listed else _unpacked(places, message.numel)] = changed


def count_tags(batch: list[Message]) -> Mapping[int, int]:
    """Returns, by peer, the tag of the counts of its messages in a batch, which no message has."""
    first: dict[int, int] = {}
    for message in batch:
        first.setdefault(message.peer, _FIRST_COUNT_TAG + message.tag)
    return first


def _bits(values: Tensor) -> Tensor:
    """Returns values as integers: equal bits are equal, of NaN and of -0.0 too."""
    return values.detach().view(_BITS[values.itemsize])


def _is_listed(count: int, numel: int) -> bool:
    """Returns whether places travel as positions."""
    return count * _POSITION.itemsize <= _mask_bytes(numel)


def _mask_bytes(numel: int) -> int:
    return -(-numel // 8)


def _packed(mask: Tensor) -> Tensor:
    """Returns a mask [n], bool, as uint8 [n / 8], the first element in the lowest bit."""
    whole = torch.nn.functional.pad(mask.to(torch.uint8), (0, -len(mask) % 8)).view(-1, 8)
    return (whole << torch.arange(8, dtype=torch.uint8, device=mask.device)).sum(1).to(torch.uint8)


def _unpacked(packed: Tensor, numel: int) -> Tensor:
    """Inverts _packed."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return (packed[:, None] >> shifts & 1).view(-1)[:numel].bool()
