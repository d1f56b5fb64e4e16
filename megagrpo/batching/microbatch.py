"""Micro-batches: rows of a Batch laid out for one forward pass, and which of its positions are trained on."""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from megagrpo.batching.balance import (
    candidate_cuts,
    cheapest_cut,
    fewest_micro_batches,
    longest_lengths,
    token_load,
)
from megagrpo.config.schema import ParallelConfig
from megagrpo.mesh import Mesh
from megagrpo.types import Batch, MicroBatch


def plan_micro_batches(
    batch: Batch,
    rows: Sequence[int],
    budget: int,
    packed: bool,
    layout: ParallelConfig,
    mesh: Mesh,
    cp_rank: int = 0,
    multiple: int = 1,
) -> list[MicroBatch]:
    """Collective over data-parallel ranks. Cuts `rows` of the batch into micro-batches, the same number on every rank.

    budget: tokens of a micro-batch of several samples, at most. Under context parallelism a rank gets its zigzag part
    of every sequence, so sequences are padded to multiples of 2 cp; whole micro-batches are multiples of tp as well,
    since sequence parallelism cuts them; each rank's part of a row has a multiple of `multiple` tokens. With pipeline
    stages all micro-batches of all ranks have one shape, and with virtual ones their number is a multiple of pp:
    Megatron's schedule asks for both.
    """
    unit = 2 * layout.cp if layout.cp > 1 else 1
    lengths = [_up(int(batch.lengths[r]), unit) for r in rows]
    if layout.pp > 1 and not packed:
        # One shape: a row is as wide as the longest of all, and the budget is counted in such rows.
        lengths = [int(mesh.reduce(torch.tensor(max(lengths, default=1)), "max"))] * len(rows)
    length_of = dict(zip(rows, lengths, strict=True))
    bins = [[rows[i] for i in b] for b in _aligned(lengths, budget, packed, layout, mesh)]

    def shape(members: list[int]) -> tuple[int, int]:
        sizes = [length_of[r] for r in members] or [1]
        height, width = (1, sum(sizes)) if packed else (max(len(members), 1), max(sizes))
        return height, _up(width, layout.tp * math.lcm(unit, multiple * layout.cp))

    shapes = [shape(b) for b in bins]
    if layout.pp > 1:
        largest = mesh.reduce(torch.tensor([max(h for h, _ in shapes), max(w for _, w in shapes)]), "max")
        shapes = [(int(largest[0]), int(largest[1]))] * len(bins)
    whole = [
        _pack(batch, members, [length_of[r] for r in members], width) if packed else _pad(batch, members, height, width)
        for members, (height, width) in zip(bins, shapes, strict=True)
    ]
    return whole if layout.cp == 1 else [_context_part(micro, cp_rank, layout.cp) for micro in whole]


def _aligned(lengths: list[int], budget: int, packed: bool, layout: ParallelConfig, mesh: Mesh) -> list[list[int]]:
    """Collective over data-parallel ranks. Cuts this rank's samples into as many micro-batches as every other rank's.

    The k-th of all ranks are alike in size. Returns the indices of each.
    """

    def largest(values: list[int]) -> list[int]:
        return mesh.reduce(torch.tensor(values), "max").tolist()

    count = max(largest([len(fewest_micro_batches(lengths, budget, packed))])[0], 1)
    count = _up(count, layout.pp) if layout.vpp > 1 else count
    ways = candidate_cuts(lengths, budget, packed, count, largest(longest_lengths(lengths, count)))
    slowest = largest([token_load(b, lengths, packed) for way in ways for b in way])
    return ways[cheapest_cut([slowest[i : i + count] for i in range(0, len(slowest), count)], one_shape=layout.pp > 1)]


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _pack(batch: Batch, members: list[int], lengths: list[int], width: int) -> MicroBatch:
    """Lays all members behind each other in one row [1, width], each padded to its length; the rest is a dummy
    sequence.
    """
    device = batch.tokens.device
    bounds = [0, *lengths, *([width - sum(lengths)] if width > sum(lengths) else [])]
    positions = torch.cat([torch.arange(n, device=device) for n in bounds[1:]])
    sequence = torch.repeat_interleave(torch.tensor(bounds[1:], device=device))
    owner = torch.tensor([*members, -1], device=device)[sequence.clamp(max=len(members))]
    real = (owner >= 0) & (positions < batch.lengths[owner.clamp(min=0)]) if members else owner >= 0
    return _micro_batch(batch, members, torch.where(real, owner, -1)[None], positions[None], bounds)


def _pad(batch: Batch, members: list[int], height: int, width: int) -> MicroBatch:
    """Lays out one member a row, [height, width], with padding at the right and empty rows below."""
    device = batch.tokens.device
    positions = torch.arange(width, device=device).expand(height, width).contiguous()
    owner = torch.tensor(members + [-1] * (height - len(members)), dtype=torch.int64, device=device)[:, None]
    real = (owner >= 0).expand(height, width)
    if members:
        real = real & (positions < batch.lengths[owner.clamp(min=0)])
    return _micro_batch(batch, members, torch.where(real, owner, -1), positions, None)


def _micro_batch(
    batch: Batch, members: list[int], rows: Tensor, positions: Tensor, bounds: list[int] | None
) -> MicroBatch:
    real = rows >= 0
    tokens = torch.zeros_like(rows)
    tokens[real] = batch.tokens[rows[real], positions[real]]
    return MicroBatch(
        tokens=tokens,
        positions=positions,
        cu_seqlens=None if bounds is None else torch.tensor(bounds, device=rows.device).cumsum(0).int(),
        rows=rows,
        columns=torch.where(real, positions, -1),
        members=torch.tensor(sorted(members), dtype=torch.int64, device=rows.device),
        max_seqlen=positions.shape[1] if bounds is None else max(bounds),
    )


def _context_part(micro: MicroBatch, cp_rank: int, cp_size: int) -> MicroBatch:
    """Returns a context-parallel rank's part: of 2 cp equal chunks of every sequence the cp_rank-th from either end."""
    width = micro.tokens.shape[1]
    bounds = [0, width] if micro.cu_seqlens is None else micro.cu_seqlens.tolist()
    kept = []
    for start, end in pairwise(bounds):
        chunk = (end - start) // (2 * cp_size)
        for number in (cp_rank, 2 * cp_size - 1 - cp_rank):
            kept.append(torch.arange(start + number * chunk, start + (number + 1) * chunk, device=micro.tokens.device))
    index = torch.cat(kept)
    return replace(
        micro,
        tokens=micro.tokens[:, index],
        positions=micro.positions[:, index],
        rows=micro.rows[:, index],
        columns=micro.columns[:, index],
    )


def targets(micro: MicroBatch, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the positions whose next token the policy sampled: the one place that shifts.

    They are flat positions [T] into the micro-batch (row-major), with the Batch row [T] and column [T] of the token
    that each predicts, all int64.
    """
    rows, columns = micro.rows.flatten(), micro.columns.flatten()
    real = rows >= 0
    next_column = (columns + 1).clamp(max=batch.tokens.shape[1] - 1)
    has_next = real & (columns + 1 < batch.lengths[rows.clamp(min=0)]) if len(batch.lengths) else real
    sampled = batch.loss_mask[rows.clamp(min=0), next_column] > 0 if len(batch.lengths) else real
    flat = torch.nonzero(has_next & sampled).flatten()
    return flat, rows[flat], columns[flat] + 1
