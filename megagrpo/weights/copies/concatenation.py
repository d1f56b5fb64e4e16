"""Concatenations of tensors: maps a slice of the result to slices of the parts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megagrpo.weights.copies.views import Untraceable


class JoinedPart(NamedTuple):
    """A part's share in a cut: `source`, a view of the part, lies in the cut from index `start` along `dim` on."""

    source: Tensor
    dim: int
    start: int


@dataclass(frozen=True)
class Concatenation:
    """`parts`, one after the other along dimension `dim` of `whole`, which is contiguous."""

    parts: Sequence[Tensor]
    dim: int
    whole: Tensor

    @classmethod
    def of(cls, parts: Sequence[Tensor], dim: int) -> "Concatenation":
        """Joins tensors without reading them."""
        dim %= parts[0].dim()
        shape = list(parts[0].shape)
        shape[dim] = sum(part.shape[dim] for part in parts)
        return cls(parts, dim, parts[0].new_empty(shape))

    def pieces(self, cut: Tensor, shape: torch.Size) -> list[JoinedPart]:
        """Returns the parts of `cut`, a range of `whole` in any order of dimensions. Else raises Untraceable."""
        first, rest = [], int(cut.storage_offset())
        for stride in self.whole.stride():
            first.append(rest // stride)
            rest %= stride
        order = self._order(cut, first)
        if sorted(order) != list(range(self.whole.dim())) or shape != cut.shape:
            raise Untraceable(
                f"shape {tuple(cut.shape)} with strides {cut.stride()}, for shape {tuple(shape)}, "
                f"which is no range of a concatenation {tuple(self.whole.shape)}"
            )
        along, begin, found = order.index(self.dim), first[self.dim], []
        stop, edge = begin + cut.shape[along], 0
        for part in self.parts:
            low, high = max(begin, edge), min(stop, edge + part.shape[self.dim])
            if low < high:
                view = part
                for dim, size in zip(order, cut.shape, strict=True):
                    start, count = (low - edge, high - low) if dim == self.dim else (first[dim], size)
                    view = view.narrow(dim, start, count)
                found.append(JoinedPart(view.permute(order), along, low - begin))
            edge += part.shape[self.dim]
        return found

    def _order(self, cut: Tensor, first: list[int]) -> list[int]:
        """Returns for each dimension of `cut` that of `whole` it runs along, or -1. first: index of its start."""
        order: list[int] = []
        for size, stride in zip(cut.shape, cut.stride(), strict=True):
            fitting = (
                dim
                for dim, step in enumerate(self.whole.stride())
                if step == stride and dim not in order and first[dim] + size <= self.whole.shape[dim]
            )
            order.append(next(fitting, -1))
        return order
