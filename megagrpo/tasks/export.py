"""Writes a checkpoint as a Hugging Face model folder, or its adapters as a PEFT folder: `megagrpo
export`."""

from pathlib import Path

import torch

from megagrpo.actor.start import make_actor
from megagrpo.check.problems import model_to_train
from megagrpo.checkpoint.resume import latest_checkpoint, load_checkpoint
from megagrpo.config.schema import ExperimentConfig
from megagrpo.weights.actor_weights import export_hf, export_peft, load_initial_weights


def export(
    config: ExperimentConfig,
    source: Path | None,
    output: str,
    device: torch.device,
    only_adapters: bool = False,
) -> None:
    """Collective. Writes checkpoint `source`, by default the latest of the run, into folder
    `output`.

    The whole model with merged adapters, or with `only_adapters` a PEFT folder.
    """
    lora = config.actor.lora
    actor = make_actor(config, model_to_train(config).arch, device)
    checkpoint = source or latest_checkpoint(config, actor.mesh)
    assert checkpoint is not None, "refuse_export refuses to begin"
    weights = load_initial_weights(actor, config.model.path, overwritten=lora is None)
    load_checkpoint(config, checkpoint, actor, with_optimizer=False)
    base = config.model.path
    dtype = config.actor.dtype
    if only_adapters and lora is not None:
        adapters = actor.trained_weights(weights)
        export_peft(Path(output), adapters, actor.mesh, lora, base, dtype)
    else:
        export_hf(output, weights, actor.mesh, base, dtype, config.model.tokenizer)
