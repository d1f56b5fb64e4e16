"""Digests that the engines' slices must have, computed from the trainers' live weights."""

from collections.abc import Iterable, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megagrpo.weights.copies.record import Copy
from megagrpo.weights.copies.views import Box
from megagrpo.weights.digests.batches import CopyBatches
from megagrpo.weights.digests.digest import batched_digest
from megagrpo.weights.transports.gather_plan import share_out
from megagrpo.weights.transports.protocol import TrainerWeights

# An HF tensor's name, start and size of a box of it: a slice as a plain tuple, because there are up to millions.
SliceKey = tuple[str, tuple[int, ...], tuple[int, ...]]


class ExpectedDigests:
    """Computes the digests of all engines' slices, numbered as added: trainer ranks digest shares, which add up."""

    def __init__(self, weights: TrainerWeights):
        self._weights = weights
        rank = weights.mesh.rank
        shares = share_out(weights.copies, weights.specs, on_main=False)
        self._share = {name: [copy for owner, copy in parts if owner == rank] for name, parts in shares.items()}
        self._index: dict[SliceKey, int] = {}  # the same on every rank
        self._copies: list[Copy] = []  # this rank's parts of all slices
        self._slices = np.empty(0, dtype=np.int64)  # by part: the index of its slice
        self._batches = CopyBatches(self._copies, weights.specs)
        self._stream: torch.cuda.Stream | None = None

    def unknown(self, copies: Iterable[Copy]) -> list[SliceKey]:
        """Returns the slices of HF tensors in `copies` that were never added, each once."""
        return list(dict.fromkeys(key for copy in copies if (key := _key(copy)) not in self._index))

    def add(self, slices: list[SliceKey]) -> None:
        """Adds slices to be digested from now on; the same list on every rank."""
        parts: list[int] = []
        for tensor, start, size in slices:
            index = self._index.setdefault((tensor, start, size), len(self._index))
            for copy in self._share[tensor]:
                common = copy.box.intersect(Box(start, size))
                if common is not None:
                    self._copies.append(copy.restrict(common))
                    parts.append(index)
        if parts:
            self._slices = np.concatenate([self._slices, np.array(parts, dtype=np.int64)])
            self._batches = CopyBatches(self._copies, self._weights.specs)

    def indices(self, copies: Sequence[Copy]) -> np.ndarray:
        """Returns the indices of these copies' slices among the digests: int64 [copies]. All must be added."""
        return np.fromiter((self._index[_key(copy)] for copy in copies), dtype=np.int64, count=len(copies))

    def compute(self) -> np.ndarray:
        """Collective. Returns the digests of all slices of the present weights, as published: int64 [slices]."""
        return self.total(self.local())

    def local(self) -> Tensor:
        """Returns this rank's share in the digest of every slice, int64 [slices] on the mesh's device.

        No collective, and only reads the parameters: a side thread may run it while they are being sent. On CUDA it
        runs in a stream of its own, after the default stream's earlier work, and waits for the result.
        """
        device = self._weights.mesh.device
        if device.type != "cuda":
            return self._digest_share()
        with torch.cuda.device(device):  # a new thread begins on the first one
            self._stream = self._stream or torch.cuda.Stream()
            self._stream.wait_stream(torch.cuda.default_stream())
            with torch.cuda.stream(self._stream):
                digests = self._digest_share()
            self._stream.synchronize()
        return digests

    def total(self, local: Tensor) -> np.ndarray:
        """Collective. Returns the digest of every slice from the ranks' shares in it (`local`): int64 [slices]."""
        if self._weights.mesh.world_size > 1:
            dist.all_reduce(local)
        return local.cpu().numpy()

    def _digest_share(self) -> Tensor:
        totals = torch.zeros(len(self._index), dtype=torch.int64, device=self._weights.mesh.device)
        found, slices = [], []
        for box, values, indices, dtype in self._batches.views(self._weights.parameters()):
            found.append(batched_digest(values.to(dtype), box))
            slices.append(self._slices[indices])
        if found:
            totals.index_add_(0, torch.from_numpy(np.concatenate(slices)).to(totals.device), torch.cat(found))
        return totals


def _key(copy: Copy) -> SliceKey:
    return copy.hf, copy.start, copy.size
