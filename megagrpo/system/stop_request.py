"""Carries the wish to stop: save at the next safe point, leave, and be continued by the next start.

It is a file on every trainer node, not a signal to the ranks: a rank that is still starting has no handler, and
torchrun ends its ranks at a signal. The node's launcher makes the file when it gets USR1 (or TERM, `megagrpo train`);
between two steps the ranks agree whether any node has one, save, and write into it how far they came; the launcher
then exits with STOPPED.
"""

from pathlib import Path

STOPPED = 85  # exit status of a launcher: saved before the last step, run it again to go on
STOP_FILE = "MEGAGRPO_STOP_FILE"  # tells the ranks of a node where the file would be


class StopRequest:
    """Asks the ranks of one node, by a file, to stop."""

    def __init__(self, path: Path):
        self._path = path

    def withdraw(self) -> None:
        """Removes what an earlier launcher of this run folder left."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.unlink(missing_ok=True)

    def make(self) -> None:
        """Asks."""
        self._path.touch()

    def made(self) -> bool:
        """Whether somebody asked."""
        return self._path.exists()

    def grant(self, step: int) -> None:
        """Notes that the run is saved after `step` and its ranks are leaving."""
        self._path.write_text(f"saved after step {step}")

    def granted(self) -> str:
        """Returns what `grant` wrote, or ""."""
        return self._path.read_text() if self.made() else ""
