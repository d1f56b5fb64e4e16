"""Writes a checkpoint as a Hugging Face model folder: `megagrpo export`."""

from pathlib import Path

import torch

from megagrpo.checkpoint_folder import latest
from megagrpo.config.schema import ExperimentConfig
from megagrpo.run import load_checkpoint, make_actor
from megagrpo.run_folder import RunFolder
from megagrpo.weights.actor_weights import export_hf, load_initial_weights


def export(config: ExperimentConfig, source: Path | None, output: str, device: torch.device) -> None:
    """Collective. Writes the checkpoint `source`, by default the latest of the run, into the folder `output`.

    ValueError when there is no checkpoint.
    """
    checkpoints = RunFolder(Path(config.output_dir)).checkpoints
    found = source or latest(checkpoints)
    if found is None:
        raise ValueError(f"{checkpoints} holds no finished checkpoint; name one with --checkpoint")
    actor = make_actor(config, 1, device)
    weights = load_initial_weights(actor, config.model.path, overwritten=True)
    load_checkpoint(config, found, actor)
    export_hf(output, weights, actor.mesh, like=config.model.path, dtype=config.actor.dtype)
