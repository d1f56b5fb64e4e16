"""The indexer of DeepSeek sparse attention (DeepSeek-V3.2, arXiv 2512.02556, 2.1) by its numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megagrpo.models.config_json import HfConfig
from megagrpo.models.costs import FP32, LayerCost, Share
from megagrpo.models.tensors import HfTensors, TensorSpec

if TYPE_CHECKING:
    from megatron.core.transformer.multi_latent_attention import MLASelfAttention

    from megagrpo.config.actor import ActorConfig
    from megagrpo.models.fields import Fields, Kernels
    from megagrpo.models.kinds.latent.describe import LatentAttention

BLOCK = 1024  # queries whose scores torch has in memory at once
_SCALED = 128  # numbers of an engine's key with one scale
_SCORED_ROWS = 8192  # queries that Megatron's sparse attention scores at a time


@dataclass(frozen=True)
class LightningIndexer:
    """Holds the sizes of what chooses keys in latent attention."""

    heads: int
    head_dim: int
    topk: int  # keys that each query sees; sequences of as many tokens are dense
    in_pairs: bool  # its rotary embedding turns neighbors; else, as usual, halves
    # Layers from `offset` on choose every `freq`-th time, and share that choice until the next
    # (IndexShare, arXiv 2603.12201); both count from 1.
    freq: int = 1
    offset: int = 1
    pool: int = 1  # keys that are chosen together, by a weighted sum of them

    @classmethod
    def read(cls, hf: HfConfig) -> LightningIndexer:
        """Reads a config.json that has its keys."""
        freq = hf.get("index_topk_freq") or 1
        return cls(
            heads=hf["index_n_heads"],
            head_dim=hf["index_head_dim"],
            topk=hf["index_topk"],
            in_pairs=bool(hf.get("indexer_rope_interleave")),
            freq=freq,
            # transformers' and SGLang's default; without sharing nothing depends on it
            offset=(hf.get("index_skip_topk_offset") or 2) if freq > 1 else 1,
            pool=hf.get("index_kpool") or 1,
        )

    def source(self, index: int) -> int:
        """Returns the layer, counted from 0, whose choice layer `index` sees: itself, or one before."""
        return index - max(index + 1 - self.offset, 0) % self.freq

    def tensors(self, hidden: int, queries: int, prefix: str) -> Iterator[TensorSpec]:
        """Yields the tensors of a layer that chooses, from a queries' latent of this width; engines compute
        with its norm in float32."""
        for name, rows, columns in (
            ("wq_b", self.heads * self.head_dim, queries),
            ("wk", self.head_dim, hidden),
            ("weights_proj", self.heads, hidden),
        ):
            yield TensorSpec(f"{prefix}{name}.weight", (rows, columns), "matrix", trained=False)
        norm = prefix + "k_norm."
        size = (self.head_dim,)
        yield TensorSpec(norm + "weight", size, "norm", dtype="float32", trained=False)
        yield TensorSpec(norm + "bias", size, "bias", dtype="float32", trained=False)
        if self.pool > 1:
            gate, places = (prefix + "index_kpool_compress_" + name for name in ("gate", "ape"))
            yield TensorSpec(gate, (self.head_dim, hidden), "matrix", trained=False)
            shape = (self.pool, self.head_dim)
            yield TensorSpec(places, shape, "matrix", dtype="float32", trained=False)

    def load(self, attention: MLASelfAttention, hf: HfTensors) -> None:
        """Loads the indexer whole, if the layer has one."""
        if (indexer := attention.core_attention.indexer) is not None:
            for name, parameter in indexer.named_parameters():
                parameter.copy_(hf["indexer." + name])

    def fields(self, actor: ActorConfig, kernels: Kernels) -> Fields:
        """Returns the fields of sparse attention; without dsa_indexer_loss_coeff its indexer is not
        trained.

        Without kernels Megatron's core would hold float32 scores of every query and key.
        """
        fields: Fields = {
            "experimental_attention_variant": "dsa",
            "dsa_indexer_n_heads": self.heads,
            "dsa_indexer_head_dim": self.head_dim,
            "dsa_indexer_topk": self.topk,
            "dsa_indexer_rope_interleaved": self.in_pairs,
            "dsa_indexer_topk_freq": self.freq,
            "dsa_indexer_skip_topk_offset": self.offset,
            "qk_layernorm": True,  # absorbed attention has norms of latents only if it says so
        }
        if self.freq > 1:  # some layers have no indexer; checkpoints would take all for alike
            fields["hetereogenous_dist_checkpoint"] = True
        if kernels.cuda and kernels.transformer_engine and self.pool == 1:
            fields["dsa_kernel_backend"] = "tilelang"
        if actor.parallel.cp > 1:  # the only exchange of its keys that Megatron has
            fields["cp_comm_type"] = "allgather"
        return fields

    def key_bytes(self, num_layers: int) -> int:
        """Returns the bytes of one token in one rank's cache that it reads: a key in FP8 with its
        scales, for each layer that chooses (SGLang's mem_cache/memory_pool.py,
        DSATokenToKVPool)."""
        choosing = sum(self.source(index) == index for index in range(num_layers))
        return choosing * (self.head_dim + self.head_dim // _SCALED * FP32)

    def cost(self, attention: LatentAttention, at: Share, dense: LayerCost) -> LayerCost:
        """Returns the cost with an indexer, which every tensor-parallel rank has whole, and of absorbed
        attention: with one key for all heads, the latent, whose first part is the value. Keys in
        pools are masked, block by block.

        dense: the cost without.
        """
        p = at.parallel
        heads = attention.heads / p.tp
        key = attention.kv_lora_rank + attention.rope_dim
        queries = attention.q_lora_rank or 0
        index = self.heads * self.head_dim
        projections = queries * index + at.hidden_size * (self.head_dim + self.heads)
        asked = index * at.part * (p.tp - 1) * at.width
        if self.pool > 1:  # scores of pools for a block of queries
            scores = min(at.whole, BLOCK) * at.whole * p.cp * self.heads / self.pool * FP32
            return dense.then(
                LayerCost(
                    kept=0.0,
                    transient=dense.transient + scores,
                    flops=2 * (projections + at.hidden_size * self.head_dim) * at.part,
                    sent={"tp": asked, "cp": 2 * self.head_dim * at.whole * at.width * (p.cp - 1)},
                    pair_flops=2 * index / self.pool,
                )
            )
        # queries before and after their turn, latent output, values; without keys and values of heads
        expanded = (attention.nope_dim + attention.v_dim) + 4 * attention.head_dim
        absorbed = 2 * key + attention.kv_lora_rank + attention.v_dim - expanded
        return LayerCost(
            # numbers of keys: int32
            kept=dense.kept + (heads * absorbed * at.width + self.topk * FP32) * at.whole,
            transient=dense.transient + min(at.whole, _SCORED_ROWS) * at.whole * p.cp * FP32,
            flops=dense.flops + 2 * projections * at.part / self.freq,
            pair_flops=2 * index / self.freq,  # the mean of layers that share a choice
            sent={
                "tp": dense.sent["tp"] + asked,
                "cp": (key + self.head_dim) * at.whole * at.width * (p.cp - 1),
            },
            chosen_flops=2 * heads * (key + attention.kv_lora_rank),
        )
