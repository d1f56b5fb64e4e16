"""Qwen3, mixture of experts: Qwen3's attention, and a softmax router over experts in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megagrpo.families.architecture import (
    COMMON_SIZE_KEYS,
    Architecture,
    attention_bias_refusals,
    common_refusals,
    decoder_architecture,
    missing_keys,
)
from megagrpo.families.loading import load_moe_layer
from megagrpo.families.tensors import moe_layer_tensors
from megagrpo.families.tiny import TinySizes

HF_CLASS = "Qwen3MoeForCausalLM"
SIZE_KEYS = COMMON_SIZE_KEYS | {"num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size"}
load_layer = load_moe_layer
layer_tensors = moe_layer_tensors


def refusals(hf: Mapping[str, Any]) -> list[str]:
    """Returns what of this config.json cannot be computed."""
    problems = missing_keys(hf, ("num_experts_per_tok", "moe_intermediate_size"))
    if not _num_experts(hf):
        problems.append("config.json lacks num_experts")
    if problems:
        return problems
    if hf.get("mlp_only_layers") or hf.get("decoder_sparse_step", 1) != 1:
        problems.append(
            "mlp_only_layers and decoder_sparse_step put layers without experts between MoE layers, "
            "which is not supported"
        )
    return [*problems, *common_refusals(hf), *attention_bias_refusals(hf)]


def architecture(hf: Mapping[str, Any]) -> Architecture:
    """Reads a config.json that has no refusals."""
    return replace(
        decoder_architecture(hf),
        qk_norm=True,
        num_experts=_num_experts(hf),
        experts_per_token=hf["num_experts_per_tok"],
        expert_ffn_size=hf["moe_intermediate_size"],
        norm_topk_prob=bool(hf.get("norm_topk_prob", False)),
    )


def tiny_options(sizes: TinySizes) -> dict[str, Any]:
    """Returns the additional keys of a tiny model's config.json."""
    return {
        "num_experts": sizes.num_experts,
        "num_experts_per_tok": sizes.experts_per_token,
        "moe_intermediate_size": sizes.expert_ffn_size,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "router_aux_loss_coef": 0.0,
    }


def _num_experts(hf: Mapping[str, Any]) -> int:
    return hf.get("num_experts") or hf.get("num_local_experts") or 0  # transformers 5 saves the second spelling
