"""Shows a run on Weights & Biases, or keeps it for `wandb sync`: `log.wandb`. On the main rank alone.

The API key is found where wandb itself looks: its environment variable or netrc. The id of the W&B run is kept in the
run folder, so that a resumed run goes on in the same one.
"""

import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

from megagrpo.config.schema import ExperimentConfig
from megagrpo.system.run_folder import RunFolder, write_whole

_PATIENCE_S = 60.0  # for the service to answer at the start, and to take what is left at the end


class WandbLog:
    """Sends every entry of metrics.jsonl under the same names, with `step` as the axis, and the resolved experiment.

    wandb's own step counter is not used: it refuses the steps that a resumed run makes again. Nothing that goes wrong
    here ends the run: the console says it once, and nothing more is sent.
    """

    def __init__(
        self, config: ExperimentConfig, folder: RunFolder, start_step: int, note: Callable[[str], None]
    ) -> None:
        options = config.log.wandb
        self._note = note
        self._run: Any = None
        if options is None or options.mode == "disabled":
            return
        with self._never_fatal("the start"):
            import wandb  # an extra, and seconds of import that only the main rank pays

            self._run = wandb.init(
                project=options.project,
                entity=options.entity,
                group=options.group,
                name=options.name or config.name,
                tags=options.tags,
                id=_run_id(folder, start_step),
                resume="allow" if options.mode == "online" else None,  # offline, `wandb sync` joins what has one id
                mode=options.mode,
                dir=str(folder.path),
                config=config.model_dump(mode="json"),
                settings=wandb.Settings(
                    silent=True,
                    console="off",  # what a rank prints is in logs/
                    x_disable_stats=True,  # the same metrics as metrics.jsonl, and no process that samples others
                    disable_git=True,
                    init_timeout=_PATIENCE_S,
                    login_timeout=_PATIENCE_S,
                    finish_timeout=_PATIENCE_S,
                ),
            )
            self._run.define_metric("*", step_metric="step")

    def write(self, step: int, values: dict[str, float]) -> None:
        """Sends one entry, at once; what is not finite goes as it is."""
        if self._run is not None:
            with self._never_fatal(f"sending step {step}"):
                self._run.log({"step": step, **values})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Waits until all is sent, or for a minute; a run that ends by an error is shown as failed."""
        if self._run is not None:
            with self._never_fatal("the end"):
                self._run.finish(exit_code=int(kind is not None))

    @contextmanager
    def _never_fatal(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as exc:  # whatever a service elsewhere and its client raise: training is worth more
            self._run = None
            self._note(
                f"log.wandb: {what} failed, and nothing more is sent; metrics.jsonl has everything: "
                f"{type(exc).__name__}: {exc}"
            )


def _run_id(folder: RunFolder, start_step: int) -> str:
    """Returns the id of the W&B run that this run folder continues; a new one where it begins anew."""
    path = folder.wandb_id
    if start_step == 0 or not path.is_file():
        write_whole(path, secrets.token_hex(4))
    return path.read_text(encoding="utf-8")
