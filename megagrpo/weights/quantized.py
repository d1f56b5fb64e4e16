"""A trainer's slices in FP8: values in buffers laid out as the actor's parameters, and block scales.

So values have the parameters' copy lists; scales have copy lists in blocks (see blocks.py).
Transports and digests treat both as any other tensors.
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
    quantize,
    whole_grid,
)
from megagrpo.weights.copies.recorder import Copy, Specs
from megagrpo.weights.copies.views import extent, row_major

_AT_ONCE = 1 << 24  # elements of a temporary in float32
_TWIN = " in FP8"  # ends the name of a parameter's buffer


def quantized_specs(specs: Specs, names: Set[str]) -> Specs:
    """Returns the specs with `names`, which are matrices, in FP8, each followed by its scales."""
    quantized: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for name, spec in specs.items():
        quantized[name] = spec
        if name in names:
            quantized[name] = spec[0], FP8
            quantized[name + SCALES] = whole_grid(spec[0]), torch.float32
    return quantized


def quantized_copies(copies: Sequence[Copy], specs: Specs, names: Set[str]) -> list[Copy]:
    """Returns a trainer rank's copies, with `names` from the FP8 buffers, and copies of the scales."""
    quantized = [copy for copy in copies if copy.hf not in names]
    for copy in copies:
        if copy.hf in names:
            quantized.append(_twin_of(copy))
            grid = whole_grid(specs[copy.hf][0])  # in which scales lie
            name = copy.hf + SCALES
            scales = Copy(name, (0,) * len(grid), grid, name, 0, row_major(grid))
            quantized.append(scales.restrict(grid_of(copy.start, copy.size)))
    return list(dict.fromkeys(quantized))


def quantized(weights: ActorWeights, mesh: Mesh) -> ActorWeights:
    """Returns the weights with the HF tensors ActorWeights.fp8 in FP8. Entering its `merged` is
    collective."""
    view = _QuantizedView(weights, mesh)
    specs = quantized_specs(weights.hf_specs, weights.fp8)
    dtypes = dict(weights.fixed_dtypes) | {
        name: dtype
        for name, (_, dtype) in specs.items()
        if name.removesuffix(SCALES) in weights.fp8
    }
    return ActorWeights(view.copies, specs, view.parameters, view.merged, dtypes)


def format_table(actor: ActorWeights, published: ActorWeights) -> Iterator[str]:
    """Yields a line for every kind of HF tensor with its format in the actor and in engines, with *
    for layer and expert."""
    live = actor.parameters()
    held = {copy.hf: live[copy.parameter].dtype for copy in actor.copies}  # by this rank
    kinds: dict[tuple[str, str, str], int] = {}
    for name, (_, stored) in actor.hf_specs.items():
        there = str(published.fixed_dtypes.get(name, "rollout.dtype"))
        if published.fixed_dtypes.get(name) == FP8:
            there += " with float32 scales"
        kind = re.sub(r"\.\d+(?=\.)", ".*", name), str(held.get(name, stored)), there
        kinds[kind] = kinds.get(kind, 0) + 1
    yield "weights, in the actor -> in the engines, how many:"
    for (name, here, there), count in kinds.items():
        yield f"  {name}: {here} -> {there}, {count}".replace("torch.", "")


class _QuantizedView:
    """One rank's slices in FP8. Buffers exist only inside `merged`."""

    def __init__(self, weights: ActorWeights, mesh: Mesh):
        self._weights = weights
        self._mesh = mesh
        mine = [copy for copy in weights.copies if copy.hf in weights.fp8]
        self._parts = [copy.restrict(box) for copy in mine for box in copy.box.split(_AT_ONCE)]
        self._quantized = {copy.parameter for copy in mine}
        self._grids = {  # of all HF tensors in FP8, on every rank
            name: whole_grid(shape)
            for name, (shape, _) in weights.hf_specs.items()
            if name in weights.fp8
        }
        self._buffers: dict[str, Tensor] = {}
        self.copies = quantized_copies(weights.copies, weights.hf_specs, weights.fp8)

    def parameters(self) -> Mapping[str, Tensor]:
        """Returns the live parameters and the buffers, under the names in `copies`."""
        return {**self._weights.parameters(), **self._buffers}

    @contextmanager
    def merged(self) -> Iterator[None]:
        """Collective on entry. Quantizes the merged weights for the block."""
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
            for name in self._quantized
        }
        scales = self._scales(live)
        for part in self._parts:
            part_scales = scales[part.hf][grid_of(part.start, part.size).slices]
            _twin_of(part).view(buffers).copy_(quantize(part.view(live), part.start, part_scales))
        self._buffers = buffers | {name + SCALES: values for name, values in scales.items()}

    def _scales(self, live: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Collective. Returns the scales of all blocks by HF tensor, whichever ranks hold them."""
        maxima = torch.zeros(sum(map(prod, self._grids.values())), device=self._mesh.device)
        by_tensor = self._by_tensor(maxima)
        for part in self._parts:
            blocks = by_tensor[part.hf][grid_of(part.start, part.size).slices]
            torch.maximum(blocks, block_maxima(part.view(live), part.start), out=blocks)
        if self._mesh.world_size > 1:  # ranks may hold parts of a block
            dist.all_reduce(maxima, op=dist.ReduceOp.MAX)
        return self._by_tensor(block_scales(maxima))

    def _by_tensor(self, flat: Tensor) -> dict[str, Tensor]:
        """Returns views of one value per block of all tensors, by tensor."""
        parts = flat.split([prod(grid) for grid in self._grids.values()])
        return {
            name: part.view(grid)
            for part, (name, grid) in zip(parts, self._grids.items(), strict=True)
        }


def _twin_of(copy: Copy) -> Copy:
    """Returns the same slice of the parameter's buffer."""
    return replace(copy, parameter=copy.parameter + _TWIN)
