"""The experiment that tools run on this machine, beside the run that it describes."""

from megagrpo.config.schema import OF_TRAINING, ExperimentConfig
from megagrpo.system.run_folder import RunFolder


def with_one_engine(
    config: ExperimentConfig, folder: RunFolder, changes: dict[str, object]
) -> ExperimentConfig:
    """Returns the experiment with one separate engine and another run folder. changes: of section
    `rollout`. Judges keep their engines."""
    one = {"num_engines": 1, "min_healthy_engines": 1, "colocate": False}
    return config.model_copy(
        update={
            "output_dir": str(folder.path),
            "rollout": config.rollout.model_copy(update=one | changes),
            "weights": config.weights.suited(colocate=False),
            # the other folder is the run's
            "checkpoint": config.checkpoint.model_copy(update={"dir": None}),
            "teachers": {},
            "algorithm": config.algorithm.model_copy(update={"distillation": None, "streams": []}),
            "data": config.data.model_copy(update=dict.fromkeys(OF_TRAINING)),
        }
    )
