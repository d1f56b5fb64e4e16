"""Grouped-query attention (Ainslie et al., arXiv 2305.13245) by its numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megagrpo.models.config_json import HfConfig, Rotary
from megagrpo.models.costs import LayerCost, Share
from megagrpo.models.kinds.attention import Attention
from megagrpo.models.kinds.grouped_query import cost
from megagrpo.models.points import Row


@dataclass(frozen=True)
class GroupedQuery(Attention):
    """Holds the numbers of attention whose queries share keys and values by groups."""

    heads: int
    kv_heads: int
    head_dim: int
    rotary: Rotary
    qkv_bias: bool = False
    qk_norm: bool = False  # RMSNorm over each head of queries and keys
    norm_over_heads: bool = False  # that one is over all heads of a token together
    output_gate: bool = False  # the output is multiplied by a sigmoid of the token

    @classmethod
    def read(cls, hf: HfConfig, fraction: float = 1.0, **numbers: Any) -> GroupedQuery:
        """Reads a config.json; fraction: of a head that turns, if it has none. numbers: those that
        are no common keys."""
        heads = hf["num_attention_heads"]
        return cls(
            heads=heads,
            kv_heads=hf.get("num_key_value_heads") or heads,
            head_dim=hf.get("head_dim") or hf["hidden_size"] // heads,
            rotary=Rotary.read(hf, fraction),
            **numbers,
        )

    @property
    def v_dim(self) -> int:
        """Returns the width of a head of values."""
        return self.head_dim

    @property
    def pair_flops(self) -> float:
        """Returns the FLOPs of a query with one key: score and sum."""
        return 4.0 * self.heads * self.head_dim

    @property
    def decode_pair_flops(self) -> float:
        """Returns the same in an engine."""
        return self.pair_flops

    def cost(self, at: Share) -> LayerCost:
        """Returns the cost of a layer's attention for a micro-batch."""
        return cost.layer(self, at)

    def cached_values(self, ranks: int) -> int:
        """Counts the values of one token in one rank's cache: heads are divided over the ranks, and
        repeated if there are fewer than ranks."""
        return 2 * max(1, self.kv_heads // ranks) * self.head_dim

    def repeated_weights(self, hidden_size: int, ranks: int) -> int:
        return 2 * hidden_size * self.head_dim * max(ranks - self.kv_heads, 0)

    def inner_points(self) -> list[Row]:
        norms: list[Row] = [
            ("q_norm", "normed queries", "q_norm", "q_layernorm", "heads"),
            ("k_norm", "normed keys", "k_norm", "k_layernorm", "heads"),
        ]
        says = "projection to queries, keys and values"
        qkv: Row = ("qkv", says, "qkv_proj", "linear_qkv", "qkv")
        # with gates among the queries the sides differ in their order, and an engine fuses the norms
        before = [] if self.output_gate else [qkv, *(norms if self.qk_norm else [])]
        core = "core_attention"
        return [
            *before,
            # as attention gets them
            ("q_rotary", "queries with positions", ("attn", "in", 0), (core, "in", 0), "heads"),
            ("k_rotary", "keys with positions", ("attn", "in", 1), (core, "in", 1), "heads"),
            ("core_attention", "attention (scale, mask, softmax)", "attn", core, "heads"),
        ]
