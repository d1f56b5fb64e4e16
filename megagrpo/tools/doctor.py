"""Reports versions, missing or conflicting packages, and remedies: `megagrpo doctor`.

Nothing heavy is imported, so a broken installation can still be diagnosed: versions are read from
package metadata, `pip check` judges the packages among each other, and another process asks torch.
Requirements are stated once, in pyproject.toml.
"""

import argparse
import importlib
import importlib.metadata
import json
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from megagrpo.system import environment

_INSTALL = "bash launch/install.sh --repair"
_SHOWN = ("torch", "megatron-core", "transformers", "sglang", "ray")
_CPU_ENGINE = "cpu-engine"  # the extra that is installed without its requirements, which name CUDA
_GIB = 2**30
_DRIVERS = {12: 525, 13: 580}  # CUDA -> the oldest driver that runs it, of NVIDIA's release notes
_DRIVER_FILE = Path("/proc/driver/nvidia/version")
_NVCC = "/usr/local/cuda/bin/nvcc"  # where a toolkit is by default
_COMPILED = {  # distribution -> its module, compiled against one torch and CUDA
    "transformer-engine": "transformer_engine.pytorch",
    "sglang-kernel": "sgl_kernel",
    "flashinfer-python": "flashinfer",
}
_LOADS_DRIVER = ("sgl_kernel", "flashinfer")
_LIMIT_S = 300.0  # for pip, or for importing torch, from a slow file system
_ASK_TORCH = """
import json, torch
found = {"cuda": torch.version.cuda, "gpus": [], "nccl": "", "why": ""}
if torch.cuda.is_available():
    found["gpus"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
elif torch.version.cuda:
    try:
        torch.cuda.init()
    except Exception as exc:
        found["why"] = str(exc).strip().partition(chr(10))[0]
print(json.dumps(found))
"""

Answer = dict[str, Any]  # torch's: cuda, gpus, nccl, why


@dataclass(frozen=True)
class Finding:
    """One line of the table."""

    what: str
    wanted: str
    found: str
    status: str  # "ok" | "warning": works, with a limit | "error": something needed is missing
    remedy: str = ""


def add_options(command: argparse.ArgumentParser) -> None:
    """Adds the options of the command line: none."""


def run(args: argparse.Namespace) -> int:
    """Prints the table; returns 0 if everything needed is there, else 1."""
    driver = Path("/dev/nvidiactl").exists()
    gpu = driver or is_for_gpus()
    answer = ask_torch()
    findings = [
        *_python(),
        *package_findings(gpu),
        *judge_pip(_run([sys.executable, "-m", "pip", "check"]), gpu),
        _torch_build(answer, gpu),
        *(gpu_findings(answer) if driver else []),
        *import_findings(driver),
        *machine_findings(gpu),
    ]
    title = f"megagrpo doctor: for {'GPUs' if gpu else 'CPUs'}, {platform.machine()}"
    table = Table(title=title, title_justify="left")
    for heading in ("", "what", "wanted", "found", "remedy"):
        table.add_column(heading, overflow="fold")
    marks = {"ok": "[green]ok[/]", "warning": "[yellow]note[/]", "error": "[red]BAD[/]"}
    for row in findings:
        # a package's extra, or a path, in brackets is no markup
        cells = map(escape, (row.what, row.wanted, row.found, row.remedy))
        table.add_row(marks[row.status], *cells)
    console = Console()
    console.print(table)
    bad = [row.what for row in findings if row.status == "error"]
    console.print(f"[red]{len(bad)} to mend: {', '.join(bad)}[/]" if bad else "[green]ready[/]")
    return 1 if bad else 0


def is_for_gpus() -> bool:
    """Returns whether launch/install.sh installed this environment for GPUs, as on a login node."""
    stamp = Path(sys.prefix, ".megagrpo-installed")
    return stamp.is_file() and stamp.read_text().startswith("gpu ")


def _python() -> list[Finding]:
    """Judges Python itself by megagrpo's own metadata; nothing if that is not installed."""
    if _version("megagrpo") is None:
        return []
    wanted = importlib.metadata.metadata("megagrpo")["Requires-Python"]
    found = platform.python_version()
    return [_judge("python", wanted, found, SpecifierSet(wanted).contains(found), "3.12")]


def _judge(
    what: str, wanted: str, found: str, fits: bool, remedy: str, otherwise: str = "error"
) -> Finding:
    return Finding(what, wanted, found, "ok" if fits else otherwise, "" if fits else remedy)


def _run(words: list[str]) -> str:
    """Returns what a program prints; its last line of errors if it fails without any."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=_LIMIT_S)
    except subprocess.TimeoutExpired:
        return f"{words[0]} gave no answer in {_LIMIT_S:g} s"
    except OSError as exc:  # of a file that is no program
        return str(exc)
    return done.stdout or "".join(done.stderr.strip().splitlines()[-1:])


# ---- packages ----------------------------------------------------------------------------------


def package_findings(gpu: bool) -> list[Finding]:
    """Returns a line for each large package, and one for every other requirement of megagrpo that is
    not met."""
    if _version("megagrpo") is None:
        return [Finding("megagrpo", "installed", "missing", "error", _INSTALL)]
    rows = [_package(requirement) for requirement in _requirements(*_extras(gpu))]
    return [row for row in rows if row.what in _SHOWN or row.status != "ok"]


def judge_pip(text: str, gpu: bool) -> list[Finding]:
    """Returns a line for each conflict that `pip check` prints, or one that there is none: an error
    if megagrpo itself requires the package that lacks something, else a warning.

    Without a GPU the engine is installed without its requirements, which are not judged.
    """
    own = {canonicalize_name(requirement.name) for requirement in _requirements(*_extras(gpu))}
    engine = {*_requirements(_CPU_ENGINE)} - {*_requirements()}
    bare = set() if gpu else {canonicalize_name(requirement.name) for requirement in engine}
    what = "requirements of packages"
    findings = []
    for line in text.splitlines():
        owner = canonicalize_name(line.partition(" ")[0])  # some versions of pip print such names
        if not line.startswith("No broken") and owner not in bare:
            status = "error" if owner in own else "warning"
            findings.append(Finding(what, "met", line, status, _INSTALL))
    return findings or [Finding(what, "met", "met", "ok")]


def _extras(gpu: bool) -> list[str]:
    return ["gpu"] if gpu else ["cpu", _CPU_ENGINE]


def _package(requirement: Requirement) -> Finding:
    found = _version(requirement.name)
    met = found is not None and requirement.specifier.contains(found, prereleases=True)
    wanted = str(requirement.specifier) or "any version"
    return _judge(requirement.name, wanted, found or "missing", met, _INSTALL)


def _version(name: str) -> str | None:
    return next((found.version for found in importlib.metadata.distributions(name=name)), None)


def _requirements(*extras: str) -> Iterator[Requirement]:
    """Yields megagrpo's requirements that apply here with these extras; none if it is not
    installed."""
    written = importlib.metadata.requires("megagrpo") if _version("megagrpo") else None
    for requirement in map(Requirement, written or []):
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            yield requirement


# ---- torch and GPUs ----------------------------------------------------------------------------


def ask_torch() -> Answer:
    """Returns torch's version of CUDA (None: a build for CPUs), GPUs, version of NCCL and why it
    cannot use them, from another process."""
    told = _run([sys.executable, "-c", _ASK_TORCH]).splitlines() or ["torch ended"]
    if told[-1].startswith("{"):
        return json.loads(told[-1])
    return {"cuda": None, "gpus": [], "nccl": "", "why": told[-1]}


def _torch_build(answer: Answer, gpu: bool) -> Finding:
    remedy = (
        "this torch cannot use the GPU: remove the environment, take PyTorch's CUDA build out of "
        f"reach of CPU indexes, {_INSTALL}"
    )
    cuda = answer["cuda"]
    found = f"CUDA {cuda}" if cuda else answer["why"] or "CPU only"
    return _judge(
        "torch build",
        "CUDA" if gpu else "any",
        found,
        bool(cuda) if gpu else not answer["why"],
        remedy,
    )


def gpu_findings(answer: Answer) -> list[Finding]:
    """Returns whether driver, torch, NCCL and Transformer Engine of a machine with GPUs fit each
    other. answer: ask_torch's."""
    cuda = answer["cuda"]
    driver = driver_version()
    least = _DRIVERS.get(int(cuda.partition(".")[0]), 0) if cuda else 0
    remedy = (
        f"CUDA {cuda} of this torch needs a newer driver: update it, or take a "
        "torch for an older CUDA"
        if driver
        else "install NVIDIA's driver, or start the container with its GPUs (docker --gpus all)"
    )
    gpus = answer["gpus"]
    return [
        _judge(
            "NVIDIA driver",
            f">={least} for CUDA {cuda}" if least else "any",
            driver or "none found",
            # an older one may do with CUDA's package for compatibility: torch then sees GPUs
            driver is not None and (bool(gpus) or int(driver.partition(".")[0]) >= least),
            remedy,
        ),
        _judge(
            "GPUs that torch sees",
            "one or more",
            f"{len(gpus)}: {', '.join(sorted(set(gpus)))}" if gpus else answer["why"] or "none",
            bool(gpus),
            "torch cannot use the machine's GPUs: see the lines above, CUDA_VISIBLE_DEVICES, and the "
            "job's options",
        ),
        *([Finding("NCCL of torch", "any", answer["nccl"], "ok")] if gpus else []),
        *(_toolkit(cuda) if cuda else []),
        _transformer_engine(),
    ]


def driver_version() -> str | None:
    """Returns the version of NVIDIA's kernel driver, such as 580.65.06; None if none is loaded."""
    text = _DRIVER_FILE.read_text() if _DRIVER_FILE.is_file() else ""
    match = re.search(r"(?:Module|x86_64|aarch64)\s+(\d+\.[\d.]+)", text)
    return match[1] if match else None


def _toolkit(cuda: str) -> list[Finding]:
    """Judges what compiles SGLang's kernels at an engine's first forward. nvcc is looked for where
    SGLang looks."""
    home = environment.get("CUDA_HOME") or environment.get("CUDA_PATH")
    nvcc = Path(home, "bin", "nvcc") if home else Path(shutil.which("nvcc") or _NVCC)
    release = re.search(r"release (\d+)", _run([str(nvcc), "--version"]) if nvcc.is_file() else "")
    major = cuda.partition(".")[0]
    ours = Path(str(importlib.metadata.distribution("torch").locate_file(f"nvidia/cu{major}")))
    install = f"install the toolkit of CUDA {cuda}, or pip install nvidia-cuda-nvcc=={cuda}.*; "
    remedy = f"{'' if (ours / 'bin/nvcc').is_file() else install}export CUDA_HOME={ours}"
    found = f"{nvcc}: CUDA {release[1]}" if release else "none"
    ninja = shutil.which("ninja") or "none"
    user = environment.get("HOME", "")
    return [
        _judge(
            "CUDA toolkit (nvcc)", f"CUDA {major}", found, found.endswith(f": CUDA {major}"), remedy
        ),
        _judge("ninja", "for SGLang's kernels", ninja, ninja != "none", "pip install ninja"),
        # of Triton, FlashInfer and TVM
        _judge(
            "HOME",
            "for compiled kernels",
            user,
            os.access(user, os.W_OK),
            "export HOME=FOLDER, one that can be written, such as /tmp/home",
        ),
    ]


def _transformer_engine() -> Finding:
    """Judges Transformer Engine: an experiment may do without, but not with one that Megatron-Core
    does not know."""
    name = "transformer-engine"
    torch_part = _version(f"{name}-torch")
    row = _package(next((r for r in _requirements("te") if r.name == name), Requirement(name)))
    if row.found == "missing":
        remedy = "without it layers are Megatron's own, one expert after the other: " + _INSTALL
        return Finding(name, row.wanted, row.found, "warning", remedy)
    if row.status == "error":
        remedy = f"pip uninstall {name} {name}-torch, then {_INSTALL}"
        return Finding(name, row.wanted, row.found, "error", remedy)
    remedy = f"its part for torch was not built (found {torch_part}): {_INSTALL}"
    return _judge(name, row.wanted, row.found, torch_part == row.found, remedy)


def import_findings(driver: bool) -> list[Finding]:
    """Returns whether those packages that are compiled for GPUs and installed here can be imported,
    each in a process of its own, after torch, which brings the libraries of CUDA.

    driver: whether this machine has NVIDIA's, whose library SGLang's kernels load.
    """
    rows = []
    for name, module in _COMPILED.items():
        if _version(name) is None:
            continue
        if module in _LOADS_DRIVER and not driver:
            row = Finding(
                f"import {module}",
                "works",
                "not tried here: no driver",
                "warning",
                "run `megagrpo doctor` on a GPU node",
            )
        else:
            told = _run([sys.executable, "-c", f"import torch, {module}; print('works')"])
            found = told.strip().rpartition("\n")[2] or "it ended without a word"
            remedy = f"a run would go without it, or end: {_INSTALL}"
            row = _judge(f"import {module}", "works", found, found == "works", remedy)
        rows.append(row)
    return rows


# ---- the machine -------------------------------------------------------------------------------


def machine_findings(gpu: bool) -> list[Finding]:
    """Returns what the machine offers: memory, files, a compiler."""
    shared = shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else 0
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)  # raised to the hard limit by now
    more_files = "raise the hard limit: `ulimit -Hn 65536` as root, limits.conf, or docker --ulimit"
    compiler = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), "none")
    # the sandbox of grader `code` and of the environment `python`
    isolation = importlib.import_module("megagrpo.sandbox.sandbox").isolation()
    programs = (
        "programs run only with isolation: off; allow user namespaces "
        "(kernel.unprivileged_userns_clone, seccomp)"
    )
    return [
        at_least(
            "free memory",
            psutil.virtual_memory().available,
            6 * _GIB,
            4 * _GIB,
            "fewer ranks or engines",
        ),
        at_least("free /dev/shm", shared, _GIB, _GIB // 16, "docker --shm-size=4g, or remount it"),
        # -1: no limit
        _judge("open files", "4096", str(files), not 0 <= files < 4096, more_files, "warning"),
        _judge(
            "C++ compiler",
            "for Transformer Engine" if gpu else "on GPU machines only",
            compiler,
            compiler != "none",
            "apt-get install g++",
            "error" if gpu else "warning",
        ),
        _judge(
            "grader code", "namespaces", isolation or "work", not isolation, programs, "warning"
        ),
    ]


def at_least(what: str, found: int, good: int, least: int, remedy: str) -> Finding:
    """Judges a number of bytes: from `good` on ok, from `least` on a warning, else an error."""
    return _judge(
        what,
        f"{good / _GIB:.0f} GiB",
        f"{found / _GIB:.1f} GiB",
        found >= good,
        remedy,
        "warning" if found >= least else "error",
    )
