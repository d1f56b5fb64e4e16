"""Plans a transfer: which trainer rank sends which elements to which engine rank, in which order.

Both sides have recorded which slices of every HF tensor they hold. A transfer is the intersection
of two lists of boxes:

1. `trainer_atoms`: every HF tensor as disjoint boxes, each with all trainer ranks that hold it.
2. `make_cover`: these boxes cut to the slices of an engine's ranks: every element of every engine
   slice once.
3. `plan_transfer`: for every piece one of the trainer ranks that hold it, and a batch. Engines share
   out these ranks.

Every rank computes the same plan from the same lists. No weight is read.
"""

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from math import ceil, prod
from typing import NamedTuple

import numpy as np
import torch

from megagrpo.weights.copies.recorder import Copy, Specs
from megagrpo.weights.copies.views import Box, ByRows, ParameterSlice
from megagrpo.weights.wire.transfer_messages import Message

# a piece of at least this size is a separate message and needs no packing
_UNPACKED_BYTES = 1 << 20
_PIECES_PER_BATCH = 8  # at least, of one rank


@dataclass(frozen=True, slots=True)
class Atom:
    """A box of an HF tensor, cut only where the trainers cut it."""

    copy: Copy  # into the parameters of each of `ranks`
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Cover:
    """All slices of one engine's ranks, in pieces. Arrays have an entry for every piece."""

    sent: list[ParameterSlice]
    received: list[ParameterSlice]
    ranks: list[tuple[int, ...]]  # distinct sets of trainer ranks that hold the same pieces
    dtypes: list[torch.dtype]  # distinct published ones
    holders: np.ndarray  # int64 [pieces], indices into `ranks`
    targets: np.ndarray  # int64 [pieces], engine ranks
    dtype_indices: np.ndarray  # int64 [pieces], indices into `dtypes`
    num_bytes: np.ndarray  # int64 [pieces]

    @cached_property
    def lines(self) -> list[tuple[np.ndarray, tuple[int, ...]]]:
        """Returns the pieces of every set of trainer ranks, ascending, and the set."""
        return [(pieces, self.ranks[self.holders[pieces[0]]]) for pieces in _groups(self.holders)]


@dataclass(frozen=True, eq=False)
class TransferPlan:
    """A transfer into one engine, or into several that get the same pieces from the same ranks.
    Arrays have an entry for every piece of the cover.

    Batch numbers are the same on all ranks. A rank starts its batches in ascending order and never
    waits for a later one, so the earliest unfinished batch can always finish: there is no deadlock.
    """

    cover: Cover
    sources: np.ndarray  # int64 [pieces], trainer ranks
    limit: int  # the most bytes of a rank in a batch

    @cached_property
    def trainers(self) -> list[int]:
        """Returns the trainer ranks that send."""
        return np.unique(self.sources).tolist()

    @cached_property
    def batches(self) -> np.ndarray:
        """Returns the batch of every piece, int64 [pieces]. It takes long, and most ranks send to
        few engines."""
        return _batches(self.cover, self.sources, self.limit)

    @cached_property
    def messages(self) -> np.ndarray:
        """Returns the message of every piece, int64 [pieces], the same numbers on all ranks."""
        return _number_messages(self.cover, self.sources, self.batches)

    def sent_by(self, rank: int) -> dict[int, list[Message]]:
        """Returns the batches that a trainer rank sends, by number; peers are engine ranks."""
        return self._messages(self.sources == rank, self.cover.targets, self.cover.sent)

    def received_by(self, rank: int) -> dict[int, list[Message]]:
        """Returns the batches that an engine rank receives, by number; peers are trainer ranks."""
        return self._messages(self.cover.targets == rank, self.sources, self.cover.received)

    def _messages(
        self, mine: np.ndarray, peers: np.ndarray, slices: list[ParameterSlice]
    ) -> dict[int, list[Message]]:
        tags: Counter[int] = Counter()  # by peer, the next one
        batch_of = self.batches.tolist()
        message_of = self.messages.tolist()
        pieces = np.flatnonzero(mine)
        pieces = pieces[np.lexsort((self.messages[pieces], self.batches[pieces]))]
        batches: dict[int, list[Message]] = {}
        for number, batch in groupby(pieces.tolist(), key=batch_of.__getitem__):
            batches[number] = []
            for _, together in groupby(batch, key=message_of.__getitem__):
                message = list(together)
                peer = int(peers[message[0]])
                dtype = self.cover.dtypes[self.cover.dtype_indices[message[0]]]
                batches[number].append(
                    Message(peer, tags[peer], dtype, tuple(slices[piece] for piece in message))
                )
                tags[peer] += 1
        return batches


def trainer_atoms(everyone: Sequence[Sequence[Copy]], specs: Specs) -> dict[str, list[Atom]]:
    """Cuts every HF tensor into disjoint boxes, each with all trainer ranks that hold it. The same
    result on all ranks.

    everyone: copies by rank; ranks with equal copies may share one list, which saves time. Raises
    ValueError naming an HF tensor with elements that no rank holds.
    """
    alike: dict[int, tuple[Sequence[Copy], list[int]]] = {}
    for rank, copies in enumerate(everyone):
        alike.setdefault(id(copies), (copies, []))[1].append(rank)
    holders: dict[str, dict[Box, dict[Copy, list[int]]]] = {name: {} for name in specs}
    for copies, ranks in alike.values():
        for copy in copies:
            holders[copy.hf].setdefault(copy.box, {}).setdefault(copy, []).extend(ranks)
    atoms: dict[str, list[Atom]] = {}
    for name, (shape, _) in specs.items():
        atoms[name] = []
        near: list[Atom] = []  # that this box, or a later one, may touch
        for box in sorted(holders[name], key=lambda b: (b.start, b.size)):
            rest = [box]
            near = [atom for atom in near if atom.copy.box.rows.stop > box.rows.start]
            for atom in near:
                rest = [piece for r in rest for piece in r.subtract(atom.copy.box)]
            # Of several parameters that hold it (tied weights on two stages), the one that most
            # ranks share.
            copy, ranks = max(
                holders[name][box].items(), key=lambda item: (len(item[1]), -min(item[1]))
            )
            new = [Atom(copy.restrict(piece), tuple(sorted(ranks))) for piece in rest]
            atoms[name] += new
            near += new
        missing = prod(shape) - sum(atom.copy.box.numel for atom in atoms[name])
        if missing:
            raise ValueError(
                f"HF tensor {name} {shape}: no trainer rank holds {missing} of "
                f"its {prod(shape)} elements"
            )
    return atoms


class _Piece(NamedTuple):
    """Elements that travel from one of `ranks` into one engine rank."""

    sent: ParameterSlice
    received: ParameterSlice
    ranks: tuple[int, ...]
    target: int
    dtype: torch.dtype

    def joined(self, other: "_Piece", limit: int) -> "_Piece | None":
        """Returns both as one piece if they are neighbors on both sides and have at most `limit`
        elements."""
        sent = _joined(self.sent, other.sent, limit)
        received = _joined(self.received, other.received, limit)
        if sent is None or received is None or self[2:] != other[2:]:
            return None
        return self._replace(sent=sent, received=received)


def make_cover(
    atoms: Mapping[str, list[Atom]],
    engine: Sequence[Sequence[Copy]],
    specs: Specs,
    piece_bytes: int,
) -> Cover:
    """Returns the pieces of every slice of an engine, in the order of its ranks' memory, none above
    `piece_bytes`.

    engine: copies by rank. specs: with published dtypes. Raises ValueError for a slice that the
    trainers do not hold exactly once.
    """
    pieces: list[_Piece] = []
    held = {name: ByRows((atom.copy.box, atom) for atom in parts) for name, parts in atoms.items()}
    for target, copies in enumerate(engine):
        for copy in sorted(copies, key=lambda c: (c.parameter, c.offset)):
            dtype = specs[copy.hf][1]
            limit = max(piece_bytes // dtype.itemsize, 1)
            for piece in _pieces(copy, held[copy.hf].near(copy.box), target, dtype, limit):
                if pieces and (joined := pieces[-1].joined(piece, limit)):
                    pieces[-1] = joined
                else:
                    pieces.append(piece)
    ranks = list(dict.fromkeys(piece.ranks for piece in pieces))
    rank_index = {holders: index for index, holders in enumerate(ranks)}
    dtypes = list(dict.fromkeys(dtype for _, dtype in specs.values()))
    return Cover(
        sent=[piece.sent for piece in pieces],
        received=[piece.received for piece in pieces],
        ranks=ranks,
        dtypes=dtypes,
        holders=np.array([rank_index[piece.ranks] for piece in pieces], dtype=np.int64),
        targets=np.array([piece.target for piece in pieces], dtype=np.int64),
        dtype_indices=np.array([dtypes.index(piece.dtype) for piece in pieces], dtype=np.int64),
        num_bytes=np.array(
            [piece.sent.numel * piece.dtype.itemsize for piece in pieces], dtype=np.int64
        ),
    )


def _pieces(
    copy: Copy, atoms: Sequence[Atom], target: int, dtype: torch.dtype, limit: int
) -> Iterator[_Piece]:
    """Yields an engine rank's slice in pieces of at most `limit` elements. atoms: all that touch it.
    Raises ValueError for missing elements."""
    held = 0
    for atom in atoms:
        if common := atom.copy.box.intersect(copy.box):
            for box in common.split(limit):
                held += box.numel
                sent = atom.copy.restrict(box)
                received = copy.restrict(box)
                yield _Piece(sent.target, received.target, atom.ranks, target, dtype)
    if held != copy.box.numel:
        raise ValueError(
            f"{copy.source}: the trainers hold {held} of its {copy.box.numel} elements"
        )


class Nearness(NamedTuple):
    """Which trainer ranks are near an engine's ranks."""

    carriers: Sequence[int]  # by engine rank, the trainer rank on its GPU
    nodes: Sequence[Hashable]  # by trainer rank

    def best_of(self, ranks: tuple[int, ...], target: int) -> tuple[int, ...]:
        """Returns the ranks that are nearest to an engine rank: the carrier, else those of the
        node, else all."""
        carrier = self.carriers[target]
        if carrier in ranks:
            return (carrier,)
        return tuple(rank for rank in ranks if self.nodes[rank] == self.nodes[carrier]) or ranks


def plan_transfer(
    cover: Cover, slot: int, slots: int, bucket_bytes: int, near: Nearness | None = None
) -> TransferPlan:
    """Returns the transfer into engine number `slot` of `slots` with the same slices.

    near: where the engine's ranks are, so that the nearest holders send. bucket_bytes: the most that
    a rank stages, for two batches in flight and all engines to which it sends concurrently. For
    each set of trainer ranks, the pieces of all engines form one line that is cut into equal parts,
    one per rank. So the ranks send equal amounts, each to as few engines as possible.
    """
    sources = np.zeros(len(cover.sent), dtype=np.int64)
    for pieces, ranks in _lines(cover, near):
        size = cover.num_bytes[pieces]
        along = (np.cumsum(size) - size / 2) / size.sum()  # of each piece's middle, within (0, 1)
        sources[pieces] = np.array(ranks)[
            ((slot % slots + along) / slots * len(ranks)).astype(np.int64)
        ]
    engines_per_rank = ceil(slots / min(map(len, cover.ranks), default=slots))
    if near is not None:  # and the engines of its node
        engines_per_rank = min(slots, engines_per_rank + ceil(slots / len(set(near.nodes))))
    return TransferPlan(cover, sources, bucket_bytes // (2 * engines_per_rank))


def _lines(cover: Cover, near: Nearness | None) -> Iterable[tuple[np.ndarray, tuple[int, ...]]]:
    """Returns the pieces of every line, ascending, and the ranks that share it. With `near` every
    engine rank has a line."""
    if near is None:
        return cover.lines
    targets = int(cover.targets.max(initial=0)) + 1
    return (
        (
            pieces,
            near.best_of(cover.ranks[cover.holders[pieces[0]]], int(cover.targets[pieces[0]])),
        )
        for pieces in _groups(cover.holders * targets + cover.targets)
    )


def _groups(keys: np.ndarray) -> Iterable[np.ndarray]:
    """Returns the indices of equal keys, ascending, by key."""
    order = np.argsort(keys, kind="stable")
    return filter(len, np.split(order, np.flatnonzero(np.diff(keys[order])) + 1))


def _batches(cover: Cover, sources: np.ndarray, limit: int) -> np.ndarray:
    """Returns the earliest batch of every piece, int64 [pieces], such that no rank has over `limit`
    bytes per batch."""
    # each pair's progress before the piece is sent, within [0, 1), so that all pairs advance together
    progress = np.zeros(len(sources))
    for pair in _groups(_pairs(cover, sources)):
        size = cover.num_bytes[pair]
        progress[pair] = (np.cumsum(size) - size) / size.sum()
    batches = np.zeros(len(sources), dtype=np.int64)
    # by side and rank: the last batch and the bytes in it
    last: dict[tuple[str, int], tuple[int, int]] = {}
    ends = list(
        zip(sources.tolist(), cover.targets.tolist(), cover.num_bytes.tolist(), strict=True)
    )
    for piece in np.argsort(progress, kind="stable").tolist():
        source, target, size = ends[piece]
        keys = ("trainer", source), ("engine", target)
        states = [last.get(key, (0, 0)) for key in keys]
        batch = max(number for number, _ in states)
        filled = [num_bytes * (number == batch) for number, num_bytes in states]
        if max(filled) and max(filled) + size > limit:
            batch = batch + 1
            filled = [0, 0]
        for key, num_bytes in zip(keys, filled, strict=True):
            last[key] = (batch, num_bytes + size)
        batches[piece] = batch
    return batches


def _number_messages(cover: Cover, sources: np.ndarray, batches: np.ndarray) -> np.ndarray:
    """Returns the message of every piece, int64 [pieces]: one per large piece, else one per pair,
    batch and dtype."""
    num_pieces = len(sources)
    together = _pairs(cover, sources) * (int(batches.max(initial=0)) + 1) + batches
    together = together * len(cover.dtypes) + cover.dtype_indices
    unpacked = np.where(cover.num_bytes >= _UNPACKED_BYTES, np.arange(num_pieces) + 1, 0)
    return np.unique(together * (num_pieces + 1) + unpacked, return_inverse=True)[1].reshape(-1)


def _pairs(cover: Cover, sources: np.ndarray) -> np.ndarray:
    """Returns the number of each piece's source and target, int64 [pieces]."""
    return sources * (int(cover.targets.max(initial=0)) + 1) + cover.targets


def piece_limit(bucket_bytes: int) -> int:
    """Returns the most bytes of a piece, so that several fit into a batch of any rank."""
    return max(bucket_bytes // (2 * _PIECES_PER_BATCH), 1)


def _joined(first: ParameterSlice, second: ParameterSlice, limit: int) -> ParameterSlice | None:
    """Returns two slices as one run of memory, None if they are not adjacent or exceed `limit`
    elements."""
    numel = first.numel + second.numel
    start = first.parameter, first.offset + first.numel
    if start != (second.parameter, second.offset) or numel > limit:
        return None
    if not (first.contiguous and second.contiguous):
        return None
    return ParameterSlice(first.parameter, first.offset, (numel,), (1,))
