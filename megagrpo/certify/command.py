"""Runs `megagrpo certify`: one launch per world size, the one-rank reference first, then the certificate."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from megagrpo.certify.cases import Case, grid, layouts_of
from megagrpo.certify.report import CaseResult, write_certificate
from megagrpo.certify.subject import make_models
from megagrpo.cluster.machine import train_ranks
from megagrpo.config.schema import ActorConfig, ExperimentConfig, ModelConfig
from megagrpo.system.run_folder import RunFolder
from megagrpo.tasks.ranks import guarded

if TYPE_CHECKING:  # the command line imports this file
    import torch


def certify(config: ExperimentConfig, ranks: int, only: Sequence[str] | None = None) -> int:
    """Writes the certificate into `<output_dir>/certify`; returns 0 if every case is within the bounds, else 1.

    only: layout names; default: all that fit `ranks`. Raises ValueError for an unknown layout or a missing model.
    """
    folder = RunFolder(Path(config.output_dir)).certify
    shutil.rmtree(folder, ignore_errors=True)
    layouts = layouts_of(config.actor)
    tiny = make_models(folder, config, config.actor.parallel, config.seed)
    cases, left_out = grid(layouts, ranks, is_moe=tiny.is_moe, only=only)
    if config.actor.transformer_engine == "auto" and config.actor.expects_transformer_engine:
        left_out["Transformer Engine's layers"] = "they are off in float32 unless actor.transformer_engine is true"
    if config.actor.dtype != "float32":
        left_out[config.actor.dtype] = "its rounding exceeds the bounds"
    results: list[CaseResult] = []
    for world in sorted({case.ranks for case in cases}):
        measured = _run_world(config, folder, world, [case for case in cases if case.ranks == world])
        if measured is None:
            return 1
        results += measured
    text, passed = write_certificate(folder, name=config.name, family=tiny.family, results=results, left_out=left_out)
    print(text, end="")
    if not passed:
        print(f"megagrpo certify: above the bound; every figure is in {folder / 'report.json'}", file=sys.stderr)
    return 0 if passed else 1


def certify_main(config: ExperimentConfig) -> int:
    """Runs one rank of a world that `certify` started."""

    def body(device: torch.device) -> None:
        from megagrpo.certify.measure import certify_ranks

        certify_ranks(config, device)

    return guarded(config, "certify", body)


def _run_world(config: ExperimentConfig, folder: Path, world: int, cases: list[Case]) -> list[CaseResult] | None:
    """Returns the results of one world size's cases; None if its ranks failed, which the launcher has reported."""
    subfolder = folder / f"ranks{world}"
    subfolder.mkdir(parents=True)
    (subfolder / "cases.json").write_text(json.dumps([asdict(case) for case in cases]))
    changes = {
        "output_dir": str(subfolder),
        "model": ModelConfig(path=str(folder / "model")),
        "actor": ActorConfig(
            world_size=world,
            device=config.actor.device,
            transformer_engine=config.actor.transformer_engine,
            deadline_s=config.actor.deadline_s,
            lora=config.actor.lora,
        ),
    }
    status = train_ranks(config.model_copy(update=changes), ["certify"])
    return json.loads((subfolder / "results.json").read_text()) if status == 0 else None
