"""Grouped-query attention (Ainslie et al., arXiv 2305.13245) by its numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megagrpo.models.config_json import HfConfig, Rotary


@dataclass(frozen=True)
class GroupedQuery:
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
