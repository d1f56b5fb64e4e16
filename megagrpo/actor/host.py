"""Chooses the device, with Transformer Engine or without; runs before Megatron is imported.

Megatron calls torch.cuda without asking whether CUDA exists: on a CPU, megagrpo.cpu.trainer answers.
"""

import importlib
import importlib.metadata
import importlib.util
import sys
import warnings
from types import ModuleType
from typing import Any, Literal

import torch

from megagrpo.config.actor import ActorConfig
from megagrpo.system import environment

_TRANSFORMER_ENGINE_BELOW = "2.15"  # those below were compared with what Megatron-Core calls


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
    admitted = _release(version) < _release(_TRANSFORMER_ENGINE_BELOW)
    reason = "" if admitted else f"Megatron-Core takes versions below {_TRANSFORMER_ENGINE_BELOW}"
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
            f"Transformer Engine {version} is installed, but {reason}. Layers are torch's; "
            "install another (bash launch/build_te.sh), or set actor.transformer_engine: "
            "true to use it all the same",
            stacklevel=2,
        )
    return not reason


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])


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
                "actor.device is cpu, but CUDA was at work in this process "
                "before it could be hidden"
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
    stand_ins = importlib.import_module("megagrpo.cpu.trainer")
    if not stand_ins.is_installed():
        if transformer_engine is not True:
            # On a machine with a GPU that is not to be seen: Megatron would call its kernels
            # because it is installed.
            _hide_transformer_engine()
        stand_ins.replace_cuda()
        _internals().install()
        stand_ins.replace_in_megatron()
    return torch.device("cpu")


def _internals() -> ModuleType:
    from megagrpo.models import internals_0_19  # imports Megatron

    return internals_0_19


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
            f"actor.dtype is bfloat16, but no GPU is visible here: {why_no_gpu()}. Ask "
            "the scheduler for GPUs (Slurm: --gpus-per-node), bring the driver up to "
            "torch's CUDA (megagrpo doctor prints both), or set actor.device: cpu to "
            "train on the CPU all the same"
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
    """Returns why the installed Transformer Engine has no kernel for attention on this GPU but one
    that holds all scores; from 2.14 on with cuDNN 9.18.1 or newer."""
    major, minor = torch.cuda.get_device_capability()
    old = _release(importlib.metadata.version("transformer_engine")) < (2, 14)
    packed = packing and (major < 9 or (major == 12 and old))
    if not packed and not (deterministic and (major == 12 or (major >= 10 and old))):
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
        f"{major}.{minor}: scores of all pairs of tokens would be held, and context parallelism "
        f"fails; pip install flash-attn, or choose {remedy}"
    )
