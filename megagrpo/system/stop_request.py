"""The stop request of a node: save at the next safe point and exit; the next start resumes.

It is three files on every trainer node, not a signal to the ranks: a starting rank has no handler
yet, and torchrun ends its ranks at a signal. The node's launcher makes the request at USR1 or INT
(or TERM, `megagrpo train`), `megagrpo stop` that of the first node; between two steps the ranks
agree whether any node has one, save, and grant each node's with the last step; the launchers then
exit with STOPPED, or after `megagrpo stop` with ENDED.

Each file is only ever added: Slurm's job repeats USR1 until its step has ended, and no request may
undo another one or the grant. A request is one file, so a launcher that starts meanwhile withdraws
it whole or not at all.
"""

import os
from pathlib import Path

from megagrpo.system.run_folder import write_whole

STOPPED = 85  # exit status of a launcher: saved before the last step; the same command resumes
ENDED = 86  # the same for `megagrpo stop`: a Slurm job is not put back into the queue
STOP_FILE = "MEGAGRPO_STOP_FILE"  # path of the first file, for the ranks of a node


class StopRequest:
    """The stop request of one node."""

    def __init__(self, path: Path):
        self._made = path
        self._final = path.with_suffix(".stop_final")
        self._granted = path.with_suffix(".stop_granted")

    def withdraw(self) -> None:
        """Removes the files of an earlier launcher."""
        self._made.parent.mkdir(parents=True, exist_ok=True)
        for file in (self._made, self._final, self._granted):
            file.unlink(missing_ok=True)

    def make(self, final: bool = False) -> None:
        """Makes the request, or makes the one that exists final: the run is not to go on by
        itself."""
        (self._final if final else self._made).touch()

    def made(self) -> bool:
        """Returns whether the request exists. A file system that fails for a moment has none:
        whoever asks asks again."""
        return os.path.exists(self._made) or self.final()

    def final(self) -> bool:
        """Returns whether the run is not to go on by itself."""
        return os.path.exists(self._final)

    def grant(self, step: int, final: bool) -> None:
        """Records that the run is saved after `step` and its ranks exit. final: by any node's
        request."""
        self.make(final)
        write_whole(self._granted, f"saved after step {step}")

    def granted(self) -> tuple[str, int] | None:
        """Returns what `grant` recorded and the exit status; None if nothing was granted."""
        if not os.path.exists(self._granted):
            return None
        return self._granted.read_text(), ENDED if self.final() else STOPPED
