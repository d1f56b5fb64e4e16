"""Sends a run to Weights & Biases, or stores it for `wandb sync`: `log.wandb`. Only on the main
rank.

wandb reads the API key from its environment variable or netrc. The id of the W&B run is stored in
the run folder, so a resumed run continues it.
"""

import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Self

from megagrpo.config.schema import ExperimentConfig
from megagrpo.system import environment
from megagrpo.system.run_folder import RunFolder, write_whole

if TYPE_CHECKING:
    from wandb import Run

_TIMEOUT_S = 60.0  # of the service at start and end


class WandbLog:
    """Sends the resolved experiment and every entry of metrics.jsonl, with `step` as the axis.

    wandb's own step counter is not used: it rejects the steps that a resumed run repeats. A failure
    never ends the run: the console reports it once, and sending stops.
    """

    def __init__(
        self,
        config: ExperimentConfig,
        folder: RunFolder,
        start_step: int,
        note: Callable[[str], None],
    ) -> None:
        options = config.log.wandb
        self._note = note
        self._run: Run | None = None
        if options is None:
            return
        with self._never_fatal("the start"):
            import wandb  # an extra; imports for seconds, only on the main rank

            # else the run in the folder continues
            if start_step == 0 or not folder.wandb_id.is_file():
                write_whole(folder.wandb_id, secrets.token_hex(4))
            timeouts = {f"{name}_timeout": _TIMEOUT_S for name in ("init", "login", "finish")}
            self._run = wandb.init(
                project=options.project,
                name=config.name,
                id=folder.wandb_id.read_text(encoding="utf-8"),
                # offline, `wandb sync` joins runs with one id
                resume="allow" if environment.get("WANDB_MODE", "online") == "online" else None,
                dir=str(folder.path),
                config=config.model_dump(mode="json"),
                # no output of ranks, which is in logs/, and only the metrics of metrics.jsonl
                settings=wandb.Settings(
                    silent=True, console="off", x_disable_stats=True, disable_git=True, **timeouts
                ),
            )
            self._run.define_metric("*", step_metric="step")

    def write(self, step: int, values: dict[str, float]) -> None:
        """Sends one entry now, non-finite values included."""
        if self._run is not None:
            with self._never_fatal(f"sending step {step}"):
                self._run.log({"step": step, **values})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Waits up to a minute until everything is sent; an error marks the run as failed."""
        if self._run is not None:
            with self._never_fatal("the end"):
                self._run.finish(exit_code=int(kind is not None))

    @contextmanager
    def _never_fatal(self, action: str) -> Iterator[None]:
        try:
            yield
        except Exception as exc:  # a remote service must not end the training
            self._run = None
            problem = f"{action} failed; no more metrics are sent; metrics.jsonl has all of them"
            self._note(f"log.wandb: {problem}: {type(exc).__name__}: {exc}")
