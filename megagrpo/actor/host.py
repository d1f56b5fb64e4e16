"""Chooses the device and patches Megatron-Core's calls of torch.cuda on a CPU; runs before Megatron
is imported.

Megatron calls torch.cuda for devices, streams and RNG states without asking whether CUDA exists. On
a CPU those calls have a natural meaning (the device is the CPU, streams are already in order, the
RNG state is the CPU's), which is given here. Nothing of Megatron's mathematics is replaced.
"""

import contextlib
import importlib.metadata
import importlib.util
import sys
import warnings
from types import ModuleType
from typing import Any, Literal

import torch
from torch.overrides import TorchFunctionMode

from megagrpo.config.actor import ActorConfig
from megagrpo.system import environment

CPU = torch.device("cpu")
_TRANSFORMER_ENGINE_BELOW = (2, 12)  # megatron-core 0.16.1's own bound


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


def _install_cuda_names() -> None:
    cuda: Any = (
        torch.cuda
    )  # other signatures than CUDA's on purpose: Megatron takes what comes back as it is
    tensor_class: Any = torch.Tensor
    module_class: Any = torch.nn.Module
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


def uses_transformer_engine(config: ActorConfig) -> bool:
    """Returns whether layers are Transformer Engine's in this process: "auto" is where they are
    installed on CUDA."""
    if config.transformer_engine != "auto":
        return config.transformer_engine
    return (
        config.expects_transformer_engine
        and config.device != "cpu"
        and _admits_transformer_engine()
    )


def _admits_transformer_engine() -> bool:
    """Returns whether there are CUDA and a version of Transformer Engine that Megatron-Core takes
    and Python imports.

    False once it is hidden.
    """
    if not torch.cuda.is_available() or importlib.util.find_spec("transformer_engine") is None:
        return False
    version = importlib.metadata.version("transformer_engine")
    admitted = tuple(int(part) for part in version.split(".")[:2]) < _TRANSFORMER_ENGINE_BELOW
    bound = ".".join(map(str, _TRANSFORMER_ENGINE_BELOW))
    reason = "" if admitted else f"Megatron-Core takes versions below {bound}"
    if admitted:
        try:
            importlib.import_module("transformer_engine.pytorch")
        except (
            ImportError,
            OSError,
            RuntimeError,
            AssertionError,
        ) as exc:  # built for another torch or CUDA
            reason = f"its import fails: {type(exc).__name__}: {exc}"
            for name in [
                name for name in sys.modules if name.partition(".")[0] == "transformer_engine"
            ]:
                del sys.modules[name]
    if reason:
        warnings.warn(
            f"Transformer Engine {version} is installed, but {reason}. Layers are torch's; install "
            "another (bash "
            "launch/build_te.sh), or set actor.transformer_engine: true to use it all the same",
            stacklevel=2,
        )
    return not reason


def prepare_host(
    device: Literal["auto", "cuda", "cpu"] = "auto",
    transformer_engine: bool | Literal["auto"] = "auto",
    deterministic: bool = False,
) -> torch.device:
    """Makes Megatron-Core importable and runnable here, and returns the device to compute on.

    To be called before anything imports Megatron; calling again with the same wishes changes
    nothing that matters.
    transformer_engine: whether Megatron finds it. Once it does, it takes Transformer Engine's
    optimizer and norms of gradients whatever the layers are, so where its layers are not used, it
    is hidden. deterministic: CUDA computes the same bits again; torch warns of an operator that
    cannot. Raises ValueError for a device that is not here.
    """
    if device == "cpu":
        environment.hide_gpus()
    if torch.cuda.is_available():
        if device == "cpu":
            raise ValueError(
                "actor.device is cpu, but CUDA was at work in this process before it could be "
                "hidden"
            )
        if transformer_engine is False or (
            transformer_engine == "auto" and not _admits_transformer_engine()
        ):
            _hide_transformer_engine()
        _internals().install()
        if deterministic:
            torch.use_deterministic_algorithms(True, warn_only=True)
            torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # made by torch
        # With an index: threads besides the main one start on device 0, and torch refuses a device
        # without one there.
        return torch.device("cuda", environment.get_int("LOCAL_RANK", 0))
    if device == "cuda":
        raise ValueError(f"actor.device is cuda, but no GPU is visible here: {why_no_gpu()}")
    if torch.cuda.Stream is not _InOrder:
        if transformer_engine is not True:
            # On a machine with a GPU that is not to be seen: Megatron would call its kernels
            # because it is installed.
            _hide_transformer_engine()
        _install_cuda_names()
        _OnCpu().__enter__()  # for the life of the process
        _internals().install()
        _internals().install_on_cpu()
        # what Megatron compiles, a router's counting, costs minutes of a C++ compiler and computes
        # the same
        torch.compiler.set_stance("force_eager")
    return CPU


def _internals() -> ModuleType:
    from megagrpo.actor.megatron import internals_0_16  # imports Megatron

    return internals_0_16


def _hide_transformer_engine() -> None:
    modules: dict[str, Any] = sys.modules
    assert modules.get("transformer_engine") is None, (
        "Transformer Engine was imported before it could be hidden"
    )
    modules["transformer_engine"] = None


def refuse_training_without_gpu(config: ActorConfig, device: torch.device) -> None:
    """Raises ValueError if training in bfloat16 found no GPU: on a CPU it would take far too long.

    device: the result of `prepare_host`.
    """
    if device.type == "cpu" and config.dtype == "bfloat16" and config.device == "auto":
        raise ValueError(
            f"actor.dtype is bfloat16, but no GPU is visible here: {why_no_gpu()}. Ask the "
            "scheduler for GPUs (Slurm: "
            "--gpus-per-node), bring the driver up to torch's CUDA (megagrpo doctor prints both), "
            "or set actor.device: "
            "cpu to train on the CPU all the same"
        )


def why_no_gpu() -> str:
    """Returns torch's reason why CUDA is not available."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    hidden = environment.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None and hidden.strip() in ("", "-1"):
        return f"CUDA_VISIBLE_DEVICES is {hidden!r}"
    try:
        torch._C._cuda_init()
    except RuntimeError as exc:
        return (
            f"torch {torch.__version__} with CUDA {torch.version.cuda} says: "
            f"{str(exc).strip().splitlines()[0]}"
        )
    return f"torch {torch.__version__} with CUDA {torch.version.cuda} sees no device"


def slow_attention(packing: bool, deterministic: bool) -> str:
    """Returns why Transformer Engine 2.11 has no kernel for attention on this GPU but one that
    holds all scores."""
    major, minor = torch.cuda.get_device_capability()
    packed = packing and (major < 9 or major == 12)
    if not packed and not (deterministic and major >= 10):
        return ""
    if any(importlib.util.find_spec(name) for name in ("flash_attn_2_cuda", "flash_attn_3")):
        return ""
    what, remedy = (
        ("packed rows", "actor.packing: false")
        if packed
        else ("deterministic runs", "no determinism")
    )
    return (
        f"Transformer Engine fuses no attention of {what} on GPUs of compute capability "
        f"{major}.{minor}: scores of all "
        "pairs of tokens would be held, and context parallelism fails; pip install flash-attn, or "
        f"choose {remedy}"
    )
