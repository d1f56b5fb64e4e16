"""Runs `megagrpo certify`: one launch per world size, the one-rank reference first, then the
certificate."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from megagrpo.check.problems import layout_problems
from megagrpo.check.rules.subject import broken
from megagrpo.cluster.machine import trainer_gpus
from megagrpo.config.schema import ActorConfig, ExperimentConfig, ModelConfig
from megagrpo.loop.ranks import guarded
from megagrpo.models.architecture import Architecture
from megagrpo.models.fields import Kernels, context_rule
from megagrpo.system.arguments import positive
from megagrpo.system.environment import under_torchrun
from megagrpo.tools.certify.cases import KEPT, grid, layouts_of
from megagrpo.tools.certify.certificate import CaseResult, write_certificate
from megagrpo.tools.certify.synthetic import make_models
from megagrpo.tools.ranks.start import train_ranks

if TYPE_CHECKING:  # the command line imports this file
    import torch


def certify(config: ExperimentConfig, ranks: int, only: Sequence[str] | None = None) -> int:
    """Writes the certificate into `<output_dir>/certify`; returns 0 if every case is within the
    bounds, 1 if one is not, another status if ranks failed.

    only: layout names; default: all that fit `ranks`. Raises ValueError for a layout that is
    unknown or cannot run, and for a missing model.
    """
    # of the policy
    config = config.model_copy(update={"actor": config.actor.model_copy(update={"draft": None})})
    folder = config.run_folder.certify
    shutil.rmtree(folder, ignore_errors=True)
    layouts = layouts_of(config.actor)
    tiny = make_models(folder, config, config.actor.parallel, config.seed)
    cases, left_out = grid(layouts, ranks, partial(refusals, tiny, config), only)
    if config.actor.transformer_engine == "auto" and config.actor.expects_transformer_engine:
        left_out["Transformer Engine's layers"] = (
            "they are off in float32 unless actor.transformer_engine is true"
        )
    if config.actor.dtype != "float32":
        left_out[config.actor.dtype] = "its rounding exceeds the bounds"
    results: list[CaseResult] = []
    for world in sorted({case.ranks for case in cases}):
        subfolder = folder / f"ranks{world}"
        subfolder.mkdir(parents=True)
        (subfolder / "cases.json").write_text(
            json.dumps([asdict(case) for case in cases if case.ranks == world])
        )
        experiment = tiny_experiment(config, folder / "model", subfolder, world)
        if status := train_ranks(experiment, "certify", []):
            return max(status, 2)  # the launcher has reported why; 1 is a certificate's
        results += json.loads((subfolder / "results.json").read_text())
    text, passed = write_certificate(
        folder, name=config.name, family=tiny.family, results=results, left_out=left_out
    )
    print(text, end="")
    if not passed:
        print(
            f"megagrpo certify: above the bound; every figure is in {folder / 'report.json'}",
            file=sys.stderr,
        )
    return 0 if passed else 1


def refusals(tiny: Architecture, config: ExperimentConfig, actor: ActorConfig) -> list[str]:
    """Returns why ranks on this machine cannot have the layout of `actor`, in float32."""
    kernels = Kernels(bool(trainer_gpus(config)), False, False)
    return [*layout_problems(tiny, actor), *broken([context_rule(actor, kernels)])]


def tiny_experiment(
    config: ExperimentConfig, model: Path, folder: Path, world: int
) -> ExperimentConfig:
    """Returns the experiment with the tiny model, in a run folder of its own; the cases have their
    own layouts."""
    kept = config.actor.model_dump(include=KEPT | {"device"})
    actor = ActorConfig(world_size=world, **kept)
    return config.model_copy(
        update={"output_dir": str(folder), "model": ModelConfig(path=str(model)), "actor": actor}
    )


def add_options(command: argparse.ArgumentParser) -> None:
    """Adds the options of the command line."""
    option = command.add_argument
    ranks = "processes on this machine; more of them cover more layouts (default 2)"
    option("--ranks", type=positive, default=2, help=ranks)
    option(
        "--layouts",
        type=lambda text: text.split(","),
        help="comma-separated names; default: all that fit",
    )


def run(args: argparse.Namespace, config: ExperimentConfig) -> int:
    """Runs the command, or one rank that it started."""

    def body(device: torch.device) -> None:
        from megagrpo.tools.certify.measure import certify_ranks

        certify_ranks(config, device)

    if under_torchrun():
        return guarded(config, "certify", body)
    return certify(config, args.ranks, args.layouts)
