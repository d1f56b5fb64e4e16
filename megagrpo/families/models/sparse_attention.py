"""DeepSeek-V3.2 and GLM-5: latent attention over the keys that a lightning indexer chooses.

The indexer is frozen: a choice of keys has no gradient, and a loss of its own (towards the
distribution of attention) would move the choice away from the engines'. GLM-5 freezes it in
reinforcement learning as well (arXiv 2602.15763).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from megagrpo.families.architecture import Architecture, HfConfig, LightningIndexer
from megagrpo.families.family import TinySizes
from megagrpo.families.loading import Shard
from megagrpo.families.models.deepseek_v3 import DeepseekV3
from megagrpo.families.tensors import TensorSpec

if TYPE_CHECKING:
    from megatron.core.transformer.multi_latent_attention import MLASelfAttention
    from torch import Tensor

_INDEXER_KEYS = ("index_n_heads", "index_head_dim", "index_topk")
# keys of config.json that change how keys are chosen, with the values that mean: as here
_ONE_CHOICE_A_LAYER = {
    "index_topk_freq": 1,
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
    # a smaller model has fewer sizes, and chooses as many or fewer keys
    SIZE_KEYS = DeepseekV3.SIZE_KEYS | {*_INDEXER_KEYS, "mlp_layer_types", "indexer_types"}
    FP8_REFUSAL = "SGLang keeps part of the indexer in bfloat16, which no test has published"

    def own_refusals(self, hf: HfConfig) -> list[str]:
        problems = super().own_refusals(hf)
        problems += [
            f"{key} {hf[key]!r} is not supported: every layer chooses {hf['index_topk']} keys by an "
            f"indexer of its own; supported: {value!r}"
            for key, value in _ONE_CHOICE_A_LAYER.items()
            if hf.get(key) not in (None, value)
        ]
        if "shared" in (hf.get("indexer_types") or ()):
            problems.append(
                "indexer_types has 'shared' layers, which see the keys of an earlier layer "
                "(GLM-5.2); supported: 'full' only (GLM-5, GLM-5.1)"
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

    def architecture(self, hf: HfConfig) -> Architecture:
        """Reads a config.json that has no refusals."""
        indexer = LightningIndexer(
            heads=hf["index_n_heads"],
            head_dim=hf["index_head_dim"],
            topk=hf["index_topk"],
            in_pairs=bool(hf.get("indexer_rope_interleave")),
        )
        return replace(super().architecture(hf), indexer=indexer)

    @staticmethod
    def load_attention(
        attention: MLASelfAttention,
        arch: Architecture,
        hf: Mapping[str, Tensor],
        prefix: str,
        shard: Shard,
    ) -> None:
        """Loads latent attention, and the indexer whole."""
        DeepseekV3.load_attention(attention, arch, hf, prefix, shard)
        indexer = dict(attention.core_attention.indexer.named_parameters())
        for spec in _indexer_tensors(arch, ""):
            indexer[spec.name].copy_(hf[f"{prefix}indexer.{spec.name}"])

    @staticmethod
    def attention_tensors(arch: Architecture, prefix: str) -> Iterator[TensorSpec]:
        """Yields the tensors of latent attention and of the indexer."""
        yield from DeepseekV3.attention_tensors(arch, prefix)
        yield from _indexer_tensors(arch, prefix + "indexer.")

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
    assert arch.mla is not None and arch.mla.q_lora_rank is not None and arch.indexer is not None
    heads = arch.indexer.heads
    dim = arch.indexer.head_dim
    for name, shape in (
        ("wq_b", (heads * dim, arch.mla.q_lora_rank)),
        ("wk", (dim, arch.hidden_size)),
        ("weights_proj", (heads, arch.hidden_size)),
    ):
        yield TensorSpec(f"{prefix}{name}.weight", shape, "matrix", trained=False)
    norm = f"{prefix}k_norm."
    yield TensorSpec(norm + "weight", (dim,), "norm", dtype="float32", trained=False)
    yield TensorSpec(norm + "bias", (dim,), "bias", dtype="float32", trained=False)


class GlmMoeDsa(DeepseekV32):
    """GLM-5 and GLM-5.1: no groups of experts, no YaRN."""

    HF_CLASS = "GlmMoeDsaForCausalLM"

    def tiny_options(self, sizes: TinySizes) -> dict[str, object]:
        """As published: plain rotary embedding, in the indexer as in attention."""
        options = {**super().tiny_options(sizes), "n_group": 1, "topk_group": 1}
        del options["rope_scaling"]
        return options
