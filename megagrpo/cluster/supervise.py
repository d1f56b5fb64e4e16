"""Children of a launcher: started with their place and their log, watched together, ended together, whatever signal comes."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from megagrpo import environment
from megagrpo.processes import spawn, stop_tree
from megagrpo.stop_request import STOPPED, StopRequest

_POLL_S = 0.2
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)  # that Signals may handle
_LOG_LINES = 25
_PARAGRAPH = "\n\n"


class Ended(Exception):
    """A signal that ends everything at once; `status` is what a shell reports for it."""

    def __init__(self, number: int):
        super().__init__(signal.Signals(number).name)
        self.status = 128 + number


def torchrun(ranks: int, max_restarts: int = 0) -> list[str]:
    """The interpreter's arguments that start `ranks` processes of what follows here; when one fails, all start again, so many times."""
    return ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--max-restarts", str(max_restarts)]


def start(
    command: list[str],
    log: Path,
    children: list[subprocess.Popen],
    torchrun: list[str] = (),
    env: dict[str, str] | None = None,
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
    print(
        f"megagrpo: {log.stem} ended with status {main.returncode}\n{explain(log)}\nwhole log: {log}", file=sys.stderr
    )
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
        handlers = dict.fromkeys(self._end, raise_ended) | dict.fromkeys(self._ask, make_request)
        self._old = {number: signal.getsignal(number) for number in _SIGNALS}
        for number, handler in handlers.items():
            signal.signal(number, handler)
        return self._request

    def __exit__(self, *exc_info):
        for number, handler in self._old.items():
            signal.signal(number, handler)
