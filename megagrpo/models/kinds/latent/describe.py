"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) by its numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megagrpo.models.config_json import YARN_KEYS, HfConfig, Rotary
from megagrpo.models.costs import FP32, LayerCost, Share
from megagrpo.models.kinds.attention import Attention
from megagrpo.models.kinds.indexed.describe import LightningIndexer
from megagrpo.models.points import Row
from megagrpo.models.tensors import HfTensors, Kind, Shard, TensorSpec, layer_index

if TYPE_CHECKING:
    from megatron.core.transformer.multi_latent_attention import MLASelfAttention

    from megagrpo.config.actor import ActorConfig
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

    def tensors(self, hidden: int, prefix: str, norm: Kind) -> Iterator[TensorSpec]:
        """Yields projections and norms."""
        for name, _, shape, _ in self._weights(hidden):
            kind: Kind = "matrix" if len(shape) > 1 else "norm"
            yield TensorSpec(f"{prefix}{name}.weight", shape, kind)

    def index_tensors(self, hidden: int, prefix: str) -> Iterator[TensorSpec]:
        """Yields the indexer's tensors if the layer has one; prefix: of the layer."""
        index = layer_index(prefix)
        if self.indexer is not None and self.indexer.source(index) == index:
            inside = f"{prefix}{self.MODULE}.indexer."
            yield from self.indexer.tensors(hidden, self.q_lora_rank or 0, inside)

    def load(self, attention: MLASelfAttention, hf: HfTensors, shard: Shard) -> None:
        """Loads down projections whole and up projections by heads, which lie one after the other
        on both sides; the indexer whole, if the layer has one."""
        for name, module, _, dim in self._weights():
            weight = hf[name + ".weight"]
            own = weight if dim is None else shard.part(weight, dim)
            attention.get_submodule(module).weight.copy_(own)
        if self.indexer is not None:
            self.indexer.load(attention, hf)

    def _weights(self, hidden: int = 0) -> Iterator[tuple[str, str, tuple[int, ...], int | None]]:
        """Yields the names that files and Megatron have, shape, and the dimension that
        tensor-parallel ranks cut, None if each has all."""
        low, latent, heads = self.q_lora_rank, self.kv_lora_rank, self.heads
        queries = heads * self.head_dim
        if low is None:
            yield "q_proj", "linear_q_proj", (queries, hidden), 0
        else:
            yield "q_a_proj", "linear_q_down_proj", (low, hidden), None
            yield "q_a_layernorm", "q_layernorm", (low,), None
            yield "q_b_proj", "linear_q_up_proj", (queries, low), 0
        down = latent + self.rope_dim
        yield "kv_a_proj_with_mqa", "linear_kv_down_proj", (down, hidden), None
        yield "kv_a_layernorm", "kv_layernorm", (latent,), None
        up = heads * (self.nope_dim + self.v_dim)
        yield "kv_b_proj", "linear_kv_up_proj", (up, latent), 0
        yield "o_proj", "linear_proj", (hidden, heads * self.v_dim), 1

    def fields(self, actor: ActorConfig, kernels: Kernels) -> Fields:
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
        return ["mla_up_proj"] * scaled

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
        if indexer is None:
            return 0.0
        return 2.0 * indexer.heads * indexer.head_dim / indexer.freq / indexer.pool

    @property
    def absorbed_weights(self) -> int:
        # the second half of keys' and values' projection
        return self.heads * self.kv_lora_rank * (self.nope_dim + self.v_dim)

    def cost(self, at: Share) -> LayerCost:
        """Returns the cost of a layer's attention for a micro-batch."""
        p = at.parallel
        heads = self.heads / p.tp
        dim = self.head_dim
        queries = self.q_lora_rank or 0
        values = self.kv_lora_rank
        # down projections and their norms' outputs
        low = 2 * queries + 2 * values + self.rope_dim
        # queries, keys' and values' projection, queries and keys with their turned parts, values and
        # output as wide as keys: the kernel takes no narrower ones
        high = heads * (dim + (self.nope_dim + self.v_dim) + 4 * dim)
        # whole on every tensor-parallel rank
        down = at.hidden_size * (queries + values + self.rope_dim)
        up = heads * ((queries or at.hidden_size) * dim + values * (self.nope_dim + self.v_dim))
        out = heads * self.v_dim * at.hidden_size
        dense = LayerCost(
            kept=low * at.part * at.width + high * at.whole * at.width + heads * at.whole * FP32,
            transient=3 * heads * dim * at.whole * at.width + at.gathered,
            flops=2 * (down * at.part + (up + out) * at.whole),
            pair_flops=2 * heads * (dim + self.v_dim),
            sent={
                "tp": at.gathers(1) + (queries + values) * at.part * (p.tp - 1) * at.width,
                "cp": heads * (dim + self.v_dim) * at.whole * at.width * (p.cp - 1),
            },
        )
        if self.indexer is None:
            return dense
        return self.indexer.cost(self, at, dense)

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
