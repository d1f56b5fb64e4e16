"""The stop request of a node: save at the next safe point and exit; the next start resumes.

It is a file on every trainer node, not a signal to the ranks: a starting rank has no handler yet,
and torchrun ends its ranks at a signal. The node's launcher creates the file at USR1 or INT (or
TERM, `megagrpo train`), `megagrpo stop` that of the first node; between two steps the ranks agree
whether any node has one, save, and write the last step into each node's; the launchers then exit
with STOPPED, or for `megagrpo stop` with ENDED.
"""

from pathlib import Path

STOPPED = 85  # exit status of a launcher: saved before the last step; the same command resumes
ENDED = 86  # the same for `megagrpo stop`: a Slurm job is not put back into the queue
STOP_FILE = "MEGAGRPO_STOP_FILE"  # path of the file, for the ranks of a node
_FINAL = "final: "


class StopRequest:
    """The stop file of one node."""

    def __init__(self, path: Path):
        self._path = path

    def withdraw(self) -> None:
        """Removes the file of an earlier launcher."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.unlink(missing_ok=True)

    def make(self, final: bool = False) -> None:
        """Creates the file. final: the run is not to go on by itself."""
        self._path.write_text(_FINAL if final else "")

    def made(self) -> bool:
        """Returns whether the file exists."""
        return self._path.exists()

    def final(self) -> bool:
        """Returns whether the file exists and the run is not to go on by itself."""
        return self.made() and self._path.read_text().startswith(_FINAL)

    def grant(self, step: int, final: bool) -> None:
        """Records that the run is saved after `step` and its ranks exit."""
        kind = _FINAL if final else ""
        self._path.write_text(f"{kind}saved after step {step}")

    def granted(self) -> tuple[str, int] | None:
        """Returns what `grant` recorded and the exit status; None if nothing was granted."""
        said = self._path.read_text() if self.made() else ""
        step = said.removeprefix(_FINAL)
        if not step:
            return None
        return step, ENDED if said != step else STOPPED
