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
WEIGHT_LOADER = "megagrpo.weights.engine_loader.run"  # engines are started with it; trainers call it by this name


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

    SGLang sets NCCL_CUMEM_ENABLE for itself alone. The timeout, in seconds, is of ranks that have not come to the first
    batch of a non-blocking communicator; torch waits 30 minutes by default.
    """
    return {
        "NCCL_CUMEM_ENABLE": get("NCCL_CUMEM_ENABLE", "0"),
        "TORCH_NCCL_NONBLOCKING_TIMEOUT": get("TORCH_NCCL_NONBLOCKING_TIMEOUT", "60"),
    }


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
