"""The actor's weights as the rest of the program sees them: HF folder in, recorded copies, HF folder out."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megagrpo.families.table import is_left_out, read_description
from megagrpo.hf_files import HfFolder, ReadingProgress, write_hf_folder
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

    def merged(self) -> AbstractContextManager[None]:
        """Lets `parameters` be what is published inside: what adapters add is part of them."""


@dataclass(frozen=True)
class ActorWeights:
    """Which slice of which HF tensor lies where in this rank's live parameters."""

    copies: list[Copy]  # this rank's, recorded from its load_hf
    hf_specs: Specs  # of the whole model: name -> shape and dtype in the checkpoint
    parameters: Callable[[], Mapping[str, Tensor]]  # live, under the names in `copies`
    merged: Callable[[], AbstractContextManager[None]] = nullcontext  # around any use of them as the model's weights


def load_initial_weights(actor: LoadableActor, path: str, overwritten: bool = False) -> ActorWeights:
    """Loads an HF folder into the actor and records where each slice goes. Raises ValueError for an unusable folder.

    With `overwritten` a checkpoint comes next: only names, shapes and dtypes are read, and the parameters are 0, which
    stays where no file holds an element, such as padding of a vocabulary.
    """
    hf, parameters = HfFolder(path), actor.parameters()
    specs = _used(hf)
    copies = record_copies(actor.load_hf, specs, parameters)
    if overwritten:
        with torch.no_grad():
            for parameter in parameters.values():
                parameter.zero_()
    else:
        actor.load_hf(ReadingProgress(hf, _bytes_by_tensor(copies, specs), shown=_is_main_rank()))
        actor.weights_loaded()
    return ActorWeights(copies, specs, actor.parameters, actor.merged)


def _used(hf: HfFolder) -> Specs:
    """Returns what a folder holds without layers that only speculate, which nobody loads."""
    description = hf.path / "config.json"
    if not description.is_file():
        return hf.specs
    config = read_description(description)
    return {name: spec for name, spec in hf.specs.items() if not is_left_out(config, name)}


def _bytes_by_tensor(copies: list[Copy], specs: Specs) -> dict[str, int]:
    """Returns how much of each HF tensor these copies read."""
    out: dict[str, int] = {}
    for copy in copies:
        out[copy.hf] = out.get(copy.hf, 0) + prod(copy.size) * specs[copy.hf][1].itemsize
    return out


def _is_main_rank() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def export_hf(target: str | Path, weights: ActorWeights, mesh: Mesh, like: str, dtype: str) -> None:
    """Collective. Writes the live weights, adapters merged, as an HF folder, whole or not at all.

    Raises LeaderError on every rank.
    """
    published: torch.dtype = getattr(torch, dtype)
    plan = make_gather_plan(mesh.gather_world(weights.copies), weights.hf_specs, published, _SHARD_BYTES)
    with weights.merged():
        gather_to_main(
            plan,
            weights.parameters(),
            mesh,
            lambda buckets: write_hf_folder(target, buckets, like, published),
            f"export to {target}",
        )
