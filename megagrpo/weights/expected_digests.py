"""The digests that the engines' slices must have, computed from the trainers' live weights."""

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megagrpo.weights.copies.recorder import Copy
from megagrpo.weights.copies.views import ByRows
from megagrpo.weights.digests.batches import CopyBatches
from megagrpo.weights.transports.gather_plan import share_out
from megagrpo.weights.transports.protocol import TrainerWeights


class ExpectedDigests:
    """Computes the digests of all engines' slices, in the order in which they are added.

    Each trainer rank digests a share; the shares' digests add up.
    """

    def __init__(self, weights: TrainerWeights):
        self._weights = weights
        self._mesh = weights.mesh
        rank = self._mesh.rank
        shares = share_out(weights.copies, weights.specs, on_main=False)
        self._share = {
            name: ByRows((copy.box, copy) for owner, copy in parts if owner == rank)
            for name, parts in shares.items()
        }
        # The number of every slice, a box of an HF tensor: name, start, size. The same on every
        # rank.
        self._index: dict[tuple[str, tuple[int, ...], tuple[int, ...]], int] = {}
        self._copies: list[Copy] = []  # this rank's parts of all slices
        self._slices = np.empty(0, dtype=np.int64)  # by part: the number of its slice
        self._batches = CopyBatches(self._copies, weights.specs)
        self._stream: torch.cuda.Stream | None = None

    def add(self, engine: Sequence[Sequence[Copy]]) -> list[np.ndarray]:
        """Adds the slices of an engine's ranks, the same on all trainers. Returns by engine rank the
        slices' numbers, int64 [slices]."""
        parts: list[int] = []

        def number_of(copy: Copy) -> int:
            known = len(self._index)
            number = self._index.setdefault((copy.hf, copy.start, copy.size), known)
            if number == known:
                for mine in self._share[copy.hf].near(copy.box):
                    if common := mine.box.intersect(copy.box):
                        self._copies.append(mine.restrict(common))
                        parts.append(number)
            return number

        numbers = [
            np.array([number_of(copy) for copy in copies], dtype=np.int64) for copies in engine
        ]
        self._slices = np.concatenate([self._slices, np.array(parts, dtype=np.int64)])
        self._batches = CopyBatches(self._copies, self._weights.specs)
        return numbers

    def local(self) -> Tensor:
        """Returns this rank's share in the digest of every slice, int64 [slices] on the mesh's
        device.

        It is no collective and only reads the parameters, so a side thread may run it while they
        are being sent. On CUDA it runs in a separate stream, after the default stream's earlier
        work, and waits for the result.
        """
        device = self._mesh.device
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
        """Collective. Returns the digest of every slice from the ranks' shares in it (`local`):
        int64 [slices]."""
        if self._mesh.world_size > 1:
            dist.all_reduce(local)
        return local.cpu().numpy()

    def _digest_share(self) -> Tensor:
        digests = self._batches.digests(self._weights.parameters())
        slices = torch.from_numpy(self._slices).to(digests.device)
        return digests.new_zeros(len(self._index)).index_add_(0, slices, digests)
