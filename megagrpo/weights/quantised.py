"""A trainer's own slices in FP8: values in buffers laid out as the actor's parameters, and scales
in blocks.

So the copy lists of values are those of the parameters; scales have lists in blocks (see
blocks.py). Transports and digests treat both as any other tensors.
"""

import re
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import replace
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from megagrpo.mesh import Mesh
from megagrpo.models.stored.quantization import SCALES
from megagrpo.weights.actor_weights import ActorWeights
from megagrpo.weights.blocks import (
    FP8,
    block_maxima,
    block_scales,
    grid_of,
    quantise,
    whole_grid,
)
from megagrpo.weights.copies.record import Copy, Specs
from megagrpo.weights.copies.views import extent, row_major

_AT_ONCE = 1 << 24  # elements of a temporary in float32
_TWIN = " in FP8"  # ends the name of a parameter's buffer


def quantised_specs(specs: Specs, names: Set[str]) -> Specs:
    """Returns the specs with `names` in FP8, each followed by its scales. Raises ValueError for no
    matrix."""
    found: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for name, (shape, dtype) in specs.items():
        if name not in names:
            found[name] = shape, dtype
            continue
        if len(shape) < 2:
            raise ValueError(
                f"HF tensor {name} {shape} has FP8 parameters in the engine, "
                "but blocks are of matrices"
            )
        found[name] = shape, FP8
        found[name + SCALES] = whole_grid(shape), torch.float32
    return found


def quantised_copies(copies: Sequence[Copy], specs: Specs, names: Set[str]) -> list[Copy]:
    """Returns a trainer rank's copies with those of `names` from its FP8 buffers, and those of
    their scales."""
    found = [copy for copy in copies if copy.hf not in names]
    mine = [copy for copy in copies if copy.hf in names]
    found += [_twin_of(copy) for copy in mine]
    for copy in mine:  # scales lie in a grid of the whole tensor
        blocks = grid_of(copy.start, copy.size)
        strides = row_major(whole_grid(specs[copy.hf][0]))
        offset = sum(first * stride for first, stride in zip(blocks.start, strides, strict=True))
        found.append(
            Copy(copy.hf + SCALES, blocks.start, blocks.size, copy.hf + SCALES, offset, strides)
        )
    return list(dict.fromkeys(found))


def quantised(weights: ActorWeights, mesh: Mesh) -> ActorWeights:
    """Returns the weights with the HF tensors ActorWeights.fp8 in FP8. Entering its `merged` is
    collective."""
    view = _QuantisedView(weights, mesh)
    specs = quantised_specs(weights.hf_specs, weights.fp8)
    kept = {
        name: spec[1]
        for name, spec in specs.items()
        if name not in weights.hf_specs or name in weights.fp8
    }
    return ActorWeights(view.copies, specs, view.parameters, view.merged, {**weights.kept, **kept})


def format_table(actor: ActorWeights, published: ActorWeights) -> Iterator[str]:
    """Yields a line for every kind of HF tensor with its format in the actor and in engines; * for
    layer and expert."""
    live = actor.parameters()
    held = {copy.hf: live[copy.parameter].dtype for copy in actor.copies}  # of this rank's
    kinds: dict[tuple[str, str, str], int] = {}
    for name, (_, stored) in actor.hf_specs.items():
        dtype = published.kept.get(name)
        there = (
            "rollout.dtype"
            if dtype is None
            else str(dtype) + (" with float32 scales" if dtype == FP8 else "")
        )
        kind = re.sub(r"\.\d+(?=\.)", ".*", name), str(held.get(name, stored)), there
        kinds[kind] = kinds.get(kind, 0) + 1
    yield "weights, in the actor -> in the engines, how many:"
    for (name, here, there), count in kinds.items():
        yield f"  {name}: {here} -> {there}, {count}".replace("torch.", "")


class _QuantisedView:
    """One rank's slices in FP8. Buffers exist inside `merged` only."""

    def __init__(self, weights: ActorWeights, mesh: Mesh):
        self._weights = weights
        self._mesh = mesh
        mine = [copy for copy in weights.copies if copy.hf in weights.fp8]
        self._parts = [copy.restrict(box) for copy in mine for box in copy.box.split(_AT_ONCE)]
        self._quantised = {copy.parameter for copy in mine}
        self._grids = {  # of all, on every rank
            name: whole_grid(shape)
            for name, (shape, _) in weights.hf_specs.items()
            if name in weights.fp8
        }
        self._buffers: dict[str, Tensor] = {}
        self.copies = quantised_copies(weights.copies, weights.hf_specs, weights.fp8)

    def parameters(self) -> Mapping[str, Tensor]:
        """Returns the live parameters and the buffers, under the names in `copies`."""
        return {**self._weights.parameters(), **self._buffers}

    @contextmanager
    def merged(self) -> Iterator[None]:
        """Collective on entry. Quantises the merged weights for the block."""
        with self._weights.merged(), torch.no_grad():
            self._fill()
            try:
                yield
            finally:
                self._buffers = {}

    def _fill(self) -> None:
        live = self._weights.parameters()
        device = self._mesh.device
        buffers = {
            name + _TWIN: torch.empty(extent(live[name]), dtype=FP8, device=device)
            for name in self._quantised
        }
        scales = self._scales(live)
        for part in self._parts:
            of_part = scales[part.hf][grid_of(part.start, part.size).slices]
            _twin_of(part).view(buffers).copy_(quantise(part.view(live), part.start, of_part))
        self._buffers = buffers | {name + SCALES: of_tensor for name, of_tensor in scales.items()}

    def _scales(self, live: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Collective. Returns by HF tensor the scales of all its blocks, whichever ranks hold
        them."""
        maxima = torch.zeros(sum(map(prod, self._grids.values())), device=self._mesh.device)
        by_tensor = self._by_tensor(maxima)
        for part in self._parts:
            blocks = by_tensor[part.hf][grid_of(part.start, part.size).slices]
            torch.maximum(blocks, block_maxima(part.view(live), part.start), out=blocks)
        self._share(maxima)
        return self._by_tensor(block_scales(maxima))

    def _by_tensor(self, flat: Tensor) -> dict[str, Tensor]:
        """Returns views of a value for every block of every tensor."""
        parts = flat.split([prod(grid) for grid in self._grids.values()])
        return {
            name: part.view(grid)
            for part, (name, grid) in zip(parts, self._grids.items(), strict=True)
        }

    def _share(self, maxima: Tensor) -> None:
        """Collective. Gives each block the largest of all ranks' maxima: its rows or columns may be
        cut within it."""
        if self._mesh.world_size > 1:
            dist.all_reduce(maxima, op=dist.ReduceOp.MAX)


def _twin_of(copy: Copy) -> Copy:
    """Returns the same slice of the parameter's buffer."""
    return replace(copy, parameter=copy.parameter + _TWIN)
