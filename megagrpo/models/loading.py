"""Loads Hugging Face tensors into Megatron's modules by slices and copies only, which the recorder
can trace."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from megagrpo.models.tensors import GATED_NAMES, GatedNames

if TYPE_CHECKING:
    from torch import Tensor


class Cut(NamedTuple):
    """Says which number of a model a number of ranks must divide."""

    key: str  # of config.json
    number: int
    by: str  # of actor.parallel
    ranks: int


@dataclass(frozen=True)
class Shard:
    """Names one of `size` equal parts; `rank` counts from 0."""

    rank: int
    size: int

    def rows(self, tensor: Tensor) -> Tensor:
        """Returns this part of [rows, ...], cut along the rows."""
        return tensor.chunk(self.size, 0)[self.rank]

    def columns(self, tensor: Tensor) -> Tensor:
        """Returns this part of [rows, columns], cut along the columns."""
        return tensor.chunk(self.size, 1)[self.rank]


@dataclass(frozen=True)
class RankPlace:
    """Says which part of each sharded tensor this rank holds."""

    tensor: Shard  # of dense layers, among the tensor-parallel ranks
    expert: Shard  # of one expert, among the expert-tensor-parallel ranks


def load_vocabulary(weight: Tensor, hf: Tensor, shard: Shard) -> None:
    """Loads this rank's rows [padded vocab / tp, hidden] of a vocabulary [vocab, hidden].

    It is padded to a multiple of tp; the rows beyond the real ones are 0 and never sampled.
    """
    start = shard.rank * weight.shape[0]
    real = hf[start : start + weight.shape[0]]
    weight[: len(real)].copy_(real)
    if len(real) < len(weight):
        weight[len(real) :].zero_()


def load_mlp(
    fc1: Tensor,
    fc2: Tensor,
    hf: Mapping[str, Tensor],
    prefix: str,
    shard: Shard,
    names: GatedNames = GATED_NAMES,
) -> None:
    """Loads a gated MLP: fc1 [2 width / tp, hidden], gate above up, and fc2 [hidden, width /
    tp]."""
    gate, up = (shard.rows(hf[f"{prefix}{name}.weight"]) for name in (names.gate, names.up))
    fc1[: len(gate)].copy_(gate)
    fc1[len(gate) :].copy_(up)
    fc2.copy_(shard.columns(hf[f"{prefix}{names.down}.weight"]))


def mlp_weights(layer, expert: int | None = None) -> tuple[Tensor, Tensor]:
    """Returns linear_fc1's and linear_fc2's weights of an MLP, or of the local expert of this
    number.

    An expert is a module of its own, or one of the numbered weights of Transformer Engine's grouped
    layers.
    """
    if expert is not None and hasattr(layer, "local_experts"):
        layer = layer.local_experts[expert]
        expert = None
    name = "weight" if expert is None else f"weight{expert}"
    return getattr(layer.linear_fc1, name), getattr(layer.linear_fc2, name)
