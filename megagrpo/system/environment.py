"""Reads os.environ, as the only file that does, and builds the environments of children."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import overload

import megagrpo

API_KEY = "MEGAGRPO_API_KEY"  # between trainers, router and engines; without it `serve` makes one
ENGINE = "MEGAGRPO_ENGINE"  # in an engine's process: its id
ENGINE_HEADER = "X-Megagrpo-Engine"  # of its answers: who sampled cannot be told from the router's URL
WEIGHT_LOADER = "megagrpo.weights.engines.loader.run"  # engines are started with it; trainers call it by this name

_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")  # torch reads the first one that is set
_EXPANDABLE, _FIXED = "expandable_segments:True", "expandable_segments:False"


@overload
def get(name: str) -> str | None: ...
@overload
def get(name: str, default: str) -> str: ...
def get(name: str, default: str | None = None) -> str | None:
    """Returns a variable of this process."""
    return os.environ.get(name, default)


def get_int(name: str, default: int) -> int:
    """Returns a variable of this process as a number; ValueError where it is none."""
    return int(os.environ.get(name, default))


def under_torchrun() -> bool:
    """Whether this process is one rank of a torchrun world, rather than started by hand."""
    return "RANK" in os.environ and "MASTER_ADDR" in os.environ


def num_trainer_nodes() -> int:
    """Returns how many machines torchrun's world spans; 1 outside torchrun."""
    world = get_int("WORLD_SIZE", 1)
    return -(-world // get_int("LOCAL_WORLD_SIZE", world))


@contextmanager
def temporarily(name: str, value: str) -> Iterator[None]:
    """Sets a variable inside the block, for a library that reads it there."""
    old = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if old is None:
            del os.environ[name]
        else:
            os.environ[name] = old


def hide_gpus() -> None:
    """Lets this process and its children see no GPU; without effect once CUDA has been asked for one."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def of_all_nccl_ranks() -> dict[str, str]:
    """Returns what trainers and engines, which meet in one NCCL communicator, must agree on.

    SGLang sets NCCL_CUMEM_ENABLE and NCCL_NVLS_ENABLE to 0 for itself alone, unless they are set. The timeout, in
    seconds, is of ranks that have not come to the first batch of a non-blocking communicator; torch waits 30 minutes
    by default.
    """
    return {
        "NCCL_CUMEM_ENABLE": get("NCCL_CUMEM_ENABLE", "0"),
        "NCCL_NVLS_ENABLE": get("NCCL_NVLS_ENABLE", "0"),
        "TORCH_NCCL_NONBLOCKING_TIMEOUT": get("TORCH_NCCL_NONBLOCKING_TIMEOUT", "60"),
    }


def of_trainer_ranks(*, cut: bool, beside_engines: bool, deterministic: bool) -> dict[str, str]:
    """Returns what trainer ranks are given beside of_all_nccl_ranks; what the user has set stays.

    cut: layers are cut over ranks, by tensor or context parallelism. beside_engines: on the same GPUs. deterministic:
    the run is to repeat bit by bit.
    """
    variables = {}
    if beside_engines:
        variables = without_expandable_segments()
    elif not any(map(get, _ALLOCATOR)):
        variables[_ALLOCATOR[0]] = _EXPANDABLE  # micro-batches of many lengths fragment fixed segments
    if cut:  # Megatron overlaps a layer's communication by issuing it first: with one queue it also runs first
        variables["CUDA_DEVICE_MAX_CONNECTIONS"] = get("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    if deterministic:
        variables["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = get("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
        variables["CUBLAS_WORKSPACE_CONFIG"] = get("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    return variables


def without_expandable_segments() -> dict[str, str]:
    """Returns the settings of torch's allocator, where the user has any, with expandable segments off.

    torch_memory_saver, which lets engines sleep, refuses them. Handles of their memory are passed by pidfd_getfd, which
    containers forbid.
    """
    return {name: value.replace(_EXPANDABLE, _FIXED) for name in _ALLOCATOR if _EXPANDABLE in (value := get(name, ""))}


def child_environment(extra: dict[str, str] | None = None, python_path: list[str] | None = None) -> dict[str, str]:
    """Returns this process's environment for a child, with `extra` set and `python_path` first on PYTHONPATH.

    The folder of this package is always on the path, so children find megagrpo however the parent was started.
    """
    env = dict(os.environ)
    folders = [*(python_path or []), str(Path(megagrpo.__file__).parent.parent)]
    old = env.get("PYTHONPATH")
    env["PYTHONPATH"] = os.pathsep.join(folders + ([old] if old else []))
    env.update(extra or {})
    return env
