"""`megagrpo bisect`: starts an engine and the trainer ranks on this machine and prints their
report."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from megagrpo.cluster.machine import ranks_beside_service
from megagrpo.config.schema import ExperimentConfig, RewardConfig
from megagrpo.loop.ranks import guarded
from megagrpo.system.arguments import positive
from megagrpo.system.environment import under_torchrun
from megagrpo.system.run_folder import RunFolder
from megagrpo.tools.one_engine import with_one_engine
from megagrpo.tools.ranks.start import require_finished

if TYPE_CHECKING:
    import torch

# hooks do not run in a replayed graph
_EAGER = {"cuda_graph_backend_decode": "disabled", "cuda_graph_backend_prefill": "disabled"}


def bisect(config: ExperimentConfig, args: argparse.Namespace) -> int:
    """Writes report.md and report.json into `<output_dir>/bisect`; returns the exit status.

    0: nothing differs; 1: something does; 2: they could not be compared. args: see add_options.
    Raises ValueError for invalid ones and for an experiment that does not fit this machine.
    """
    if args.bound is not None and not args.bound > 0:
        raise ValueError(f"--bound {args.bound}: a relative error above 0, such as 1e-5")
    if args.checkpoint is not None:
        require_finished(Path(args.checkpoint))  # before an engine starts, which takes minutes
    folder = config.run_folder.bisect
    folder.bisect_report.unlink(missing_ok=True)
    words = ["--own-weights"] * args.own_weights
    for name in ("checkpoint", "prompts", "max_new_tokens", "bound"):
        if (value := getattr(args, name)) is not None:
            words += [f"--{name.replace('_', '-')}", str(value)]
    if ranks_beside_service(experiment_of(config, args.own_weights, folder), words):
        return 2
    report = json.loads(folder.bisect_report.read_text())
    print((folder.path / "report.md").read_text(), end="")
    if report["place"] is not None:
        print(
            f"megagrpo bisect: {report['place']} differs; every figure is in {folder.bisect_report}",
            file=sys.stderr,
        )
    return 0 if report["place"] is None else 1


def experiment_of(
    config: ExperimentConfig, own_weights: bool, folder: RunFolder
) -> ExperimentConfig:
    """Returns the experiment with one engine without CUDA graphs and draft, in a run folder of its
    own."""
    alone = with_one_engine(config, folder, own_weights)
    sglang = alone.rollout.sglang | _EAGER
    # SGLang would pass the requests of hooks to a draft, too
    rollout = alone.rollout.model_copy(update={"sglang": sglang, "draft_tokens": None})
    # a fused router does not accept given experts
    actor = config.actor.model_copy(
        update={"megatron": config.actor.megatron | {"moe_router_fusion": False}}
    )
    changes = {"rollout": rollout, "actor": actor, "reward": RewardConfig()}
    return alone.model_copy(update=changes)


def add_options(command: argparse.ArgumentParser) -> None:
    """Adds the options of the command line."""
    option = command.add_argument
    option("--checkpoint", help="checkpoint folder; default: the weights in model.path")
    option(
        "--prompts",
        type=positive,
        default=4,
        help="number of prompts, from the start of the data (default 4)",
    )
    option("--max-new-tokens", type=positive, default=32, help="tokens per response (default 32)")
    own = "the engine keeps the weights that it loads from model.path, and nothing is published"
    option("--own-weights", action="store_true", help=own)
    option(
        "--bound",
        type=float,
        help="largest relative difference before the first layer; default: by dtype",
    )


def run(args: argparse.Namespace, config: ExperimentConfig) -> int:
    """Runs the command, or one rank that it started."""

    def body(device: torch.device) -> None:
        # imports Megatron, which the host must be prepared for
        from megagrpo.tools.bisect.ranks import bisect_ranks

        bisect_ranks(config, args, device)

    return guarded(config, "bisect", body) if under_torchrun() else bisect(config, args)
