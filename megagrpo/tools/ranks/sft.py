"""Supervised warm-up before a run: `megagrpo sft`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from megagrpo.config.schema import ExperimentConfig
from megagrpo.loop.ranks import guarded, start_progress
from megagrpo.system.environment import under_torchrun
from megagrpo.system.errors import translated
from megagrpo.tools.ranks.export import refuse_target
from megagrpo.tools.ranks.start import model_to_warm_up, train_ranks

if TYPE_CHECKING:
    import torch


def add_options(command: argparse.ArgumentParser) -> None:
    """Adds the options of the command line: none."""


def run(args: argparse.Namespace, config: ExperimentConfig) -> int:
    """Runs the command, or one rank that it started."""
    refuse_sft(config, args.config)
    if not under_torchrun():
        return train_ranks(config, "sft", [])
    with start_progress(f"{config.name} sft") as progress:

        def body(device: torch.device) -> None:
            # imports Megatron, which the host must be prepared for
            from megagrpo.tools.ranks.warm_up import warm_up

            warm_up(config, device, progress)

        return guarded(config, "sft", body, trains=True)


def refuse_sft(config: ExperimentConfig, file: str) -> None:
    """Raises ValueError for what the warm-up lacks, and for a folder that it would remove. file: of
    the experiment."""
    if config.sft is None or config.sft_data is None:
        raise ValueError(f"{file} has no sft section, so there is no warm-up to run")
    with translated("model.path", ValueError):
        refuse_target(config, Path(config.model.path), "model.path")
    with translated("sft.model", ValueError):
        model_to_warm_up(config)
    for path in config.sft_data.paths:
        if not Path(path).exists():
            raise ValueError(f"sft.path: {path} does not exist")
