"""FP8 as DeepSeek-V3 publishes it: E4M3 values with one float32 scale for each block, of a trainer's own slices.

    scale(block) = max(|x| over the block, 1e-12) / 448        value = e4m3(x / scale(block))

in float32, of the actor's own values; e4m3 rounds to the nearest, ties to even. 448 is the largest value of E4M3, 1e-12
keeps a block of zeros from 0 / 0. Blocks at a tensor's end may be partial. The values lie in buffers laid out as the
actor's parameters, so their copy lists are those of the parameters; scales have lists in blocks. Transports and digests
treat both as any other tensors.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import pairwise

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megagrpo.families.quantization import FP8_BLOCK, SCALES
from megagrpo.mesh import Mesh
from megagrpo.weights.actor_weights import ActorWeights
from megagrpo.weights.copies.record import Copy, Specs
from megagrpo.weights.copies.views import Box, row_major

FP8 = torch.float8_e4m3fn
_LARGEST, _SMALLEST = 448.0, 1e-12
_SHOWN = 10  # wrong names
_AT_ONCE = 1 << 24  # elements of a temporary in float32


def quantised_specs(specs: Specs, names: set[str]) -> Specs:
    """Returns the specs with `names` in FP8, each followed by its scales. Raises ValueError for no matrix."""
    found: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for name, (shape, dtype) in specs.items():
        if name not in names:
            found[name] = shape, dtype
            continue
        if len(shape) != 2:
            raise ValueError(f"HF tensor {name} {shape} has FP8 parameters in the engine, but blocks are of matrices")
        found[name] = shape, FP8
        found[name + SCALES] = _grid_of((0, 0), shape).size, torch.float32
    return found


def quantised_copies(copies: Sequence[Copy], specs: Specs, names: set[str]) -> list[Copy]:
    """Returns a trainer rank's copies with those of `names` from its FP8 buffers, and those of their scales."""
    found = [copy for copy in copies if copy.hf not in names]
    mine = [copy for copy in copies if copy.hf in names]
    found += [Copy(c.hf, c.start, c.size, _twin(c.parameter), c.offset, c.strides) for c in mine]
    for copy in mine:  # scales lie in a grid of the whole tensor
        blocks, strides = _grid_of(copy.start, copy.size), row_major(_grid_of((0, 0), specs[copy.hf][0]).size)
        offset = sum(first * stride for first, stride in zip(blocks.start, strides, strict=True))
        found.append(Copy(copy.hf + SCALES, blocks.start, blocks.size, copy.hf + SCALES, offset, strides))
    return list(dict.fromkeys(found))


def block_maxima(values: Tensor, start: tuple[int, ...]) -> Tensor:
    """Returns the largest |element| of each block, float32 [blocks, blocks].

    values: a part [n, m] of a matrix, which begins at `start`.
    """
    grid = _grid_of(start, tuple(values.shape))
    padded = torch.zeros([n * b for n, b in zip(grid.size, FP8_BLOCK, strict=True)], device=values.device)
    top, left = (first % block for first, block in zip(start, FP8_BLOCK, strict=True))
    padded[top : top + values.shape[0], left : left + values.shape[1]] = values
    rows, columns = grid.size
    return padded.abs_().view(rows, FP8_BLOCK[0], columns, FP8_BLOCK[1]).amax((1, 3))


def block_scales(maxima: Tensor) -> Tensor:
    """Returns the scales of blocks with these maxima, float32 of the same shape."""
    return maxima.clamp(min=_SMALLEST) / _LARGEST


def quantise(values: Tensor, start: tuple[int, ...], scales: Tensor) -> Tensor:
    """Returns values / scale of their block in E4M3, [n, m]. start: see block_maxima; scales [blocks, blocks]."""
    return (values.float() / _of_elements(scales, start, values.shape)).to(FP8)


def dequantise(values: Tensor, start: tuple[int, ...], scales: Tensor) -> Tensor:
    """Returns values in E4M3 * scale of their block, float32 [n, m]; arguments as those of `quantise`."""
    return values.float() * _of_elements(scales, start, values.shape)


def quantised(weights: ActorWeights, names: set[str], mesh: Mesh) -> ActorWeights:
    """Collective. Returns the weights with the HF tensors `names` in FP8. Entering its `merged` is collective.

    A block that several ranks share (its rows or columns are cut within it) gets the largest of their maxima. Raises
    ValueError if `names` are not ActorWeights.fp8.
    """
    if names != weights.fp8:
        wrong = [f"{name}: not in FP8, but must be" for name in sorted(weights.fp8 - names)]
        wrong += [f"{name}: in FP8, but must not be" for name in sorted(names - weights.fp8)]
        raise ValueError(
            f"rollout.quantization fp8: the engine keeps {len(wrong)} weights in another format than the model's "
            "family names (see SGLANG_FP8_IGNORED_LAYERS):\n" + "\n".join(wrong[:_SHOWN])
        )
    view = _QuantisedView(weights, names, mesh)
    specs = quantised_specs(weights.hf_specs, names)
    kept = {name: spec[1] for name, spec in specs.items() if name not in weights.hf_specs or name in names}
    return ActorWeights(view.copies, specs, view.parameters, view.merged, {**weights.kept, **kept})


def rounding(weights: ActorWeights, mesh: Mesh) -> Callable[[], AbstractContextManager[None]]:
    """Collective. Returns a context, entered collectively, inside which live parameters have what engines compute with.

    Those that engines keep in FP8 (ActorWeights.fp8) are value * scale there, in their own dtype; on leaving they get
    their bits back.
    """
    return _QuantisedView(weights, set(weights.fp8), mesh).rounded


def format_table(actor: ActorWeights, published: ActorWeights) -> Iterator[str]:
    """Yields a line for every kind of HF tensor with its format in the actor and in engines; * for layer and expert."""
    live = actor.parameters()
    held = {copy.hf: live[copy.parameter].dtype for copy in actor.copies}  # of this rank's
    kinds: dict[tuple[str, str, str], int] = {}
    for name, (_, stored) in actor.hf_specs.items():
        dtype = published.kept.get(name)
        there = "rollout.dtype" if dtype is None else str(dtype) + (" with float32 scales" if dtype == FP8 else "")
        kind = re.sub(r"\.\d+(?=\.)", ".*", name), str(held.get(name, stored)), there
        kinds[kind] = kinds.get(kind, 0) + 1
    yield "weights, in the actor -> in the engines, how many:"
    for (name, here, there), count in kinds.items():
        yield f"  {name}: {here} -> {there}, {count}".replace("torch.", "")


class _QuantisedView:
    """One rank's slices in FP8. Buffers exist inside `merged` only."""

    def __init__(self, weights: ActorWeights, names: set[str], mesh: Mesh):
        self._weights, self._mesh = weights, mesh
        mine = [copy for copy in weights.copies if copy.hf in names]
        self._parts: dict[str, list[Copy]] = {}  # by HF tensor: bounded parts of this rank's slices
        for copy in mine:
            self._parts.setdefault(copy.hf, []).extend(_in_rows(copy))
        self._grids = {name: _grid_of((0, 0), weights.hf_specs[name][0]).size for name in self._parts}
        self._quantised = {copy.parameter for copy in mine}
        self._buffers: dict[str, Tensor] = {}
        self._shared = self._shared_blocks()
        self.copies = quantised_copies(weights.copies, weights.hf_specs, names)

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

    @contextmanager
    def rounded(self) -> Iterator[None]:
        """Collective on entry. See `rounding`."""
        live = self._weights.parameters()
        with torch.no_grad():
            scales = self._scales(live)
            kept = {name: live[name].detach().clone() for name in self._quantised}
        try:
            with torch.no_grad():
                for part, of_part in self._with_scales(scales):
                    values = part.view(live)
                    values.copy_(dequantise(quantise(values, part.start, of_part), part.start, of_part))
            yield
        finally:
            with torch.no_grad():
                for name, values in kept.items():
                    live[name].copy_(values)

    def _fill(self) -> None:
        live, device = self._weights.parameters(), self._mesh.device
        buffers = {_twin(name): torch.empty(_extent(live[name]), dtype=FP8, device=device) for name in self._quantised}
        scales = self._scales(live)
        for part, of_part in self._with_scales(scales):
            twin = Copy(part.hf, part.start, part.size, _twin(part.parameter), part.offset, part.strides)
            twin.view(buffers).copy_(quantise(part.view(live), part.start, of_part))
        self._buffers = buffers | {name + SCALES: of_tensor for name, of_tensor in scales.items()}

    def _scales(self, live: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Collective. Returns by HF tensor the scales of all its blocks; right where this rank holds a part of one."""
        maxima = {name: torch.zeros(grid, device=self._mesh.device) for name, grid in self._grids.items()}
        for name, parts in self._parts.items():
            for part in parts:
                blocks = maxima[name][_grid_of(part.start, part.size).slices]
                torch.maximum(blocks, block_maxima(part.view(live), part.start), out=blocks)
        self._share(maxima)
        return {name: block_scales(of_tensor) for name, of_tensor in maxima.items()}

    def _with_scales(self, scales: Mapping[str, Tensor]) -> Iterator[tuple[Copy, Tensor]]:
        """Yields every part of this rank's slices with the scales of its blocks."""
        for name, parts in self._parts.items():
            for part in parts:
                yield part, scales[name][_grid_of(part.start, part.size).slices]

    def _shared_blocks(self) -> dict[str, Tensor]:
        """Collective. Returns by HF tensor the blocks that some rank holds in part, int64, as indices in its grid.

        The same on every rank, whether it holds such a tensor or not.
        """
        partial: dict[str, set[int]] = {}
        for name, parts in self._parts.items():
            if blocks := _partial_blocks(parts, self._weights.hf_specs[name][0]):
                partial[name] = blocks
        if not self._mesh.any_true(bool(partial)):
            return {}
        union: dict[str, set[int]] = {}
        for of_rank in self._mesh.gather_world(partial):
            for name, blocks in of_rank.items():
                union.setdefault(name, set()).update(blocks)
        return {name: torch.tensor(sorted(union[name]), device=self._mesh.device) for name in sorted(union)}

    def _share(self, maxima: Mapping[str, Tensor]) -> None:
        """Collective if there are shared blocks. Gives them the largest of all ranks' maxima."""
        if not self._shared:
            return
        lengths = [len(blocks) for blocks in self._shared.values()]
        flat = torch.zeros(sum(lengths), device=self._mesh.device)
        own = [
            (part, maxima[name].view(-1), blocks)
            for part, (name, blocks) in zip(flat.split(lengths), self._shared.items(), strict=True)
            if name in maxima
        ]
        for part, of_tensor, blocks in own:
            part.copy_(of_tensor[blocks])
        dist.all_reduce(flat, op=dist.ReduceOp.MAX)
        for part, of_tensor, blocks in own:
            of_tensor[blocks] = part


def _of_elements(scales: Tensor, start: tuple[int, ...], shape: Sequence[int]) -> Tensor:
    """Returns the scale of each element of a part that begins at `start`; scales of the blocks that it touches."""
    for dim, (first, block) in enumerate(zip(start, FP8_BLOCK, strict=True)):
        scales = scales.repeat_interleave(block, dim).narrow(dim, first % block, shape[dim])
    return scales


def _grid_of(start: Sequence[int], size: Sequence[int]) -> Box:
    """Returns the blocks that a part of a matrix touches, as a box of the grid of blocks."""
    first = tuple(a // block for a, block in zip(start, FP8_BLOCK, strict=True))
    stop = (-(-(a + n) // block) for a, n, block in zip(start, size, FP8_BLOCK, strict=True))
    return Box(first, tuple(b - a for a, b in zip(first, stop, strict=True)))


def _in_rows(copy: Copy) -> Iterator[Copy]:
    """Cuts a copy between rows of blocks into parts of at most _AT_ONCE elements, or of one row of blocks."""
    (top, left), (height, width) = copy.start, copy.size
    step = max(_AT_ONCE // (width * FP8_BLOCK[0]), 1) * FP8_BLOCK[0]
    edges = [top, *range(top - top % FP8_BLOCK[0] + step, top + height, step), top + height]
    for first, stop in pairwise(edges):
        yield copy.restrict(Box((first, left), (stop - first, width)))


def _partial_blocks(parts: Sequence[Copy], shape: tuple[int, ...]) -> set[int]:
    """Returns the blocks of a matrix that the parts touch and do not cover, as indices in its grid."""
    grid = _grid_of((0, 0), shape).size
    covered = np.zeros(grid, dtype=np.int64)
    for box in {part.box for part in parts}:  # several parameters may hold one slice
        rows, columns = (_overlaps(a, n, k, b) for a, n, k, b in zip(box.start, box.size, grid, FP8_BLOCK, strict=True))
        covered += np.outer(rows, columns)
    whole = np.outer(*(_overlaps(0, n, k, b) for n, k, b in zip(shape, grid, FP8_BLOCK, strict=True)))
    return set(np.flatnonzero((covered > 0) & (covered < whole)).tolist())


def _overlaps(start: int, size: int, count: int, block: int) -> np.ndarray:
    """Returns how many of the indices from `start` on lie in each of `count` blocks, int64 [count]."""
    edges = np.arange(count) * block
    return np.clip(np.minimum(edges + block, start + size) - np.maximum(edges, start), 0, None)


def _twin(parameter: str) -> str:
    return f"{parameter} in FP8"


def _extent(parameter: Tensor) -> int:
    """Returns the elements from the first to the last of a parameter in memory."""
    return sum((n - 1) * s for n, s in zip(parameter.shape, parameter.stride(), strict=True)) + 1
