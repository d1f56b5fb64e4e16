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
from megagrpo.rollout.client import SERVICE_FILE

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
    unmade = [path for path in _inputs(config) if not Path(path).exists()]
    if unmade:  # preflight lets pass what this experiment itself makes
        raise ValueError(f"not there yet: {', '.join(unmade)}; first `megagrpo prepare`" + (", then `megagrpo sft`" if config.sft else ""))
    run_dir = Path(config.output_dir)
    resolved = _write_resolved(config, run_dir)
    (run_dir / SERVICE_FILE).unlink(missing_ok=True)  # a killed run's URL would mislead the trainers
    logs = run_dir / "logs"
    children: list[subprocess.Popen] = []
    try:
        with _signals_raise():
            service = _start(["serve", str(resolved)], logs / "service.log", children)
            trainers = _start(["train", str(resolved)], logs / "trainer.log", children, ranks=config.actor.world_size)
            return _watch(trainers, logs / "trainer.log", service)
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
            log = run_dir / "logs" / f"{name}.log"
            return _watch(_start([name, str(resolved), *rest], log, children, ranks=config.actor.world_size), log)
    except _Ended as exc:
        print(f"megagrpo {command[0]}: {exc}; stopping", file=sys.stderr)
        return 143
    finally:
        for child in children:
            stop_tree(child.pid)
            child.wait()


def _inputs(config: ExperimentConfig) -> list[str]:
    return [config.model.path, config.data.path, *([config.eval.data.path] if config.eval else [])]


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
    quiet = {"OMP_NUM_THREADS": environment.get("OMP_NUM_THREADS", "1"), "PYTHONWARNINGS": "ignore"}
    env = environment.child_environment(quiet)
    child = spawn([*python, "-m", "megagrpo.cli", *command], env, log, signal.SIGTERM, share_stdout=ranks is not None)
    children.append(child)
    return child


def _watch(ranks: subprocess.Popen, log: Path, service: subprocess.Popen | None = None) -> int:
    """Wait for the ranks, which write to `log`. Returns 0, or 1 after printing why they or the service ended."""
    while ranks.poll() is None:
        if service is not None and service.poll() is not None:
            print(f"megagrpo: the rollout service ended with status {service.returncode}", file=sys.stderr)
            return _show_end(log.with_name("service.log"))
        time.sleep(_POLL_S)
    if ranks.returncode == 0:
        return 0
    print(f"megagrpo: the trainers ended with status {ranks.returncode}", file=sys.stderr)
    # The first to fail knows why; the others may only have seen it go.
    reports = sorted(log.parent.glob("error_rank*.txt"), key=lambda report: report.stat().st_mtime_ns)
    if not reports:
        return _show_end(log)
    print(f"{reports[0].read_text().rstrip()}\nwhole log: {log}", file=sys.stderr)
    return 1


def _show_end(log: Path) -> int:
    """Print the last lines of a log and where it is. Returns 1."""
    print("\n".join(log.read_text(errors="replace").splitlines()[-_LOG_LINES:]), f"\nwhole log: {log}", file=sys.stderr)
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
