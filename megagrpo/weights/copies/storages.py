"""The storages that a loader fills while it is recorded, and which elements of which HF tensor they
hold."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megagrpo.weights.copies.views import Untraceable, factor, naming, row_major


class JoinedPart(NamedTuple):
    """A view of a part of a concatenation, which begins at index `start` along `dim` of a cut."""

    source: Tensor
    dim: int
    start: int


@dataclass(frozen=True)
class Concatenation:
    """Tensors one after the other along dimension `dim` of `result`, which is contiguous."""

    parts: Sequence[Tensor]
    dim: int
    result: Tensor

    def pieces(self, cut: Tensor, shape: torch.Size) -> list[JoinedPart]:
        """Returns the parts of `cut`, a range of `result` in any order of dimensions. Raises
        Untraceable for another view."""
        first = []
        rest = int(cut.storage_offset())
        for stride in self.result.stride():
            first.append(rest // stride)
            rest %= stride
        order = self._order(cut, first)
        if sorted(order) != list(range(self.result.dim())) or shape != cut.shape:
            raise Untraceable(
                f"shape {tuple(cut.shape)} with strides {cut.stride()}, for shape {tuple(shape)}, "
                f"which is no range of a concatenation {tuple(self.result.shape)}"
            )
        along = order.index(self.dim)
        begin = first[self.dim]
        parts = []
        stop = begin + cut.shape[along]
        edge = 0
        for part in self.parts:
            low = max(begin, edge)
            high = min(stop, edge + part.shape[self.dim])
            if low < high:
                view = part
                for dim, size in zip(order, cut.shape, strict=True):
                    start, count = (
                        (low - edge, high - low) if dim == self.dim else (first[dim], size)
                    )
                    view = view.narrow(dim, start, count)
                parts.append(JoinedPart(view.permute(order), along, low - begin))
            edge += part.shape[self.dim]
        return parts

    def _order(self, cut: Tensor, first: list[int]) -> list[int]:
        """Returns for each dimension of `cut` the dimension of `result` along which it runs, or -1.
        first: the index of the cut's first element."""
        order: list[int] = []
        for size, stride in zip(cut.shape, cut.stride(), strict=True):
            fitting = (
                dim
                for dim, step in enumerate(self.result.stride())
                if step == stride
                and dim not in order
                and first[dim] + size <= self.result.shape[dim]
            )
            order.append(next(fitting, -1))
        return order


@dataclass
class Computed:
    """How a loader computes a tensor from the HF tensors `hf` by more than copies."""

    how: str
    hf: set[str]


@dataclass(frozen=True)
class HfView:
    """Elements of one HF tensor in an order of iteration, with their `offset` and `strides` in that
    tensor, in elements."""

    hf: str
    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]


class Zeros:
    """Elements that are 0: padding that the loader makes."""


class TracedStorages:
    """The storages that a loader makes: views of HF tensors, concatenations, computed values,
    zeros."""

    def __init__(self, hf: Mapping[str, Tensor]):
        # a dense storage's elements in the order of memory
        self._known: dict[int, HfView | Concatenation | Computed | Zeros] = {
            storage_id(t): HfView(name, 0, tuple(t.shape), row_major(tuple(t.shape)))
            for name, t in hf.items()
        }
        self._keep: list[Tensor] = []  # a freed storage's address could come back as another tensor

    def is_traced(self, tensor: Tensor) -> bool:
        """Returns whether all elements are those of one HF tensor."""
        return isinstance(self._known.get(storage_id(tensor)), HfView)

    def is_zero(self, tensor: Tensor) -> bool:
        """Returns whether all elements are zeros that the loader made."""
        return isinstance(self._known.get(storage_id(tensor)), Zeros)

    def note_zeros(self, zeros: Tensor) -> Tensor:
        """Records that a new tensor has only zeros, and returns it."""
        self._keep.append(zeros)
        self._known[storage_id(zeros)] = Zeros()
        return zeros

    def overwritten(self, written: list[Tensor]) -> None:
        """Records that tensors are overwritten with values that come from no HF tensor."""
        for tensor in filter(self.is_zero, written):
            del self._known[storage_id(tensor)]

    def from_hf(self, tensor: Tensor) -> bool:
        """Returns whether any element comes from an HF tensor."""
        return storage_id(tensor) in self._known and not self.is_zero(tensor)

    def computed(self, tensor: Tensor) -> Computed | None:
        """Returns how the tensor was computed, None if it has only copies."""
        known = self._known.get(storage_id(tensor))
        if isinstance(known, Computed):
            return known
        return None

    def names(self, tensor: Tensor) -> list[str]:
        """Returns the HF tensors whose elements a traced tensor or a concatenation of such tensors
        has."""
        known = self._known.get(storage_id(tensor))
        if isinstance(known, Concatenation):
            return [name for part in known.parts for name in self.names(part)]
        return [known.hf] if isinstance(known, HfView) else []

    def rewrite(self, source: Tensor, dtype: torch.dtype | None) -> Tensor:
        """Returns a new storage with the elements of `source` in the same order."""
        if parts := self.joined_parts(source, source.shape):
            return self.concatenate(
                [self.rewrite(part.source, dtype) for part in parts], parts[0].dim
            )
        out = torch.empty_like(
            source, dtype=dtype or source.dtype, memory_format=torch.preserve_format
        )
        if self.is_zero(source):
            self.note_zeros(out)
        elif self.is_traced(source):
            self._trace(out, source)
        else:
            self.lose(out, [source], "a rewritten tensor")
        return out

    def concatenate(self, parts: list[Tensor], dim: int = 0) -> Tensor:
        """Returns the concatenation of traced tensors and of zeros."""
        dim %= parts[0].dim()
        shape = list(parts[0].shape)
        shape[dim] = sum(part.shape[dim] for part in parts)
        result = parts[0].new_empty(shape)
        self._keep += [result, *parts]
        self._known[storage_id(result)] = Concatenation(parts, dim, result)
        return result

    def copy_to_temporary(self, target: Tensor, source: Tensor) -> None:
        """Traces a copy into a tensor that is no parameter."""
        full = target.nbytes == target.untyped_storage().nbytes() and target.shape == source.shape
        if full and self.is_traced(source):
            self._trace(target, source)
        else:
            self.lose(target, [source, target], "a piecewise copy into a temporary")

    def joined_parts(self, source: Tensor, shape: torch.Size) -> list[JoinedPart]:
        """Returns the parts of a view of a concatenation that is copied into this shape; [] for any
        other tensor."""
        joined = self._known.get(storage_id(source))
        if isinstance(joined, Concatenation) and source.numel():
            try:
                return joined.pieces(source, shape)
            except Untraceable as exc:
                self.lose(source, [source], str(exc))
        return []

    def hf_view(
        self,
        tensor: Tensor,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        other: tuple[int, ...],
    ) -> tuple[HfView, tuple[int, ...]]:
        """Returns a traced tensor, read with this shape and these strides, as a view of the HF
        tensor.

        Also returns the strides, along the dimensions of that view, of a second tensor [*shape] with
        strides `other`.
        """
        origin = self._known[storage_id(tensor)]
        assert isinstance(origin, HfView), "the tensor is traced"
        with naming(f"HF tensor {origin.hf}"):
            first, pieces = factor(int(tensor.storage_offset()), shape, strides, origin.sizes)
        offset = origin.offset + sum(i * s for i, s in zip(first, origin.strides, strict=True))
        hf_strides = tuple(origin.strides[p.base] * p.step for p in pieces)
        view = HfView(origin.hf, offset, tuple(p.size for p in pieces), hf_strides)
        return view, tuple(other[p.dim] * p.scale for p in pieces)

    def lose(self, tensor: Tensor, origins: list[Tensor], how: str) -> None:
        """Records that a tensor is no view of one HF tensor. how: the operation on the `origins`."""
        self._keep.append(tensor)
        earlier = list(filter(None, map(self.computed, origins)))
        names = [name for t in origins for name in self.names(t)]
        if earlier:
            how = earlier[0].how
        else:
            how += f" of HF tensor {names[0]}"
        hf = set(names).union(*(part.hf for part in earlier))
        self._known[storage_id(tensor)] = Computed(how, hf)

    def _trace(self, out: Tensor, source: Tensor) -> None:
        self._keep.append(out)
        view, strides = self.hf_view(source, tuple(source.shape), source.stride(), out.stride())
        dense = sorted(zip(strides, view.sizes, view.strides, strict=True), reverse=True)
        sizes = tuple(size for _, size, _ in dense)
        hf_strides = tuple(hf_stride for _, _, hf_stride in dense)
        self._known[storage_id(out)] = HfView(view.hf, view.offset, sizes, hf_strides)


def storage_id(tensor: Tensor) -> int:
    """Returns the identity of a tensor's storage, on the meta device too."""
    return tensor.untyped_storage()._cdata
