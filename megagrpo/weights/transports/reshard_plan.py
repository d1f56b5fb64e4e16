"""Plans a transfer: which trainer rank sends which elements to which engine rank, in which order.

Both sides have recorded which slices of every HF tensor they hold; a transfer is the intersection
of two box lists:

1. `trainer_atoms`: every HF tensor as disjoint boxes, each with all trainer ranks that hold it.
2. `make_cover`: those boxes cut to what the ranks of an engine need: every element of every engine
   slice once.
3. `plan_transfer`: one of its holders for every piece, and a batch to travel in. Engines share out
   the holders.

Every rank computes the same plan from the same lists; no weight is read.
"""

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import ceil, prod
from typing import NamedTuple

import numpy as np
import torch

from megagrpo.weights.copies.record import Copy, Specs
from megagrpo.weights.copies.views import Box, ParameterSlice
from megagrpo.weights.wire.messages import Message

# a piece of at least this size is a message of its own and needs no packing
_UNPACKED_BYTES = 1 << 20
_PIECES_A_BATCH = 8  # at least, of one rank


@dataclass(frozen=True, slots=True)
class Atom:
    """A box of an HF tensor, cut no finer than the trainers cut it."""

    copy: Copy  # into the parameters of each of `ranks`
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Cover:
    """All slices of the ranks of one engine, in pieces. Arrays have an entry for every piece."""

    sent: list[ParameterSlice]
    received: list[ParameterSlice]
    ranks: list[tuple[int, ...]]  # distinct sets of trainer ranks that hold the same pieces
    dtypes: list[torch.dtype]  # distinct published ones
    holders: np.ndarray  # int64 [pieces], indices into `ranks`
    targets: np.ndarray  # int64 [pieces], engine ranks
    dtype_indices: np.ndarray  # int64 [pieces], indices into `dtypes`
    num_bytes: np.ndarray  # int64 [pieces]

    @property
    def total_bytes(self) -> int:
        """Returns the bytes of all elements that the engine needs, the lower bound of any
        transfer."""
        return int(self.num_bytes.sum())


@dataclass(frozen=True)
class TransferPlan:
    """A whole transfer into one engine. Arrays have an entry for every piece of the cover.

    Batch numbers are the same on all ranks. A rank starts its batches in ascending order and never
    waits for a later one, so the earliest unfinished batch can always finish: there is no deadlock.
    """

    cover: Cover
    sources: np.ndarray  # int64 [pieces], trainer ranks
    batches: np.ndarray  # int64 [pieces]
    messages: np.ndarray  # int64 [pieces], the same numbers on all ranks

    @property
    def trainers(self) -> list[int]:
        """Returns the trainer ranks that send."""
        return np.unique(self.sources).tolist()

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
        for box in sorted(holders[name], key=lambda b: (b.start, b.size)):
            rest = [box]
            for atom in atoms[name]:
                rest = [piece for r in rest for piece in r.subtract(atom.copy.box)]
            # Of several parameters that hold it (tied weights on two stages), the one that most
            # ranks share.
            copy, ranks = max(
                holders[name][box].items(), key=lambda item: (len(item[1]), -min(item[1]))
            )
            atoms[name] += [Atom(copy.restrict(piece), tuple(sorted(ranks))) for piece in rest]
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
        received = _joined(self.received, other.received, limit) if sent is not None else None
        alike = (self.ranks, self.target, self.dtype) == (other.ranks, other.target, other.dtype)
        return self._replace(sent=sent, received=received) if sent and received and alike else None


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
    for target, copies in enumerate(engine):
        for copy in sorted(copies, key=lambda c: (c.parameter, c.offset)):
            dtype = specs[copy.hf][1]
            limit = max(piece_bytes // dtype.itemsize, 1)
            for piece in _pieces(copy, atoms[copy.hf], target, dtype, limit):
                if pieces and (joined := pieces[-1].joined(piece, limit)):
                    pieces[-1] = joined
                else:
                    pieces.append(piece)
    ranks = list(dict.fromkeys(piece.ranks for piece in pieces))
    dtypes = list(dict.fromkeys(dtype for _, dtype in specs.values()))
    rank_index = {each: index for index, each in enumerate(ranks)}
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
    """Yields a slice of an engine rank in pieces of at most `limit` elements. Raises ValueError for
    missing ones."""
    found = 0
    for atom in atoms:
        common = atom.copy.box.intersect(copy.box)
        for box in common.split(limit) if common is not None else ():
            found += box.numel
            yield _Piece(
                atom.copy.restrict(box).target, copy.restrict(box).target, atom.ranks, target, dtype
            )
    if found != copy.box.numel:
        raise ValueError(
            f"{copy.source}: the trainers hold {found} of its {copy.box.numel} elements"
        )


class Nearness(NamedTuple):
    """Which trainer ranks are near an engine's ranks."""

    carriers: Sequence[int]  # by engine rank, the trainer rank on its GPU
    nodes: Sequence[Hashable]  # by trainer rank

    def best_of(self, ranks: tuple[int, ...], target: int) -> tuple[int, ...]:
        """Returns the nearest of `ranks` to an engine rank: its carrier, else those of its node,
        else all."""
        carrier = self.carriers[target]
        if carrier in ranks:
            return (carrier,)
        return tuple(rank for rank in ranks if self.nodes[rank] == self.nodes[carrier]) or ranks


def plan_transfer(
    cover: Cover, slot: int, slots: int, bucket_bytes: int, near: Nearness | None = None
) -> TransferPlan:
    """Returns the transfer into engine number `slot` of `slots` with the same slices.

    near: where the engine's ranks are; the nearest holders send. bucket_bytes: the most that a rank
    stages, over two batches in flight and all engines that it serves concurrently. For each set of
    trainer ranks, the pieces of all engines form one line, cut into equal parts, one per rank: the
    ranks send equal amounts, each to as few engines as possible.
    """
    sources = np.zeros(len(cover.sent), dtype=np.int64)
    for pieces, ranks in _lines(cover, near):
        size = cover.num_bytes[pieces]
        along = (np.cumsum(size) - size / 2) / size.sum()  # of each piece's middle, within (0, 1)
        sources[pieces] = np.array(ranks)[
            ((slot % slots + along) / slots * len(ranks)).astype(np.int64)
        ]
    engines_a_rank = ceil(slots / min(map(len, cover.ranks))) if cover.ranks else 1
    if near is not None:  # and those of its own node
        engines_a_rank = min(slots, engines_a_rank + ceil(slots / len(set(near.nodes))))
    batches = _batches(cover, sources, bucket_bytes // (2 * engines_a_rank))
    return TransferPlan(cover, sources, batches, _number_messages(cover, sources, batches))


def _lines(cover: Cover, near: Nearness | None) -> Iterator[tuple[np.ndarray, tuple[int, ...]]]:
    """Yields the pieces of every line, ascending, and the ranks that share it; with `near` one for
    each engine rank."""
    targets = np.zeros_like(cover.targets) if near is None else cover.targets
    order = np.lexsort((targets, cover.holders))  # stable: pieces stay in order
    changes = (np.diff(cover.holders[order]) != 0) | (np.diff(targets[order]) != 0)
    for pieces in np.split(order, np.flatnonzero(changes) + 1) if len(order) else ():
        ranks = cover.ranks[cover.holders[pieces[0]]]
        yield pieces, ranks if near is None else near.best_of(ranks, int(cover.targets[pieces[0]]))


def _batches(cover: Cover, sources: np.ndarray, limit: int) -> np.ndarray:
    """Returns the earliest batch of every piece, int64 [pieces], such that no rank has over `limit`
    bytes a batch."""
    pairs = sources * (int(cover.targets.max(initial=0)) + 1) + cover.targets
    # of its pair before a piece is sent, within [0, 1): all pairs advance together
    progress = np.zeros(len(sources))
    order = np.argsort(pairs, kind="stable")
    for pair in np.split(order, np.flatnonzero(np.diff(pairs[order])) + 1) if len(order) else ():
        size = cover.num_bytes[pair]
        progress[pair] = (np.cumsum(size) - size) / size.sum()
    batches = np.zeros(len(sources), dtype=np.int64)
    # by side and rank: its last batch and the bytes in it
    last: dict[tuple[str, int], tuple[int, int]] = {}
    ends = list(
        zip(sources.tolist(), cover.targets.tolist(), cover.num_bytes.tolist(), strict=True)
    )
    for piece in np.lexsort((np.arange(len(ends)), progress)).tolist():
        source, target, size = ends[piece]
        keys = ("trainer", source), ("engine", target)
        states = [last.get(key, (0, 0)) for key in keys]
        batch = max(number for number, _ in states)
        filled = [num_bytes if number == batch else 0 for number, num_bytes in states]
        if max(filled) and max(filled) + size > limit:
            batch = batch + 1
            filled = [0, 0]
        for key, num_bytes in zip(keys, filled, strict=True):
            last[key] = (batch, num_bytes + size)
        batches[piece] = batch
    return batches


def _number_messages(cover: Cover, sources: np.ndarray, batches: np.ndarray) -> np.ndarray:
    """Returns the message of every piece, int64 [pieces]: one per large piece, else per pair, batch
    and dtype."""
    num_pieces = len(sources)
    pairs = sources * (int(cover.targets.max(initial=0)) + 1) + cover.targets
    together = (pairs * (int(batches.max(initial=0)) + 1) + batches) * len(
        cover.dtypes
    ) + cover.dtype_indices
    unpacked = np.where(cover.num_bytes >= _UNPACKED_BYTES, np.arange(num_pieces) + 1, 0)
    return np.unique(together * (num_pieces + 1) + unpacked, return_inverse=True)[1].reshape(-1)


def piece_limit(bucket_bytes: int) -> int:
    """Returns the most bytes of a piece, so that a batch of any rank has room for several."""
    return max(bucket_bytes // (2 * _PIECES_A_BATCH), 1)


def _joined(first: ParameterSlice, second: ParameterSlice, limit: int) -> ParameterSlice | None:
    """Returns two slices as one run of memory, None if they are not adjacent or exceed `limit`
    elements."""
    numel = first.numel + second.numel
    follows = second.offset == first.offset + first.numel
    if first.parameter != second.parameter or not follows or numel > limit:
        return None
    return (
        ParameterSlice(first.parameter, first.offset, (numel,), (1,))
        if first.contiguous and second.contiguous
        else None
    )
