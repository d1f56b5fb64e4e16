"""The CPU in the place of torch.cuda, for the parts that Megatron-Core calls without asking whether
CUDA exists.

These are devices, streams and RNG states. On a CPU they have a natural meaning (the device is the
CPU, streams are already in order, the RNG state is the CPU's), which is given here. Nothing of
Megatron's mathematics is replaced. actor/host.py calls this module by its name.
"""

import contextlib
import sys
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")
_TRITON_KERNELS = "megatron.core.transformer.moe.ops.paged_stash"
_NAMES_OF_KERNELS = ("GLOBAL_BLOCK_SIZE", "paged_stash_copy_kernel", "paged_stash_pop_kernel")


class _InOrder:
    """Stands for a stream or event of a device that executes in order: waiting is never needed, all
    streams are one."""

    cuda_stream = 0

    def __init__(self, *args, **kwargs):
        pass

    def _nothing(self, *args, **kwargs):
        return None

    wait_stream = wait_event = synchronize = record = wait = _nothing

    def record_event(self, *args):
        return self

    def __eq__(self, other):
        return isinstance(other, _InOrder)

    __hash__ = object.__hash__


class _OnCpu(TorchFunctionMode):
    """Sends `device="cuda"` to the CPU and pins no memory.

    tensor.type() keeps its CUDA spelling, which gradient clipping asserts.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs = {**kwargs, "device": CPU}
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        if func is torch.Tensor.to:
            args = tuple(CPU if isinstance(a, str) and a.startswith("cuda") else a for a in args)
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.")
        return func(*args, **kwargs)


def _not_compiled(function: object = None, **options: object) -> object:
    """Returns the function, or a decorator that does, as torch.compile."""
    return _not_compiled if function is None else function


def _install_cuda_names() -> None:
    # other signatures than CUDA's on purpose: Megatron takes what comes back as it is
    library: Any = torch
    cuda, tensor_class, module_class = library.cuda, library.Tensor, library.nn.Module
    # What Megatron compiles, a router's counting, costs minutes of a C++ compiler and computes the
    # same. Only to name what is to be compiled, it would import torch's compiler.
    library.compile = _not_compiled
    cuda.current_device = lambda: CPU
    # one function each: torch's compiler, imported by Megatron, refuses a name that stands for two
    # of its rules
    cuda.synchronize = lambda *args, **kwargs: None
    cuda.set_device = lambda *args, **kwargs: None
    cuda.empty_cache = lambda: None
    cuda.get_rng_state = cuda.random.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    cuda.set_rng_state = cuda.random.set_rng_state = lambda state, *args, **kwargs: (
        torch.set_rng_state(state)
    )
    cuda.manual_seed = lambda seed: torch.manual_seed(seed)
    cuda.Stream = cuda.Event = _InOrder
    cuda.current_stream = lambda *args: _InOrder()
    cuda.default_stream = lambda *args: _InOrder()
    cuda.stream = lambda stream: contextlib.nullcontext()
    tensor_class.cuda = lambda self, *args, **kwargs: self
    module_class.cuda = lambda self, *args, **kwargs: self


def is_installed() -> bool:
    """Returns whether `replace_cuda` was called in this process."""
    return torch.cuda.Stream is _InOrder


def replace_cuda() -> None:
    """Gives the names of torch.cuda their meaning on a CPU, for the life of the process; to be
    called before Megatron is imported."""
    _install_cuda_names()
    _OnCpu().__enter__()
    without_triton()


def without_triton() -> None:
    """Lets Megatron be imported where Triton is not installed: every model imports kernels that
    `moe_paged_stash` alone calls."""
    if find_spec("triton") is None:
        kernels = ModuleType(_TRITON_KERNELS)
        vars(kernels).update(dict.fromkeys(_NAMES_OF_KERNELS))
        sys.modules[_TRITON_KERNELS] = kernels


def replace_in_megatron() -> None:
    """Replaces what Megatron does for a GPU only; imports it."""
    from megatron.core.transformer.moe import token_dispatcher

    def to_cpu(tensor: Tensor, as_numpy: bool = False, record_stream: bool = False) -> object:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    # numpy split sizes, as they are when they come from a GPU
    token_dispatcher.maybe_move_tensor_to_cpu = to_cpu
