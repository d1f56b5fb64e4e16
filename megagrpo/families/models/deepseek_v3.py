"""DeepSeek-V3, R1, Kimi-K2 and Moonlight: multi-head latent attention, experts as in sigmoid_moe.py."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megagrpo.families.architecture import (
    COMMON_SIZE_KEYS,
    Architecture,
    LatentAttention,
    attention_bias_refusals,
    common_refusals,
    decoder_architecture,
    missing_keys,
)
from megagrpo.families.loading import RankPlace, Shard, load_norms
from megagrpo.families.models.sigmoid_moe import (
    REQUIRED_KEYS,
    feed_forward_tensors,
    load_feed_forward,
    router_refusals,
    tiny_moe_options,
    with_sigmoid_moe,
)
from megagrpo.families.models.sigmoid_moe import SIZE_KEYS as _MOE_SIZE_KEYS
from megagrpo.families.tensors import TensorSpec, layer_norms, layer_prefix
from megagrpo.families.tiny import TinySizes

if TYPE_CHECKING:
    from megatron.core.transformer.multi_latent_attention import MLASelfAttention
    from megatron.core.transformer.transformer_layer import TransformerLayer
    from torch import Tensor

HF_CLASS = "DeepseekV3ForCausalLM"
_MLA_KEYS = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
SIZE_KEYS = COMMON_SIZE_KEYS | _MOE_SIZE_KEYS | {*_MLA_KEYS}
_YARN_KEYS = (
    "factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
)
_READ_KEYS = {*_YARN_KEYS, "type", "rope_type", "rope_theta", "partial_rotary_factor"}


def refusals(hf: Mapping[str, Any]) -> list[str]:
    """Returns what of this config.json cannot be computed."""
    problems = missing_keys(hf, (*_MLA_KEYS, *REQUIRED_KEYS))
    if problems:
        return problems
    if not hf.get("rope_interleave", True):
        problems.append("rope_interleave false is not supported: rows of the projections would have to be permuted")
    if "moe_layer_freq" not in hf:
        problems.append('config.json lacks "moe_layer_freq": 1, which engines read; transformers 5 does not write it')
    heads, kv_heads = hf["num_attention_heads"], hf.get("num_key_value_heads", hf["num_attention_heads"])
    if heads != kv_heads:
        problems.append(f"num_key_value_heads {kv_heads} must be num_attention_heads {heads} in latent attention")
    common = common_refusals(hf, of_scaling=_yarn_refusals)
    return [*problems, *common, *attention_bias_refusals(hf), *router_refusals(hf)]


def _yarn_refusals(scaling: Mapping[str, Any]) -> list[str]:
    """Returns why a rotary scaling is not YaRN with every number given, which Megatron and transformers share."""
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind != "yarn":
        return [f"rope scaling {kind!r} is not supported by this family; supported: none, or 'yarn'"]
    missing = [key for key in _YARN_KEYS if not scaling.get(key)]
    others = sorted(key for key in scaling.keys() - _READ_KEYS if scaling[key] is not None)
    problems = [f"rope scaling 'yarn' lacks {', '.join(missing)}, or has 0 there"] if missing else []
    return problems + ([f"rope scaling 'yarn' with {', '.join(others)} is not supported"] if others else [])


def architecture(hf: Mapping[str, Any]) -> Architecture:
    """Reads a config.json that has no refusals; its head_dim says nothing here."""
    mla = LatentAttention(
        q_lora_rank=hf["q_lora_rank"],
        kv_lora_rank=hf["kv_lora_rank"],
        nope_dim=hf["qk_nope_head_dim"],
        rope_dim=hf["qk_rope_head_dim"],
        v_dim=hf["v_head_dim"],
    )
    return with_sigmoid_moe(replace(decoder_architecture(hf), mla=mla, head_dim=mla.nope_dim + mla.rope_dim), hf)


def load_layer(layer: TransformerLayer, arch: Architecture, hf: Mapping[str, Tensor], place: RankPlace) -> None:
    """Loads a layer with latent attention, and an MLP or experts."""
    prefix = layer_prefix(layer.layer_number - 1)
    load_norms(layer, hf, prefix)
    _load_latent_attention(layer.self_attention, arch, hf, prefix + "self_attn.", place.tensor)
    load_feed_forward(layer, arch, hf, place)


def _load_latent_attention(
    attention: MLASelfAttention, arch: Architecture, hf: Mapping[str, Tensor], prefix: str, shard: Shard
) -> None:
    """Loads down projections whole and up projections by heads, which lie one after the other on both sides."""
    assert arch.mla is not None
    if arch.mla.q_lora_rank is None:
        attention.linear_q_proj.weight.copy_(shard.rows(hf[prefix + "q_proj.weight"]))
    else:
        attention.linear_q_down_proj.weight.copy_(hf[prefix + "q_a_proj.weight"])
        attention.q_layernorm.weight.copy_(hf[prefix + "q_a_layernorm.weight"])
        attention.linear_q_up_proj.weight.copy_(shard.rows(hf[prefix + "q_b_proj.weight"]))
    attention.linear_kv_down_proj.weight.copy_(hf[prefix + "kv_a_proj_with_mqa.weight"])
    attention.kv_layernorm.weight.copy_(hf[prefix + "kv_a_layernorm.weight"])
    attention.linear_kv_up_proj.weight.copy_(shard.rows(hf[prefix + "kv_b_proj.weight"]))
    attention.linear_proj.weight.copy_(shard.columns(hf[prefix + "o_proj.weight"]))


def layer_tensors(arch: Architecture, index: int) -> Iterator[TensorSpec]:
    """Yields the tensors of a layer."""
    mla, hidden, heads = arch.mla, arch.hidden_size, arch.num_heads
    assert mla is not None
    prefix = layer_prefix(index) + "self_attn."
    queries = heads * (mla.nope_dim + mla.rope_dim)
    if mla.q_lora_rank is None:
        yield TensorSpec(prefix + "q_proj.weight", (queries, hidden), "matrix")
    else:
        yield TensorSpec(prefix + "q_a_proj.weight", (mla.q_lora_rank, hidden), "matrix")
        yield TensorSpec(prefix + "q_a_layernorm.weight", (mla.q_lora_rank,), "norm")
        yield TensorSpec(prefix + "q_b_proj.weight", (queries, mla.q_lora_rank), "matrix")
    yield TensorSpec(prefix + "kv_a_proj_with_mqa.weight", (mla.kv_lora_rank + mla.rope_dim, hidden), "matrix")
    yield TensorSpec(prefix + "kv_a_layernorm.weight", (mla.kv_lora_rank,), "norm")
    yield TensorSpec(prefix + "kv_b_proj.weight", (heads * (mla.nope_dim + mla.v_dim), mla.kv_lora_rank), "matrix")
    yield TensorSpec(prefix + "o_proj.weight", (hidden, heads * mla.v_dim), "matrix")
    yield from layer_norms(arch, index)
    yield from feed_forward_tensors(arch, index)


def tiny_options(sizes: TinySizes) -> dict[str, Any]:
    """Returns the keys of a tiny model's config.json that add to or replace the common ones.

    Kimi-K2 has no groups of experts. Engines require moe_layer_freq, topk_method and scoring_func.
    """
    rope = sizes.head_dim // 2
    return {
        "num_key_value_heads": sizes.num_heads,
        "head_dim": rope,  # as transformers writes it
        "q_lora_rank": sizes.hidden_size // 4,
        "kv_lora_rank": sizes.hidden_size // 2,
        "qk_nope_head_dim": sizes.head_dim,
        "qk_rope_head_dim": rope,
        "v_head_dim": sizes.head_dim,
        "rope_scaling": {
            "type": "yarn",
            "factor": 8.0,
            "original_max_position_embeddings": 256,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        "moe_layer_freq": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        **tiny_moe_options(sizes, groups=sizes.family != "kimi_k2"),
    }
