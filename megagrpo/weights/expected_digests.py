"""What the engines' slices must contain, as digests of the trainers' live weights."""

from collections.abc import Iterable

import torch
import torch.distributed as dist

from megagrpo.weights.digest import slice_digest
from megagrpo.weights.plan import share_out
from megagrpo.weights.record import Copy, HfSlice
from megagrpo.weights.transport import TrainerWeights


class ExpectedDigests:
    """Computes the digests of all slices that engines hold: every trainer rank digests its share, and shares add up."""

    def __init__(self, weights: TrainerWeights):
        self._weights = weights
        rank = weights.mesh.rank
        shares = share_out(weights.copies, weights.specs, on_main=False)
        self._share = {name: [copy for owner, copy in parts if owner == rank] for name, parts in shares.items()}
        # This rank's parts of a slice; the same keys and order on every rank.
        self._parts: dict[HfSlice, list[Copy]] = {}

    def unknown(self, slices: Iterable[HfSlice]) -> list[HfSlice]:
        """Returns those that were never added, each once."""
        return [part for part in dict.fromkeys(slices) if part not in self._parts]

    def add(self, slices: list[HfSlice]) -> None:
        """Adds slices to be digested from now on; the same list on every rank."""
        for part in slices:
            common = [(copy, copy.box.intersect(part.box)) for copy in self._share[part.tensor]]
            self._parts[part] = [copy.restrict(box) for copy, box in common if box is not None]

    def compute(self) -> dict[HfSlice, int]:
        """Collective. Returns the digest of every slice, of the published dtype of this moment's weights."""
        parameters, mesh = self._weights.parameters(), self._weights.mesh
        totals = torch.zeros(len(self._parts), dtype=torch.int64, device=mesh.device)  # [number of slices]
        for place, copies in enumerate(self._parts.values()):
            for copy in copies:
                values = copy.view(parameters).to(self._weights.dtype)
                totals[place] += slice_digest(values, copy.box)
        if mesh.world_size > 1:
            dist.all_reduce(totals)
        return dict(zip(self._parts, totals.tolist(), strict=True))
