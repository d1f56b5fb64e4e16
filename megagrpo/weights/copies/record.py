"""The recorder learns what a model's own loader copies where, without loading anything.

The loader runs over empty tensors on the meta device that have the checkpoint's names and shapes, under a dispatch
mode that notes every `copy_` into a parameter and does not execute it. Run on the actor and on every engine rank, the
two lists of copies determine export, exchange and digests; no table of fused or sharded names exists anywhere.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megagrpo.weights.copies.concatenation import Concatenation, JoinedPart
from megagrpo.weights.copies.views import (
    Box,
    ParameterSlice,
    Untraceable,
    factor,
    naming,
    overlap,
    row_major,
    split_into_boxes,
)

Load = Callable[[Mapping[str, Tensor]], object]
Specs = Mapping[str, tuple[tuple[int, ...], torch.dtype]]  # HF tensors: name -> shape and dtype

_aten = torch.ops.aten
_FILLS = {_aten.zero_.default, _aten.fill_.Scalar}
_REWRITES = {_aten.clone.default, _aten._to_copy.default}  # same elements and order, new storage


@dataclass(frozen=True)
class HfSlice:
    """A box of one HF tensor: what trainers and engines mean when they speak of the same elements."""

    tensor: str
    box: Box

    def __str__(self) -> str:
        return f"{self.tensor} {self.box}"


@dataclass(frozen=True)
class Copy:
    """Maps a box of an HF tensor to a strided slice of a parameter.

    `offset`, from the parameter's first element, and `strides` count elements.
    """

    hf: str
    start: tuple[int, ...]
    size: tuple[int, ...]
    parameter: str
    offset: int
    strides: tuple[int, ...]

    @property
    def box(self) -> Box:
        """Returns the elements of the HF tensor."""
        return Box(self.start, self.size)

    @property
    def source(self) -> HfSlice:
        """Returns what is copied, without where it goes."""
        return HfSlice(self.hf, self.box)

    def restrict(self, box: Box) -> "Copy":
        """Returns the part of this copy that lies in `box`, which must be inside it."""
        shift = sum((a - b) * s for a, b, s in zip(box.start, self.start, self.strides, strict=True))
        return Copy(self.hf, box.start, box.size, self.parameter, self.offset + shift, self.strides)

    @property
    def target(self) -> ParameterSlice:
        """Returns where it goes, without what is copied."""
        return ParameterSlice(self.parameter, self.offset, self.size, self.strides)

    def view(self, parameters: Mapping[str, Tensor]) -> Tensor:
        """Returns the parameter's elements as a view, shaped like the box."""
        return self.target.view(parameters)


@dataclass(frozen=True)
class Fill(ParameterSlice):
    """Elements of a parameter that the loader sets to a constant, such as padding of a vocabulary."""

    value: float


@dataclass
class Computed:
    """Says how a loader computes a parameter from HF tensors by more than copies, and from which."""

    how: str
    hf: set[str]


@dataclass
class Recording:
    """Collects what one run of a loader does to the parameters of one rank."""

    copies: list[Copy] = field(default_factory=list)
    fills: list[Fill] = field(default_factory=list)
    computed: dict[str, Computed] = field(default_factory=dict)  # by parameter
    # Names of HF tensors that the loader concatenates before it copies: it must be given them in one call.
    together: set[tuple[str, ...]] = field(default_factory=set)


def record_copies(load: Load, hf_specs: Specs, parameters: Mapping[str, Tensor]) -> list[Copy]:
    """Returns the copies that `load` makes from HF tensors of these shapes and dtypes into `parameters`, which stay
    untouched.

    Raises ValueError naming the tensor for anything but views, dtype casts and copies, and naming the parameter when
    an element is written never or twice (elements that the loader sets to a constant count as written).
    """
    return record_whole(load, hf_specs, parameters).copies


def record_whole(load: Load, hf_specs: Specs, parameters: Mapping[str, Tensor]) -> Recording:
    """Returns what record_copies does, with the constants that `load` sets."""
    recording = record(load, hf_specs, parameters)
    problems = coverage_problems(recording, parameters)
    if problems:
        raise ValueError("the loader does not write every parameter element exactly once:\n" + "\n".join(problems))
    return recording


def record(load: Load, hf_specs: Specs, parameters: Mapping[str, Tensor], allow_computed: bool = False) -> Recording:
    """Records copies and constants, without the coverage check of record_copies.

    allow_computed: notes parameters that are computed from HF tensors by more than copies, instead of raising.
    """
    hf = {name: torch.empty(shape, dtype=dtype, device="meta") for name, (shape, dtype) in hf_specs.items()}
    mode = _Recorder(hf, parameters, allow_computed)
    with torch.no_grad(), mode:
        load(hf)
    recording = mode.recording
    for copy in recording.copies:  # a parameter is one or the other
        if copy.parameter in recording.computed:
            recording.computed[copy.parameter].hf.add(copy.hf)
    recording.copies = [copy for copy in recording.copies if copy.parameter not in recording.computed]
    return recording


@dataclass(frozen=True)
class _Traced:
    """Describes a dense storage that holds elements of one HF tensor.

    `sizes` and, in the HF tensor, `offset` and `hf_strides` of its dimensions, in elements.
    """

    hf: str
    offset: int
    sizes: tuple[int, ...]
    hf_strides: tuple[int, ...]


@dataclass(frozen=True)
class _Strided:
    """`size` elements, `hf_stride` apart in the HF tensor; one step is `scale` steps along `dim` of the view."""

    size: int
    hf_stride: int
    dim: int
    scale: int


@dataclass(frozen=True)
class _HfView:
    """A view, of any tensor that was copied from an HF tensor, as a view of that HF tensor."""

    hf: str
    offset: int
    pieces: list[_Strided]  # in the view's order of iteration


@dataclass(frozen=True)
class _Extent:
    """The elements of a storage from `start` to before `stop`, which are those of a parameter."""

    start: int
    stop: int
    parameter: str


class _Recorder(TorchDispatchMode):
    def __init__(self, hf: Mapping[str, Tensor], parameters: Mapping[str, Tensor], allow_computed: bool):
        super().__init__()
        self.recording, self.allow_computed = Recording(), allow_computed
        self.hf = hf
        self.traced = {
            _storage(t): _Traced(name, 0, tuple(t.shape), row_major(tuple(t.shape))) for name, t in hf.items()
        }
        self.joined: dict[int, Concatenation] = {}  # storages that are concatenations of traced tensors
        self.lost: dict[int, Computed] = {}  # storages computed from HF tensors by something else than a copy
        self.parameters: dict[int, list[_Extent]] = {}  # by storage: many may share one flat buffer
        for name, tensor in parameters.items():
            start = int(tensor.storage_offset())
            stop = start + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
            self.parameters.setdefault(_storage(tensor), []).append(_Extent(start, stop, name))
        self.keep: list[Tensor] = []  # a freed storage's address could come back as another tensor

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is _aten.copy_.default:
            return self._copy(args[0], args[1])
        if func in _FILLS and self._is_parameter(args[0]):
            return self._fill(args[0], 0.0 if func is _aten.zero_.default else float(args[1]))
        sources = [t for t in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        arguments = zip(args, func._schema.arguments, strict=False)
        written = [value for value, a in arguments if a.alias_info and a.alias_info.is_write]
        for tensor in written:
            if isinstance(tensor, Tensor) and self._is_parameter(tensor):
                raise ValueError(
                    f"parameter {self._parameter(tensor)[0]} is written by {func}, "
                    "which is no copy: it cannot be traced"
                )
        origin = next((t for t in sources if self._from_hf(t)), None)
        if origin is None:
            return func(*args, **kwargs)
        if func in _REWRITES and _storage(origin) not in self.lost:
            return self._rewrite(origin, kwargs.get("dtype"))
        if func is _aten.cat.default and all(_storage(t) in self.traced for t in sources):
            return self._concatenate(sources, *args[1:], **kwargs)
        out = func(*args, **kwargs)
        for tensor in written:
            if isinstance(tensor, Tensor) and self._from_hf(tensor):
                self._lose(tensor, sources, str(func))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if isinstance(tensor, Tensor) and not self._known(tensor):
                self._lose(tensor, sources, str(func))
        return out

    def _rewrite(self, source: Tensor, dtype: torch.dtype | None) -> Tensor:
        if pieces := self._pieces(source, source.shape):
            return self._concatenate([self._rewrite(piece.source, dtype) for piece in pieces], pieces[0].dim)
        out = torch.empty_like(source, dtype=dtype or source.dtype, memory_format=torch.preserve_format)
        if _storage(source) in self.traced:
            self.keep.append(out)
            self._trace(out, source)
        else:
            self._lose(out, [source], "a rewritten tensor")
        return out

    def _concatenate(self, parts: list[Tensor], dim: int = 0) -> Tensor:
        joined = Concatenation.of(parts, dim)
        self.keep += [joined.whole, *parts]
        self.joined[_storage(joined.whole)] = joined
        return joined.whole

    def _copy(self, target: Tensor, source: Tensor) -> Tensor:
        if target.numel() == 0:
            return target
        if self._is_parameter(target) and (pieces := self._pieces(source, target.shape)):
            return self._copy_pieces(target, source, pieces)
        lost = self.lost.get(_storage(source))
        if self._is_parameter(target):
            if lost and self.allow_computed:
                known = self.recording.computed.setdefault(self._parameter(target)[0], Computed(lost.how, set()))
                known.hf |= lost.hf
                return target
            if lost or _storage(source) not in self.traced:
                raise ValueError(
                    f"parameter {self._parameter(target)[0]} is filled from "
                    f"{lost.how if lost else 'a tensor that is no HF tensor'}"
                )
            self._record(target, source)
        elif self._from_hf(source):  # through a temporary
            self.keep.append(target)
            whole = target.nbytes == target.untyped_storage().nbytes() and target.shape == source.shape
            if whole and _storage(source) in self.traced:
                self._trace(target, source)
            else:
                self._lose(target, [source, target], "a piecewise copy into a temporary")
        else:
            _aten.copy_.default(target, source)
        return target

    def _pieces(self, source: Tensor, shape: torch.Size) -> list[JoinedPart]:
        """Returns what a cut of a concatenation that is copied into this shape consists of, [] for another tensor."""
        joined = self.joined.get(_storage(source))
        if joined is None or source.numel() == 0:
            return []
        try:
            return joined.pieces(source, shape)
        except Untraceable as exc:
            self._lose(source, [source], str(exc))
            return []

    def _copy_pieces(self, target: Tensor, source: Tensor, pieces: list[JoinedPart]) -> Tensor:
        for piece in pieces:
            self._copy(target.narrow(piece.dim, piece.start, piece.source.shape[piece.dim]), piece.source)
        names = sorted(set(self._names(source)))
        if len(names) > 1:
            self.recording.together.add(tuple(names))
        return target

    def _record(self, target: Tensor, source: Tensor) -> None:
        if source.numel() != target.numel():
            raise ValueError(
                f"parameter {self._parameter(target)[0]} is filled by broadcasting {self.traced[_storage(source)].hf}: "
                "it cannot be traced"
            )
        pad = target.dim() - source.dim()
        name, offset = self._parameter(target)
        shape, strides = (1,) * pad + tuple(source.shape), (0,) * pad + tuple(source.stride())
        view = self._hf_view(source, shape, strides)
        with naming(f"HF tensor {view.hf} -> parameter {name}"):
            pairs = split_into_boxes(
                offset=view.offset,
                shape=tuple(piece.size for piece in view.pieces),
                strides=tuple(piece.hf_stride for piece in view.pieces),
                base=tuple(self.hf[view.hf].shape),
                other=tuple(target.stride(piece.dim) * piece.scale for piece in view.pieces),
            )
        for pair in pairs:
            copy = Copy(view.hf, pair.box.start, pair.box.size, name, offset + pair.offset, pair.strides)
            self.recording.copies.append(copy)

    def _hf_view(self, tensor: Tensor, shape: tuple[int, ...], strides: tuple[int, ...]) -> _HfView:
        """Returns what a traced tensor, read with this shape and these strides, is of its HF tensor."""
        origin = self.traced[_storage(tensor)]
        with naming(f"HF tensor {origin.hf}"):
            first, pieces = factor(int(tensor.storage_offset()), shape, strides, origin.sizes)
        offset = origin.offset + sum(i * s for i, s in zip(first, origin.hf_strides, strict=True))
        strided = [_Strided(p.size, origin.hf_strides[p.base] * p.step, p.dim, p.scale) for p in pieces]
        return _HfView(origin.hf, offset, strided)

    def _trace(self, out: Tensor, source: Tensor) -> None:
        view = self._hf_view(source, tuple(source.shape), tuple(source.stride()))
        dense = sorted(((out.stride(p.dim) * p.scale, p.size, p.hf_stride) for p in view.pieces), reverse=True)
        self.traced[_storage(out)] = _Traced(
            view.hf,
            view.offset,
            sizes=tuple(size for _, size, _ in dense),
            hf_strides=tuple(hf_stride for _, _, hf_stride in dense),
        )

    def _fill(self, target: Tensor, value: float) -> Tensor:
        if target.numel():
            name, offset = self._parameter(target)
            self.recording.fills.append(Fill(name, offset, tuple(target.shape), tuple(target.stride()), value))
        return target

    def _lose(self, tensor: Tensor, origins: list[Tensor], how: str) -> None:
        """Notes that a tensor is no view of one HF tensor. how: what made it of the `origins`."""
        self.keep.append(tensor)
        earlier = [self.lost[_storage(t)] for t in origins if _storage(t) in self.lost]
        names = [name for t in origins for name in self._names(t)]
        text = earlier[0].how if earlier else f"{how} of HF tensor {names[0]}"
        self.lost[_storage(tensor)] = Computed(text, set(names).union(*(part.hf for part in earlier)))
        for known in (self.traced, self.joined):
            known.pop(_storage(tensor), None)

    def _names(self, tensor: Tensor) -> list[str]:
        """Returns the HF tensors that a traced tensor or a concatenation of such holds elements of."""
        joined, origin = self.joined.get(_storage(tensor)), self.traced.get(_storage(tensor))
        if joined is not None:
            return [self.traced[_storage(part)].hf for part in joined.parts]
        return [origin.hf] if origin else []

    def _from_hf(self, tensor: Tensor) -> bool:
        return any(_storage(tensor) in known for known in (self.traced, self.joined, self.lost))

    def _known(self, tensor: Tensor) -> bool:
        return self._from_hf(tensor) or self._is_parameter(tensor)

    def _is_parameter(self, tensor: Tensor) -> bool:
        return _storage(tensor) in self.parameters

    def _parameter(self, tensor: Tensor) -> tuple[str, int]:
        """Returns the (first) name of the parameter that a view lies in, and where in it the view begins."""
        offset = int(tensor.storage_offset())
        for extent in self.parameters[_storage(tensor)]:
            if extent.start <= offset < extent.stop:
                return extent.parameter, offset - extent.start
        raise ValueError("the loader writes between the parameters of a shared buffer")


def _storage(tensor: Tensor) -> int:
    """Returns what tells storages apart, on the meta device too."""
    return tensor.untyped_storage()._cdata


def coverage_problems(recording: Recording, parameters: Mapping[str, Tensor]) -> list[str]:
    """Returns a line for each parameter of which an element is not written exactly once. Tied names count as one.

    What happens inside a parameter that is computed is not known.
    """
    writes: dict[str, list[ParameterSlice]] = {}
    for write in [*(copy.target for copy in recording.copies), *recording.fills]:
        writes.setdefault(write.parameter, []).append(write)
    problems, seen = [], set()
    for name, tensor in parameters.items():
        place = (_storage(tensor), tensor.storage_offset())
        if place in seen or tensor.numel() == 0 or name in recording.computed:
            continue
        seen.add(place)
        done, total = sum(prod(write.size) for write in writes.get(name, [])), tensor.numel()
        if done < total:
            problems.append(
                f"parameter {name} {tuple(tensor.shape)}: {total - done} of {total} elements are never written"
            )
        elif done > total or overlap(writes[name], tuple(tensor.shape), tensor.stride()):
            problems.append(f"parameter {name} {tuple(tensor.shape)}: some elements are written twice")
    return problems
