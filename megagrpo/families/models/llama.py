"""Llama 2 and 3: grouped-query attention, a gated MLP, optionally Llama 3's rotary scaling."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megagrpo.families.architecture import (
    COMMON_SIZE_KEYS,
    Architecture,
    attention_bias_refusals,
    common_refusals,
    decoder_architecture,
    missing_keys,
)
from megagrpo.families.loading import load_dense_layer
from megagrpo.families.tensors import dense_layer_tensors
from megagrpo.families.tiny import TinySizes

HF_CLASS = "LlamaForCausalLM"
SIZE_KEYS = COMMON_SIZE_KEYS
load_layer = load_dense_layer
layer_tensors = dense_layer_tensors


def refusals(hf: Mapping[str, Any]) -> list[str]:
    """Returns what of this config.json cannot be computed."""
    return missing_keys(hf) or [*common_refusals(hf), *attention_bias_refusals(hf)]


def architecture(hf: Mapping[str, Any]) -> Architecture:
    """Reads a config.json that has no refusals."""
    return decoder_architecture(hf)


def tiny_options(sizes: TinySizes) -> dict[str, Any]:
    """Returns the additional keys of a tiny model's config.json."""
    return {}
