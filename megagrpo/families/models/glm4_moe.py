"""GLM-4.5, Air and GLM-4.6: grouped-query attention with partial rotary embedding, DeepSeek-V3's experts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megagrpo.families.architecture import (
    COMMON_SIZE_KEYS,
    Architecture,
    common_refusals,
    decoder_architecture,
    every_scaling_refused,
    missing_keys,
    rotary_fraction,
)
from megagrpo.families.loading import RankPlace, load_attention, load_norms
from megagrpo.families.models.sigmoid_moe import (
    REQUIRED_KEYS,
    feed_forward_tensors,
    load_feed_forward,
    router_refusals,
    tiny_moe_options,
    with_sigmoid_moe,
)
from megagrpo.families.models.sigmoid_moe import SIZE_KEYS as _MOE_SIZE_KEYS
from megagrpo.families.tensors import TensorSpec, attention_tensors, layer_prefix
from megagrpo.families.tiny import TinySizes

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_layer import TransformerLayer
    from torch import Tensor

HF_CLASS = "Glm4MoeForCausalLM"
SIZE_KEYS = COMMON_SIZE_KEYS | _MOE_SIZE_KEYS
_ROTARY_FRACTION = 0.5  # of transformers' Glm4MoeConfig, where config.json does not say


def refusals(hf: Mapping[str, Any]) -> list[str]:
    """Returns what of this config.json cannot be computed."""
    problems = missing_keys(hf, REQUIRED_KEYS)
    if problems:
        return problems
    arch = decoder_architecture(hf)
    turning = arch.head_dim * rotary_fraction(hf, _ROTARY_FRACTION)
    if turning != int(turning) or int(turning) % 2:
        problems.append(f"partial_rotary_factor turns {turning:g} of head_dim {arch.head_dim}; rotary turns pairs")
    common = common_refusals(hf, of_scaling=every_scaling_refused, partial_rotary=True)
    return [*problems, *common, *router_refusals(hf)]


def architecture(hf: Mapping[str, Any]) -> Architecture:
    """Reads a config.json that has no refusals; attention_bias is of queries, keys and values alone."""
    attention = replace(
        decoder_architecture(hf),
        qkv_bias=bool(hf.get("attention_bias")),
        qk_norm=bool(hf.get("use_qk_norm", False)),
        rotary_fraction=rotary_fraction(hf, _ROTARY_FRACTION),
    )
    return with_sigmoid_moe(attention, hf)


def load_layer(layer: TransformerLayer, arch: Architecture, hf: Mapping[str, Tensor], place: RankPlace) -> None:
    """Loads a layer with grouped-query attention, and an MLP or experts."""
    prefix = layer_prefix(layer.layer_number - 1)
    load_norms(layer, hf, prefix)
    load_attention(layer.self_attention, arch, hf, prefix + "self_attn.", place.tensor)
    load_feed_forward(layer, arch, hf, place)


def layer_tensors(arch: Architecture, index: int) -> Iterator[TensorSpec]:
    """Yields the tensors of a layer."""
    yield from attention_tensors(arch, index)
    yield from feed_forward_tensors(arch, index)


def tiny_options(sizes: TinySizes) -> dict[str, Any]:
    """Returns the keys of a tiny model's config.json that add to or replace the common ones."""
    moe = tiny_moe_options(sizes, groups=False)
    return {"attention_bias": True, "use_qk_norm": True, "partial_rotary_factor": _ROTARY_FRACTION, **moe}
