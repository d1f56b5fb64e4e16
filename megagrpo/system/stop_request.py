"""The stop request of a node: save at the next safe point and exit; the next start resumes.

It is a file on every trainer node, not a signal to the ranks: a starting rank has no handler yet,
and torchrun ends its ranks at a signal. The node's launcher creates the file at USR1 (or TERM,
`megagrpo train`); between two steps the ranks agree whether any node has one, save, and write the
last step into it; the launcher then exits with STOPPED.
"""

from pathlib import Path

STOPPED = 85  # exit status of a launcher: saved before the last step; the same command resumes
STOP_FILE = "MEGAGRPO_STOP_FILE"  # path of the file, for the ranks of a node


class StopRequest:
    """The stop file of one node."""

    def __init__(self, path: Path):
        self._path = path

    def withdraw(self) -> None:
        """Removes the file of an earlier launcher."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.unlink(missing_ok=True)

    def make(self) -> None:
        """Creates the file."""
        self._path.touch()

    def made(self) -> bool:
        """Returns whether the file exists."""
        return self._path.exists()

    def grant(self, step: int) -> None:
        """Records that the run is saved after `step` and its ranks exit."""
        self._path.write_text(f"saved after step {step}")

    def granted(self) -> str:
        """Returns what `grant` wrote, or ""."""
        return self._path.read_text() if self.made() else ""
