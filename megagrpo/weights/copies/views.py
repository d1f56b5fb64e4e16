"""Strided views and boxes: the elements of a tensor that a view touches, in order.

A *box* is a start and a size along each dimension. Copies of weights are boxes of the HF tensor,
because boxes intersect, subtract and split without looking at elements. `factor` turns any view
that a loader makes into boxes.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import prod
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from megagrpo.system.errors import translated

Held = TypeVar("Held")


class Untraceable(ValueError):
    """A view does not consist of boxes; the caller adds the tensor's name."""


def naming(tensor: str) -> AbstractContextManager[None]:
    """Adds the tensor's name to an Untraceable inside the block."""
    return translated(tensor, Untraceable)


@dataclass(frozen=True)
class Box:
    """Selects the elements start[k] <= index[k] < start[k] + size[k]."""

    start: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.size)

    @property
    def slices(self) -> tuple[slice, ...]:
        """Returns the index that selects the box in its tensor."""
        return tuple(map(slice, self.start, self._stop()))

    @property
    def rows(self) -> range:
        """Returns the indices along the first dimension; of a scalar one."""
        return range(self.start[0], self.start[0] + self.size[0]) if self.start else range(1)

    def intersect(self, other: "Box") -> "Box | None":
        """Returns the common box, None if there is none."""
        start = tuple(map(max, self.start, other.start))
        stop = map(min, self._stop(), other._stop())
        size = tuple(b - a for a, b in zip(start, stop, strict=True))
        if min(size, default=1) <= 0:
            return None
        return Box(start, size)

    def subtract(self, other: "Box") -> list["Box"]:
        """Returns disjoint boxes that cover self without other, at most two per dimension."""
        common = self.intersect(other)
        if common is None:
            return [self]
        rest = []
        box = self
        for k, low in enumerate(common.start):
            begin, end = box.start[k], box.start[k] + box.size[k]
            high = low + common.size[k]
            rest += [box._between(k, a, b) for a, b in ((begin, low), (high, end)) if b > a]
            box = box._between(k, low, high)
        return rest

    def split(self, limit: int) -> list["Box"]:
        """Cuts a box, along its first dimensions, into boxes of at most `limit` elements."""
        if self.numel <= limit:
            return [self]
        k = next(k for k, n in enumerate(self.size) if n > 1)
        rows = max(limit // (self.numel // self.size[k]), 1)
        first = self.start[k]
        bounds = pairwise([*range(first, first + self.size[k], rows), first + self.size[k]])
        return [piece for a, b in bounds for piece in self._between(k, a, b).split(limit)]

    def _between(self, k: int, begin: int, end: int) -> "Box":
        """Returns the part with begin <= index[k] < end."""
        start, size = list(self.start), list(self.size)
        start[k], size[k] = begin, end - begin
        return Box(tuple(start), tuple(size))

    def _stop(self) -> tuple[int, ...]:
        return tuple(a + n for a, n in zip(self.start, self.size, strict=True))

    def __str__(self) -> str:
        ranges = zip(self.start, self._stop(), strict=True)
        return f"[{', '.join(f'{a}:{b}' for a, b in ranges)}]"


class ByRows(Generic[Held]):
    """What lies in boxes of one tensor, to find what is near a box without a look at all: a tensor
    may hold a layer's experts."""

    def __init__(self, held: Iterable[tuple[Box, Held]]):
        pairs = sorted(((box.rows, item) for box, item in held), key=lambda pair: pair[0].start)
        self._held = [item for _, item in pairs]
        self._starts = [rows.start for rows, _ in pairs]
        self._stops = list(accumulate((rows.stop for rows, _ in pairs), max))

    def near(self, box: Box) -> list[Held]:
        """Returns, among others, all whose boxes touch this one."""
        first = bisect_right(self._stops, box.rows.start)
        return self._held[first : bisect_left(self._starts, box.rows.stop)]


@dataclass(frozen=True)
class Piece:
    """`size` elements, `step` apart along dimension `base`. A step is `scale` steps along the view's
    `dim`."""

    size: int
    base: int
    step: int
    dim: int
    scale: int


@dataclass(frozen=True)
class ParameterSlice:
    """Elements of a parameter. `offset`, from its first element, and `strides` count elements."""

    parameter: str
    offset: int
    size: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.size)

    @property
    def contiguous(self) -> bool:
        dense = row_major(self.size)
        return all(n == 1 or a == b for n, a, b in zip(self.size, self.strides, dense, strict=True))

    def view(self, parameters: Mapping[str, Tensor]) -> Tensor:
        """Returns the live elements as a view [*size]."""
        parameter = parameters[self.parameter]
        return parameter.detach().as_strided(
            self.size, self.strides, parameter.storage_offset() + self.offset
        )


def tuples(values: Iterable[object]) -> Iterator:
    """Yields values that come from JSON, lists as tuples."""
    return (tuple(value) if isinstance(value, list) else value for value in values)


def extent(tensor: Tensor) -> int:
    """Returns the number of elements from the first to the last of a tensor in memory."""
    return sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the strides of a contiguous tensor, in elements."""
    return tuple(prod(shape[k + 1 :]) for k in range(len(shape)))


def factor(
    offset: int, shape: tuple[int, ...], strides: tuple[int, ...], base: tuple[int, ...]
) -> tuple[tuple[int, ...], list[Piece]]:
    """Rewrites a view of a contiguous tensor of shape `base` as pieces along one dimension of `base`
    each.

    Returns the index in `base` of the view's first element, and the pieces, in the view's order of
    iteration (dimensions of size 1 give none). Raises Untraceable for views such as a range of a
    flattened matrix that cuts through the rows.
    """
    base_strides = row_major(base)
    rest = offset
    first: list[int] = []
    for stride in base_strides:
        first.append(rest // stride)
        rest %= stride
    # per dimension of base the largest index touched so far: below its size there is no carry
    reach = list(first)
    pieces: list[Piece] = []
    for dim, (size, stride) in enumerate(zip(shape, strides, strict=True)):
        inner_first = []
        scale = 1
        while size > 1:
            k = next(
                (k for k, n in enumerate(base) if n > 1 and 0 < base_strides[k] <= stride), None
            )
            if k is None or stride % base_strides[k]:
                raise Untraceable(
                    f"stride {stride} of a view of shape {shape} is no step along a tensor {base}"
                )
            step = stride // base_strides[k]
            take = size
            if reach[k] + (size - 1) * step >= base[k]:
                # The view leaves this dimension: it must fill it and go on in the one before.
                take = base[k] // step
                if (
                    take < 2
                    or take * step != base[k]
                    or size % take
                    or reach[k] + (take - 1) * step >= base[k]
                ):
                    raise Untraceable(
                        f"a view of shape {shape} crosses dimension {k} of a tensor {base} unevenly"
                    )
            inner_first.append(Piece(take, k, step, dim, scale))
            reach[k] += (take - 1) * step
            size //= take
            stride *= take
            scale *= take
        pieces += reversed(inner_first)
    return tuple(first), pieces


def split_into_boxes(
    offset: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    base: tuple[int, ...],
    other: tuple[int, ...],
) -> list[tuple[Box, int, tuple[int, ...]]]:
    """Returns the boxes of `base` that a view covers, each with the offset and strides of the same
    elements in a second view.

    other: strides of the second view, per dimension of `shape`. The boxes are disjoint if the view
    touches no element twice.
    """
    start, pieces = factor(offset, shape, strides, base)
    boxes = [(list(start), [1] * len(base), 0, [0] * len(base))]
    for k in range(len(base)):
        along = sorted((p for p in pieces if p.base == k), key=lambda p: p.step)
        parts = [(p.size, p.step, other[p.dim] * p.scale) for p in along]
        run = (1, 1, 0)  # size, step, stride in the other view
        if parts and parts[0][1] == 1:
            run = parts.pop(0)
            while parts and parts[0][1] == run[0] and parts[0][2] == run[0] * run[2]:
                run = (run[0] * parts.pop(0)[0], 1, run[2])
        elif parts:
            step = parts[0][1]
            raise Untraceable(
                f"a view of shape {shape} takes every {step}th element of dimension {k} of {base}"
            )
        for _, size, _, run_strides in boxes:
            size[k], run_strides[k] = run[0], run[2]
        for count, step, stride in parts:  # not one run in the second view: one box per step
            boxes = [
                ([*a[:k], a[k] + i * step, *a[k + 1 :]], list(n), o + i * stride, list(s))
                for a, n, o, s in boxes
                for i in range(count)
            ]
    return [(Box(tuple(a), tuple(n)), o, tuple(s)) for a, n, o, s in boxes]


def overlap(
    parts: Sequence[ParameterSlice], shape: tuple[int, ...], strides: tuple[int, ...]
) -> bool:
    """Returns whether slices share an element of a dense tensor [*shape] with as many elements as
    all slices."""
    in_memory = tuple(
        shape[d] for d in sorted(range(len(shape)), key=strides.__getitem__, reverse=True)
    )
    try:
        boxes = [
            box
            for part in parts
            for box, *_ in split_into_boxes(
                part.offset, part.size, part.strides, in_memory, (0,) * len(part.size)
            )
        ]
    except Untraceable:  # interleaved slices are no boxes, so elements are counted
        count = torch.zeros(prod(shape), dtype=torch.uint8, device="cpu")
        for part in parts:
            count.as_strided(part.size, part.strides, part.offset).add_(1)
        return bool((count != 1).any())
    low = np.array([b.start for b in boxes]).reshape(len(boxes), -1)
    high = low + np.array([b.size for b in boxes]).reshape(len(boxes), -1)
    return any(
        ((low[i + 1 :] < high[i]) & (low[i] < high[i + 1 :])).all(axis=1).any()
        for i in range(len(boxes) - 1)
    )
