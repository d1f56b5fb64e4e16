"""Keeps a step's batch on disk, when an update was not finite or when asked, for `megagrpo replay`.

run/dumps/step_000012/   named like the step's entry in metrics.jsonl: an update of weights 11
    dp_0.pt ...          the tensors of one data-parallel rank's Batch, advantages included
    step.json            weight version, algorithm with its present KL coefficient, metrics; written last
"""

import json
import math
from dataclasses import dataclass, fields
from pathlib import Path

import torch

from megagrpo.config.algorithm import AlgorithmConfig
from megagrpo.mesh import Mesh
from megagrpo.run_folder import write_whole
from megagrpo.types import Batch

_DESCRIPTION = "step.json"
_LEFT_OUT = "reference"  # hidden states of a whole model, of one layout; a replay computes them again


def write_dump(
    folder: Path, batch: Batch, algorithm: AlgorithmConfig, weight_version: int, values: dict[str, float], mesh: Mesh
) -> None:
    """Collective. Keeps a batch of the step at hand; LeaderError on every rank when it cannot be written."""

    def write() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        parts = {field.name: getattr(batch, field.name) for field in fields(Batch) if field.name != _LEFT_OUT}
        torch.save(parts, folder / f"dp_{mesh.dp_rank}.pt")

    mesh.from_leader(write, f"dump into {folder}")

    def describe() -> None:
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        description = {"weight_version": weight_version, "dp": mesh.dp_size, "values": finite}
        description["algorithm"] = algorithm.model_dump(mode="json")
        write_whole(folder / _DESCRIPTION, json.dumps(description, indent=1))

    mesh.from_main(describe, f"dump into {folder}")


@dataclass(frozen=True)
class Dump:
    """A step that was kept: `folder` holds its batches."""

    folder: Path
    weight_version: int  # that the step sampled from and updated
    dp: int
    algorithm: AlgorithmConfig
    values: dict[str, float | None]  # what was measured then

    def batch(self, mesh: Mesh) -> Batch:
        """Returns this rank's part. ValueError when the data-parallel size is another one."""
        if mesh.dp_size != self.dp:
            raise ValueError(f"{self.folder} is of {self.dp} data-parallel ranks, this layout has {mesh.dp_size}")
        parts = torch.load(self.folder / f"dp_{mesh.dp_rank}.pt", weights_only=True)
        return Batch(**parts)


def read_dump(folder: Path) -> Dump:
    """Reads what `write_dump` wrote. ValueError when the folder is no finished dump."""
    try:
        description = json.loads((folder / _DESCRIPTION).read_text())
    except (OSError, ValueError) as exc:
        raise ValueError(f"{folder} is not a finished dump of a step: {exc}") from exc
    algorithm = AlgorithmConfig.model_validate(description.pop("algorithm"))
    return Dump(folder, algorithm=algorithm, **description)
