"""Records the copies of a model's own loader without loading anything.

The loader runs over empty tensors on the meta device that have the checkpoint's names and shapes,
under a dispatch mode that records every `copy_` into a parameter and does not execute it. The lists
of copies of the actor and of every engine rank determine export, exchange and digests, so there is
no table of fused or sharded names.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megagrpo.weights.copies.storages import Computed, TracedStorages, storage_id
from megagrpo.weights.copies.views import (
    Box,
    ParameterSlice,
    extent,
    naming,
    overlap,
    split_into_boxes,
)

Load = Callable[[Mapping[str, Tensor]], object]
Specs = Mapping[str, tuple[tuple[int, ...], torch.dtype]]  # HF tensors: name -> shape and dtype

_aten = torch.ops.aten
_FILLS = {_aten.zero_.default, _aten.fill_.Scalar}
_ZEROS = {_aten.zeros.default, _aten.new_zeros.default, _aten.zeros_like.default}
_REWRITES = {_aten.clone.default, _aten._to_copy.default}  # same elements and order, new storage


@dataclass(frozen=True)
class Copy:
    """Maps a box of an HF tensor to a slice of a parameter: `offset` from its start and `strides`,
    in elements."""

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
    def source(self) -> str:
        """Returns the HF tensor and its elements, for messages."""
        return f"{self.hf} {self.box}"

    @property
    def target(self) -> ParameterSlice:
        """Returns the elements of the parameter."""
        return ParameterSlice(self.parameter, self.offset, self.size, self.strides)

    def restrict(self, box: Box) -> "Copy":
        """Returns the part of this copy that lies in `box`, which must be inside it."""
        shift = sum(
            (a - b) * s for a, b, s in zip(box.start, self.start, self.strides, strict=True)
        )
        return Copy(self.hf, box.start, box.size, self.parameter, self.offset + shift, self.strides)

    def view(self, parameters: Mapping[str, Tensor]) -> Tensor:
        """Returns the parameter's elements as a view, shaped like the box."""
        return self.target.view(parameters)


@dataclass(frozen=True)
class Fill(ParameterSlice):
    """Elements of a parameter that the loader sets to a constant, such as a vocabulary's padding."""

    value: float


@dataclass
class Recording:
    """The effects of one run of a loader on the parameters of one rank."""

    copies: list[Copy] = field(default_factory=list)
    fills: list[Fill] = field(default_factory=list)
    computed: dict[str, Computed] = field(default_factory=dict)  # by parameter
    # names of HF tensors that the loader concatenates before it copies, so it needs them in one call
    together: set[tuple[str, ...]] = field(default_factory=set)


def record_whole(load: Load, hf_specs: Specs, parameters: Mapping[str, Tensor]) -> Recording:
    """Records the copies of `load` from HF tensors of these specs into `parameters`, which do not
    change.

    Raises ValueError naming the tensor for anything but views, dtype casts and copies, and naming
    the parameter if an element is never written or written twice (an element that the loader sets
    to a constant is written).
    """
    recording = record(load, hf_specs, parameters)
    if problems := coverage_problems(recording, parameters):
        raise ValueError(
            "the loader does not write every parameter element exactly once:\n"
            + "\n".join(problems)
        )
    return recording


def record(
    load: Load, hf_specs: Specs, parameters: Mapping[str, Tensor], allow_computed: bool = False
) -> Recording:
    """As record_whole, without the check of elements. allow_computed: also records parameters that
    are computed by more than copies; else they raise."""
    hf = {
        name: torch.empty(shape, dtype=dtype, device="meta")
        for name, (shape, dtype) in hf_specs.items()
    }
    mode = _Recorder(hf, parameters, allow_computed)
    with torch.no_grad(), mode:
        load(hf)
    recording = mode.recording
    for copy in recording.copies:  # a parameter is one or the other
        if copy.parameter in recording.computed:
            recording.computed[copy.parameter].hf.add(copy.hf)
    # Without repetitions: loaders of tied models copy the embedding again into the output layer,
    # which has the same memory.
    copies = dict.fromkeys(recording.copies)
    recording.copies = [copy for copy in copies if copy.parameter not in recording.computed]
    return recording


class _Recorder(TorchDispatchMode):
    def __init__(
        self, hf: Mapping[str, Tensor], parameters: Mapping[str, Tensor], allow_computed: bool
    ):
        super().__init__()
        self.recording = Recording()
        self.allow_computed = allow_computed
        self.hf = hf
        self.storages = TracedStorages(hf)
        # By storage, since several parameters may share one flat buffer: names and ranges of elements.
        self.parameters: dict[int, list[tuple[str, range]]] = {}
        for name, tensor in parameters.items():
            start = int(tensor.storage_offset())
            elements = range(start, start + extent(tensor))
            self.parameters.setdefault(storage_id(tensor), []).append((name, elements))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        storages = self.storages
        if func is _aten.copy_.default:
            return self._copy(args[0], args[1])
        if func in _FILLS and self._is_parameter(args[0]):
            return self._fill(args[0], 0.0 if func is _aten.zero_.default else float(args[1]))
        sources = [
            t for t in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)
        ]
        arguments = zip(args, func._schema.arguments, strict=False)
        written = [
            t
            for t, a in arguments
            if a.alias_info and a.alias_info.is_write and isinstance(t, Tensor)
        ]
        for tensor in filter(self._is_parameter, written):
            name = self._parameter(tensor)[0]
            raise ValueError(
                f"parameter {name} is written by {func}, which is no copy: it cannot be traced"
            )
        origin = next(filter(storages.from_hf, sources), None)
        if func in _ZEROS:
            return storages.note_zeros(func(*args, **kwargs))
        if origin is None:
            storages.overwritten(written)
            return func(*args, **kwargs)
        if func in _REWRITES and storages.computed(origin) is None:
            return storages.rewrite(origin, kwargs.get("dtype"))
        if func is _aten.cat.default and all(
            storages.is_traced(t) or storages.is_zero(t) for t in sources
        ):
            return storages.concatenate(sources, *args[1:], **kwargs)
        out = func(*args, **kwargs)
        for tensor in filter(storages.from_hf, written):
            storages.lose(tensor, sources, str(func))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if isinstance(tensor, Tensor) and not (
                storages.from_hf(tensor) or self._is_parameter(tensor)
            ):
                storages.lose(tensor, sources, str(func))
        return out

    def _copy(self, target: Tensor, source: Tensor) -> Tensor:
        if target.numel() == 0:
            return target
        if self._is_parameter(target):
            self._copy_to_parameter(target, source)
        elif self.storages.from_hf(source):
            self.storages.copy_to_temporary(target, source)
        else:
            _aten.copy_.default(target, source)
        return target

    def _copy_to_parameter(self, target: Tensor, source: Tensor) -> None:
        if parts := self.storages.joined_parts(source, target.shape):
            for part in parts:
                self._copy(
                    target.narrow(part.dim, part.start, part.source.shape[part.dim]), part.source
                )
            if len(names := sorted(set(self.storages.names(source)))) > 1:
                self.recording.together.add(tuple(names))
            return
        if self.storages.is_zero(source):  # padding
            self._fill(target, 0.0)
            return
        name = self._parameter(target)[0]
        computed = self.storages.computed(source)
        traced = computed is not None or self.storages.is_traced(source)
        if not traced and any(copy.parameter == name for copy in self.recording.copies):
            # SGLang's composed_weight_loader copies, and then computes the parameter of itself
            computed = Computed("its own copies", set())
        if computed and self.allow_computed:
            self.recording.computed.setdefault(
                name, Computed(computed.how, set())
            ).hf |= computed.hf
        elif computed or not self.storages.is_traced(source):
            how = computed.how if computed else "a tensor that is no HF tensor"
            raise ValueError(f"parameter {name} is filled from {how}")
        elif source.numel() != target.numel():
            (hf,) = self.storages.names(source)
            raise ValueError(
                f"parameter {name} is filled by broadcasting {hf}: it cannot be traced"
            )
        else:
            self._record(target, source)

    def _record(self, target: Tensor, source: Tensor) -> None:
        pad = target.dim() - source.dim()
        name, offset = self._parameter(target)
        shape = (1,) * pad + tuple(source.shape)
        strides = (0,) * pad + tuple(source.stride())
        view, into = self.storages.hf_view(source, shape, strides, target.stride())
        with naming(f"HF tensor {view.hf} -> parameter {name}"):
            parts = split_into_boxes(
                view.offset, view.sizes, view.strides, tuple(self.hf[view.hf].shape), into
            )
        self.recording.copies += [
            Copy(view.hf, box.start, box.size, name, offset + shift, box_strides)
            for box, shift, box_strides in parts
        ]

    def _fill(self, target: Tensor, value: float) -> Tensor:
        if target.numel():
            name, offset = self._parameter(target)
            self.recording.fills.append(
                Fill(name, offset, tuple(target.shape), tuple(target.stride()), value)
            )
        return target

    def _is_parameter(self, tensor: Tensor) -> bool:
        return storage_id(tensor) in self.parameters

    def _parameter(self, tensor: Tensor) -> tuple[str, int]:
        """Returns the (first) name of the parameter that contains a view, and the view's offset in
        the parameter, in elements."""
        offset = int(tensor.storage_offset())
        for name, elements in self.parameters[storage_id(tensor)]:
            if offset in elements:
                return name, offset - elements.start
        raise ValueError("the loader writes between the parameters of a shared buffer")


def coverage_problems(recording: Recording, parameters: Mapping[str, Tensor]) -> list[str]:
    """Returns a line for each parameter with an element that is not written exactly once, except
    tied and computed ones."""
    writes: dict[str, list[ParameterSlice]] = {}
    for write in [*(copy.target for copy in recording.copies), *recording.fills]:
        writes.setdefault(write.parameter, []).append(write)
    problems = []
    seen = set()
    for name, tensor in parameters.items():
        memory = storage_id(tensor), tensor.storage_offset()
        if memory in seen or tensor.numel() == 0 or name in recording.computed:
            continue
        seen.add(memory)
        shape = tuple(tensor.shape)
        total = tensor.numel()
        done = sum(write.numel for write in writes.get(name, []))
        if done < total:
            problems.append(
                f"parameter {name} {shape}: {total - done} of {total} elements are never written"
            )
        elif done > total or overlap(writes[name], shape, tensor.stride()):
            problems.append(f"parameter {name} {shape}: some elements are written twice")
    return problems
