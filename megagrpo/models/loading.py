"""Loads Hugging Face tensors into Megatron's modules by slices and copies only, which the recorder
can trace."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megagrpo.models.architecture import Architecture
from megagrpo.models.kinds.grouped_query.describe import GroupedQuery
from megagrpo.models.tensors import GATED_NAMES, GatedNames

if TYPE_CHECKING:
    from megatron.core.transformer.attention import SelfAttention
    from torch import Tensor


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


def load_attention(
    attention: SelfAttention,
    arch: Architecture,
    hf: Mapping[str, Tensor],
    prefix: str,
    shard: Shard,
) -> None:
    """Loads grouped-query attention: projections, and biases and head norms where the architecture
    has them."""
    assert isinstance(arch.attention, GroupedQuery)
    _load_qkv(attention.linear_qkv.weight, arch, hf, prefix, "weight", shard)
    if arch.attention.qkv_bias:
        _load_qkv(attention.linear_qkv.bias, arch, hf, prefix, "bias", shard)
    attention.linear_proj.weight.copy_(shard.columns(hf[prefix + "o_proj.weight"]))
    if arch.attention.qk_norm:
        attention.q_layernorm.weight.copy_(hf[prefix + "q_norm.weight"])
        attention.k_layernorm.weight.copy_(hf[prefix + "k_norm.weight"])


def load_vocabulary(weight: Tensor, hf: Tensor, shard: Shard) -> None:
    """Loads this rank's rows [padded vocab / tp, hidden] of a vocabulary [vocab, hidden].

    It is padded to a multiple of tp; the rows beyond the real ones are 0 and never sampled.
    """
    start = shard.rank * weight.shape[0]
    real = hf[start : start + weight.shape[0]]
    weight[: len(real)].copy_(real)
    if len(real) < len(weight):
        weight[len(real) :].zero_()


def _load_qkv(
    parameter: Tensor,
    arch: Architecture,
    hf: Mapping[str, Tensor],
    prefix: str,
    kind: str,
    shard: Shard,
) -> None:
    """Loads Megatron's interleaving by key/value head: [q of its queries, k, v] for each of the
    local groups."""
    queries = arch.attention.heads // arch.attention.kv_heads
    dim = arch.attention.head_dim
    groups = arch.attention.kv_heads
    if groups < shard.size:
        _load_part_of_group(parameter, arch, hf, prefix, kind, shard)
        return
    local = groups // shard.size
    tail = parameter.shape[1:]  # (hidden,) for the weight, () for the bias
    target = parameter.view(local, queries + 2, dim, *tail)
    places = {
        "q": (slice(0, queries), queries),
        "k": (slice(queries, queries + 1), 1),
        "v": (slice(queries + 1, None), 1),
    }
    for name, (place, heads) in places.items():
        source = hf[f"{prefix}{name}_proj.{kind}"].view(groups, heads, dim, *tail)
        target[:, place].copy_(shard.rows(source))


def _load_part_of_group(
    parameter: Tensor,
    arch: Architecture,
    hf: Mapping[str, Tensor],
    prefix: str,
    kind: str,
    shard: Shard,
) -> None:
    """Loads this rank's rows of a group [q of its queries, k, v] that several ranks share, cut
    evenly, also in heads.

    Megatron gathers a layer's projections from all ranks, and each takes from them the heads that
    it computes with.
    """
    queries = arch.attention.heads // arch.attention.kv_heads
    dim = arch.attention.head_dim
    group, first = divmod(shard.rank * len(parameter), (queries + 2) * dim)
    last = first + len(parameter)
    start = 0
    for name, heads in (("q", queries), ("k", 1), ("v", 1)):
        end = start + heads * dim
        low, high = max(first, start), min(last, end)
        if low < high:
            source = hf[f"{prefix}{name}_proj.{kind}"]
            shift = group * heads * dim - start
            parameter[low - first : high - first].copy_(source[low + shift : high + shift])
        start = end


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
