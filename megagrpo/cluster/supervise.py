"""Starts a launcher's child processes, writes their logs, monitors them and ends them."""

import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from megagrpo.system import environment
from megagrpo.system.errors import collected, translated
from megagrpo.system.processes import last_lines, spawn, stop_tree
from megagrpo.system.run_folder import RunFolder
from megagrpo.system.stop_request import STOP_FILE, StopRequest

_POLL_S = 0.2
_END_S = 10.0
_LOOK_S = 2.0  # between two looks into a folder that all nodes share
# all signals that a launch may handle
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
Handler = Callable[[int, FrameType | None], None]
_OF_ONE_NODE = "trainer"  # ranks; those of several nodes are trainer-0, trainer-1 ...


@dataclass(frozen=True)
class Child:
    """A process that a launch started."""

    process: subprocess.Popen
    log: Path
    reports: str = ""  # the name of the ranks' error reports, if it is torchrun


class Launch:
    """A context manager that starts children, handles signals, and ends the children at its exit.

    The block sets `status`. Signals, by argument:

    - end: leaves the block, with status 128 + the signal's number as in a shell.
    - ask: makes the stop request. A TERM or INT after the request also leaves the block, and so
      does an INT before the first step of ranks on this node only. A request that the ranks grant
      before they end decides the status, whatever ends the block; an exception is then only
      printed.
    - unheard: does nothing.
    - USR2, unless it is among these: says that the rollout service of other nodes has ended. A
      second one leaves the block.

    The clean-up ends the children in reverse order with their descendants, by force after `grace_s`
    seconds, and removes the folders in `scratch`. Meanwhile all signals are ignored. After a
    launch with `ask` they stay ignored, because Slurm's job repeats USR1 until the process exits.

    command: the megagrpo command of this launcher. ranks: the name of the log, the stop request and
    the error reports of start_ranks.
    """

    def __init__(
        self,
        folder: RunFolder,
        command: str,
        *,
        end: Sequence[signal.Signals],
        ask: Sequence[signal.Signals] = (),
        unheard: Sequence[signal.Signals] = (),
        ranks: str = _OF_ONE_NODE,
        grace_s: float = 5.0,
    ):
        self.status = 1
        self._folder = folder
        self._command = command
        self._ranks = ranks
        self._end = end
        self._ask = ask
        self._unheard = unheard
        self._grace_s = grace_s
        self._request = StopRequest(folder.stop_request(ranks))
        self.scratch = list[Path]()  # folders to remove after all children have ended
        self._children = list[Child]()
        self._unread = list[str]()  # problems of a shared file system
        self._needed_ended = False  # a process without which the ranks cannot go on

    def __enter__(self) -> "Launch":
        if self._ask:
            self._request.withdraw()
        self._old_handlers = {number: signal.getsignal(number) for number in _SIGNALS}
        # not SIG_IGN, which the children would inherit
        handlers: dict[signal.Signals, Handler] = {signal.SIGUSR2: self._lose}
        handlers |= dict.fromkeys(self._unheard, lambda *_: None)
        handlers |= dict.fromkeys(self._end, self._leave)
        handlers |= dict.fromkeys(self._ask, self._ask_to_stop)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        return self

    def __exit__(self, kind: object, exc: BaseException | None, trace: object) -> bool:
        _ignore_signals()
        if isinstance(exc, _Ended):
            self.status = 128 + exc.args[0]
            _say(f"megagrpo {self._command}: {exc.args[0].name}; stopping")
        while self._children:
            self.end(self._children[-1])
        for folder in self.scratch:
            shutil.rmtree(folder, ignore_errors=True)
        granted = None
        if self._ask:  # the ranks may grant until they have ended
            granted = self._request.granted()
        if granted:
            answer, self.status = granted
            if isinstance(exc, Exception):
                _say(f"megagrpo {self._command}: {exc!r}")
            _say(f"megagrpo: stopped as requested, {answer}; the same command resumes from there")
        if not self._ask:
            for number, handler in self._old_handlers.items():
                signal.signal(number, handler)
        return isinstance(exc, _Ended) or (bool(granted) and isinstance(exc, Exception))

    def start(self, command: list[str], name: str, env: dict[str, str]) -> Child:
        """Starts a subcommand of megagrpo as one process with the log `name`."""
        return self._start(["-m", "megagrpo.cli", *command], self._folder.log(name), "", env)

    def start_ranks(self, command: list[str], torchrun: list[str], env: dict[str, str]) -> Child:
        """Starts a subcommand of megagrpo as ranks under torchrun. Rank 0 prints to this terminal.

        The ranks of all nodes (trainer-0, trainer-1) report errors under one name, the part before
        the hyphen.
        """
        reports = self._ranks.partition("-")[0]
        for stale in self._folder.error_reports(reports):
            stale.unlink(missing_ok=True)  # another node may have removed it
        stop_file = str(self._folder.stop_request(self._ranks))
        env = {environment.REPORTS: reports, STOP_FILE: stop_file} | env
        rank = ["--no-python", sys.executable, "-P", "-u", "-m", "megagrpo.cli"]
        arguments = [*torchrun, *rank, *command]
        return self._start(arguments, self._folder.log(self._ranks), reports, env)

    def spawn(self, command: list[str], log: Path, env: dict[str, str], reports: str = "") -> Child:
        """Starts any program with this environment and `env`. With `reports` it prints to this
        terminal."""
        env = environment.child_environment(env)
        child = Child(spawn(command, env, log, signal.SIGTERM, bool(reports)), log, reports)
        self._children.append(child)
        return child

    def end(self, child: Child) -> None:
        """Ends a child and its descendants."""
        stop_tree(child.process.pid, self._grace_s)
        with suppress(subprocess.TimeoutExpired):  # in a call to a file system that hangs
            child.process.wait(_END_S)
        self._children.remove(child)

    def watch(self, main: Child, *needed: Child) -> int:
        """Waits for `main`, which requires `needed`.

        If one of these ends, ranks that have begun a step notice, save what they have finished, and
        end. Returns 0, or 1 after printing why one of the children failed.
        """
        known = set[Path]()
        with suppress(OSError):
            known = self._folder.deadline_pages()
        look_at = 0.0
        while main.process.poll() is None:
            for other in needed:
                if other.process.poll() is not None and not self._needed_ended:
                    self._needed_ended = True
                    self._failed(other)
            if self._needed_ended and not (self._ask and self._request.listened()):
                return 1
            if time.monotonic() > look_at:
                if self._look(main, known):
                    stop_tree(main.process.pid)  # torchrun would restart the ranks
                look_at = time.monotonic() + _LOOK_S
            time.sleep(_POLL_S)
        _ignore_signals()  # the status is decided
        self._look(main, known)
        if main.process.returncode:
            return self._failed(main)
        return 0

    def _look(self, main: Child, known: set[Path]) -> bool:
        """Prints the first paragraphs of new pages, adds these to `known`, and returns whether a
        rank of `main` gave up.

        An error of a shared file system may pass, so it is printed once and ends nothing.
        """
        unread = f"{self._folder.logs} unread, looks again"
        with collected(self._unread), translated(unread, OSError):
            for page in self._folder.deadline_pages() - known:
                first = page.read_text().split("\n\n")[0]
                _say(f"megagrpo: {first}\nstacks: {page}")
                known.add(page)
            return bool(main.reports and self._folder.error_reports(main.reports, True))
        if len(self._unread) == 1:
            _say(f"megagrpo: {self._unread[0]}")
        return False

    def _start(self, arguments: list[str], log: Path, reports: str, env: dict[str, str]) -> Child:
        quiet = environment.unless_set(OMP_NUM_THREADS="1") | {
            "PYTHONWARNINGS": "ignore",
            # In torchrun's own store, restarted ranks would find the dead ranks' addresses under
            # the same names.
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }
        # -P: another checkout in the working folder is not this program
        words = [sys.executable, "-P", "-W", "ignore", *arguments]
        return self.spawn(words, log, quiet | env, reports)

    def _failed(self, child: Child) -> int:
        reason = ""
        with suppress(OSError):  # of a shared file system
            if reports := self._folder.error_reports(child.reports):
                # the first one has the cause
                first = min(reports, key=lambda report: report.stat().st_mtime_ns)
                reason = first.read_text().rstrip()
            else:
                reason = last_lines(child.log)
        status = f"{child.log.stem} ended with status {child.process.returncode}"
        _say(f"megagrpo: {status}\n{reason}\nwhole log: {child.log}")
        return 1

    def _leave(self, number: int, frame: FrameType | None) -> None:
        _ignore_signals()
        raise _Ended(signal.Signals(number))

    def _lose(self, number: int, frame: FrameType | None) -> None:
        if self._needed_ended:
            self._leave(number, frame)
        self._needed_ended = True  # `watch` sees it

    def _ask_to_stop(self, number: int, frame: FrameType | None) -> None:
        notes = list[str]()
        begun = self._request.listened()
        if number == signal.SIGINT and not begun and self._ranks == _OF_ONE_NODE:
            _say(f"megagrpo {self._command}: no step has begun, so nothing is lost")
            self._leave(number, frame)
        # a full or read-only file system ends no run that could be saved later
        with collected(notes), translated("not asked to stop, ask again", OSError):
            if number in (signal.SIGTERM, signal.SIGINT) and self._request.made():
                self._leave(number, frame)
            self._request.make()
        if number == signal.SIGINT and not notes:
            when = "saves after this step and ends" if begun else "ends before its first step"
            notes.append(f"{when}; Ctrl-C again ends it at once")
        for note in notes:
            _say(f"megagrpo {self._command}: {note}")


# torchrun's options for ranks of one machine. Their default address is the host name, which may not
# resolve.
ALONE = ("--standalone", "--local-addr", "127.0.0.1")


class _Ended(BaseException):
    """A signal that ends everything."""


def torchrun(ranks: int, max_restarts: int = 0, forks: bool = False) -> list[str]:
    """Returns Python's arguments for `ranks` processes. If one fails, all restart, up to
    `max_restarts` times. forks: without a GPU, from one process that has imported the libraries."""
    module = "-u -m megagrpo.cpu.ranks" if forks else "-m torch.distributed.run"
    return f"{module} --nproc-per-node {ranks} --max-restarts {max_restarts}".split()


def _say(text: str) -> None:
    with suppress(OSError):  # of `| tee`, which a Ctrl-C ends before the run has saved
        print(text, file=sys.stderr)


def _ignore_signals() -> None:
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
