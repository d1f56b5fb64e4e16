"""The stop request of a node: save at the next safe point and exit; the next start resumes.

A request is not a signal to the ranks, because a starting rank has no handler yet, and torchrun
ends its ranks at a signal. It is files on every trainer node:

1. A launcher makes its node's request at USR1 or INT (or TERM, `megagrpo train`); `megagrpo stop`
   makes that of the first node.
2. Between two steps the ranks agree whether any node has a request. If so, they save and grant the
   request of every node, with the last step.
3. The launchers exit with STOPPED, or after `megagrpo stop` with ENDED.

Another file says whether the ranks listen: from their first step on. Before, nothing can be saved,
and they may wait for engines for an hour.

Files are only added, because Slurm's job repeats USR1 until its step has ended, and no request may
undo another one or the grant. Each request is one file, so a launcher that starts meanwhile
withdraws all of it or nothing.
"""

import os
from contextlib import suppress
from pathlib import Path

from megagrpo.system.run_folder import write_whole

STOPPED = 85  # exit status of a launcher: saved before the last step; the same command resumes
ENDED = 86  # the same for `megagrpo stop`: a Slurm job is not put back into the queue
STOP_FILE = "MEGAGRPO_STOP_FILE"  # the path of the first file, for a node's ranks


class StopRequest:
    """The stop request of one node."""

    def __init__(self, path: Path):
        self._made = path
        self._final = path.with_suffix(".stop_final")
        self._granted = path.with_suffix(".stop_granted")
        self._listens = path.with_suffix(".stop_listens")

    def withdraw(self) -> None:
        """Removes the files of an earlier launcher."""
        self._made.parent.mkdir(parents=True, exist_ok=True)
        for file in (self._made, self._final, self._granted, self._listens):
            file.unlink(missing_ok=True)

    def listen(self, now: bool) -> None:
        """Records whether the node's ranks are in their steps."""
        with suppress(OSError):  # of a shared file system: it ends no run
            if now:
                self._listens.touch()
            else:
                self._listens.unlink()

    def listened(self) -> bool:
        """Returns whether ranks would save finished steps; True while the file system fails."""
        try:
            self._listens.stat()
        except OSError as exc:
            return not isinstance(exc, FileNotFoundError)
        return True

    def make(self, final: bool = False) -> None:
        """Makes the request. final: the run must not resume by itself, whoever asked first."""
        (self._final if final else self._made).touch()

    def made(self) -> bool:
        """Returns whether the request exists; False while the file system fails. Callers poll."""
        return os.path.exists(self._made) or self.final()

    def final(self) -> bool:
        """Returns whether the run must not resume by itself."""
        return os.path.exists(self._final)

    def grant(self, step: int, final: bool) -> None:
        """Records that the run is saved after `step` and its ranks exit. final: some node's request
        is."""
        self.make(final)
        write_whole(self._granted, f"saved after step {step}")

    def granted(self) -> tuple[str, int] | None:
        """Returns what `grant` recorded and the exit status; None if nothing was granted."""
        if not os.path.exists(self._granted):
            return None
        answer = "saved"
        with suppress(OSError):  # of a shared file system: the status must not depend on it
            answer = self._granted.read_text()
        if self.final():
            return answer, ENDED
        return answer, STOPPED
