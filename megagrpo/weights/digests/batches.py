"""Batches of recorded copies for one digest call, so that launches do not grow with experts."""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megagrpo.weights.copies.recorder import Copy, Specs
from megagrpo.weights.copies.views import Box
from megagrpo.weights.digests.digest import batched_digest

_CAST_ELEMENTS = 1 << 26  # of a temporary tensor in the published dtype


class LiveBatch(NamedTuple):
    """The live elements of k copies with one box and one published dtype."""

    box: Box
    values: Tensor  # [k, *box.size], a view
    indices: np.ndarray  # [k] int64, of the copies in CopyBatches
    dtype: torch.dtype  # published; the values may have another
    firsts: Tensor | None  # see batched_digest


class _Run(NamedTuple):
    """Copies at a constant distance in one storage."""

    first: Copy
    step: int  # elements from one to the next
    indices: np.ndarray


class CopyBatches:
    """Batches copies with equal box, strides and storage at constant distances, in any parameters.

    specs: with published dtypes. The batches follow parameters that move to other storages between
    two calls.
    """

    def __init__(self, copies: Sequence[Copy], specs: Specs):
        self._copies = copies
        self._specs = specs
        self._parameters = list(dict.fromkeys(copy.parameter for copy in copies))
        self._layout: dict[str, tuple[int, int, torch.dtype]] = {}
        self._runs: list[_Run] = []

    def views(self, parameters: Mapping[str, Tensor]) -> Iterator[LiveBatch]:
        """Yields every copy once, in the parameters' dtype. If another dtype is published, yields
        them in parts, because a cast makes a copy."""
        layout = {name: _in_memory(parameters[name]) for name in self._parameters}
        if layout != self._layout:
            self._layout, self._runs = layout, self._plan(layout)
        for copy, step, indices in self._runs:
            parameter = parameters[copy.parameter].detach()
            count = len(indices)
            dtype = self._specs[copy.hf][1]
            first = parameter.storage_offset() + copy.offset
            values = parameter.as_strided((count, *copy.size), (step, *copy.strides), first)
            at_once = count
            if values.dtype != dtype:
                at_once = max(1, _CAST_ELEMENTS // max(copy.box.numel, 1))
            for begin in range(0, count, at_once):
                part = slice(begin, begin + at_once)
                firsts = None
                if _is_row(copy):
                    starts = [self._copies[index].start[0] for index in indices[part]]
                    firsts = torch.tensor(starts, device=values.device)
                yield LiveBatch(copy.box, values[part], indices[part], dtype, firsts)

    def digests(self, parameters: Mapping[str, Tensor]) -> Tensor:
        """Returns the digests of all copies' live values in the published dtypes, int64
        [copies]."""
        device = next(iter(parameters.values())).device
        places = [np.empty(0, dtype=np.int64)]
        found = [torch.empty(0, dtype=torch.int64, device=device)]
        for box, values, indices, dtype, firsts in self.views(parameters):
            places.append(indices)
            found.append(batched_digest(values.to(dtype), box, firsts))
        digests = torch.cat(found)
        # in one piece: each copy to a GPU waits for what runs there
        order = torch.from_numpy(np.concatenate(places)).to(device)
        return torch.empty_like(digests).index_copy_(0, order, digests)

    def _plan(self, layout: Mapping[str, tuple[int, int, torch.dtype]]) -> list[_Run]:
        alike: dict[tuple, list[tuple[int, int]]] = {}
        for index, copy in enumerate(self._copies):
            storage, offset, dtype = layout[copy.parameter]
            # gate and up of experts take turns in memory: each has its own step
            kind = re.sub(r"\d+", "*", copy.hf)
            start = copy.start[_is_row(copy) :]
            key = storage, dtype, self._specs[copy.hf][1], kind, start, copy.size, copy.strides
            alike.setdefault(key, []).append((offset + copy.offset, index))
        runs = []
        for group in alike.values():
            offsets, indices = zip(*sorted(group), strict=True)
            for run in constant_steps(offsets):
                step = offsets[run[1]] - offsets[run[0]] if len(run) > 1 else 0
                runs.append(
                    _Run(self._copies[indices[run[0]]], step, np.array([indices[k] for k in run]))
                )
        return runs


def _is_row(copy: Copy) -> bool:
    """Tells whether a copy is of one expert in a tensor that holds all of a layer."""
    return copy.size[:-2] == (1,)


def constant_steps(ascending: Sequence[int]) -> Iterator[range]:
    """Cuts ascending numbers into the longest runs of constant steps, and yields their indices."""
    first = 0
    for stop in range(1, len(ascending) + 1):
        steps = [b - a for a, b in pairwise(ascending[max(first, stop - 2) : stop + 1])]
        if stop == len(ascending) or len(set(steps)) > 1:
            yield range(first, stop)
            first = stop


def _in_memory(tensor: Tensor) -> tuple[int, int, torch.dtype]:
    """Returns the storage's identity, the tensor's offset in it (in elements), and its dtype."""
    return tensor.untyped_storage()._cdata, int(tensor.storage_offset()), tensor.dtype
