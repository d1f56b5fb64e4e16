"""The changes of a message since it was sent last: values and places of elements, if they are fewer
bytes than all values.

For every message of a batch the sender first sends a count. A message of n elements with `count`
changes travels as that many values, then int32 positions or a mask of n bits, the shorter of the
two. With count 0 it does not travel. With ALL it travels as all values.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megagrpo.weights.digests.digest import INTEGERS
from megagrpo.weights.wire.transfer_messages import Message

if TYPE_CHECKING:
    from megagrpo.weights.wire.moving import Traffic

ALL = -1
_FIRST_COUNT_TAG = 1 << 24  # no link has so many messages
_POSITION = torch.int32


class LastSent:
    """The values that one rank has sent last on one link, in host memory.

    It lives as long as the link, so a restarted engine gets all values.
    """

    def __init__(self) -> None:
        self._bits: dict[tuple[int, int], Tensor] = {}  # [n], by peer and tag of a message

    def update(self, message: Message, values: Tensor, sent: "Traffic") -> tuple[int, Tensor]:
        """Returns the count and content of a message with values [n] that are sent now: the values,
        or changes as uint8 [bytes]. Counts compared elements."""
        bits = _bits(values)
        key = (message.peer, message.tag)
        last = self._bits.get(key)
        if last is None:
            self._bits[key] = bits.to("cpu", copy=True)
            return ALL, values
        differs = bits != last.to(bits.device)
        positions = differs.nonzero()[:, 0]
        count = len(positions)
        sent.compared += message.numel
        sent.changed += count
        if changes_bytes(count, message.numel, message.dtype) >= message.num_bytes:
            last.copy_(bits)
            return ALL, values
        changed = bits[positions]
        last[positions.cpu()] = changed.cpu()
        places = positions.to(_POSITION).view(torch.uint8)
        if not _is_listed(count, message.numel):
            places = _packed(differs)
        return count, torch.cat([changed.view(torch.uint8), places])


def changes_bytes(count: int, numel: int, dtype: torch.dtype) -> int:
    """Returns the bytes of `count` changed elements of `numel`."""
    return count * dtype.itemsize + min(count * _POSITION.itemsize, _mask_bytes(numel))


def write_changes(message: Message, count: int, content: Tensor, values: Tensor) -> None:
    """Writes changed elements, uint8 [bytes], over the last received values [n] of a message."""
    bits = _bits(values)
    split = count * message.dtype.itemsize
    changed = content[:split].view(bits.dtype)
    places = content[split:].clone()  # aligned, unlike the content's part
    if _is_listed(count, message.numel):
        bits[places.view(_POSITION).long()] = changed
    else:
        bits[_unpacked(places, message.numel)] = changed


def count_tags(batch: list[Message]) -> Mapping[int, int]:
    """Returns by peer the tag for the counts of a batch's messages, which no message has."""
    first: dict[int, int] = {}
    for message in batch:
        first.setdefault(message.peer, _FIRST_COUNT_TAG + message.tag)
    return first


def _bits(values: Tensor) -> Tensor:
    """Returns values as integers, which are equal if the bits are, even for NaN and -0.0."""
    return values.detach().view(INTEGERS[values.itemsize])


def _is_listed(count: int, numel: int) -> bool:
    """Returns whether places travel as positions."""
    return count * _POSITION.itemsize <= _mask_bytes(numel)


def _mask_bytes(numel: int) -> int:
    return -(-numel // 8)


def _packed(mask: Tensor) -> Tensor:
    """Returns a mask [n], bool, as uint8 [n / 8], the first element in the lowest bit."""
    bits = torch.nn.functional.pad(mask.to(torch.uint8), (0, -len(mask) % 8)).view(-1, 8)
    return (bits << torch.arange(8, dtype=torch.uint8, device=mask.device)).sum(1).to(torch.uint8)


def _unpacked(packed: Tensor, numel: int) -> Tensor:
    """Inverts _packed."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return (packed[:, None] >> shifts & 1).view(-1)[:numel].bool()
