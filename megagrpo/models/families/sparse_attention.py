"""DeepSeek-V3.2 and GLM-5: latent attention over the keys that a lightning indexer chooses.

The indexer is frozen: a choice of keys has no gradient, and a loss of its own (towards the
distribution of attention) would move the choice away from the engines'. GLM-5 freezes it in
reinforcement learning as well (arXiv 2602.15763).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from megagrpo.models.architecture import Architecture
from megagrpo.models.config_json import HfConfig
from megagrpo.models.families.deepseek_v3 import DeepseekV3
from megagrpo.models.family import TinySizes
from megagrpo.models.kinds.indexed.describe import LightningIndexer
from megagrpo.models.kinds.latent.describe import LatentAttention
from megagrpo.models.loading import Shard
from megagrpo.models.tensors import TensorSpec, layer_prefix

if TYPE_CHECKING:
    from megatron.core.transformer.multi_latent_attention import MLASelfAttention
    from torch import Tensor

_INDEXER_KEYS = ("index_n_heads", "index_head_dim", "index_topk")
# keys of config.json that change how keys are chosen, with the values that mean: as here
_PLAIN_CHOICE = {
    "index_topk_pattern": None,
    "index_kpool": 1,
    "index_k_norm_type": "layer",
    "index_init_tokens": 0,
    "index_local_tokens": 0,
}


class DeepseekV32(DeepseekV3):
    """DeepSeek-V3 with an indexer in every layer."""

    HF_CLASS = "DeepseekV32ForCausalLM"
    REQUIRED_KEYS = (*_INDEXER_KEYS, *DeepseekV3.REQUIRED_KEYS)
    # a smaller model chooses fewer keys, in every layer: shared choices have no padded batches
    SIZE_KEYS = DeepseekV3.SIZE_KEYS | {
        *_INDEXER_KEYS,
        *("index_topk_freq", "index_skip_topk_offset", "indexer_types", "mlp_layer_types"),
    }

    def own_refusals(self, hf: HfConfig) -> list[str]:
        problems = super().own_refusals(hf)
        problems += [
            f"{key} {hf[key]!r} is not supported: it chooses keys in another "
            f"way; supported: {value!r}"
            for key, value in _PLAIN_CHOICE.items()
            if hf.get(key) not in (None, value)
        ]
        indexer = LightningIndexer.read(hf)
        kinds = [
            "full" if indexer.source(index) == index else "shared"
            for index in range(hf["num_hidden_layers"])
        ]
        if hf.get("indexer_types") not in (None, kinds):
            problems.append(
                f"indexer_types is not what index_topk_freq {indexer.freq} and "
                f"index_skip_topk_offset {indexer.offset} give, by which Megatron-Core shares choices"
            )
        if hf["q_lora_rank"] is None:
            problems.append("q_lora_rank null is not supported: the indexer reads queries' latent")
        if hf["index_head_dim"] < hf["qk_rope_head_dim"]:
            problems.append(
                f"index_head_dim {hf['index_head_dim']} is less than qk_rope_head_dim "
                f"{hf['qk_rope_head_dim']}, the part of it that turns"
            )
        dense = hf["first_k_dense_replace"]
        kinds = hf.get("mlp_layer_types") or []
        if kinds and kinds != ["dense"] * dense + ["sparse"] * (hf["num_hidden_layers"] - dense):
            problems.append(
                f"mlp_layer_types must begin with first_k_dense_replace {dense} times 'dense', and "
                "have 'sparse' for every other layer"
            )
        return problems

    def attention(self, hf: HfConfig) -> LatentAttention:
        return LatentAttention.read(hf, LightningIndexer.read(hf))

    @staticmethod
    def load_attention(
        attention: MLASelfAttention,
        arch: Architecture,
        hf: Mapping[str, Tensor],
        prefix: str,
        shard: Shard,
    ) -> None:
        """Loads latent attention, and the indexer whole, if the layer has one."""
        DeepseekV3.load_attention(attention, arch, hf, prefix, shard)
        if (indexer := attention.core_attention.indexer) is not None:
            for name, parameter in indexer.named_parameters():
                parameter.copy_(hf[f"{prefix}indexer.{name}"])

    def layer_tensors(self, arch: Architecture, index: int) -> Iterator[TensorSpec]:
        """Yields a layer's tensors, the indexer's at the end."""
        yield from super().layer_tensors(arch, index)
        assert arch.indexer is not None
        if arch.indexer.source(index) == index:
            yield from _indexer_tensors(arch, layer_prefix(index) + "self_attn.indexer.")

    def tiny_options(self, sizes: TinySizes) -> dict[str, object]:
        """16 keys: samples of a certificate are longer, those of the smallest runs are not."""
        return {
            **super().tiny_options(sizes),
            "index_n_heads": 8,
            "index_head_dim": sizes.head_dim,
            "index_topk": 16,
        }


def dense_config(hf: HfConfig) -> dict[str, object]:
    """Returns config.json of the same model without its indexer, as a DeepSeek-V3: the same model
    for sequences of at most index_topk tokens."""
    kept = {
        key: value
        for key, value in hf.items()
        if not key.startswith("index") and key not in ("layer_types", "mlp_layer_types")
    }
    return kept | {"architectures": [DeepseekV3.HF_CLASS], "model_type": "deepseek_v3"}


def _indexer_tensors(arch: Architecture, prefix: str) -> Iterator[TensorSpec]:
    """Yields an indexer's tensors; engines compute with its norm in float32."""
    assert isinstance(arch.attention, LatentAttention)
    assert arch.attention.q_lora_rank is not None and arch.indexer is not None
    heads = arch.indexer.heads
    dim = arch.indexer.head_dim
    for name, shape in (
        ("wq_b", (heads * dim, arch.attention.q_lora_rank)),
        ("wk", (dim, arch.hidden_size)),
        ("weights_proj", (heads, arch.hidden_size)),
    ):
        yield TensorSpec(f"{prefix}{name}.weight", shape, "matrix", trained=False)
    norm = f"{prefix}k_norm."
    yield TensorSpec(norm + "weight", (dim,), "norm", dtype="float32", trained=False)
    yield TensorSpec(norm + "bias", (dim,), "bias", dtype="float32", trained=False)


class GlmMoeDsa(DeepseekV32):
    """GLM-5, 5.1 and 5.2: no groups of experts, no YaRN."""

    HF_CLASS = "GlmMoeDsaForCausalLM"

    def tiny_options(self, sizes: TinySizes) -> dict[str, object]:
        """As published: plain rotary embedding, in the indexer as in attention."""
        options = {**super().tiny_options(sizes), "n_group": 1, "topk_group": 1}
        del options["rope_scaling"]
        return options
