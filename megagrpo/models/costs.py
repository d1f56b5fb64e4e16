"""Costs of a decoder layer for one micro-batch on one rank: bytes, FLOPs, bytes sent. No torch.

Layers are counted for CUDA, where attention keeps no scores.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from megagrpo.config.actor import ParallelConfig

ITEM = 2  # bytes of a bf16 value
FP32 = 4


@dataclass(frozen=True)
class LayerCost:
    """One layer, or a part of one, on one rank, for one micro-batch."""

    kept: float  # bytes from its forward to its backward, without recomputation
    transient: float  # bytes in addition to those while its backward runs
    flops: float  # of a forward, without attention's scores
    sent: Mapping[str, float]  # bytes in a forward, by "tp", "cp", "ep"
    pair_flops: float = 0.0  # of a forward, for each query and key that it sees
    chosen_flops: float = 0.0  # of a forward, for each query and key that an indexer chose for it

    def then(self, other: LayerCost) -> LayerCost:
        """Returns the cost of both, one after the other."""
        return LayerCost(
            kept=self.kept + other.kept,
            transient=max(self.transient, other.transient),
            flops=self.flops + other.flops,
            sent=Counter(self.sent) + Counter(other.sent),
            pair_flops=self.pair_flops + other.pair_flops,
            chosen_flops=self.chosen_flops + other.chosen_flops,
        )


@dataclass(frozen=True)
class Share:
    """A rank's tokens of a micro-batch, and the layout that cuts them."""

    hidden_size: int
    parallel: ParallelConfig
    whole: float  # tokens of a context-parallel rank
    part: float  # tokens of a tensor-parallel rank under sequence parallelism
    width: int  # bytes of a number

    def gathers(self, count: int) -> float:
        """Returns the bytes that a rank sends in `count` gathers or scatters of hidden states along
        the sequence."""
        return count * self.hidden_size * self.part * (self.parallel.tp - 1) * self.width

    @property
    def gathered(self) -> float:
        """Returns the bytes of hidden states gathered along the sequence, if it is cut."""
        return self.hidden_size * self.whole * self.width if self.parallel.tp > 1 else 0.0


def mlp_cost(at: Share, ffn_size: int, gated: bool) -> LayerCost:
    """Returns the cost of an MLP of a width over all tensor-parallel ranks."""
    own = ffn_size / at.parallel.tp * at.whole
    return LayerCost(
        # gate and up, silu(gate), up + 0, their product; or up, relu(up), its square
        kept=(5 if gated else 3) * own * at.width,
        transient=(1.5 if gated else 1.0) * own * at.width + 2 * at.gathered,
        flops=(6 if gated else 4) * at.hidden_size * own,
        sent={"tp": at.gathers(2)},
    )
