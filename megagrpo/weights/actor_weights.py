"""The actor's weights as the rest of the program sees them: HF folder in, recorded copies, HF folder out."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from megagrpo.hf_files import HfFolder, write_hf_folder
from megagrpo.mesh import Mesh
from megagrpo.weights.plan import Specs, gather_buckets, gather_copies, make_gather_plan
from megagrpo.weights.record import Copy, record_copies

_SHARD_BYTES = 2 << 30


class Loadable(Protocol):
    """The actor as its weights see it."""

    def load_hf(self, hf: Mapping[str, Tensor]) -> None: ...  # recordable: only slices and copies

    def weights_loaded(self) -> None: ...

    def parameters(self) -> Mapping[str, Tensor]: ...


@dataclass(frozen=True)
class ActorWeights:
    """Which slice of which HF tensor lies where in this rank's live parameters."""

    copies: list[Copy]
    hf_specs: Specs
    parameters: Callable[[], Mapping[str, Tensor]]


def load_initial_weights(actor: Loadable, path: str) -> ActorWeights:
    """HF weights into the actor, and the record of where each slice went."""
    hf = HfFolder(path)
    actor.load_hf(hf)
    actor.weights_loaded()
    return ActorWeights(record_copies(actor.load_hf, hf.specs, actor.parameters()), hf.specs, actor.parameters)


def export_hf(target: str | Path, weights: ActorWeights, mesh: Mesh, like: str, dtype: str) -> None:
    """Collective: write the live weights as an HF folder, whole or not at all. LeaderError on every rank when it fails."""
    kind = getattr(torch, dtype)
    plan = make_gather_plan(gather_copies(weights.copies, mesh), weights.hf_specs, kind, _SHARD_BYTES)
    buckets = gather_buckets(plan, weights.parameters(), mesh)
    error = ""
    if mesh.is_main:
        try:
            write_hf_folder(target, buckets, like, kind)
        except OSError as exc:
            error = str(exc)
    for _ in buckets:  # the others contribute; the main rank, where it failed, lets them finish
        pass
    mesh.raise_any(error)
