"""One machine: the rollout service and the trainers as child processes, watched together, ended together. Its parts serve nodes.py too."""

import fcntl
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from megagrpo import environment
from megagrpo.config import ExperimentConfig
from megagrpo.config_load import dump_config
from megagrpo.processes import spawn, stop_tree
from megagrpo.rollout.client import SERVICE_FILE
from megagrpo.stop_request import STOP_FILE, STOPPED, StopRequest

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)  # that Signals may handle
_POLL_S = 0.2
_DEAD_LOCK_S = 150.0  # how long a file server keeps the lock of a node that died, whose job is started again elsewhere
_SERVICE_GRACE_S = 30.0  # engines, Ray and the router end in order
_LOG_LINES = 25
_PARAGRAPH = "\n\n"


class Ended(Exception):
    """A signal that ends everything at once; `status` is what a shell reports for it."""

    def __init__(self, number: int):
        super().__init__(signal.Signals(number).name)
        self.status = 128 + number


def run(config: ExperimentConfig) -> int:
    """`megagrpo run`: serve + torchrun on this machine. Returns the trainers' exit status; leaves no process behind.

    USR1: save after the present step and return STOPPED. TERM, INT, USR2: end at once.
    Raises ValueError, before anything starts, with every problem that can be known by then.
    """
    from megagrpo.explain import preflight  # transformers: seconds in which nodes.py could not be told to stop

    problems = preflight(config)
    if problems:
        raise ValueError("this experiment cannot run:\n  " + "\n  ".join(problems))
    unmade = [path for path in _inputs(config) if not Path(path).exists()]
    if unmade:  # preflight lets pass what this experiment itself makes
        raise ValueError(f"not there yet: {', '.join(unmade)}; first `megagrpo prepare`" + (", then `megagrpo sft`" if config.sft else ""))
    devices = _devices(config, _visible_gpus())
    with alone_in(Path(config.output_dir)):
        return _serve_and_train(config, *devices)


@contextmanager
def alone_in(run_dir: Path) -> Iterator[None]:
    """Inside, no other trains into this run folder. ValueError where one does."""
    run_dir.mkdir(parents=True, exist_ok=True)
    patience_s = _DEAD_LOCK_S if environment.get_int("SLURM_RESTART_COUNT", 0) else 0.0
    with (run_dir / ".lock").open("w") as file:
        try:
            _lock(file, patience_s)
        except BlockingIOError:
            raise ValueError(f"output_dir {run_dir}: another run trains into this folder; wait for its end or name another") from None
        except OSError as exc:  # some cluster file systems are mounted without locks
            print(f"megagrpo: {run_dir} cannot be locked ({exc.strerror}): start no second run there", file=sys.stderr)
        yield


def _lock(file: IO, patience_s: float) -> None:
    deadline = time.monotonic() + patience_s
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
        time.sleep(_POLL_S)


def _serve_and_train(config: ExperimentConfig, of_trainers: dict[str, str], of_engines: dict[str, str]) -> int:
    run_dir = Path(config.output_dir)
    resolved = write_resolved(config, run_dir)
    (run_dir / SERVICE_FILE).unlink(missing_ok=True)  # a killed run's URL would mislead the trainers
    logs = run_dir / "logs"
    stop_file = logs / "trainer.stop_request"
    children: list[subprocess.Popen] = []
    with Signals((signal.SIGTERM, signal.SIGINT, signal.SIGUSR2), (signal.SIGUSR1,), StopRequest(stop_file)) as request:
        try:
            service = start(["serve", str(resolved)], logs / "service.log", children, env=of_engines)
            ranks, env = torchrun(config.actor.world_size, config.actor.max_restarts), {STOP_FILE: str(stop_file)} | of_trainers
            trainers = start(["train", str(resolved)], logs / "trainer.log", children, [*ranks, "--standalone"], env)
            status = watch(trainers, logs / "trainer.log", first_report, service, logs / "service.log")
            return stopped(request) if status == 0 and request.granted() else status
        except Ended as exc:
            print(f"megagrpo run: {exc}; stopping", file=sys.stderr)
            return exc.status
        finally:
            ignore_signals()
            end_all(children, _SERVICE_GRACE_S)


def _visible_gpus() -> list[str]:
    import torch

    named = environment.get("CUDA_VISIBLE_DEVICES")
    return [name for name in named.split(",") if name] if named is not None else [str(i) for i in range(torch.cuda.device_count())]


def _devices(config: ExperimentConfig, visible: list[str]) -> tuple[dict[str, str], dict[str, str]]:
    """Environment of the trainers and of the service: GPUs of their own. Empty where there are none.

    Raises ValueError when there are too few; weights over `disk` may share them, NCCL refuses two ranks on one.
    """
    ranks, engine_ranks = config.actor.world_size, config.rollout.num_engines * config.rollout.tp
    if not visible or (len(visible) < ranks + engine_ranks and config.weights.transport == "disk"):
        return {}, {}
    if len(visible) < ranks + engine_ranks:
        raise ValueError(
            f"{len(visible)} GPU(s) are visible, but {ranks} trainer ranks (actor.world_size) and {engine_ranks} engine ranks "
            "(rollout.num_engines x tp) need one each; lower them, or let them share GPUs with weights.transport: disk"
        )
    return {"CUDA_VISIBLE_DEVICES": ",".join(visible[:ranks])}, {"CUDA_VISIBLE_DEVICES": ",".join(visible[ranks:])}


def train_ranks(config: ExperimentConfig, command: list[str]) -> int:
    """Run a collective subcommand (sft, export) as `actor.world_size` ranks of this machine; returns its exit status.

    ValueError when it has GPUs, but fewer than ranks.
    """
    run_dir, ranks, gpus = Path(config.output_dir), config.actor.world_size, len(_visible_gpus())
    if 0 < gpus < ranks:
        raise ValueError(
            f"`megagrpo {command[0]}` runs on one machine: {gpus} GPU(s) are visible for {ranks} ranks (actor.world_size). Over several "
            f"nodes start `torchrun --nnodes N --nproc-per-node {gpus} ... -m megagrpo.cli {' '.join(command[:1])} ...` on each of them"
        )
    resolved = write_resolved(config, run_dir)
    children: list[subprocess.Popen] = []
    with Signals((signal.SIGTERM, signal.SIGINT)):
        try:
            name, *rest = command
            log = run_dir / "logs" / f"{name}.log"
            ranks = [*torchrun(config.actor.world_size), "--standalone"]
            return watch(start([name, str(resolved), *rest], log, children, ranks), log, first_report)
        except Ended as exc:
            print(f"megagrpo {command[0]}: {exc}; stopping", file=sys.stderr)
            return exc.status
        finally:
            ignore_signals()
            end_all(children)


def _inputs(config: ExperimentConfig) -> list[str]:
    return [config.model.path, config.data.path, *([config.eval.data.path] if config.eval else [])]


def write_resolved(config: ExperimentConfig, run_dir: Path) -> Path:
    run_dir.mkdir(parents=True, exist_ok=True)
    path = run_dir / "config.yaml"
    dump_config(config, path)
    return path


def torchrun(ranks: int, max_restarts: int = 0) -> list[str]:
    """The interpreter's arguments that start `ranks` processes of what follows here; when one fails, all start again, so many times."""
    return ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--max-restarts", str(max_restarts)]


def start(
    command: list[str], log: Path, children: list[subprocess.Popen], torchrun: list[str] = (), env: dict[str, str] | None = None
) -> subprocess.Popen:
    """A subcommand as a child: one process, or ranks under `torchrun`. Rank 0's standard output is this terminal's."""
    if torchrun:
        for stale in _reports(log):
            stale.unlink(missing_ok=True)  # another node may have been quicker
    quiet = {"OMP_NUM_THREADS": environment.get("OMP_NUM_THREADS", "1"), "PYTHONWARNINGS": "ignore"}
    # In torchrun's own store, ranks that start again would find the dead ones' addresses under the same names.
    quiet["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    quiet |= environment.of_all_nccl_ranks()
    python = [sys.executable, "-W", "ignore", *torchrun, "-m", "megagrpo.cli"]
    whole = environment.child_environment(quiet | (env or {}))
    child = spawn([*python, *command], whole, log, signal.SIGTERM, share_stdout=bool(torchrun))
    children.append(child)
    return child


def ignore_signals() -> None:
    """The first act of a clean-up inside Signals, whose end undoes it."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def end_all(children: list[subprocess.Popen], grace_s: float = 5.0) -> None:
    """End what was started, the last first, with all that it started in turn."""
    for child in reversed(children):
        stop_tree(child.pid, grace_s)
        child.wait()


def stopped(request: StopRequest) -> int:
    """The exit status of a run that was asked to stop and did, after saying so."""
    print(f"megagrpo: stopped as asked, {request.granted()}; the same command goes on from there", file=sys.stderr)
    return STOPPED


def last_lines(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-_LOG_LINES:])


def first_report(log: Path) -> str:
    """Why ranks failed: the first to fail knows, the others may only have seen it go."""
    reports = sorted(_reports(log), key=lambda report: report.stat().st_mtime_ns)
    return reports[0].read_text().rstrip() if reports else last_lines(log)


def _reports(log: Path, ending: str = ".txt") -> list[Path]:
    """Of the ranks that write to `log`, on all nodes (trainer-0.log, trainer-1.log): an export must not be taken for the run beside it."""
    return list(log.parent.glob(f"error_{log.stem.partition('-')[0]}_rank*{ending}"))


def watch(
    main: subprocess.Popen,
    log: Path,
    explain: Callable[[Path], str] = last_lines,
    needed: subprocess.Popen | None = None,
    needed_log: Path | None = None,
) -> int:
    """Wait for `main`, which writes to `log` and cannot do without `needed`. Returns 0, or 1 after printing why either ended."""
    known = set(log.parent.glob("deadline_*.txt"))
    while main.poll() is None:
        for page in set(log.parent.glob("deadline_*.txt")) - known:
            known.add(page)
            print(f"megagrpo: {page.read_text().split(_PARAGRAPH)[0]}\nstacks: {page}", file=sys.stderr)
        if needed is not None and needed.poll() is not None:
            main, log, explain = needed, needed_log, last_lines
            break
        if explain is first_report and _reports(log, ".final.txt"):  # torchrun would start the ranks again
            stop_tree(main.pid)
        time.sleep(_POLL_S)
    if main.returncode == 0 and main is not needed:
        return 0
    print(f"megagrpo: {log.stem} ended with status {main.returncode}\n{explain(log)}\nwhole log: {log}", file=sys.stderr)
    return 1


class Signals:
    """Inside, signals in `end` raise Ended, so that `finally` blocks stop the children; those in `ask` make the request, and a
    TERM that comes after the request ends too. A second signal is ignored, and a clean-up calls ignore_signals: nothing cuts it short."""

    def __init__(self, end: Iterable[int], ask: Iterable[int] = (), request: StopRequest | None = None):
        self._end, self._ask, self._request = end, ask, request

    def __enter__(self) -> StopRequest | None:
        def raise_ended(number, frame):
            ignore_signals()
            raise Ended(number)

        def make_request(number, frame):
            if number == signal.SIGTERM and self._request.made():
                raise_ended(number, frame)
            self._request.make()

        if self._request is not None:
            self._request.withdraw()
        handlers = {number: raise_ended for number in self._end} | {number: make_request for number in self._ask}
        self._old = {number: signal.getsignal(number) for number in _SIGNALS}
        for number, handler in handlers.items():
            signal.signal(number, handler)
        return self._request

    def __exit__(self, *exc_info):
        for number, handler in self._old.items():
            signal.signal(number, handler)
