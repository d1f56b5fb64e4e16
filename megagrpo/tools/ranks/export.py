"""Writes a checkpoint as a Hugging Face model folder, or its adapters as a PEFT folder: `megagrpo
export`."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from megagrpo.check.problems import model_to_train
from megagrpo.check.rules.inputs import read_files
from megagrpo.checkpoint.folder import latest
from megagrpo.config.schema import ExperimentConfig
from megagrpo.loop.ranks import guarded
from megagrpo.models.folder import ADAPTERS
from megagrpo.system.environment import under_torchrun
from megagrpo.tools.ranks.start import latest_checkpoint, require_finished, train_ranks

if TYPE_CHECKING:
    import torch


def add_options(command: argparse.ArgumentParser) -> None:
    """Adds the options of the command line."""
    command.add_argument("output", help="folder to create")
    command.add_argument("--lora", action="store_true", help="only the adapters, in PEFT's format")
    command.add_argument("--checkpoint", help="checkpoint folder; default: the latest checkpoint")


def run(args: argparse.Namespace, config: ExperimentConfig) -> int:
    """Runs the command, or one rank that it started."""
    refuse_export(config, args.checkpoint, args.lora, Path(args.output))
    if under_torchrun():
        return guarded(config, "export", partial(export, config, args))
    words = [args.output, *["--lora"] * args.lora]
    if args.checkpoint is not None:
        words += ["--checkpoint", args.checkpoint]
    return train_ranks(config, "export", words)


def refuse_export(
    config: ExperimentConfig, source: str | None, only_adapters: bool, target: Path
) -> None:
    """Raises ValueError for what an export lacks, and for a folder that it would remove. source: the
    checkpoint, if one is named."""
    refuse_target(config, target)
    if only_adapters and config.actor.lora is None:
        raise ValueError(
            "export --lora writes adapters, but the experiment has no actor.lora: "
            "all weights are trained"
        )
    root = config.run_folder.checkpoints
    if source is None and latest(root) is None:
        raise ValueError(f"{root} holds no finished checkpoint; name one with --checkpoint")
    if source is not None:
        require_finished(Path(source))
    tokenizer = model_to_train(config).tokenizer_folder
    if not tokenizer.is_dir():
        raise ValueError(f"model.tokenizer: {tokenizer} does not exist; the export would have none")


def refuse_target(config: ExperimentConfig, target: Path, key: str = "") -> None:
    """Raises ValueError for a folder that is not to be replaced by another, or cannot be, as the
    mount point of a disk. key: of the only input of the experiment that may lie there."""
    described = any((target / name).exists() for name in ("config.json", ADAPTERS))
    others = target.is_file() or (not described and any(target.glob("*")))
    real = target.resolve()
    inputs = [Path(path).resolve() for name, path in read_files(config) if name != key]
    if others or real.is_mount() or any(path.is_relative_to(real) for path in inputs):
        raise ValueError(
            f"{target} would be replaced, and what is in it removed: name a new folder, or that of "
            "an older export"
        )


def export(config: ExperimentConfig, args: argparse.Namespace, device: torch.device) -> None:
    """Collective. Writes the checkpoint, by default the latest of the run, into the output folder.

    The whole model with merged adapters, or a PEFT folder of these alone.
    """
    # these import Megatron, which the host must be prepared for
    from megagrpo.actor.start import make_actor
    from megagrpo.checkpoint.resume import load_checkpoint, run_identity
    from megagrpo.tools.ranks.peft_folder import export_peft
    from megagrpo.weights.actor_weights import load_initial_weights
    from megagrpo.weights.hf_export import export_hf

    actor = make_actor(config, model_to_train(config).arch, device)
    checkpoint = latest_checkpoint(config, actor.mesh)
    if args.checkpoint is not None:
        checkpoint = Path(args.checkpoint)
    assert checkpoint is not None, "refuse_export refuses to begin"
    weights = load_initial_weights(actor, config.model.path, overwritten=config.actor.lora is None)
    load_checkpoint(checkpoint, run_identity(config, actor), actor, with_optimizer=False)
    if args.lora:
        adapters = actor.trained_weights(weights)
        export_peft(Path(args.output), adapters, actor.mesh, config)
    else:
        export_hf(args.output, weights, actor.mesh, config, config.model.path)
