"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) by its numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megagrpo.models.config_json import YARN_KEYS, HfConfig, Rotary
from megagrpo.models.costs import LayerCost, Share
from megagrpo.models.kinds.attention import Attention
from megagrpo.models.kinds.indexed.describe import LightningIndexer
from megagrpo.models.kinds.latent import cost
from megagrpo.models.points import Row
from megagrpo.models.tensors import Shard, TensorSpec

if TYPE_CHECKING:
    from megatron.core.transformer.multi_latent_attention import MLASelfAttention
    from torch import Tensor

    from megagrpo.config.actor import ActorConfig
    from megagrpo.models.architecture import Architecture
    from megagrpo.models.fields import Fields, Kernels


@dataclass(frozen=True)
class LatentAttention(Attention):
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

    def tensors(self, arch: Architecture, prefix: str) -> Iterator[TensorSpec]:
        """Yields projections and norms."""
        hidden, queries, latent = arch.hidden_size, self.heads * self.head_dim, self.kv_lora_rank
        if self.q_lora_rank is None:
            yield TensorSpec(prefix + "q_proj.weight", (queries, hidden), "matrix")
        else:
            yield TensorSpec(prefix + "q_a_proj.weight", (self.q_lora_rank, hidden), "matrix")
            yield TensorSpec(prefix + "q_a_layernorm.weight", (self.q_lora_rank,), "norm")
            yield TensorSpec(prefix + "q_b_proj.weight", (queries, self.q_lora_rank), "matrix")
        down = (latent + self.rope_dim, hidden)
        yield TensorSpec(prefix + "kv_a_proj_with_mqa.weight", down, "matrix")
        yield TensorSpec(prefix + "kv_a_layernorm.weight", (latent,), "norm")
        up = (self.heads * (self.nope_dim + self.v_dim), latent)
        yield TensorSpec(prefix + "kv_b_proj.weight", up, "matrix")
        yield TensorSpec(prefix + "o_proj.weight", (hidden, self.heads * self.v_dim), "matrix")

    def load(
        self, attention: MLASelfAttention, hf: Mapping[str, Tensor], prefix: str, shard: Shard
    ) -> None:
        """Loads down projections whole and up projections by heads, which lie one after the other
        on both sides; the indexer whole, if the layer has one."""
        if self.q_lora_rank is None:
            attention.linear_q_proj.weight.copy_(shard.rows(hf[prefix + "q_proj.weight"]))
        else:
            attention.linear_q_down_proj.weight.copy_(hf[prefix + "q_a_proj.weight"])
            attention.q_layernorm.weight.copy_(hf[prefix + "q_a_layernorm.weight"])
            attention.linear_q_up_proj.weight.copy_(shard.rows(hf[prefix + "q_b_proj.weight"]))
        attention.linear_kv_down_proj.weight.copy_(hf[prefix + "kv_a_proj_with_mqa.weight"])
        attention.kv_layernorm.weight.copy_(hf[prefix + "kv_a_layernorm.weight"])
        attention.linear_kv_up_proj.weight.copy_(shard.rows(hf[prefix + "kv_b_proj.weight"]))
        attention.linear_proj.weight.copy_(shard.columns(hf[prefix + "o_proj.weight"]))
        if self.indexer is not None:
            self.indexer.load(attention, hf, prefix)

    def fields(self, arch: Architecture, actor: ActorConfig, kernels: Kernels) -> Fields:
        """Returns the fields of Megatron's MLATransformerConfig."""
        scaling = self.rotary.scaling
        yarn = {key: scaling[key] for key in YARN_KEYS if key != "factor"} if scaling else {}
        indexer = self.indexer.fields(actor, kernels) if self.indexer else {}
        return {
            "num_attention_heads": self.heads,
            "num_query_groups": self.heads,
            "kv_channels": self.head_dim,
            "q_lora_rank": self.q_lora_rank,
            "kv_lora_rank": self.kv_lora_rank,
            "qk_head_dim": self.nope_dim,
            "qk_pos_emb_head_dim": self.rope_dim,
            "v_head_dim": self.v_dim,
            "rotary_base": self.rotary.theta,
            "rope_type": "yarn" if scaling else "rope",
            # Megatron's default would scale the softmax without YaRN, too
            "rotary_scaling_factor": scaling["factor"] if scaling else 1.0,
            **yarn,
            **indexer,
        }

    def recomputed(self, engine: bool, scaled: bool) -> list[str]:
        return ["mla_up_proj"] if scaled else []

    @property
    def pair_flops(self) -> float:
        """Returns the FLOPs of a query with one key: score and sum."""
        return 2.0 * self.heads * (self.head_dim + self.v_dim)

    @property
    def decode_pair_flops(self) -> float:
        """Returns the same in an engine, which multiplies with the latent itself."""
        return 2.0 * self.heads * (2 * self.kv_lora_rank + self.rope_dim)

    @property
    def most_keys(self) -> float:
        return math.inf if self.indexer is None else self.indexer.topk

    @property
    def index_flops(self) -> float:
        # the mean of layers that share a choice
        indexer = self.indexer
        return 2.0 * indexer.heads * indexer.head_dim / indexer.freq if indexer else 0.0

    @property
    def absorbed_weights(self) -> int:
        # the second half of keys' and values' projection
        return self.heads * self.kv_lora_rank * (self.nope_dim + self.v_dim)

    def cost(self, at: Share) -> LayerCost:
        """Returns the cost of a layer's attention for a micro-batch."""
        return cost.layer(self, at)

    def cached_values(self, ranks: int) -> int:
        """Counts the values of one token in one rank's cache: each has the whole latent."""
        return self.kv_lora_rank + self.rope_dim

    def index_bytes(self, num_layers: int) -> int:
        return 0 if self.indexer is None else self.indexer.key_bytes(num_layers)

    def inner_points(self) -> list[Row]:
        says = "normed latent of"
        queries: Row = ("q_latent", f"{says} queries", "q_a_layernorm", "q_layernorm", "whole")
        return [
            *([] if self.q_lora_rank is None else [queries]),
            ("kv_latent", f"{says} keys and values", "kv_a_layernorm", "kv_layernorm", "whole"),
        ]
