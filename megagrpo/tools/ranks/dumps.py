"""Reads what monitor/dump.py wrote, for `megagrpo replay`."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from megagrpo.config.algorithm import AlgorithmConfig
from megagrpo.mesh import Mesh
from megagrpo.monitor.dump import DESCRIPTION, PARTS
from megagrpo.system.errors import translated
from megagrpo.types import Batch, ImageRef, Routing


@dataclass(frozen=True)
class Dump:
    """A dumped step; its batches are in `folder`."""

    folder: Path
    weight_version: int  # of the weights that the step updated
    dp: int
    algorithm: AlgorithmConfig
    values: dict[str, float | None]  # the step's metrics

    def batch(self, mesh: Mesh, layers: Sequence[int]) -> Batch:
        """Returns this rank's batch, with the routed experts of its `layers` if they were dumped."""
        parts = torch.load(self.folder / f"dp_{mesh.dp_rank}.pt", weights_only=True)
        lengths = parts.pop("routed_lengths")
        parts |= {name: kind(**parts[name]) for name, kind in PARTS.items() if parts.get(name)}
        parts["images"] = tuple(tuple(ImageRef(*ref) for ref in refs) for refs in parts["images"])
        by_layer: dict[int, torch.Tensor] = {}
        for file in self.folder.glob(f"dp_{mesh.dp_rank}_experts_*.pt") if layers else ():
            stage = torch.load(file, weights_only=True)
            by_layer |= zip(stage["layers"], stage["experts"].unbind(1), strict=True)
        if by_layer:
            experts = torch.stack([by_layer[layer] for layer in layers], dim=1)
            parts["routing"] = Routing(experts, lengths)
        return Batch(**parts)


def read_dump(folder: Path) -> Dump:
    """Returns the dump in `folder`. Raises ValueError if it is not a finished dump."""
    with translated(f"{folder} is not a finished dump of a step", OSError, ValueError):
        description = json.loads((folder / DESCRIPTION).read_text())
    algorithm = AlgorithmConfig.model_validate(description.pop("algorithm"))
    return Dump(folder, algorithm=algorithm, **description)
