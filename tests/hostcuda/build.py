"""Compiles the device once for these sources and this torch, and gives processes what makes them see it."""

import fcntl
import hashlib
import os
import subprocess
import sys
import sysconfig
from functools import cache
from pathlib import Path

HERE = Path(__file__).parent
SITE = HERE / "site"  # first on the path of a process: its sitecustomize.py waits for torch
LIBRARY = "HOSTCUDA_LIBRARY"


@cache
def library() -> Path:
    """Returns the compiled device. Compiles it, in about 30 s, if no session has done so."""
    torch = Path(sysconfig.get_paths()["purelib"]) / "torch"
    sources = sorted((HERE / "device").iterdir())
    version = (torch / "version.py").read_bytes()
    content = hashlib.sha256(b"".join([version, *(path.read_bytes() for path in sources)]))
    folder = Path(sys.prefix) / "hostcuda"
    folder.mkdir(exist_ok=True)
    made = folder / f"{content.hexdigest()[:16]}.so"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            _compile(torch, made)
    return made


def _compile(torch: Path, made: Path) -> None:
    include = (torch / "include", torch / "include/torch/csrc/api/include")
    headers = [f"-I{path}" for path in (*include, sysconfig.get_paths()["include"])]
    libraries = [f"-L{torch / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"]
    flags = ["-std=c++20", "-O1", "-g0", "-w", "-fPIC", "-shared", "-DTORCH_EXTENSION_NAME=hostcuda"]
    unfinished = made.with_suffix(".part")
    command = ["g++", *flags, *headers, str(HERE / "device/module.cpp"), *libraries]
    subprocess.run([*command, "-o", str(unfinished)], check=True)
    unfinished.rename(made)


def variables() -> dict[str, str]:
    """Returns what the environment of a process needs besides SITE on its path."""
    # no compiled code: torch's compiler would look for Triton and for a driver
    return {LIBRARY: str(library()), "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}


def environment() -> dict[str, str]:
    """Returns a whole environment for a process that computes on the device."""
    path = os.pathsep.join(filter(None, (str(SITE), str(HERE.parents[1]), os.environ.get("PYTHONPATH"))))
    return {**os.environ, **variables(), "PYTHONPATH": path}
