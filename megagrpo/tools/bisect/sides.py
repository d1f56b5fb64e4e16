"""Assembles the records of all ranks, so that both sides have one array [tokens, width] a point.

Tokens are those of all sequences, one sequence after the other; patches and features those of their
distinct images.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from megagrpo.models.architecture import Architecture
from megagrpo.tools.bisect.compared_points import Point, Sizes
from megagrpo.tools.bisect.hooks import SeenTokens, experts_key

_Records = Sequence[Mapping[str, Sequence[Tensor]]]


class Side(NamedTuple):
    """The values of an engine or of the trainers."""

    # by point: [tokens, width]; experts as a map [tokens, experts] of 0 and 1
    values: dict[str, Tensor]
    notes: list[str]  # why a point is missing


def from_engine(points: Sequence[Point], ranks: _Records, sizes: Sizes, arch: Architecture) -> Side:
    """Returns the engine's side. ranks: by rank and tap, a tensor [tokens, ...] for each forward
    pass."""
    return _side(
        (point, _engine_side(point, ranks, sum(sizes[point.unit]), arch)) for point in points
    )


def from_trainer(
    points: Sequence[Point], pieces: Iterable[SeenTokens], sizes: Sizes, arch: Architecture
) -> Side:
    """Returns the trainers' side of the pieces of all ranks."""
    starts = {unit: torch.tensor([0, *accumulate(counts)]) for unit, counts in sizes.items()}
    by_key: dict[str, list[SeenTokens]] = {}
    for piece in pieces:
        by_key.setdefault(piece.key, []).append(piece)
    return _side(
        (p, _trainer_side(p, by_key.get(p.name, []), starts[p.unit], arch)) for p in points
    )


def _side(point_values: Iterable[tuple[Point, Tensor | str]]) -> Side:
    """Splits values from reasons why a point has none."""
    side = Side({}, [])
    for point, value in point_values:
        if isinstance(value, str):
            side.notes.append(f"{point.name}: {value}")
        else:
            side.values[point.name] = value
    return side


def _engine_side(
    point: Point, ranks: _Records, num_tokens: int, arch: Architecture
) -> Tensor | str:
    if point.one_rank and len(ranks) > 1:
        return f"each of the engine's {len(ranks)} ranks has a part of a sum"
    names = (
        [point.name, experts_key(point.layer or 0)] if point.layout == "shares" else [point.name]
    )
    recorded = {name: [list(seen.get(name, [])) for seen in ranks] for name in names}
    rows = [sum(map(len, calls)) for name in names for calls in recorded[name]]
    if (
        bad := next((count for count in rows if not count or count % num_tokens), None)
    ) is not None:
        return f"the engine's hooks saw {bad} rows of {num_tokens} {point.unit}"
    # norms over heads have one row after the other for the heads of a token
    parts = [torch.cat(calls).reshape(num_tokens, -1) for calls in recorded[point.name]]
    match point.layout:
        case "map":
            return _spread(parts[0], torch.ones_like(parts[0]), arch)
        case "shares":
            ids = torch.cat(recorded[names[1]][0]).reshape(num_tokens, -1)
            return _shares(_spread(ids, parts[0], arch))
        case "heads" | "qkv":
            return _joined(point, parts, arch, by_group=False)
        case _:
            return parts[0].float()


def _trainer_side(
    point: Point, pieces: Sequence[SeenTokens], starts: Tensor, arch: Architecture
) -> Tensor | str:
    if not pieces:
        return "the trainers' layers have no such module"
    sharded = point.layout in ("heads", "qkv")
    parts = []
    for rank in sorted({piece.tp_rank for piece in pieces}) if sharded else [None]:
        values = torch.zeros(int(starts[-1]), pieces[0].values.shape[1])
        seen = torch.zeros(len(values), dtype=torch.bool)
        for piece in (piece for piece in pieces if rank is None or piece.tp_rank == rank):
            at = starts[piece.rows] + piece.columns
            values[at] = piece.values.float()
            seen[at] = True
        if not bool(seen.all()):
            return f"the trainers' ranks saw {int(seen.sum())} of {len(seen)} {point.unit}"
        parts.append(values)
    if point.layout == "shares":
        return _shares(parts[0])
    # Megatron keeps the queries of a group next to its key and value
    return _joined(point, parts, arch, by_group=True)


def _joined(
    point: Point, parts: Sequence[Tensor], arch: Architecture, by_group: bool
) -> Tensor | str:
    """Returns all heads [tokens, width]; of "qkv" first queries, then keys, then values. parts: of
    the tensor-parallel ranks. by_group: each part has one group of heads after the other."""
    if point.layout != "qkv":
        return torch.cat(list(parts), 1).float()
    attention = arch.attention
    own, left = divmod(attention.kv_heads, len(parts))
    if left:
        return f"{len(parts)} ranks share {attention.kv_heads} heads of keys and values"
    groups = own if by_group else 1
    sizes = [n // len(parts) // groups for n in (attention.heads, *[attention.kv_heads] * 2)]
    split = [
        part.float().view(len(part), groups, -1, attention.head_dim).split(sizes, 2)
        for part in parts
    ]
    return torch.cat([t.flatten(1) for kind in zip(*split, strict=True) for t in kind], 1)


def _spread(ids: Tensor, weights: Tensor, arch: Architecture) -> Tensor:
    """Returns weights [tokens, k] at the columns of ids [tokens, k] of [tokens, experts], 0
    elsewhere."""
    real = (ids >= 0) & (ids < arch.routed.count)  # larger ids are shared experts, fused with these
    columns = torch.where(real, ids, arch.routed.count).long()
    return torch.zeros(len(ids), arch.routed.count + 1).scatter(1, columns, weights.float())[
        :, : arch.routed.count
    ]


def _shares(weights: Tensor) -> Tensor:
    """Returns weights [tokens, experts] divided by their sum: the sides apply a factor at different
    points."""
    return weights / weights.sum(1, keepdim=True).clamp(min=1e-20)
