"""Runs `megagrpo bisect`: an engine and the trainers' ranks on this machine, the comparison, the report."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megagrpo.cluster.machine import ranks_beside_service
from megagrpo.config.schema import ExperimentConfig, WeightsConfig
from megagrpo.system.run_folder import RunFolder, write_whole
from megagrpo.tasks.ranks import guarded

if TYPE_CHECKING:  # the command line imports this file
    import torch

_EAGER = ("cuda_graph_backend_decode", "cuda_graph_backend_prefill")  # hooks see nothing of what a graph replays


@dataclass(frozen=True)
class BisectOptions:
    """Holds what the command line says beside the experiment."""

    checkpoint: str | None = None  # folder; None: the weights in model.path
    num_prompts: int = 4
    max_new_tokens: int = 32
    own_weights: bool = False  # the engine keeps what it has loaded from model.path; else the trainers publish theirs
    bound: float | None = None  # relative, before the first layer


def bisect(config: ExperimentConfig, options: BisectOptions) -> int:
    """Writes report.md, report.json and report.png into `<output_dir>/bisect`; returns the exit status.

    That is 0 when nothing differs, 1 when something does, 2 when they could not be compared. Raises ValueError for what
    cannot be run on this machine.
    """
    if options.num_prompts < 1 or options.max_new_tokens < 1:
        raise ValueError("--prompts and --max-new-tokens are at least 1")
    if options.bound is not None and not options.bound > 0:
        raise ValueError(f"--bound {options.bound}: a relative error above 0, such as 1e-5")
    if options.checkpoint is not None:
        _refuse_what_is_no_checkpoint(Path(options.checkpoint))
    folder = RunFolder(Path(config.output_dir)).bisect
    folder.bisect_report.unlink(missing_ok=True)
    write_whole(folder.bisect_options, json.dumps(asdict(options)))
    if ranks_beside_service(experiment_of(config, options, folder.path)):
        return 2
    found = json.loads(folder.bisect_report.read_text())
    print((folder.path / "report.md").read_text(), end="")
    if found["place"] is not None:
        print(f"megagrpo bisect: {found['place']} differs; every figure is in {folder.bisect_report}", file=sys.stderr)
    return 0 if found["place"] is None else 1


def _refuse_what_is_no_checkpoint(folder: Path) -> None:
    """Raises ValueError before an engine starts, which takes minutes."""
    if (folder / "config.json").is_file():
        raise ValueError(f"--checkpoint {folder} is a Hugging Face folder: give it as --set model.path={folder}")
    if not (folder / "manifest.json").is_file():
        raise ValueError(
            f"--checkpoint {folder} is no finished checkpoint: it has no manifest.json; those of a run are "
            "<output_dir>/checkpoints/step_000010 and the like"
        )


def bisect_main(config: ExperimentConfig) -> int:
    """Runs one rank that `bisect` started."""

    def body(device: torch.device) -> None:
        from megagrpo.bisect.ranks import bisect_ranks

        options = json.loads(RunFolder(Path(config.output_dir)).bisect_options.read_text())
        bisect_ranks(config, BisectOptions(**options), device)

    return guarded(config, "bisect", body)


def experiment_of(config: ExperimentConfig, options: BisectOptions, folder: Path) -> ExperimentConfig:
    """Returns the experiment with one engine that hooks can look into, in a run folder of its own."""
    rollout = config.rollout.model_copy(
        update={
            "num_engines": 1,
            "min_healthy_engines": 1,
            "colocate": False,
            "load_format": "model" if options.own_weights else config.rollout.load_format,
            "sglang": config.rollout.sglang | dict.fromkeys(_EAGER, "disabled"),
        }
    )
    # no GPU is shared here
    weights = config.weights
    if weights.traits.needs_colocation:
        weights = weights.model_copy(update={"transport": WeightsConfig().transport})
    # a fused router cannot be told its experts
    actor = config.actor.model_copy(update={"megatron": config.actor.megatron | {"moe_router_fusion": False}})
    changes = {"output_dir": str(folder), "actor": actor, "rollout": rollout, "weights": weights}
    return config.model_copy(update=changes)
