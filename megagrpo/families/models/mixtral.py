"""Mixtral: Llama's attention, and a softmax router over experts in every layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megagrpo.families.architecture import (
    COMMON_SIZE_KEYS,
    Architecture,
    attention_bias_refusals,
    common_refusals,
    decoder_architecture,
    missing_keys,
)
from megagrpo.families.loading import RankPlace, load_attention, load_experts, load_norms
from megagrpo.families.tensors import (
    GatedNames,
    TensorSpec,
    attention_tensors,
    layer_prefix,
    mlp_tensors,
    router_tensor,
)
from megagrpo.families.tiny import TinySizes

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_layer import TransformerLayer
    from torch import Tensor

HF_CLASS = "MixtralForCausalLM"
SIZE_KEYS = COMMON_SIZE_KEYS | {"num_local_experts", "num_experts_per_tok"}
_MOE = "block_sparse_moe."
_NAMES = GatedNames(gate="w1", up="w3", down="w2")


def refusals(hf: Mapping[str, Any]) -> list[str]:
    """Returns what of this config.json cannot be computed."""
    problems = missing_keys(hf, ("num_local_experts", "num_experts_per_tok"))
    if problems:
        return problems
    if hf.get("sliding_window") is not None:
        problems.append(
            f"sliding_window {hf['sliding_window']} is not supported: attention here sees every earlier token"
        )
    return [*problems, *common_refusals(hf), *attention_bias_refusals(hf)]


def architecture(hf: Mapping[str, Any]) -> Architecture:
    """Reads a config.json that has no refusals; its intermediate_size is that of one expert."""
    return replace(
        decoder_architecture(hf),
        num_experts=hf["num_local_experts"],
        experts_per_token=hf["num_experts_per_tok"],
        expert_ffn_size=hf["intermediate_size"],
    )


def load_layer(layer: TransformerLayer, arch: Architecture, hf: Mapping[str, Tensor], place: RankPlace) -> None:
    """Loads a layer with grouped-query attention, a router and this rank's experts."""
    prefix = layer_prefix(layer.layer_number - 1)
    load_norms(layer, hf, prefix)
    load_attention(layer.self_attention, arch, hf, prefix + "self_attn.", place.tensor)
    layer.mlp.router.weight.copy_(hf[prefix + _MOE + "gate.weight"])
    load_experts(layer.mlp, hf, prefix + _MOE + "experts.", place.expert, _NAMES)


def layer_tensors(arch: Architecture, index: int) -> Iterator[TensorSpec]:
    """Yields the tensors of a layer."""
    prefix = layer_prefix(index) + _MOE
    yield from attention_tensors(arch, index)
    yield router_tensor(arch, prefix)
    for expert in range(arch.num_experts):
        yield from mlp_tensors(arch.hidden_size, arch.expert_ffn_size, f"{prefix}experts.{expert}.", True, _NAMES)


def tiny_options(sizes: TinySizes) -> dict[str, Any]:
    """Returns the keys of a tiny model's config.json that add to or replace the common ones."""
    return {
        "num_local_experts": sizes.num_experts,
        "num_experts_per_tok": sizes.experts_per_token,
        "intermediate_size": sizes.expert_ffn_size,
        "sliding_window": None,
        "router_aux_loss_coef": 0.0,
        "router_jitter_noise": 0.0,
    }
