"""Which trainer rank sends which elements into which engine rank's parameters, and in which order.

Both sides have recorded what they hold of every HF tensor, so a transfer is the intersection of two lists of boxes:

1. `trainer_atoms`: every HF tensor as disjoint boxes, each with all trainer ranks that hold it.
2. `make_cover`: those boxes cut to what the ranks of an engine need: every element of every engine slice once.
3. `plan_transfer`: one of its holders for every piece, and a batch to travel in. Engines share out the holders.

All of it is computed alike on every rank, from the same lists; nothing here looks at a weight.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from math import ceil, prod

import numpy as np
import torch

from megagrpo.weights.copies.record import Copy, Specs
from megagrpo.weights.copies.views import Box, Place

_ALONE_BYTES = 1 << 20  # from this size on a piece is a message of its own, which needs no packing
_PIECES_A_BATCH = 8  # at least, of one rank


@dataclass(frozen=True, slots=True)
class Atom:
    """A box of an HF tensor, cut no finer than the trainers cut it. `copy`: its place in each of `ranks`."""

    copy: Copy
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Message:
    """What travels at once between two ranks: the elements of `places`, one after the other. `tag`: its number."""

    peer: int
    tag: int
    dtype: torch.dtype  # in which they travel
    places: tuple[Place, ...]

    @property
    def numel(self) -> int:
        """Returns the number of elements."""
        return sum(place.numel for place in self.places)

    @property
    def num_bytes(self) -> int:
        """Returns the bytes on the wire."""
        return self.numel * self.dtype.itemsize


Batches = list[list[Message]]  # of one rank, in the order in which they travel


@dataclass(frozen=True)
class Cover:
    """Pieces that together are what the ranks of one engine hold. Arrays have an entry for every piece.

    holders: place in `ranks` of the trainer ranks that have the piece. targets: the engine rank that needs it. kinds:
    place in `dtypes` of its published dtype.
    """

    sent: list[Place]
    received: list[Place]
    ranks: list[tuple[int, ...]]
    dtypes: list[torch.dtype]
    holders: np.ndarray  # int64 [pieces]
    targets: np.ndarray  # int64 [pieces]
    kinds: np.ndarray  # int64 [pieces]
    num_bytes: np.ndarray  # int64 [pieces]

    @property
    def total_bytes(self) -> int:
        """Returns the bytes of all elements that the engine needs: no transfer can move less."""
        return int(self.num_bytes.sum())


@dataclass(frozen=True)
class TransferPlan:
    """A whole transfer into one engine. Arrays have an entry for every piece of the cover.

    Batches are numbered alike on all ranks. A rank starts those that it takes part in one after the other and never
    waits for a later one, so the earliest unfinished batch can always finish: there is no deadlock.
    """

    cover: Cover
    sources: np.ndarray  # int64 [pieces], trainer ranks
    batches: np.ndarray  # int64 [pieces]
    messages: np.ndarray  # int64 [pieces], numbered alike on all ranks

    @property
    def trainers(self) -> list[int]:
        """Returns the trainer ranks that take part."""
        return np.unique(self.sources).tolist()

    def traffic(self, world: int, tp: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns bytes and messages of every pair, int64 [trainer ranks, engine ranks]."""
        pairs = self.sources * tp + self.cover.targets
        first = np.unique(self.messages, return_index=True)[1]  # of each message its first piece
        num_bytes = np.bincount(pairs, self.cover.num_bytes, world * tp).astype(np.int64)
        return num_bytes.reshape(world, tp), np.bincount(pairs[first], minlength=world * tp).reshape(world, tp)

    def sent_by(self, rank: int) -> Batches:
        """Returns what a trainer rank sends, to which engine ranks."""
        return list(self.numbered_sent_by(rank).values())

    def received_by(self, rank: int) -> Batches:
        """Returns what an engine rank receives, from which trainer ranks."""
        return list(self.numbered_received_by(rank).values())

    def numbered_sent_by(self, rank: int) -> dict[int, list[Message]]:
        """Returns what sent_by does, by the number of the batch."""
        return self._messages(self.sources == rank, self.cover.targets, self.cover.sent)

    def numbered_received_by(self, rank: int) -> dict[int, list[Message]]:
        """Returns what received_by does, by the number of the batch."""
        return self._messages(self.cover.targets == rank, self.sources, self.cover.received)

    def _messages(self, mine: np.ndarray, peers: np.ndarray, places: list[Place]) -> dict[int, list[Message]]:
        tags: Counter[int] = Counter()  # by peer, the next one
        batch_of, message_of = self.batches.tolist(), self.messages.tolist()
        pieces = np.flatnonzero(mine)
        pieces = pieces[np.lexsort((self.messages[pieces], self.batches[pieces]))]
        batches: dict[int, list[Message]] = {}
        for number, batch in groupby(pieces.tolist(), key=batch_of.__getitem__):
            batches[number] = []
            for _, together in groupby(batch, key=message_of.__getitem__):
                message = list(together)
                peer = int(peers[message[0]])
                dtype = self.cover.dtypes[self.cover.kinds[message[0]]]
                batches[number].append(Message(peer, tags[peer], dtype, tuple(places[piece] for piece in message)))
                tags[peer] += 1
        return batches


def trainer_atoms(everyone: Sequence[Sequence[Copy]], specs: Specs) -> dict[str, list[Atom]]:
    """Cuts every HF tensor into disjoint boxes, each with all trainer ranks that hold it. The same result on all ranks.

    everyone: the copies of every rank, by rank; ranks that hold the same may share one list, which saves time. Raises
    ValueError naming an HF tensor of which no rank holds some elements.
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
            # Of several places that it has (tied weights on two stages), the one that most ranks share.
            copy, ranks = max(holders[name][box].items(), key=lambda item: (len(item[1]), -min(item[1])))
            atoms[name] += [Atom(copy.restrict(piece), tuple(sorted(ranks))) for piece in rest]
        missing = prod(shape) - sum(atom.copy.box.numel for atom in atoms[name])
        if missing:
            raise ValueError(f"HF tensor {name} {shape}: no trainer rank holds {missing} of its {prod(shape)} elements")
    return atoms


def make_cover(
    atoms: Mapping[str, list[Atom]], engine: Sequence[Sequence[Copy]], specs: Specs, piece_bytes: int
) -> Cover:
    """Returns the pieces of every slice of an engine, in the order of its ranks' memory, none above `piece_bytes`.

    engine: what it copies, by rank. specs: with published dtypes. Raises ValueError for a slice whose elements are not
    all there exactly once.
    """
    sent: list[Place] = []
    received: list[Place] = []
    holders: list[int] = []
    targets: list[int] = []
    kinds: list[int] = []
    dtypes = list(dict.fromkeys(dtype for _, dtype in specs.values()))
    numbers: dict[tuple[int, ...], int] = {}  # of sets of trainer ranks
    for target, copies in enumerate(engine):
        first = len(sent)
        for copy in sorted(copies, key=lambda c: (c.parameter, c.offset)):
            found, dtype = 0, specs[copy.hf][1]
            limit, kind = max(piece_bytes // dtype.itemsize, 1), dtypes.index(dtype)
            for atom in atoms[copy.hf]:
                common = atom.copy.box.intersect(copy.box)
                for box in _split(common, limit) if common is not None else ():
                    found += box.numel
                    holder = numbers.setdefault(atom.ranks, len(numbers))
                    ours, theirs = atom.copy.restrict(box).place, copy.restrict(box).place
                    if len(sent) > first and holders[-1] == holder and kinds[-1] == kind:
                        joined = _joined(sent[-1], ours, limit), _joined(received[-1], theirs, limit)
                        if joined[0] is not None and joined[1] is not None:
                            sent[-1], received[-1] = joined[0], joined[1]
                            continue
                    sent.append(ours)
                    received.append(theirs)
                    holders.append(holder)
                    targets.append(target)
                    kinds.append(kind)
            if found != copy.box.numel:
                raise ValueError(f"{copy.source}: the trainers hold {found} of its {copy.box.numel} elements")
    return Cover(
        sent=sent,
        received=received,
        ranks=list(numbers),
        dtypes=dtypes,
        holders=np.array(holders, dtype=np.int64),
        targets=np.array(targets, dtype=np.int64),
        kinds=np.array(kinds, dtype=np.int64),
        num_bytes=np.array(
            [place.numel * dtypes[kind].itemsize for place, kind in zip(sent, kinds, strict=True)], dtype=np.int64
        ),
    )


def plan_transfer(
    cover: Cover, slot: int, slots: int, bucket_bytes: int, near: Sequence[int] | None = None
) -> TransferPlan:
    """Returns the transfer into the engine number `slot` of `slots` that hold the same.

    near: by engine rank, the trainer rank beside it, which gives what it holds itself.

    What all engines need of what some trainer ranks hold is laid on one line, engine after engine, and the line is cut
    into equal parts, one a rank: the ranks send equally much, and each of them to as few engines as that allows.
    bucket_bytes: staged at most by a rank, two batches in flight and all engines that it serves at once counted.
    """
    sources = np.zeros(len(cover.sent), dtype=np.int64)
    for number, ranks in enumerate(cover.ranks):
        pieces = np.flatnonzero(cover.holders == number)
        size = cover.num_bytes[pieces]
        along = (np.cumsum(size) - size / 2) / size.sum()  # of each piece's middle, within (0, 1)
        sources[pieces] = np.array(ranks)[((slot % slots + along) / slots * len(ranks)).astype(np.int64)]
    if near is not None:
        beside = np.array(near)[cover.targets]
        for number, ranks in enumerate(cover.ranks):
            own = (cover.holders == number) & np.isin(beside, ranks)
            sources[own] = beside[own]
    engines_a_rank = ceil(slots / min(map(len, cover.ranks))) if cover.ranks else 1
    batches = _batches(cover, sources, bucket_bytes // (2 * engines_a_rank))
    return TransferPlan(cover, sources, batches, _number_messages(cover, sources, batches))


def _batches(cover: Cover, sources: np.ndarray, limit: int) -> np.ndarray:
    """Returns the batch of every piece, int64 [pieces]: as early as every rank stays within `limit` bytes a batch."""
    pairs = sources * (int(cover.targets.max(initial=0)) + 1) + cover.targets
    progress = np.zeros(len(sources))  # of its pair when a piece is sent: all pairs advance together
    order = np.argsort(pairs, kind="stable")
    for pair in np.split(order, np.flatnonzero(np.diff(pairs[order])) + 1) if len(order) else ():
        size = cover.num_bytes[pair]
        progress[pair] = (np.cumsum(size) - size) / size.sum()
    batches = np.zeros(len(sources), dtype=np.int64)
    now: dict[tuple[str, int], tuple[int, int]] = {}  # by end: its present batch and the bytes in it
    ends = zip(sources.tolist(), cover.targets.tolist(), cover.num_bytes.tolist(), strict=True)
    work = list(ends)
    for piece in np.lexsort((np.arange(len(work)), progress)).tolist():
        source, target, size = work[piece]
        keys = ("trainer", source), ("engine", target)
        states = [now.get(key, (0, 0)) for key in keys]
        batch = max(number for number, _ in states)
        filled = [taken if number == batch else 0 for number, taken in states]
        if max(filled) and max(filled) + size > limit:
            batch, filled = batch + 1, [0, 0]
        for key, taken in zip(keys, filled, strict=True):
            now[key] = (batch, taken + size)
        batches[piece] = batch
    return batches


def _number_messages(cover: Cover, sources: np.ndarray, batches: np.ndarray) -> np.ndarray:
    """Returns the message of every piece, int64 [pieces]: large ones travel alone, others with those of their batch
    that have their dtype."""
    num_pieces = len(sources)
    pairs = sources * (int(cover.targets.max(initial=0)) + 1) + cover.targets
    together = (pairs * (int(batches.max(initial=0)) + 1) + batches) * len(cover.dtypes) + cover.kinds
    alone = np.where(cover.num_bytes >= _ALONE_BYTES, np.arange(num_pieces) + 1, 0)
    return np.unique(together * (num_pieces + 1) + alone, return_inverse=True)[1].reshape(-1)


def piece_limit(bucket_bytes: int) -> int:
    """Returns the bytes of the largest piece: several fit into a batch of every rank."""
    return max(bucket_bytes // (2 * _PIECES_A_BATCH), 1)


def _joined(first: Place, second: Place, limit: int) -> Place | None:
    """Returns the two as one run of memory, None if they are none or more than `limit` elements."""
    numel = first.numel
    follows = first.parameter == second.parameter and second.offset == first.offset + numel
    if not follows or numel + second.numel > limit or not (first.contiguous and second.contiguous):
        return None
    return Place(first.parameter, first.offset, (numel + second.numel,), (1,))


def _split(box: Box, limit: int) -> list[Box]:
    """Cuts a box, along its first dimensions, into boxes of at most `limit` elements."""
    if box.numel <= limit:
        return [box]
    k = next(k for k, n in enumerate(box.size) if n > 1)
    rows = max(limit // (box.numel // box.size[k]), 1)
    edges = [*range(0, box.size[k], rows), box.size[k]]
    parts = [
        Box((*box.start[:k], box.start[k] + a, *box.start[k + 1 :]), (*box.size[:k], b - a, *box.size[k + 1 :]))
        for a, b in pairwise(edges)
    ]
    return [piece for part in parts for piece in _split(part, limit)]
