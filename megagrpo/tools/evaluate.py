"""`megagrpo evaluate`: one evaluation of a run's newest checkpoint, or of the model, without training."""

import argparse

from megagrpo.checkpoint.folder import latest
from megagrpo.cluster import machine
from megagrpo.config.schema import ExperimentConfig


def evaluation_alone(config: ExperimentConfig) -> ExperimentConfig:
    """Returns a run of no steps from the newest checkpoint, else from what a run would start from.

    Its folder is `evaluations/step_N` (or `evaluations/start`) in the run folder, whose record and
    checkpoints it leaves as they are. Raises ValueError without a section `eval`.
    """
    if config.eval is None:
        raise ValueError("there is no section eval; write eval: {data: {path: FILE}}")
    folder = config.run_folder
    newest = latest(folder.checkpoints)
    name = "start" if newest is None else newest.name
    load = config.checkpoint.load if newest is None else str(newest)
    saving = {"dir": None, "load": load, "resume": "auto"}
    return config.model_copy(
        update={
            "output_dir": str(folder.path / "evaluations" / name),
            "train": config.train.model_copy(update={"num_steps": 0, "num_epochs": None}),
            "checkpoint": config.checkpoint.model_copy(update=saving),
        }
    )


def add_options(command: argparse.ArgumentParser) -> None:
    """Adds the options of the command line: none."""


def run(_: argparse.Namespace, config: ExperimentConfig) -> int:
    """Runs the command."""
    return machine.run(evaluation_alone(config))
