"""Lets the real code of a trainer rank run where floating-point tensors have a shape and no memory.

Integers and booleans are computed, so token positions, routing maps and split sizes are real; numbers live on the meta
device. What is read from them, a norm for instance, is 1. Messages between ranks arrive at once and carry nothing.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._C._distributed_c10d import FakeWork, Work
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from megagrpo.actor.live_bytes import tensors_in

META = torch.device("meta")
_ATEN = torch.ops.aten
_ANY_ATTENTION = torch.nn.functional.scaled_dot_product_attention
_READ = _ATEN._local_scalar_dense.default
_FACTORIES = {
    getattr(_ATEN, name).default
    for name in ("empty_strided", "ones", "zeros", "full", "rand", "randn", "scalar_tensor")
} | {_ATEN.empty.memory_format, _ATEN.new_empty.default, _ATEN.new_zeros.default, _ATEN.new_full.default}


class ShapesOnly(TorchDispatchMode):
    """Makes new floating-point tensors without memory, and mixes them with real integers."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in _FACTORIES:
            return func(*args, **_without_memory(func, args, kwargs))
        on_meta = [tensor.device.type == "meta" for tensor in tensors_in((args, *kwargs.values()))]
        if not any(on_meta):
            return func(*args, **kwargs)
        if func.namespace == "c10d":
            return _arrived(func, args)
        if func is _READ:
            return torch.ones((), dtype=args[0].dtype, device="cpu").item()
        if func is _ATEN._to_copy.default and _leaves_meta(kwargs):
            return torch.ones(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype, device="cpu")
        if func is _ATEN.masked_select.default and not args[1].is_meta:
            return args[0].new_empty(int(args[1].sum()))
        if func is _ATEN.copy_.default and not args[0].is_meta:
            return args[0]
        if all(on_meta):
            return func(*args, **kwargs)
        mixed_args, mixed_kwargs = tree_map_only(Tensor, _shape_of, (args, kwargs))
        out = func(*mixed_args, **mixed_kwargs)
        if func._schema.is_mutable:  # the tensor that was passed in, not the one in its place
            return kwargs["out"] if "out" in kwargs else args[0]
        return out


def _arrived(func: OpOverload, args: tuple) -> Any:
    """Returns what a message between ranks returns: its first argument where it has an output, and what to wait for."""
    work = Work.boxed(FakeWork())
    return work if len(func._schema.returns) == 1 else (args[0], work)


def _without_memory(func: OpOverload, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    dtype = kwargs.get("dtype")
    if func in (_ATEN.new_empty.default, _ATEN.new_zeros.default, _ATEN.new_full.default):
        floating = (dtype or args[0].dtype).is_floating_point
    elif dtype is None and func in (_ATEN.full.default, _ATEN.scalar_tensor.default):
        floating = isinstance(args[-1], float)
    else:
        floating = (dtype or torch.get_default_dtype()).is_floating_point
    return {**kwargs, "device": META} if floating else kwargs


def _shape_of(tensor: Tensor) -> Tensor:
    """Returns a tensor without memory in its place; an expanded one stays as small as it is."""
    if tensor.is_meta:
        return tensor
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=META)


def _leaves_meta(kwargs: dict[str, Any]) -> bool:
    device = kwargs.get("device")
    return device is not None and torch.device(device).type != "meta"


@contextmanager
def as_on_device(cuda: bool) -> Iterator[None]:
    """Answers for tensors without memory what code asks before it chooses a kernel: those of a GPU, or of a CPU.

    By replacing functions: a mode for functions would not be on while a layer is computed again in a backward.
    """
    tensor_type, make, norm = torch.Tensor.type, torch.tensor, torch.nn.functional.rms_norm
    names = {torch.float32: "torch.cuda.FloatTensor", torch.bfloat16: "torch.cuda.BFloat16Tensor"}

    def own_type(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        return names[self.dtype] if self.is_meta and not args and not kwargs else tensor_type(self, *args, **kwargs)

    def own_tensor(values: Any, *args: Any, **kwargs: Any) -> Tensor:
        if isinstance(values, list) and _holds_meta(values):
            return torch.empty(len(values))  # the original reads them without asking a dispatch mode
        return make(values, *args, **kwargs)

    with (
        patch.object(torch.Tensor, "is_cuda", property(lambda self: cuda and self.is_meta), create=True),
        patch.object(torch.Tensor, "type", own_type),
        patch.object(torch, "tensor", own_tensor),
        patch.object(torch.cuda, "get_device_capability", lambda *_: (9, 0)),
        patch.object(torch.nn.functional, "scaled_dot_product_attention", _ANY_ATTENTION if cuda else _cpu_attention),
        patch.object(torch.nn.functional, "rms_norm", _gpu_norm if cuda else norm),
    ):
        yield


class _FusedNorm(torch.autograd.Function):
    """Keeps what a GPU's RMSNorm keeps, its input and a float32 a row; on meta torch would take it into pieces."""

    @staticmethod
    def forward(ctx, values, weight):
        ctx.save_for_backward(values, weight, values.new_empty(values.shape[:-1], dtype=torch.float32))
        return torch.empty_like(values)

    @staticmethod
    def backward(ctx, gradient):
        values, weight, _ = ctx.saved_tensors
        return torch.empty_like(values), torch.empty_like(weight)


def _gpu_norm(values: Tensor, shape: Any, weight: Tensor, eps: float) -> Tensor:
    return _FusedNorm.apply(values, weight)


def _holds_meta(values: list) -> bool:
    return any(tensor.is_meta for tensor in tensors_in(values))


def _cpu_attention(
    query: Tensor, key: Tensor, value: Tensor, *, attn_mask: Tensor | None, is_causal: bool, scale: float
) -> Tensor:
    """Runs the kernel that a CPU chooses; of tensors on meta torch would choose the one that keeps all scores."""
    if value.shape[-1] != query.shape[-1]:  # no kernel takes these: all scores are kept on a CPU, too
        return _ANY_ATTENTION(query, key, value, attn_mask=attn_mask, is_causal=is_causal, scale=scale)
    if attn_mask is not None:
        attn_mask = torch.zeros(attn_mask.shape, dtype=query.dtype).masked_fill(~attn_mask, -torch.inf)
    out, _ = _ATEN._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, is_causal, attn_mask=attn_mask, scale=scale
    )
    return out
