"""Reports what this machine and this environment have, what is missing or clashes, and the remedy: `megagrpo doctor`.

Versions are read from package metadata; nothing heavy is imported, so a broken installation can still be diagnosed.
What is wanted is stated once, in pyproject.toml.
"""

import importlib.metadata
import platform
import re
import resource
import shutil
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
from packaging.requirements import Requirement
from packaging.utils import NormalizedName, canonicalize_name
from rich.console import Console
from rich.table import Table

from megagrpo.rewards.sandbox import isolation

_INSTALL = "bash launch/install.sh --repair"
_SHOWN = tuple(
    canonicalize_name(name)
    for name in ("torch", "megatron-core", "transformers", "sglang", "sglang-router", "ray", "transformer-engine")
)
_CPU_ENGINE = "cpu-engine"  # the extra that is installed without its requirements, which name CUDA packages
_GIB = 2**30
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
    findings = [_python(), *package_findings(gpu), *machine_findings(gpu)]
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
    for owner, requirement in _closure("megagrpo", extras, bare):
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
    version_file = Path(str(importlib.metadata.distribution("torch").locate_file("torch/version.py")))
    match = re.search(r"^cuda\b.*= ['\"]([\d.]+)['\"]", version_file.read_text(), re.MULTILINE)
    found = f"CUDA {match[1]}" if match else "CPU only"
    clash = gpu and match is None
    remedy = (
        "this torch cannot use the GPU: remove the environment, take PyTorch's CUDA build out of reach of CPU indexes, "
        + _INSTALL
    )
    return Finding("torch build", wanted, found, "error" if clash else "ok", remedy if clash else "")


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


def _closure(root: str, extras: list[str], bare: set[NormalizedName]) -> Iterator[tuple[str, Requirement]]:
    """Yields (owner, requirement) for all that is reachable from `root`; those of `bare` packages are not followed."""
    todo: list[tuple[str, tuple[str, ...]]] = [(root, tuple(sorted(extras)))]
    seen: set[tuple[str, tuple[str, ...]]] = set()
    while todo:
        owner, owner_extras = todo.pop()
        if (owner, owner_extras) in seen or canonicalize_name(owner) in bare or _version(owner) is None:
            continue
        seen.add((owner, owner_extras))
        for requirement in _requirements(owner, list(owner_extras)):
            yield owner, requirement
            todo.append((canonicalize_name(requirement.name), tuple(sorted(requirement.extras))))


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
