"""Micro-batches: rows of a Batch laid out for one forward pass, and which of its positions are trained on."""

from collections.abc import Sequence

import torch
from torch import Tensor

from megagrpo.config import ParallelConfig
from megagrpo.mesh import Mesh
from megagrpo.schedule import micro_batches, same_count
from megagrpo.types import Batch, MicroBatch


def plan(batch: Batch, rows: Sequence[int], budget: int, packed: bool, layout: ParallelConfig, mesh: Mesh) -> list[MicroBatch]:
    """Cut `rows` of the batch into micro-batches: the same number on every data-parallel rank. Collective over those ranks.

    Lengths are multiples of tp (sequence parallelism cuts them). With pipeline stages all micro-batches of all ranks have one
    shape, and with virtual ones their number is a multiple of pp: Megatron's schedule asks for both.
    """
    multiple = layout.tp
    lengths = [int(batch.lengths[r]) for r in rows]
    bins = [[rows[i] for i in b] for b in micro_batches(lengths, budget, packed)]
    count = int(mesh.reduce(torch.tensor(len(bins)), "max"))
    bins = same_count(bins, -(-count // layout.pp) * layout.pp if layout.vpp > 1 else count)

    def shape(members: list[int]) -> tuple[int, int]:
        sizes = [int(batch.lengths[r]) for r in members] or [0]
        height, width = (1, sum(sizes)) if packed else (max(len(members), 1), max(sizes))
        return height, max(-(-width // multiple), 1) * multiple

    shapes = [shape(b) for b in bins]
    if layout.pp > 1 and shapes:
        largest = mesh.reduce(torch.tensor([max(h for h, _ in shapes), max(w for _, w in shapes)]), "max")
        shapes = [(int(largest[0]), int(largest[1]))] * len(bins)
    make = _pack if packed else _pad
    return [make(batch, members, *size) for members, size in zip(bins, shapes, strict=True)]


def _pack(batch: Batch, members: list[int], _: int, width: int) -> MicroBatch:
    """All members behind each other in one row; what is left is one dummy sequence of padding."""
    pieces = [torch.arange(int(batch.lengths[r]), device=batch.tokens.device) for r in members]
    rows = torch.cat([torch.full_like(p, r) for p, r in zip(pieces, members, strict=True)] or [batch.lengths[:0]])
    columns = torch.cat(pieces or [batch.lengths[:0]])
    tail = torch.arange(width - len(rows), device=rows.device)
    bounds = [0, *[int(batch.lengths[r]) for r in members], *([len(tail)] if len(tail) else [])]
    padding = torch.full_like(tail, -1)
    return MicroBatch(
        tokens=torch.cat([batch.tokens[rows, columns], torch.zeros_like(tail)])[None],
        positions=torch.cat([columns, tail])[None],
        cu_seqlens=torch.tensor(bounds, dtype=torch.int32, device=rows.device).cumsum(0, dtype=torch.int32),
        rows=torch.cat([rows, padding])[None],
        columns=torch.cat([columns, padding])[None],
        max_seqlen=max(bounds),
    )


def _pad(batch: Batch, members: list[int], height: int, width: int) -> MicroBatch:
    """One member a row, padding at the right; empty rows below."""
    columns = torch.arange(width, device=batch.tokens.device).expand(height, width)
    index = torch.tensor(members + [-1] * (height - len(members)), dtype=torch.int64, device=columns.device)
    lengths = torch.where(index >= 0, batch.lengths[index] if len(batch.lengths) else torch.zeros_like(index), 0)
    real = columns < lengths[:, None]
    rows = torch.where(real, index[:, None], -1)
    tokens = torch.zeros_like(rows)
    tokens[real] = batch.tokens[rows[real], columns[real]]
    return MicroBatch(
        tokens=tokens, positions=columns.contiguous(), cu_seqlens=None, rows=rows, columns=torch.where(real, columns, -1), max_seqlen=width
    )


def targets(micro: MicroBatch, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Positions whose next token the policy sampled: the one place that shifts.

    Returns flat positions [T] into the micro-batch (row-major), and the Batch row and column [T] of the token each predicts.
    """
    rows, columns = micro.rows.flatten(), micro.columns.flatten()
    real = rows >= 0
    next_column = (columns + 1).clamp(max=batch.tokens.shape[1] - 1)
    has_next = real & (columns + 1 < batch.lengths[rows.clamp(min=0)]) if len(batch.lengths) else real
    sampled = batch.loss_mask[rows.clamp(min=0), next_column] > 0 if len(batch.lengths) else real
    flat = torch.nonzero(has_next & sampled).flatten()
    return flat, rows[flat], columns[flat] + 1
