"""Puts what ranks saw together, so that both sides have one array [tokens, width] a point.

Tokens are those of all sequences, one sequence after the other.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from megagrpo.bisect.points import Point
from megagrpo.families.architecture import Architecture
from megagrpo.weights.engines.hooks import SeenTokens, experts_key


class Side(NamedTuple):
    """Holds what an engine or the trainers computed."""

    values: dict[str, Tensor]  # by point: [tokens, width]; experts as a map [tokens, experts] of 0 and 1
    notes: list[str]  # why a point is missing


def from_engine(
    points: Sequence[Point], ranks: Sequence[Mapping[str, Sequence[Tensor]]], num_tokens: int, arch: Architecture
) -> Side:
    """Returns the engine's side of what its ranks' hooks saw: by tap, a tensor [tokens, ...] for each forward pass."""
    values: dict[str, Tensor] = {}
    notes = []
    for point in points:
        if point.one_rank and len(ranks) > 1:
            notes.append(f"{point.name}: each of the engine's {len(ranks)} ranks has a part of a sum")
            continue
        try:
            parts = [_rows(point.name, seen.get(point.name, []), num_tokens) for seen in ranks]
            if point.layout == "shares":
                ids = experts_key(point.layer or 0)
                values[point.name] = _shares(_spread(_rows(ids, ranks[0].get(ids, []), num_tokens), parts[0], arch))
            else:
                values[point.name] = _whole_of_engine(point, parts, arch)
        except _NotComparable as exc:
            notes.append(str(exc))
    return Side(values, notes)


def from_trainer(
    points: Sequence[Point], pieces: Iterable[SeenTokens], lengths: Sequence[int], arch: Architecture
) -> Side:
    """Returns the trainers' side of the pieces of all ranks. lengths: of the sequences, in tokens."""
    starts = torch.tensor([0, *accumulate(lengths)])
    by_key: dict[str, list[SeenTokens]] = {}
    for piece in pieces:
        by_key.setdefault(piece.key, []).append(piece)
    values, notes = {}, []
    for point in points:
        try:
            found = by_key.get(point.name, [])
            values[point.name] = _whole_of_trainer(point, found, starts, arch)
        except _NotComparable as exc:
            notes.append(str(exc))
    return Side(values, notes)


class _NotComparable(ValueError):
    """Says why a point is left out."""


def _rows(name: str, calls: Sequence[Tensor], num_tokens: int) -> Tensor:
    """Returns [tokens, width] of all passes. Norms over heads have a row for each head, behind each other."""
    together = torch.cat(list(calls)) if calls else torch.empty(0)
    together = together if together.dtype in (torch.int32, torch.int64) else together.float()
    if not len(together) or len(together) % num_tokens:
        raise _NotComparable(f"{name}: the engine's hooks saw {len(together)} rows of {num_tokens} tokens")
    return together.reshape(num_tokens, -1)


def _spread(ids: Tensor, weights: Tensor, arch: Architecture) -> Tensor:
    """Returns weights [tokens, k] at the columns of ids [tokens, k] of [tokens, experts], 0 elsewhere."""
    real = (ids >= 0) & (ids < arch.num_experts)  # what is beyond are shared experts fused with these
    columns = torch.where(real, ids, arch.num_experts).long()
    return torch.zeros(len(ids), arch.num_experts + 1).scatter(1, columns, weights.float())[:, : arch.num_experts]


def _shares(weights: Tensor) -> Tensor:
    """Returns weights [tokens, experts] divided by their sum: where a factor is applied differs between the sides."""
    return weights / weights.sum(1, keepdim=True).clamp(min=1e-20)


def _whole_of_engine(point: Point, parts: list[Tensor], arch: Architecture) -> Tensor:
    match point.layout:
        case "map":
            return _spread(parts[0], torch.ones_like(parts[0]), arch)
        case "heads":
            return torch.cat(parts, 1)
        case "qkv":
            _check_kv_heads(point, len(parts), arch)
            sizes = [heads * arch.head_dim // len(parts) for heads in (arch.num_heads, *[arch.num_kv_heads] * 2)]
            split = [part.split(sizes, 1) for part in parts]
            return torch.cat([torch.cat(of, 1) for of in zip(*split, strict=True)], 1)
        case _:
            return parts[0]


def _whole_of_trainer(point: Point, pieces: Sequence[SeenTokens], starts: Tensor, arch: Architecture) -> Tensor:
    if not pieces:
        raise _NotComparable(f"{point.name}: the trainers' layers have no such module")
    ranks = sorted({piece.tp_rank for piece in pieces}) if point.layout in ("heads", "qkv") else [None]
    parts = [_filled(point, [p for p in pieces if rank is None or p.tp_rank == rank], starts) for rank in ranks]
    if point.layout == "qkv":
        _check_kv_heads(point, len(parts), arch)
        # Megatron keeps the queries of a group beside its key and value
        grouped = [part.view(len(part), -1, arch.num_heads // arch.num_kv_heads + 2, arch.head_dim) for part in parts]
        split = [(part[:, :, :-2], part[:, :, -2], part[:, :, -1]) for part in grouped]
        return torch.cat([torch.cat([t.flatten(1) for t in of], 1) for of in zip(*split, strict=True)], 1)
    return _shares(parts[0]) if point.layout == "shares" else torch.cat(parts, 1)


def _filled(point: Point, pieces: Sequence[SeenTokens], starts: Tensor) -> Tensor:
    values = torch.zeros(int(starts[-1]), pieces[0].values.shape[1])
    seen = torch.zeros(len(values), dtype=torch.bool)
    for piece in pieces:
        at = starts[piece.rows] + piece.columns
        values[at], seen[at] = piece.values.float(), True
    if not bool(seen.all()):
        raise _NotComparable(f"{point.name}: the trainers' ranks saw {int(seen.sum())} of {len(seen)} tokens")
    return values


def _check_kv_heads(point: Point, ranks: int, arch: Architecture) -> None:
    if arch.num_kv_heads % ranks:
        raise _NotComparable(f"{point.name}: {ranks} ranks share {arch.num_kv_heads} heads of keys and values")
