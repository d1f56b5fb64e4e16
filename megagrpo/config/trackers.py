"""Where metrics go besides the run folder: `log.wandb` and `log.trackers`."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from pydantic import Field

from megagrpo.config.fields import Section, Text
from megagrpo.config.objective.own import OwnArguments
from megagrpo.system.user_function import check_arguments, load_function

# `name` of log.trackers -> class; the package that it uses has the same name
TRACKERS = {
    name: f"megagrpo.monitor.trackers:{name.capitalize()}Tracker"
    for name in ("mlflow", "swanlab", "trackio")
}


@dataclass(frozen=True)
class TrackedRun:
    """Describes a run to a tracker."""

    name: str
    folder: Path  # the run folder
    id: str  # of this run, in letters and digits
    continued: bool  # an earlier start of this run has begun it
    config: dict[str, object]  # the resolved experiment


class Tracker(Protocol):
    """A place that metrics are sent to. A class of yours is made with `args` of log.trackers."""

    def start(self, run: TrackedRun) -> str:
        """Begins the run, or continues it. Returns the id that the next start gets as `run.id`."""

    def log(self, step: int, values: dict[str, float]) -> None:
        """Sends one entry. A resumed run repeats the steps after its checkpoint."""

    def finish(self, failed: bool) -> None:
        """Sends what is left. failed: the rank ends with an error."""


class WandbConfig(Section):
    """Metrics on Weights & Biases (extra `wandb`), under the experiment's name. wandb reads
    everything else from environment variables: WANDB_API_KEY (or `wandb login`), WANDB_MODE,
    WANDB_ENTITY, WANDB_RUN_GROUP, WANDB_TAGS."""

    project: Text
    """Project for the run."""


class TrackerConfig(Section):
    """Another tracker for metrics, which reads its address and key from its own environment
    variables."""

    name: str
    """`mlflow`, `swanlab`, `trackio`, or [your class](../extend.md#a-tracker), `module:Class`."""
    args: OwnArguments = Field(default={})
    """Keyword arguments for the class. The first three take `project`."""

    def load(self) -> Callable[[], Tracker]:
        """Returns what makes the tracker. Raises ValueError if there is no such class, or if it
        does not take the arguments."""
        kind = load_function(self.name, TRACKERS, "log.trackers.name")
        check_arguments("log.trackers.args do not fit", self.name, kind, [], self.args)
        return partial(kind, **self.args)
