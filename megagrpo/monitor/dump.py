"""Writes a step's batch to disk for `megagrpo replay`: after an update that was not finite, or by
log.dump_steps.

In run/dumps/step_000012/, numbered like the step in metrics.jsonl (the update of weights 11):

- dp_0.pt, ...: the tensors of one data-parallel rank's Batch, advantages included
- dp_0_experts_0.pt, ...: with actor.routing_replay, the experts of one pipeline stage, named after
  its first layer
- step.json: weight version, algorithm with its current KL coefficient, metrics; written last
"""

import json
from collections.abc import Sequence
from pathlib import Path

import torch

from megagrpo.config.algorithm import AlgorithmConfig
from megagrpo.mesh import Mesh
from megagrpo.monitor.step_log import finite
from megagrpo.system.run_folder import whole_file, write_whole
from megagrpo.types import Batch, Correction, Rewards, Streams

DESCRIPTION = "step.json"
# Hidden states of a whole model, of one layout: a replay computes them again. Experts are in files
# of their own.
_LEFT_OUT = ("reference", "routing")
PARTS = {"rewards": Rewards, "correction": Correction, "streams": Streams}


def write_dump(
    folder: Path,
    batch: Batch,
    algorithm: AlgorithmConfig,
    weight_version: int,
    values: dict[str, float],
    mesh: Mesh,
    layers: Sequence[int],
) -> None:
    """Collective. Writes the batch of the current step. Raises LeaderError on every rank if that
    fails.

    layers: this rank's layers with experts, whose routed experts are in the batch.
    """

    def write() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        parts = {name: value for name, value in vars(batch).items() if name not in _LEFT_OUT}
        parts |= {name: vars(parts[name]) for name in PARTS if parts[name] is not None}
        # torch.load reads it
        parts["images"] = [[tuple(vars(ref).values()) for ref in refs] for refs in batch.images]
        parts["routed_lengths"] = batch.routing and batch.routing.lengths
        for earlier in folder.glob(f"dp_{mesh.dp_rank}_experts_*"):
            earlier.unlink()  # of an earlier start, possibly with other stages
        torch.save(parts, folder / f"dp_{mesh.dp_rank}.pt")

    mesh.from_leader(write, f"dump into {folder}")
    _write_experts(folder, batch, mesh, layers)

    def describe() -> None:
        description = {
            "weight_version": weight_version,
            "dp": mesh.dp_size,
            "values": finite(values),
            "algorithm": algorithm.model_dump(mode="json"),
        }
        write_whole(folder / DESCRIPTION, json.dumps(description, indent=1))

    mesh.from_main(describe, f"dump into {folder}")


def _write_experts(folder: Path, batch: Batch, mesh: Mesh, layers: Sequence[int]) -> None:
    """Collective. Each rank writes the experts of its stage; ranks of one stage write the same
    file."""
    error = ""
    if batch.routing is not None and layers:
        path = folder / f"dp_{mesh.dp_rank}_experts_{layers[0]}.pt"
        try:
            with whole_file(path) as draft:
                torch.save({"layers": list(layers), "experts": batch.routing.experts}, draft)
        except (OSError, RuntimeError) as exc:  # torch raises RuntimeError for a full disk
            error = f"rank {mesh.rank} could not write {path}: {exc}"
    mesh.raise_any(error)
