"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) by its numbers."""

from __future__ import annotations

from dataclasses import dataclass

from megagrpo.models.config_json import HfConfig, Rotary
from megagrpo.models.kinds.indexed.describe import LightningIndexer


@dataclass(frozen=True)
class LatentAttention:
    """Holds the widths of attention whose keys and values are computed from a latent; of the heads:
    of one each."""

    heads: int
    q_lora_rank: int | None  # None: queries are one projection
    kv_lora_rank: int  # of the latent that keys and values are computed from
    nope_dim: int  # of queries and keys without a position
    rope_dim: int  # of queries and keys with one; all key heads share it
    v_dim: int
    rotary: Rotary
    indexer: LightningIndexer | None = None  # None: a query sees every key before it

    @classmethod
    def read(cls, hf: HfConfig, indexer: LightningIndexer | None = None) -> LatentAttention:
        """Reads a config.json, in which head_dim says nothing."""
        return cls(
            heads=hf["num_attention_heads"],
            q_lora_rank=hf["q_lora_rank"],
            kv_lora_rank=hf["kv_lora_rank"],
            nope_dim=hf["qk_nope_head_dim"],
            rope_dim=hf["qk_rope_head_dim"],
            v_dim=hf["v_head_dim"],
            rotary=Rotary.read(hf),
            indexer=indexer,
        )

    @property
    def kv_heads(self) -> int:
        """Counts the heads of keys and values: as many as of queries."""
        return self.heads

    @property
    def head_dim(self) -> int:
        """Returns the width of a head of queries."""
        return self.nope_dim + self.rope_dim
