"""The actor's weights as the rest of the program sees them: HF folder in, recorded copies, HF folder out."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from megagrpo.hf_files import HfFolder, write_hf_folder
from megagrpo.mesh import Mesh
from megagrpo.weights.plan import gather_to_main, make_gather_plan
from megagrpo.weights.record import Copy, Specs, record_copies

_SHARD_BYTES = 2 << 30


class LoadableActor(Protocol):
    """An actor whose loading from HF tensors can be recorded."""

    def load_hf(self, hf: Mapping[str, Tensor]) -> None:
        """Fills the parameters by slicing and copying only, which is what makes it recordable."""

    def weights_loaded(self) -> None:
        """Brings everything derived from the parameters (the optimiser's copies) up to date."""

    def parameters(self) -> Mapping[str, Tensor]:
        """Returns this rank's live parameters by name."""


@dataclass(frozen=True)
class ActorWeights:
    """Which slice of which HF tensor lies where in this rank's live parameters."""

    copies: list[Copy]  # this rank's, recorded from its load_hf
    hf_specs: Specs  # of the whole model: name -> shape and dtype in the checkpoint
    parameters: Callable[[], Mapping[str, Tensor]]  # live, under the names in `copies`


def load_initial_weights(actor: LoadableActor, path: str) -> ActorWeights:
    """Loads an HF folder into the actor and records where each slice goes. Raises ValueError for an unusable folder."""
    hf = HfFolder(path)
    actor.load_hf(hf)
    actor.weights_loaded()
    return ActorWeights(record_copies(actor.load_hf, hf.specs, actor.parameters()), hf.specs, actor.parameters)


def export_hf(target: str | Path, weights: ActorWeights, mesh: Mesh, like: str, dtype: str) -> None:
    """Collective. Writes the live weights as an HF folder, whole or not at all. Raises LeaderError on every rank."""
    published: torch.dtype = getattr(torch, dtype)
    plan = make_gather_plan(mesh.gather_world(weights.copies), weights.hf_specs, published, _SHARD_BYTES)
    gather_to_main(
        plan,
        weights.parameters(),
        mesh,
        lambda buckets: write_hf_folder(target, buckets, like, published),
        f"export to {target}",
    )
