"""Writes and reads the metrics of a run: metrics.jsonl and TensorBoard.

Entries are numbered by finished steps, which equals the weight version. Entry 0 has the values
before the first update. Entry n has those of the step that produced weights n, and of the
evaluation of weights n.
"""

import json
import math

from megagrpo.config.schema import LogConfig
from megagrpo.monitor.step_lines import drop_later_steps, read_step_lines
from megagrpo.system.run_folder import RunFolder


def finite(values: dict[str, float]) -> dict[str, float | None]:
    """Returns the values as JSON has them: null for those that are not finite."""
    return {name: value if math.isfinite(value) else None for name, value in values.items()}


class StepLog:
    """Writes metrics.jsonl and tensorboard/. Only on the main rank.

    A run that resumes after `start_step` finished steps drops the entries of later steps.
    """

    def __init__(self, folder: RunFolder, config: LogConfig, start_step: int = 0) -> None:
        self._folder = folder
        folder.path.mkdir(parents=True, exist_ok=True)
        drop_later_steps(folder.metrics, start_step)
        folder.metrics.touch()
        self._board = None
        if config.tensorboard:
            # imports for seconds; only the main rank needs it
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(folder.tensorboard), purge_step=start_step + 1)

    def write(self, step: int, values: dict[str, float]) -> None:
        """Appends an entry; readers merge entries of one step. Non-finite values are written as
        null."""
        entry = {"step": step, **finite(values)}
        with self._folder.metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")
        if self._board is not None:
            for name, value in values.items():
                self._board.add_scalar(name, value, step)
            self._board.flush()

    def close(self) -> None:
        """Closes TensorBoard's file."""
        if self._board is not None:
            self._board.close()


def read_metrics(folder: RunFolder) -> list[dict]:
    """Returns the entries of metrics.jsonl by step, {"step": int, name: float | None}; lines of one
    step are merged.

    An incomplete last line (a crash) is ignored. Raises ValueError if the file is missing or
    another line is broken.
    """
    if not folder.metrics.is_file():
        raise ValueError(
            f"{folder.metrics}: no such file; a run folder has one after its first step"
        )
    entries: dict[int, dict] = {}
    for entry in read_step_lines(folder.metrics):
        entries.setdefault(entry["step"], {}).update(entry)
    return [entries[step] for step in sorted(entries)]
