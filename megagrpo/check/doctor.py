"""Reports versions, missing or conflicting packages, and remedies: `megagrpo doctor`.

Versions are read from package metadata; nothing heavy is imported, so a broken installation can
still be diagnosed: `pip check` judges the packages among each other, and on a machine with GPUs
another process asks torch about them. Requirements are stated once, in pyproject.toml.
"""

import importlib
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
from typing import TypedDict

import psutil
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from rich.console import Console
from rich.table import Table

from megagrpo.system import environment

_INSTALL = "bash launch/install.sh --repair"
_SHOWN = tuple(
    map(
        canonicalize_name,
        ("torch", "megatron-core", "transformers", "sglang", "ray"),
    )
)
_CPU_ENGINE = (
    "cpu-engine"  # the extra that is installed without its requirements, which name CUDA packages
)
_GIB = 2**30
_DRIVERS = {
    12: 525,
    13: 580,
}  # CUDA's major version -> the oldest driver that runs it, of NVIDIA's release notes
_NVCC = "/usr/local/cuda/bin/nvcc"  # where a toolkit is by default
_PIP_S = 300.0  # to read the metadata of all packages, from a slow file system
_TORCH_S = 180.0  # to import torch and ask it: seconds, minutes from a slow file system
_ASK_TORCH = """
import json, torch
found = {"available": torch.cuda.is_available(), "why": "", "gpus": [], "nccl": ""}
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


@dataclass(frozen=True)
class Finding:
    """One line of the table."""

    what: str
    wanted: str
    found: str
    status: str  # "ok" | "warning": works, with a limit | "error": something needed is missing
    remedy: str = ""


class TorchAnswer(TypedDict):
    """Torch's view of CUDA."""

    available: bool
    why: str  # it is not available
    gpus: list[str]
    nccl: str


def run_doctor() -> int:
    """Prints the table; returns 0 if everything needed is there, else 1."""
    gpu = Path("/dev/nvidiactl").exists()
    enough = sys.version_info >= (3, 11)
    python = _judge(
        "python", ">=3.11", platform.python_version(), enough, "install Python 3.11 or later"
    )
    findings = [
        python,
        *package_findings(gpu),
        *pip_findings(gpu),
        *(gpu_findings() if gpu else []),
        *machine_findings(gpu),
    ]
    title = f"megagrpo doctor: {'GPU' if gpu else 'CPU'} machine, {platform.machine()}"
    table = Table(title=title, title_justify="left")
    for heading in ("", "what", "wanted", "found", "remedy"):
        table.add_column(heading, overflow="fold")
    marks = {"ok": "[green]ok[/]", "warning": "[yellow]note[/]", "error": "[red]BAD[/]"}
    for finding in findings:
        table.add_row(
            marks[finding.status], finding.what, finding.wanted, finding.found, finding.remedy
        )
    console = Console()
    console.print(table)
    bad = [finding.what for finding in findings if finding.status == "error"]
    console.print(f"[red]{len(bad)} to mend: {', '.join(bad)}[/]" if bad else "[green]ready[/]")
    return 1 if bad else 0


def _judge(
    what: str, wanted: str, found: str, fits: bool, remedy: str, otherwise: str = "error"
) -> Finding:
    return Finding(what, wanted, found, "ok" if fits else otherwise, "" if fits else remedy)


# ---- packages ----------------------------------------------------------------------------------


def package_findings(gpu: bool) -> list[Finding]:
    """Returns a line for each large package, and one for every other requirement of megagrpo that is
    not met."""
    if _version("megagrpo") is None:
        return [Finding("megagrpo", "installed", "missing", "error", _INSTALL)]
    wanted = {canonicalize_name(r.name): r for r in _requirements("megagrpo", _extras(gpu))}
    shown = [_package_finding(wanted[name]) for name in _SHOWN if name in wanted]
    others = [_package_finding(wanted[name]) for name in wanted if name not in _SHOWN]
    unmet = [finding for finding in others if finding.status != "ok"]
    return [*shown, _torch_build(gpu), *unmet]


def pip_findings(gpu: bool) -> list[Finding]:
    """Returns what `pip check` says about the requirements of all installed packages."""
    words = [sys.executable, "-m", "pip", "check"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=_PIP_S, check=False)
    if done.returncode and not done.stdout:
        return [Finding("pip check", "pip", done.stderr.strip(), "warning", "install pip")]
    return judge_pip(done.stdout, gpu)


def judge_pip(text: str, gpu: bool) -> list[Finding]:
    """Returns a line for each conflict that `pip check` prints, or one that there is none: an error
    if megagrpo itself requires the package that lacks something, else a warning.

    Without a GPU the engine is installed without its requirements, which are not judged.
    """
    own = {canonicalize_name(r.name) for r in _requirements("megagrpo", _extras(gpu))}
    bare = {r.name for r in _requirements("megagrpo", [_CPU_ENGINE], only_extra=True)}
    what, findings = "requirements of packages", []
    for line in text.splitlines():
        owner = line.partition(" ")[0]
        if (" requires " in line or " has requirement " in line) and (gpu or owner not in bare):
            status = "error" if canonicalize_name(owner) in own else "warning"
            findings.append(Finding(what, "met", line, status, _INSTALL))
    return findings or [Finding(what, "met", "met", "ok")]


def _extras(gpu: bool) -> list[str]:
    return ["gpu"] if gpu else ["cpu", _CPU_ENGINE]


def _package_finding(requirement: Requirement) -> Finding:
    found = _version(requirement.name)
    met = found is not None and requirement.specifier.contains(found, prereleases=True)
    return _judge(
        requirement.name,
        str(requirement.specifier) or "any version",
        found or "missing",
        met,
        _INSTALL,
    )


def _torch_build(gpu: bool) -> Finding:
    """Reports which device this torch was built for, read from its version file: importing torch
    takes seconds."""
    if _version("torch") is None:
        return Finding("torch build", "CUDA" if gpu else "any", "missing", "error", _INSTALL)
    cuda = _cuda_of_torch()
    remedy = (
        "this torch cannot use the GPU: remove the environment, take PyTorch's CUDA build out of "
        "reach of CPU indexes, " + _INSTALL
    )
    found = f"CUDA {cuda}" if cuda else "CPU only"
    return _judge(
        "torch build", "CUDA" if gpu else "any", found, not gpu or cuda is not None, remedy
    )


def _cuda_of_torch() -> str | None:
    """Returns the version of CUDA that torch was built for, such as 13.0; None for a CPU build, or
    without torch."""
    if _version("torch") is None:
        return None
    version_file = Path(
        str(importlib.metadata.distribution("torch").locate_file("torch/version.py"))
    )
    match = re.search(r"^cuda\b.*= ['\"]([\d.]+)['\"]", version_file.read_text(), re.MULTILINE)
    return match[1] if match else None


def _version(name: str) -> str | None:
    return next((found.version for found in importlib.metadata.distributions(name=name)), None)


def _requirements(name: str, extras: list[str], only_extra: bool = False) -> Iterator[Requirement]:
    """Yields the requirements of a distribution that apply here with these extras; none if it is
    not installed."""
    written = importlib.metadata.requires(name) if _version(name) else None
    for requirement in map(Requirement, written or []):
        marker = requirement.marker
        if marker is None or marker.evaluate({"extra": ""}):
            if not only_extra:
                yield requirement
        elif any(marker.evaluate({"extra": extra}) for extra in extras):
            yield requirement


# ---- GPUs --------------------------------------------------------------------------------------


def gpu_findings() -> list[Finding]:
    """Returns whether driver, torch, NCCL and Transformer Engine of a machine with GPUs fit each
    other."""
    cuda, driver = _cuda_of_torch(), driver_version()
    least = _DRIVERS.get(int(cuda.partition(".")[0])) if cuda else None
    wanted = f">={least} for CUDA {cuda}" if least else "any"
    fits = driver is not None and (least is None or int(driver.partition(".")[0]) >= least)
    remedy = (
        f"CUDA {cuda} of this torch needs a newer driver: update it, or take a torch for an "
        "older CUDA"
    )
    if driver is None:
        remedy = "install NVIDIA's driver, or start the container with its GPUs (docker --gpus all)"
    judged = _judge("NVIDIA driver", wanted, driver or "none found", fits, remedy)
    return [judged, *_torch_findings(), *(_toolkit(cuda) if cuda else ()), _transformer_engine()]


def driver_version() -> str | None:
    """Returns the version of NVIDIA's kernel driver, such as 580.65.06; None if none is loaded."""
    file = Path("/proc/driver/nvidia/version")
    match = (
        re.search(r"(?:Module|x86_64|aarch64)\s+(\d+\.[\d.]+)", file.read_text())
        if file.is_file()
        else None
    )
    program = shutil.which("nvidia-smi")
    if match or program is None:
        return match[1] if match else None
    words = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    return done.stdout.split()[0] if done.returncode == 0 and done.stdout.split() else None


def ask_torch() -> TorchAnswer:
    """Returns torch's view of CUDA, from a child process."""
    try:
        words = [sys.executable, "-c", _ASK_TORCH]
        done = subprocess.run(words, capture_output=True, text=True, timeout=_TORCH_S, check=False)
    except subprocess.TimeoutExpired:
        return TorchAnswer(
            available=False, why=f"torch gave no answer in {_TORCH_S:.0f} s", gpus=[], nccl=""
        )
    if done.returncode != 0:
        why = (done.stderr.strip().splitlines() or ["torch ended"])[-1]
        return TorchAnswer(available=False, why=why, gpus=[], nccl="")
    return json.loads(done.stdout.splitlines()[-1])


def _torch_findings() -> list[Finding]:
    answer, what = ask_torch(), "GPUs that torch sees"
    if answer["available"]:
        gpus = answer["gpus"]
        seen = Finding(what, "one or more", f"{len(gpus)}: {', '.join(sorted(set(gpus)))}", "ok")
        return [seen, Finding("NCCL of torch", "any", answer["nccl"], "ok")]
    remedy = (
        "torch cannot use the machine's GPUs: see the lines above, CUDA_VISIBLE_DEVICES, and "
        "the job's options"
    )
    return [Finding(what, "one or more", answer["why"] or "none", "error", remedy)]


def _toolkit(cuda: str) -> list[Finding]:
    """Judges what compiles SGLang's kernels at an engine's first forward. nvcc is looked for where
    SGLang looks."""
    home = environment.get("CUDA_HOME") or environment.get("CUDA_PATH")
    nvcc = Path(home, "bin", "nvcc") if home else Path(shutil.which("nvcc") or _NVCC)
    found = "none"
    if nvcc.is_file():
        told = subprocess.run(
            [nvcc, "--version"], capture_output=True, text=True, timeout=60, check=False
        ).stdout
        release = re.search(r"release (\d+)", told)
        found = f"{nvcc}: CUDA {release[1] if release else 'unknown'}"
    major = cuda.partition(".")[0]
    ours = Path(str(importlib.metadata.distribution("torch").locate_file(f"nvidia/cu{major}")))
    remedy = (
        f"install the toolkit of CUDA {cuda}, or pip install nvidia-cuda-nvcc=={cuda}.*; "
        f"export CUDA_HOME={ours}"
    )
    if (ours / "bin" / "nvcc").is_file():
        remedy = f"export CUDA_HOME={ours}"
    judged = _judge(
        "CUDA toolkit (nvcc)", f"CUDA {major}", found, found.endswith(f"CUDA {major}"), remedy
    )
    ninja = shutil.which("ninja") or ""
    return [
        judged,
        _judge("ninja", "for SGLang's kernels", ninja or "none", bool(ninja), "pip install ninja"),
    ]


def _transformer_engine() -> Finding:
    """Judges Transformer Engine: an experiment may do without, but not with one that Megatron-Core
    does not know."""
    name, torch_part = "transformer-engine", "transformer-engine-torch"
    extra = _requirements("megagrpo", ["te"], only_extra=True)
    wanted = next((r.specifier for r in extra if canonicalize_name(r.name) == name), None)
    bounds, found = str(wanted or "any version"), _version(name)
    if found is None:
        remedy = "without it layers are Megatron's own, one expert after the other: " + _INSTALL
        return Finding(name, bounds, "missing", "warning", remedy)
    if wanted is not None and not wanted.contains(found, prereleases=True):
        return Finding(
            name, bounds, found, "error", f"pip uninstall {name} {torch_part}, then {_INSTALL}"
        )
    remedy = f"its part for torch was not built (found {_version(torch_part)}): {_INSTALL}"
    return _judge(name, bounds, found, _version(torch_part) == found, remedy)


# ---- the machine -------------------------------------------------------------------------------


def machine_findings(gpu: bool) -> list[Finding]:
    """Returns what the machine offers: memory, disk, cores, files, a compiler, local ports."""
    cores = psutil.cpu_count() or 1
    memory, disk = psutil.virtual_memory().available, shutil.disk_usage(Path.cwd()).free
    shared = shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else 0
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)  # raised to the hard limit by now
    unlimited = soft == resource.RLIM_INFINITY
    more_files = (
        "raise the hard limit: `ulimit -Hn 65536` as root, limits.conf, or docker "
        "--ulimit nofile=65536"
    )
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    compiler_use, no_compiler = (
        ("for Transformer Engine", "error") if gpu else ("on GPU machines only", "warning")
    )
    found = "unlimited" if unlimited else str(soft)
    more_shared = "mount -o remount,size=4G /dev/shm (docker: --shm-size=4g)"
    return [
        at_least(
            "free memory",
            memory,
            6 * _GIB,
            4 * _GIB,
            "fewer actor ranks or engines, or a larger machine",
        ),
        at_least(
            "free disk here",
            disk,
            10 * _GIB,
            2 * _GIB,
            "free some, or set output_dir to a larger disk",
        ),
        at_least("free /dev/shm", shared, 1 * _GIB, _GIB // 16, more_shared),
        _judge(
            "CPU cores", "2", str(cores), cores >= 2, "everything shares one core: slow", "warning"
        ),
        _judge("open files", "4096", found, unlimited or soft >= 4096, more_files, "warning"),
        _judge(
            "C++ compiler",
            compiler_use,
            compiler or "none",
            bool(compiler),
            "apt-get install g++",
            no_compiler,
        ),
        _loopback(),
        _program_isolation(),
    ]


def at_least(what: str, found: int, good: int, least: int, remedy: str) -> Finding:
    """Judges a number of bytes: from `good` on ok, from `least` on a warning, else an error."""
    otherwise = "warning" if found >= least else "error"
    return _judge(
        what, f"{good / _GIB:.0f} GiB", f"{found / _GIB:.1f} GiB", found >= good, remedy, otherwise
    )


def _loopback() -> Finding:
    """Tries 127.0.0.1, over which services of one machine meet; a proxy or a closed sandbox can
    forbid even that."""
    found = "work"
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=5).close()
    except OSError as error:
        found = str(error)
    return _judge(
        "ports on 127.0.0.1", "bind and connect", found, found == "work", "allow local sockets"
    )


def _program_isolation() -> Finding:
    """Tries a trivial program in the sandbox of grader `code` and of the environment `python`."""
    problem = importlib.import_module("megagrpo.sandbox.sandbox").isolation()
    remedy = (
        "programs run only with isolation: off; allow user namespaces "
        "(kernel.unprivileged_userns_clone, seccomp)"
    )
    found = problem or "programs are isolated"
    return _judge("grader code", "namespaces", found, not problem, remedy, "warning")
