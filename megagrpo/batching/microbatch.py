"""Micro-batches: samples of a Batch laid out for one forward pass, with their loss masks.

Layouts are planned on the host, where the Batch is, and copied to the device without
synchronization: no size or index in the forward and backward of a micro-batch depends on a device
value.
"""

import math
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from megagrpo.batching.balance import (
    candidate_cuts,
    cheapest_cut,
    fewest_micro_batches,
    longest_lengths,
    token_load,
)
from megagrpo.batching.image_positions import with_images
from megagrpo.batching.rounds import Round, common_rounds, largest, sequence_unit, up
from megagrpo.config.schema import ParallelConfig
from megagrpo.mesh import Mesh
from megagrpo.types import Batch, MicroBatch, Targets


class MicroBatchSize(NamedTuple):
    """How samples are put together."""

    budget: int  # tokens of several samples, at most
    packed: bool  # behind each other in one row, else a row for each
    multiple: int = 1  # of tokens in each rank's part of a row
    merge: int = 0  # patches of an image token on a side; 0: a text-only model
    attention_length: int | None = None  # as of `sample_cost`


def plan_micro_batches(
    batch: Batch,
    rows: Sequence[int],
    size: MicroBatchSize,
    layout: ParallelConfig,
    mesh: Mesh,
    cp_rank: int = 0,
) -> "MicroBatches":
    """Collective over data-parallel ranks. Cuts `rows` of the batch into micro-batches, the same
    number on every rank.

    Under context parallelism a rank gets its zigzag part of every sequence, so sequences are padded
    to multiples of twice the ranks that share them; whole micro-batches are multiples of tp as well,
    since sequence parallelism cuts them. With pipeline stages all micro-batches of all ranks have one shape, so
    all are filled up to the longest sample, and with virtual ones their number is a multiple of pp:
    Megatron's schedule requires both.
    """
    packed = size.packed
    lengths = batch.lengths[list(rows)].tolist()
    unit = sequence_unit(layout.cp)
    longest = 0
    if layout.pp > 1:
        (most,) = largest([max(lengths, default=1)], mesh)
        longest = up(most, unit)
        size = size._replace(budget=max(size.budget, longest))
        if not packed:
            # A row is as wide as the longest of all, and the budget is counted in such rows.
            lengths = [longest] * len(rows)
    if layout.dynamic_context:
        rounds = common_rounds(lengths, size.budget, size.attention_length, layout, mesh)
    else:
        bins = _aligned([up(length, unit) for length in lengths], size, layout, mesh)
        rounds = [Round(layout.cp, [members]) for members in bins]
    shapes = _shapes(rounds, lengths, size, layout, mesh, cp_rank)
    trained = batch.trained_mask  # a pass over all tokens, once for all micro-batches

    def build(number: int) -> MicroBatch:
        context = rounds[number].context
        members = rounds[number].of(cp_rank)
        height, width = shapes[number][0], shapes[number][1] * context
        sizes = [width] * height
        if packed:
            sizes = [up(lengths[i], sequence_unit(context)) for i in members]
            sizes += _dummies(width - sum(sizes), longest or width)
        members = [rows[i] for i in members]
        micro = _micro_batch(batch, trained, members, sizes, packed, (cp_rank % context, context))
        if size.merge:
            micro = with_images(batch, micro, size.merge)
        return micro

    return MicroBatches(build, shapes)


def _shapes(
    rounds: list[Round],
    lengths: list[int],
    size: MicroBatchSize,
    layout: ParallelConfig,
    mesh: Mesh,
    cp_rank: int,
) -> list[tuple[int, int]]:
    """Collective over data-parallel ranks. Returns rows and tokens per row of a rank's part of its
    micro-batches."""

    def shape(members: list[int], context: int) -> tuple[int, int]:
        # one without samples is a dummy
        sequences = [up(lengths[i], sequence_unit(context)) for i in members] or [1]
        chunks = 1 if layout.cp == 1 else 2 * context
        width_unit = layout.tp * math.lcm(chunks, size.multiple * context)
        if size.packed:
            sequences = [sum(sequences)]
        return len(sequences), up(max(sequences), width_unit) // context

    if layout.pp == 1:
        return [shape(each.of(cp_rank), each.context) for each in rounds]
    shapes = [shape(part, each.context) for each in rounds for part in each.parts]
    heights, widths = zip(*shapes, strict=True)
    height, width = largest([max(heights), max(widths)], mesh)
    return [(height, width)] * len(rounds)


def _dummies(tokens: int, longest: int) -> list[int]:
    """Returns the lengths of the sequences that fill a row up: the cost of attention is quadratic
    in them, so none is longer than the longest sample."""
    rest = tokens % longest
    return [longest] * (tokens // longest) + [rest] * (rest > 0)


class MicroBatches(Sequence[MicroBatch]):
    """Makes each micro-batch when it is consumed: all at once they would be several times the
    batch.

    shapes: [b, s] of each, of this rank's part.
    """

    def __init__(self, build: Callable[[int], MicroBatch], shapes: Sequence[tuple[int, int]]):
        self._build = build
        self.shapes = shapes

    def __len__(self) -> int:
        return len(self.shapes)

    def __getitem__(self, number):
        # the range raises the IndexError that ends an iteration
        return self._build(range(len(self))[number])


def _aligned(
    lengths: list[int], size: MicroBatchSize, layout: ParallelConfig, mesh: Mesh
) -> list[list[int]]:
    """Collective over data-parallel ranks. Cuts this rank's samples into the same number of
    micro-batches as on every other rank.

    The k-th micro-batches of all ranks are alike in size. Returns the indices in each.
    """
    budget = size.budget
    packed = size.packed
    (count,) = largest([max(len(fewest_micro_batches(lengths, budget, packed)), 1)], mesh)
    if layout.vpp > 1:
        count = up(count, layout.pp)
    ways = candidate_cuts(
        lengths, budget, packed, count, largest(longest_lengths(lengths, count), mesh)
    )
    loads = largest([token_load(b, lengths, packed) for way in ways for b in way], mesh)
    slowest = [loads[i : i + count] for i in range(0, len(loads), count)]
    return ways[cheapest_cut(slowest, one_shape=layout.pp > 1)]


def _micro_batch(
    batch: Batch,
    trained: Tensor,
    samples: list[int],
    sizes: list[int],
    packed: bool,
    context: tuple[int, int],
) -> MicroBatch:
    """Returns a context-parallel rank's part (rank, size) of samples in sequences of `sizes`
    tokens, padded at the end.

    Packed they lie behind each other in one row, else each is a row. Sequences beyond the samples
    are dummies.
    """
    rows, positions = _layout(batch, samples, sizes, packed, context)
    columns = torch.where(rows >= 0, positions, -1)
    next_tokens = targets(rows, columns, batch.lengths, trained)
    starts = batch.starts
    tokens = torch.zeros_like(rows)
    if len(batch.tokens):
        places = starts[rows.clamp(min=0)] + columns.clamp(min=0)
        tokens = torch.where(rows >= 0, batch.tokens[places].long(), 0)
    members = torch.tensor(sorted(samples), dtype=torch.int64)
    lengths = batch.lengths[members]
    owners = torch.arange(len(members)).repeat_interleave(lengths)
    before = starts[members] - (lengths.cumsum(0) - lengths)
    places = before[owners] + torch.arange(len(owners))
    is_trained = trained[places]
    target_places = starts[next_tokens.rows] + next_tokens.columns
    return MicroBatch(
        tokens=tokens,
        positions=positions,
        cu_seqlens=torch.tensor([0, *accumulate(sizes)], dtype=torch.int32) if packed else None,
        rows=rows,
        columns=columns,
        targets=next_tokens,
        target_places=target_places,
        target_order=torch.searchsorted(places[is_trained], target_places),
        members=members,
        places=places,
        trained=places[is_trained],
        num_trained=torch.zeros_like(lengths).index_add(0, owners, is_trained.long()),
        sizes=tuple(sizes),
        context=context[1],
    )


def _layout(
    batch: Batch, samples: list[int], sizes: list[int], packed: bool, context: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """Returns for each place [b, s / cp] its sample, -1 for padding, and its position in its
    sequence."""
    height = 1 if packed else len(sizes)
    positions = torch.cat([torch.arange(n) for n in sizes]).view(height, -1)
    sequence = torch.repeat_interleave(torch.tensor(sizes)).view(height, -1)
    owner = torch.tensor([*samples, -1])[sequence.clamp(max=len(samples))]
    lengths = torch.cat((batch.lengths, batch.lengths.new_zeros(1)))  # the last: of owner -1
    rows = torch.where(positions < lengths[owner], owner, -1)
    if context[1] > 1:
        if not packed:
            sizes = sizes[:1]
        index = _context_part([0, *accumulate(sizes)], *context)
        rows, positions = rows[:, index], positions[:, index]
    return rows, positions


def _context_part(bounds: list[int], cp_rank: int, cp_size: int) -> Tensor:
    """Returns the positions of a context-parallel rank, [s / cp]. Every sequence, from bound to
    bound, has 2 cp equal chunks; the rank has the cp_rank-th from either end.
    """
    parts = []
    for start, end in pairwise(bounds):
        chunk = (end - start) // (2 * cp_size)
        for number in (cp_rank, 2 * cp_size - 1 - cp_rank):
            parts.append(torch.arange(start + number * chunk, start + (number + 1) * chunk))
    return torch.cat(parts)


def targets(rows: Tensor, columns: Tensor, lengths: Tensor, trained: Tensor) -> Targets:
    """Returns the positions whose next token is trained on: the one place that shifts.

    rows, columns: [b, s] int64, of samples and inside them, -1 padding. lengths: [N] of the Batch.
    trained: [T] bool.
    """
    rows, columns = rows.flatten(), columns.flatten()
    is_target = rows >= 0
    if len(lengths):
        owner = rows.clamp(min=0)
        following = ((lengths.cumsum(0) - lengths)[owner] + columns + 1).clamp(max=len(trained) - 1)
        is_target = is_target & (columns + 1 < lengths[owner]) & trained[following]
    flat = torch.nonzero(is_target).flatten()
    return Targets(flat, rows[flat], columns[flat] + 1)
