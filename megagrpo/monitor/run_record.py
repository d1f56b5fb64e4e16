"""The record of a run: the main rank's metrics, each replica's groups and trained samples."""

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, suppress
from types import TracebackType
from typing import TYPE_CHECKING, Self

from torch import Tensor

from megagrpo.config.schema import ExperimentConfig
from megagrpo.mesh import Mesh
from megagrpo.monitor.alarms import HealthWatch
from megagrpo.monitor.console import StepConsole
from megagrpo.monitor.rollout_log import Decode, RolloutLog
from megagrpo.monitor.step_lines import drop_later_steps, read_step_lines
from megagrpo.monitor.step_log import StepLog
from megagrpo.monitor.trackers import tracker_logs
from megagrpo.monitor.trained import TrainedLog
from megagrpo.system.run_folder import RunFolder
from megagrpo.types import Batch, RolloutGroup

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class RunRecord:
    """Writes this rank's part of the run's record. A context manager, at whose end everything is on
    disk.

    console: on the main rank.
    """

    def __init__(
        self,
        config: ExperimentConfig,
        mesh: Mesh,
        start_step: int,
        console: StepConsole | None = None,
    ):
        self.folder = config.run_folder
        self._config = config
        self._mesh = mesh
        self.start_step = start_step
        self._console = console
        self._stack = ExitStack()
        self._rollouts: RolloutLog | None = None  # on the replica's rank that samples
        self._trained: TrainedLog | None = None  # on the replica's rank that has the tokens' values
        self._outputs: list[Callable[[int, dict[str, float]], None]] = []  # of metrics

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self._stack.__exit__(kind, error, trace)
        except OSError as exc:
            if error is None:
                raise
            print(f"the run's record: {exc}", file=sys.stderr)  # the reason of the end is another

    def open(
        self, tokenizer: "PreTrainedTokenizerBase", decode: Decode, has_token_values: bool
    ) -> None:
        """Collective. Cuts the record of earlier starts, and opens this rank's logs. decode: the
        one for graded texts. has_token_values: whether updates leave the values of the replica's
        tokens on this rank."""
        config = self._config
        mesh = self._mesh
        start = self.start_step
        mesh.from_main(lambda: cut_record(self.folder, start), "cut the record")

        if has_token_values:
            trained = TrainedLog(
                self.folder,
                mesh.dp_rank,
                config.log.tokens,
                lambda ids: [str(tokenizer.decode([token])) for token in ids],
            )
            self._trained = self._stack.enter_context(closing(trained))
        if mesh.is_leader:
            rollouts = RolloutLog(self.folder, mesh.dp_rank, decode)
            self._rollouts = self._stack.enter_context(closing(rollouts))
        console = self._console
        if console is not None:
            steps = self._stack.enter_context(closing(StepLog(self.folder, config.log, start)))
            health = HealthWatch(config.log.alarms, console.note)
            self._outputs = [steps.write, console.update, health.see]
            for tracker in tracker_logs(config, self.folder, start, console.note):
                self._outputs.append(self._stack.enter_context(tracker).write)

    def log(
        self, step: int, values: dict[str, float], groups: Sequence[RolloutGroup] | None
    ) -> None:
        """Adds one entry."""
        if self._rollouts is not None and groups is not None:
            self._rollouts.write(step, groups)
        for write in self._outputs:
            write(step, values)

    def log_trained(self, step: int, batch: Batch, logprobs: Tensor) -> None:
        """Adds the batch of an update with the trainer's log-probabilities [T]."""
        if self._trained is not None:
            self._trained.write(step, batch, logprobs)

    def note(self, text: str) -> None:
        """Prints a line on the main rank's console."""
        if self._console is not None:
            self._console.note(text)

    def flush(self) -> None:
        """Waits until the groups are on disk: a later start never samples groups before a
        checkpoint again."""
        if self._rollouts is not None:
            self._rollouts.flush()


def cut_record(folder: RunFolder, num_steps: int) -> None:
    """Keeps the samples of the first `num_steps` steps. With 0, moves the record aside, because it
    comes from a start that ended before its first checkpoint."""
    files = folder.rollout_files()
    trained = folder.trained_files()
    lines = read_step_lines(folder.metrics) if folder.metrics.exists() else ()
    made = bool(files or trained)
    with suppress(ValueError):  # of a broken line
        made |= any(line["step"] for line in lines)
    if num_steps == 0 and made:
        aside = folder.path / time.strftime("unsaved_%Y%m%d_%H%M%S")
        aside.mkdir()
        # whichever of the last three is left when this is killed is moved by the next start
        step_files = (folder.metrics, folder.trained, folder.rollouts)
        for path in (folder.starts, folder.tensorboard, *step_files):
            if path.exists():
                path.rename(aside / path.name)
        print(f"steps were made and not saved; their record is now in {aside}", flush=True)
        return
    for path in trained.values():
        drop_later_steps(path, num_steps)
    for path in (path for step in files if step > num_steps for path in files[step].values()):
        path.unlink()
