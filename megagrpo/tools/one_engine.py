"""The experiment that tools run on this machine, beside the run that it describes."""

from megagrpo.config.schema import OF_TRAINING, ExperimentConfig
from megagrpo.system.run_folder import RunFolder


def with_one_engine(
    config: ExperimentConfig, folder: RunFolder, own_weights: bool
) -> ExperimentConfig:
    """Returns the experiment with one separate engine and another run folder. own_weights: the engine
    computes with what is in `model.path`. Judges keep their engines."""
    one: dict[str, object] = {"num_engines": 1, "min_healthy_engines": 1, "colocate": False}
    if own_weights:
        one |= {"load_format": "model", "quantization": None}
        if config.rollout.quantization:  # DeepEP takes no experts in bfloat16
            one["sglang"] = config.rollout.sglang | {"moe_a2a_backend": "none"}
    return config.model_copy(
        update={
            "output_dir": str(folder.path),
            "rollout": config.rollout.model_copy(update=one),
            "weights": config.weights.suited(colocate=False),
            # the other folder is the run's
            "checkpoint": config.checkpoint.model_copy(update={"dir": None}),
            "teachers": {},
            "algorithm": config.algorithm.model_copy(update={"distillation": None, "streams": []}),
            "data": config.data.model_copy(update=dict.fromkeys(OF_TRAINING)),
        }
    )
