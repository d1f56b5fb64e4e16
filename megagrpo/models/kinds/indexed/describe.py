"""The indexer of DeepSeek sparse attention (DeepSeek-V3.2, arXiv 2512.02556, 2.1) by its numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megagrpo.models.config_json import HfConfig
from megagrpo.models.costs import FP32
from megagrpo.models.tensors import TensorSpec

if TYPE_CHECKING:
    from megatron.core.transformer.multi_latent_attention import MLASelfAttention
    from torch import Tensor

    from megagrpo.config.actor import ActorConfig
    from megagrpo.models.architecture import Architecture
    from megagrpo.models.fields import Fields, Kernels


_SCALED = 128  # numbers of an engine's key with one scale


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
        )

    def source(self, index: int) -> int:
        """Returns the layer, counted from 0, whose choice layer `index` sees: itself, or one before."""
        return index - max(index + 1 - self.offset, 0) % self.freq

    def tensors(self, arch: Architecture, prefix: str) -> Iterator[TensorSpec]:
        """Yields the tensors of a layer that chooses; engines compute with its norm in float32."""
        hidden = arch.hidden_size
        assert arch.latent is not None and arch.latent.q_lora_rank is not None
        for name, rows, columns in (
            ("wq_b", self.heads * self.head_dim, arch.latent.q_lora_rank),
            ("wk", self.head_dim, hidden),
            ("weights_proj", self.heads, hidden),
        ):
            yield TensorSpec(f"{prefix}{name}.weight", (rows, columns), "matrix", trained=False)
        norm = prefix + "k_norm."
        size = (self.head_dim,)
        yield TensorSpec(norm + "weight", size, "norm", dtype="float32", trained=False)
        yield TensorSpec(norm + "bias", size, "bias", dtype="float32", trained=False)

    def load(self, attention: MLASelfAttention, hf: Mapping[str, Tensor], prefix: str) -> None:
        """Loads the indexer whole, if the layer has one."""
        if (indexer := attention.core_attention.indexer) is not None:
            for name, parameter in indexer.named_parameters():
                parameter.copy_(hf[f"{prefix}indexer.{name}"])

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
        if kernels.cuda and kernels.transformer_engine:
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
