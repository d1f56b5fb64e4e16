"""Qwen's sparse attention (QSA) by its numbers: grouped-query attention over the blocks of keys that
a frozen indexer chooses, and the tokens behind the last whole block."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from megagrpo.models.config_json import HfConfig
from megagrpo.models.costs import FP32, LayerCost, Share
from megagrpo.models.kinds.grouped_query.describe import GroupedQuery
from megagrpo.models.kinds.indexed.describe import BLOCK
from megagrpo.models.tensors import HfTensors, Kind, Shard, TensorSpec

if TYPE_CHECKING:
    from megatron.core.transformer.attention import SelfAttention


@dataclass(frozen=True, kw_only=True)
class PooledQuery(GroupedQuery):
    """Adds the indexer's sizes."""

    index_heads: int
    index_dim: int
    ratio: int  # tokens of a block, whose mean is the indexer's key
    topk: int  # blocks that a query sees

    @classmethod
    def read(cls, hf: HfConfig, fraction: float = 1.0) -> PooledQuery:
        """As GroupedQuery's, of a config.json with the indexer's keys."""
        ratio = hf["indexer_compress_ratio"]
        return cls(
            **vars(GroupedQuery.read(hf, fraction)),
            index_heads=hf["indexer_n_heads"],
            index_dim=hf["indexer_head_dim"],
            ratio=ratio,
            topk=hf["indexer_budget"] // ratio,
        )

    @property
    def most_keys(self) -> float:
        return (self.topk + 1) * self.ratio - 1

    @property
    def index_flops(self) -> float:
        return 2.0 * self.index_heads * self.index_dim / self.ratio

    def cached_values(self, ranks: int) -> int:
        """As GroupedQuery's, with the indexer's keys, which each rank has."""
        return super().cached_values(ranks) + self.index_dim // self.ratio

    def index_tensors(self, hidden: int) -> Iterator[TensorSpec]:
        """Yields the indexer's tensors, by their names in it."""
        shape = (self.index_heads + 1) * self.index_dim, hidden
        yield TensorSpec("index_qk_proj.weight", shape, "matrix", trained=False)
        for name in ("q_layernorm.weight", "k_layernorm.weight"):
            yield TensorSpec(name, (self.index_dim,), "centered norm", trained=False)

    def tensors(self, hidden: int, prefix: str, norm: Kind) -> Iterator[TensorSpec]:
        yield from super().tensors(hidden, prefix, norm)
        for spec in self.index_tensors(hidden):
            yield replace(spec, name=f"{prefix}indexer.{spec.name}")

    def load(self, attention: SelfAttention, hf: HfTensors, shard: Shard) -> None:
        super().load(attention, hf, shard)
        for name, parameter in attention.core_attention.indexer.named_parameters():
            parameter.copy_(hf["indexer." + name])

    def cost(self, at: Share) -> LayerCost:
        """Returns the cost of a layer's attention for a micro-batch, as torch computes it, block of
        queries by block: with all keys, under masks of the chosen ones."""
        dense = super().cost(at)
        p = at.parallel
        index = (self.index_heads + 1) * self.index_dim
        scores = self.heads / p.tp * min(at.whole, BLOCK) * at.whole * p.cp
        return replace(
            dense,
            kept=dense.kept + index * at.whole * at.width,
            transient=dense.transient + 2 * scores * FP32,
            flops=dense.flops + 2 * at.hidden_size * index * at.part,
            pair_flops=dense.pair_flops + self.index_flops,
        )
