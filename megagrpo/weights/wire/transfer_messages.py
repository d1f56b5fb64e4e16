"""Messages of a transfer, and the requests that start it on an engine's ranks."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import NotRequired, TypedDict

import torch

from megagrpo.weights.copies.views import ParameterSlice, tuples


@dataclass(frozen=True, slots=True)
class Message:
    """Values that travel together between two ranks: the elements of `slices`, in order."""

    peer: int
    tag: int  # the number of the message between these two ranks
    dtype: torch.dtype  # in which they travel
    slices: tuple[ParameterSlice, ...]

    @property
    def numel(self) -> int:
        return sum(part.numel for part in self.slices)

    @property
    def num_bytes(self) -> int:
        return self.numel * self.dtype.itemsize


Batches = list[list[Message]]  # of one rank, in the order in which they travel


class ReceiveRequest(TypedDict):
    """Makes one engine rank receive its slices, through a shared buffer if it has `memory`, else in a
    process group."""

    group: str  # name of the link
    plan: str  # mailbox key of the encoded batches, which a new link reads
    left_s: float  # for the whole transfer
    delta: NotRequired[bool]  # counts come before each batch; see changes.py
    memory: NotRequired[str]  # key of the handover in the store
    rank: NotRequired[int]  # in the group, in which trainers come first
    size: NotRequired[int]  # of the group
    num_ranks: NotRequired[int]  # of the engine
    join_s: NotRequired[float]  # for all ranks of the group to meet
    max_ctas: NotRequired[int]  # of NCCL


def encode_batches(batches: Iterable[Sequence[Message]], ranks: Mapping[int, int]) -> list:
    """Returns the batches of an engine rank as JSON can express them. ranks: trainer rank -> rank
    in the group."""
    return [
        [
            (
                ranks[m.peer],
                m.tag,
                str(m.dtype).removeprefix("torch."),
                [astuple(part) for part in m.slices],
            )
            for m in batch
        ]
        for batch in batches
    ]


def decode_batches(encoded: list) -> Batches:
    """Returns the batches that encode_batches encoded."""

    return [
        [
            Message(
                peer,
                tag,
                getattr(torch, dtype),
                tuple(ParameterSlice(*tuples(part)) for part in parts),
            )
            for peer, tag, dtype, parts in batch
        ]
        for batch in encoded
    ]
