"""Sends metrics to experiment trackers: `log.wandb` and `log.trackers`. Only on the main rank.

Each reads addresses and keys from environment variables of its own. The id of a tracker's run is
stored in the run folder, so a resumed run continues it.
"""

import re
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import ClassVar, Self

from megagrpo.config.schema import ExperimentConfig
from megagrpo.config.trackers import TrackedRun, Tracker
from megagrpo.system import environment
from megagrpo.system.run_folder import RunFolder, write_whole

_TIMEOUT_S = 60.0  # of Weights & Biases at start and end
_END_S = 120.0  # in which a tracker sends what is left
_WANDB = "wandb"
_LAST = "the end"  # the name of a tracker's last call


@dataclass
class TrackerLog:
    """Sends the resolved experiment and every entry of metrics.jsonl to one tracker.

    A failure never ends the run: the console reports it once, and sending stops. One thread makes,
    starts, feeds and ends the tracker: the other ranks would wait for a service that does not
    answer, SwanLab takes Ctrl-C for itself in the main thread, and Trackio finds its run only in the
    context that began it.
    """

    key: str  # under `log`, for messages
    make: Callable[[], Tracker]
    run: TrackedRun
    id_file: Path  # keeps the id for the next start
    note: Callable[[str], None]

    def __post_init__(self) -> None:
        self._failed = False
        self._calls: SimpleQueue[tuple[str, Callable[[Tracker], None]]] = SimpleQueue()
        self._thread = Thread(target=self._send, daemon=True)

    def write(self, step: int, values: dict[str, float]) -> None:
        """Sends one entry soon, non-finite values included."""
        entry = dict(values)
        self._calls.put((f"sending step {step}", lambda tracker: tracker.log(step, entry)))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Waits until everything is sent; an error marks the run as failed."""
        self._calls.put((_LAST, lambda tracker: tracker.finish(kind is not None)))
        self._thread.join(_END_S)
        if self._thread.is_alive():
            self.note(
                f"log.{self.key}: it does not answer; the run ends, and metrics.jsonl has all metrics"
            )

    def _send(self) -> None:
        with self._never_fatal("the start"):
            tracker = self.make()
            write_whole(self.id_file, tracker.start(self.run))
        action = ""
        while action != _LAST:
            action, call = self._calls.get()
            if not self._failed:
                with self._never_fatal(action):
                    call(tracker)

    @contextmanager
    def _never_fatal(self, action: str) -> Iterator[None]:
        try:
            yield
        except Exception as exc:  # a remote service must not end the training
            self._failed = True
            problem = f"{action} failed; no more metrics are sent; metrics.jsonl has all of them"
            self.note(f"log.{self.key}: {problem}: {type(exc).__name__}: {exc}")


def tracker_logs(
    config: ExperimentConfig, folder: RunFolder, start_step: int, note: Callable[[str], None]
) -> Iterator[TrackerLog]:
    """Yields the experiment's trackers, each of which begins or continues its run when entered."""
    makers = {f"trackers {one.name}": one.load() for one in config.log.trackers}
    if config.log.wandb is not None:
        makers[_WANDB] = partial(WandbTracker, config.log.wandb.project)
    for key, make in makers.items():
        # of Weights & Biases as earlier versions have it
        word = re.sub(r"[\W_]", "_", key.removeprefix("trackers "))
        file = folder.path / f"{word}_id"
        continued = start_step > 0 and file.is_file()
        run_id = file.read_text(encoding="utf-8") if continued else secrets.token_hex(4)
        run = TrackedRun(
            config.name, folder.path, run_id, continued, config.model_dump(mode="json")
        )
        yield TrackerLog(key, make, run, file, note)


class _ModuleTracker:
    """A tracker whose package is used as a module, which imports for seconds: only on the main
    rank."""

    package: ClassVar[str]

    def __init__(self, project: str):
        self._module = import_module(self.package)
        self._project = project

    def log(self, step: int, values: dict[str, float]) -> None:
        """Sends one entry."""
        self._module.log(values, step=step)


class WandbTracker(_ModuleTracker):
    """Weights & Biases, or its files for `wandb sync`.

    wandb's own step counter is not used: it rejects the steps that a resumed run repeats.
    """

    package = _WANDB

    def start(self, run: TrackedRun) -> str:
        """Begins or continues it."""
        self._module.init(
            project=self._project,
            name=run.name,
            id=run.id,
            # offline, `wandb sync` joins runs with one id
            resume="allow" if environment.get("WANDB_MODE", "online") == "online" else None,
            dir=str(run.folder),
            config=run.config,
            # no output of ranks, which is in logs/, and only the metrics of metrics.jsonl
            settings=self._module.Settings(
                silent=True,
                console="off",
                x_disable_stats=True,
                disable_git=True,
                init_timeout=_TIMEOUT_S,
                login_timeout=_TIMEOUT_S,
                finish_timeout=_TIMEOUT_S,
            ),
        ).define_metric("*", step_metric="step")
        return run.id

    def log(self, step: int, values: dict[str, float]) -> None:
        """Sends one entry."""
        self._module.log({"step": step, **values})

    def finish(self, failed: bool) -> None:
        """Waits up to a minute until everything is sent."""
        self._module.finish(exit_code=int(failed))


class MlflowTracker:
    """MLflow, at MLFLOW_TRACKING_URI."""

    def __init__(self, project: str):
        from mlflow import MlflowClient

        self._client = MlflowClient()
        self._project = project
        self._id = ""

    def start(self, run: TrackedRun) -> str:
        """Begins or continues it; the resolved experiment is its artifact `experiment.json`."""
        client = self._client
        if run.continued:
            client.update_run(run.id, status="RUNNING")
            self._id = run.id
            return run.id
        found = client.get_experiment_by_name(self._project)
        experiment = found.experiment_id if found else client.create_experiment(self._project)
        self._id = client.create_run(experiment, run_name=run.name).info.run_id
        client.log_dict(self._id, run.config, "experiment.json")
        return self._id

    def log(self, step: int, values: dict[str, float]) -> None:
        """Sends one entry in one request."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(name, value, now, step) for name, value in values.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def finish(self, failed: bool) -> None:
        """Says how it ended."""
        self._client.set_terminated(self._id, "FAILED" if failed else "FINISHED")


class SwanlabTracker(_ModuleTracker):
    """SwanLab; SWANLAB_MODE=offline keeps its files in the run folder."""

    package = "swanlab"

    def start(self, run: TrackedRun) -> str:
        """Begins or continues it."""
        self._module.init(
            project=self._project,
            name=run.name,
            id=run.id,
            resume="allow",
            log_dir=str(run.folder / "swanlab"),
            config=run.config,
        )
        return run.id

    def finish(self, failed: bool) -> None:
        """Waits until everything is sent."""
        self._module.finish("crashed" if failed else "success")


class TrackioTracker(_ModuleTracker):
    """Trackio, which stores on this machine unless TRACKIO_SPACE_ID or TRACKIO_SERVER_URL is set."""

    package = "trackio"

    def start(self, run: TrackedRun) -> str:
        """Begins or continues it; Trackio finds a run by its name."""
        self._module.init(
            project=self._project,
            name=f"{run.name}-{run.id}",
            resume="allow",
            config=run.config,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        return run.id

    def finish(self, failed: bool) -> None:
        """Waits until everything is sent; Trackio knows no failed runs."""
        self._module.finish()
