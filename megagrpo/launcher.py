"""One machine: the rollout service and the trainers as child processes, watched together, ended together."""

import signal
import subprocess
import sys
import time
from pathlib import Path

from megagrpo import environment
from megagrpo.config import ExperimentConfig
from megagrpo.config_load import dump_config
from megagrpo.explain import preflight
from megagrpo.processes import spawn, stop_tree

_POLL_S = 0.2
_SERVICE_GRACE_S = 30.0  # engines, Ray and the router end in order
_LOG_LINES = 25


class _Ended(Exception):
    """SIGTERM or SIGINT arrived."""


def run(config: ExperimentConfig) -> int:
    """`megagrpo run`: serve + torchrun on this machine. Returns the trainers' exit status; leaves no process behind.

    Raises ValueError, before anything starts, with every problem that can be known by then.
    """
    problems = preflight(config)
    if problems:
        raise ValueError("this experiment cannot run:\n  " + "\n  ".join(problems))
    run_dir = Path(config.output_dir)
    resolved = _write_resolved(config, run_dir)
    logs = run_dir / "logs"
    children: list[subprocess.Popen] = []
    try:
        with _signals_raise():
            service = _start(["serve", str(resolved)], logs / "service.log", children)
            trainers = _start(["train", str(resolved)], logs / "trainer.log", children, ranks=config.actor.world_size)
            return _watch(trainers, service, run_dir)
    except _Ended as exc:
        print(f"megagrpo run: {exc}; stopping", file=sys.stderr)
        return 143
    finally:
        for child in reversed(children):
            stop_tree(child.pid, _SERVICE_GRACE_S)
            child.wait()


def train_ranks(config: ExperimentConfig, command: list[str]) -> int:
    """Run a collective subcommand (sft, export) as `actor.world_size` ranks of this machine; returns its exit status."""
    run_dir = Path(config.output_dir)
    resolved = _write_resolved(config, run_dir)
    children: list[subprocess.Popen] = []
    try:
        with _signals_raise():
            name, *rest = command
            ranks = _start([name, str(resolved), *rest], run_dir / "logs" / f"{name}.log", children, ranks=config.actor.world_size)
            return _watch(ranks, None, run_dir)
    except _Ended as exc:
        print(f"megagrpo {command[0]}: {exc}; stopping", file=sys.stderr)
        return 143
    finally:
        for child in children:
            stop_tree(child.pid)
            child.wait()


def _write_resolved(config: ExperimentConfig, run_dir: Path) -> Path:
    run_dir.mkdir(parents=True, exist_ok=True)
    path = run_dir / "config.yaml"
    dump_config(config, path)
    return path


def _start(command: list[str], log: Path, children: list[subprocess.Popen], ranks: int | None = None) -> subprocess.Popen:
    """A subcommand as a child: one process, or `ranks` of them under torchrun. Rank 0's standard output is this terminal's."""
    python = [sys.executable, "-W", "ignore"]
    if ranks is not None:
        for stale in log.parent.glob("error_rank*.txt"):
            stale.unlink()
        python += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    log.parent.mkdir(parents=True, exist_ok=True)
    env = environment.child_environment({"OMP_NUM_THREADS": environment.get("OMP_NUM_THREADS", "1")})
    child = spawn([*python, "-m", "megagrpo.cli", *command], env, log, signal.SIGTERM, share_stdout=ranks is not None)
    children.append(child)
    return child


def _watch(ranks: subprocess.Popen, service: subprocess.Popen | None, run_dir: Path) -> int:
    """Wait for the ranks. When the service ends first, the ranks learn it from their own deadline or are ended here."""
    while ranks.poll() is None:
        if service is not None and service.poll() is not None:
            return _explain(f"the rollout service ended with status {service.returncode}", run_dir, ["service.log"])
        time.sleep(_POLL_S)
    if ranks.returncode == 0:
        return 0
    return _explain(f"the trainers ended with status {ranks.returncode}", run_dir, ["trainer.log", "sft.log", "export.log"])


def _explain(what: str, run_dir: Path, logs: list[str]) -> int:
    """Print why: the rank's own message where there is one, else the end of the log. Returns 1."""
    folder = run_dir / "logs"
    reports = sorted(folder.glob("error_rank*.txt"))
    print(f"megagrpo: {what}", file=sys.stderr)
    if reports:
        print(reports[0].read_text().rstrip(), file=sys.stderr)
    for log in (folder / name for name in logs):
        if log.exists():
            if not reports:
                print("\n".join(log.read_text(errors="replace").splitlines()[-_LOG_LINES:]), file=sys.stderr)
            print(f"whole log: {log}", file=sys.stderr)
    return 1


class _signals_raise:
    """Inside, SIGTERM and SIGINT raise _Ended, so that `finally` blocks stop the children."""

    def __enter__(self):
        def end(number, frame):
            raise _Ended(signal.Signals(number).name)

        self._old = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGINT)}

    def __exit__(self, *exc_info):
        for number, handler in self._old.items():
            signal.signal(number, handler)
