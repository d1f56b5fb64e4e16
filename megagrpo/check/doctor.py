"""Reports versions, missing or conflicting packages, and remedies: `megagrpo doctor`.

Versions are read from package metadata; nothing heavy is imported, so a broken installation can still be diagnosed: on
a machine with GPUs another process asks torch about them. What is wanted is stated once, in pyproject.toml.
"""

import importlib.metadata
import json
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from packaging.requirements import Requirement
from packaging.utils import NormalizedName, canonicalize_name
from rich.console import Console
from rich.table import Table

from megagrpo.rewards.sandbox.sandbox import isolation

_INSTALL = "bash launch/install.sh --repair"
_SHOWN = tuple(
    canonicalize_name(name) for name in ("torch", "megatron-core", "transformers", "sglang", "sglang-router", "ray")
)
_CPU_ENGINE = "cpu-engine"  # the extra that is installed without its requirements, which name CUDA packages
_GIB = 2**30
_DRIVERS = {12: 525, 13: 580}  # CUDA's major version -> the oldest driver that runs it, of NVIDIA's release notes
_TORCH_S = 180.0  # to import torch and ask it: seconds, minutes from a slow file system
_ASK_TORCH = """
import json, torch
found = {"cuda": torch.version.cuda, "available": torch.cuda.is_available(), "why": ""}
if found["available"]:
    found["gpus"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
else:
    try:
        torch.cuda.init()
    except Exception as exc:
        found["why"] = str(exc).strip().partition(chr(10))[0]
print(json.dumps(found))
"""
_SHM_REMEDY = "mount -o remount,size=4G /dev/shm (docker: --shm-size=4g)"


@dataclass(frozen=True)
class Finding:
    """One line of the table."""

    what: str
    wanted: str
    found: str
    status: str  # "ok" | "warning": works, with a limit | "error": something needed is missing
    remedy: str = ""


def run_doctor() -> int:
    """Prints the table; returns 0 when everything needed is there, else 1."""
    gpu = _has_gpu()
    findings = [_python(), *package_findings(gpu), *(gpu_findings() if gpu else []), *machine_findings(gpu)]
    table = Table(
        title=f"megagrpo doctor: {'GPU' if gpu else 'CPU'} machine, {platform.machine()}", title_justify="left"
    )
    for heading in ("", "what", "wanted", "found", "remedy"):
        table.add_column(heading, overflow="fold")
    marks = {"ok": "[green]ok[/]", "warning": "[yellow]note[/]", "error": "[red]BAD[/]"}
    for finding in findings:
        table.add_row(marks[finding.status], finding.what, finding.wanted, finding.found, finding.remedy)
    console = Console()
    console.print(table)
    bad = [finding.what for finding in findings if finding.status == "error"]
    console.print(f"[red]{len(bad)} to mend: {', '.join(bad)}[/]" if bad else "[green]ready[/]")
    return 1 if bad else 0


def _python() -> Finding:
    found = platform.python_version()
    enough = tuple(map(int, platform.python_version_tuple()[:2])) >= (3, 11)
    return Finding(
        "python", ">=3.11", found, "ok" if enough else "error", "" if enough else "install Python 3.11 or later"
    )


# ---- packages ------------------------------------------------------------------------------------------------------


def package_findings(gpu: bool) -> list[Finding]:
    """Returns a line for each large package, one for every other requirement that is not met, and their number."""
    if _version("megagrpo") is None:
        return [Finding("megagrpo", "installed", "missing", "error", _INSTALL)]
    extras = ["gpu"] if gpu else ["cpu", _CPU_ENGINE]
    wanted = {canonicalize_name(r.name): r for r in _requirements("megagrpo", extras)}
    shown = [_package_finding(wanted[name]) for name in _SHOWN if name in wanted]
    bare = (
        set() if gpu else {canonicalize_name(r.name) for r in _requirements("megagrpo", [_CPU_ENGINE], only_extra=True)}
    )
    num_met, unmet = 0, []
    for owner, requirement in _closure(extras, bare):
        finding = _package_finding(requirement)
        if finding.status == "ok":
            num_met += 1
        elif canonicalize_name(requirement.name) not in _SHOWN or owner != "megagrpo":
            unmet.append(Finding(f"{requirement.name} (for {owner})", finding.wanted, finding.found, "error", _INSTALL))
    others = Finding("requirements, with those of requirements", "met", f"{num_met} met, {len(unmet)} not", "ok")
    return [*shown, _torch_build(gpu), *unmet, others]


def _package_finding(requirement: Requirement) -> Finding:
    found = _version(requirement.name)
    wanted = str(requirement.specifier) or "any version"
    if found is None:
        return Finding(requirement.name, wanted, "missing", "error", _INSTALL)
    met = requirement.specifier.contains(found, prereleases=True)
    return Finding(requirement.name, wanted, found, "ok" if met else "error", "" if met else _INSTALL)


def _torch_build(gpu: bool) -> Finding:
    """Reports which device this torch was built for, read from its version file: importing torch takes seconds."""
    wanted = "CUDA" if gpu else "any"
    if _version("torch") is None:
        return Finding("torch build", wanted, "missing", "error", _INSTALL)
    cuda = _cuda_of_torch()
    found = f"CUDA {cuda}" if cuda else "CPU only"
    clash = gpu and cuda is None
    remedy = (
        "this torch cannot use the GPU: remove the environment, take PyTorch's CUDA build out of reach of CPU indexes, "
        + _INSTALL
    )
    return Finding("torch build", wanted, found, "error" if clash else "ok", remedy if clash else "")


def _cuda_of_torch() -> str | None:
    """Returns the version of CUDA that torch was built for, such as 13.0; None for a CPU build, or without torch."""
    if _version("torch") is None:
        return None
    version_file = Path(str(importlib.metadata.distribution("torch").locate_file("torch/version.py")))
    match = re.search(r"^cuda\b.*= ['\"]([\d.]+)['\"]", version_file.read_text(), re.MULTILINE)
    return match[1] if match else None


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _requirements(name: str, extras: list[str], only_extra: bool = False) -> Iterator[Requirement]:
    """Yields the requirements of an installed distribution that apply here with these extras."""
    for text in importlib.metadata.requires(name) or []:
        requirement = Requirement(text)
        marker = requirement.marker
        if marker is None or marker.evaluate({"extra": ""}):
            if not only_extra:
                yield requirement
        elif any(marker.evaluate({"extra": extra}) for extra in extras):
            yield requirement


def _closure(extras: list[str], bare: set[NormalizedName]) -> Iterator[tuple[str, Requirement]]:
    """Yields (owner, requirement) for all that megagrpo leads to; those of `bare` packages are not followed."""
    todo: list[tuple[str, tuple[str, ...]]] = [("megagrpo", tuple(sorted(extras)))]
    seen: set[tuple[str, tuple[str, ...]]] = set()
    while todo:
        owner, owner_extras = todo.pop()
        if (owner, owner_extras) in seen or canonicalize_name(owner) in bare or _version(owner) is None:
            continue
        seen.add((owner, owner_extras))
        for requirement in _requirements(owner, list(owner_extras)):
            yield owner, requirement
            todo.append((canonicalize_name(requirement.name), tuple(sorted(requirement.extras))))


# ---- GPUs ----------------------------------------------------------------------------------------------------------


def gpu_findings() -> list[Finding]:
    """Returns whether driver, torch, NCCL and Transformer Engine of a machine with GPUs fit each other."""
    cuda, driver = _cuda_of_torch(), driver_version()
    least = _DRIVERS.get(int(cuda.partition(".")[0])) if cuda else None
    wanted = f">={least} for CUDA {cuda}" if least else "any"
    if driver is None:
        fits, remedy = False, "install NVIDIA's driver, or start the container with its GPUs (docker --gpus all)"
    else:
        fits = least is None or int(driver.partition(".")[0]) >= least
        remedy = f"CUDA {cuda} of this torch needs a newer driver: update it, or take a torch for an older CUDA"
    findings = [_judge("NVIDIA driver", wanted, driver or "none found", fits, "error", remedy)]
    return [*findings, *_torch_findings(), _transformer_engine()]


def driver_version() -> str | None:
    """Returns the version of NVIDIA's kernel driver, such as 580.65.06; None where none is loaded."""
    file = Path("/proc/driver/nvidia/version")
    match = re.search(r"(?:Module|x86_64|aarch64)\s+(\d+\.[\d.]+)", file.read_text()) if file.is_file() else None
    if match:
        return match[1]
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    words = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    return done.stdout.split()[0] if done.returncode == 0 and done.stdout.split() else None


def ask_torch() -> dict[str, Any]:
    """Returns torch's view of CUDA, from a child process: "available", "gpus" and "nccl", or "why" there is none."""
    try:
        words = [sys.executable, "-c", _ASK_TORCH]
        done = subprocess.run(words, capture_output=True, text=True, timeout=_TORCH_S, check=False)
    except subprocess.TimeoutExpired:
        return {"available": False, "why": f"torch gave no answer in {_TORCH_S:.0f} s"}
    if done.returncode != 0:
        return {"available": False, "why": (done.stderr.strip().splitlines() or ["torch ended"])[-1]}
    return json.loads(done.stdout.splitlines()[-1])


def _torch_findings() -> list[Finding]:
    answer = ask_torch()
    if answer["available"]:
        gpus = answer["gpus"]
        seen = Finding("GPUs that torch sees", "one or more", f"{len(gpus)}: {', '.join(sorted(set(gpus)))}", "ok")
        return [seen, Finding("NCCL of torch", "any", answer["nccl"], "ok")]
    remedy = (
        "there are GPUs, and torch cannot use them: see the lines above, CUDA_VISIBLE_DEVICES, and what the job asked"
    )
    return [Finding("GPUs that torch sees", "one or more", answer["why"] or "none", "error", remedy)]


def _transformer_engine() -> Finding:
    """Judges Transformer Engine: an experiment may do without, but not with one that Megatron-Core does not know."""
    name = "transformer-engine"
    wanted = next(
        (r for r in _requirements("megagrpo", ["te"], only_extra=True) if canonicalize_name(r.name) == name), None
    )
    found = _version(name)
    bounds = str(wanted.specifier) if wanted else "any version"
    if found is None:
        remedy = "without it layers are Megatron's own, one expert after the other: " + _INSTALL
        return Finding(name, bounds, "missing", "warning", remedy)
    if wanted is not None and not wanted.specifier.contains(found, prereleases=True):
        return Finding(name, bounds, found, "error", f"pip uninstall {name} transformer-engine-torch, then {_INSTALL}")
    if _version("transformer-engine-torch") != found:
        remedy = f"its part for torch was not built (found {_version('transformer-engine-torch')}): {_INSTALL}"
        return Finding(name, bounds, found, "error", remedy)
    return Finding(name, bounds, found, "ok")


# ---- the machine ---------------------------------------------------------------------------------------------------


def machine_findings(gpu: bool) -> list[Finding]:
    """Returns what the machine offers: memory, disk, cores, files, a compiler, local ports."""
    cores = psutil.cpu_count() or 1
    memory, disk = psutil.virtual_memory().available, shutil.disk_usage(Path.cwd()).free
    shared = shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else 0
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    compiler_use = "for Transformer Engine" if gpu else "on GPU machines only"
    no_compiler = "error" if gpu else "warning"
    enough_files = soft == resource.RLIM_INFINITY or soft >= 4096
    most = hard if 0 < hard < 65536 else 65536
    open_files = "unlimited" if soft == resource.RLIM_INFINITY else str(soft)
    return [
        _at_least("free memory", memory, 6 * _GIB, 4 * _GIB, "fewer actor ranks or engines, or a larger machine"),
        _at_least("free disk here", disk, 10 * _GIB, 2 * _GIB, "free some, or set output_dir to a larger disk"),
        _at_least("free /dev/shm", shared, 1 * _GIB, _GIB // 16, _SHM_REMEDY),
        _judge("CPU cores", "2", str(cores), cores >= 2, "warning", "everything shares one core: slow"),
        _judge("open files", "4096", open_files, enough_files, "warning", f"ulimit -n {most}"),
        _judge("C++ compiler", compiler_use, compiler or "none", bool(compiler), no_compiler, "apt-get install g++"),
        _loopback(),
        _program_isolation(),
    ]


def _at_least(what: str, found: int, good: int, least: int, remedy: str) -> Finding:
    """Judges a number of bytes: from `good` on ok, from `least` on a warning, else an error."""
    status = "ok" if found >= good else "warning" if found >= least else "error"
    wanted = f"{good / _GIB:.0f} GiB"
    return Finding(what, wanted, f"{found / _GIB:.1f} GiB", status, "" if status == "ok" else remedy)


def _judge(what: str, wanted: str, found: str, fulfilled: bool, otherwise: str, remedy: str) -> Finding:
    return Finding(what, wanted, found, "ok" if fulfilled else otherwise, "" if fulfilled else remedy)


def _loopback() -> Finding:
    """Tries 127.0.0.1, over which services of one machine meet; a proxy or a closed sandbox can forbid even that."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=5).close()
            return Finding("ports on 127.0.0.1", "bind and connect", "work", "ok")
    except OSError as error:
        return Finding("ports on 127.0.0.1", "bind and connect", str(error), "error", "allow local sockets")


def _program_isolation() -> Finding:
    """Tries a trivial program in the sandbox of grader `code`."""
    problem = isolation()
    if not problem:
        return Finding("grader code", "namespaces", "programs are isolated", "ok")
    remedy = "programs run within limits alone; allow user namespaces (kernel.unprivileged_userns_clone, seccomp)"
    return Finding("grader code", "namespaces", problem, "warning", remedy)


def _has_gpu() -> bool:
    return Path("/dev/nvidiactl").exists()
