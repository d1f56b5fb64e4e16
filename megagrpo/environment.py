"""The one file that reads os.environ; everybody else is handed values, and child environments are built here."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import megagrpo

API_KEY = "MEGAGRPO_API_KEY"  # between trainers, router and engines; without it `serve` makes one
WEIGHT_LOADER = "megagrpo.weights.engine_loader.run"  # engines are started with it, and trainers call it there by this name


def get(name: str, default: str | None = None) -> str | None:
    return os.environ.get(name, default)


def get_int(name: str, default: int) -> int:
    return int(os.environ.get(name, default))


def under_torchrun() -> bool:
    """Whether this process is one rank of a torchrun world, rather than started by hand."""
    return "RANK" in os.environ and "MASTER_ADDR" in os.environ


@contextmanager
def temporarily(name: str, value: str) -> Iterator[None]:
    """Inside, this process has the variable, for a library that reads it there."""
    old = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if old is None:
            del os.environ[name]
        else:
            os.environ[name] = old


def of_all_nccl_ranks() -> dict[str, str]:
    """What trainers and engines, who meet in one NCCL communicator, must agree on; SGLang alone would set it for its own ranks."""
    return {"NCCL_CUMEM_ENABLE": get("NCCL_CUMEM_ENABLE", "0")}


def child_environment(extra: dict[str, str] | None = None, python_path: list[str] | None = None) -> dict[str, str]:
    """A copy of this process's environment for a child, with `extra` set and `python_path` folders put first on PYTHONPATH.

    The folder of this package is always on the path, so children find megagrpo however the parent was started.
    """
    env = dict(os.environ)
    folders = [*(python_path or []), str(Path(megagrpo.__file__).parent.parent)]
    old = env.get("PYTHONPATH")
    env["PYTHONPATH"] = os.pathsep.join(folders + ([old] if old else []))
    env.update(extra or {})
    return env
