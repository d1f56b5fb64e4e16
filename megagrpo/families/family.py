"""The description of a family: Llama's way, and what a subclass in models/ says or does differently."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar

from megagrpo.families.architecture import (
    COMMON_SIZE_KEYS,
    Architecture,
    HfConfig,
    common_refusals,
    decoder_architecture,
    llama3_refusals,
    missing_keys,
)
from megagrpo.families.loading import RankPlace, load_attention, load_feed_forward, load_norms
from megagrpo.families.tensors import (
    GATED_NAMES,
    GatedNames,
    TensorSpec,
    attention_tensors,
    feed_forward_tensors,
    layer_norms,
    layer_prefix,
)
from megagrpo.families.tiny import TinySizes

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_layer import TransformerLayer
    from torch import Tensor


class Family:
    """Reads, loads and lists models of one architecture."""

    HF_CLASS: ClassVar[str]  # the model's class in transformers, as config.json names it
    REQUIRED_KEYS: ClassVar[tuple[str, ...]] = ()  # of config.json, besides the common ones
    SIZE_KEYS: ClassVar[frozenset[str]] = COMMON_SIZE_KEYS  # keys that a smaller model of the same kind changes
    MLP: ClassVar[str] = "mlp."  # begins the names of an MLP, or of router and experts, in a layer
    PROJECTIONS: ClassVar[GatedNames] = GATED_NAMES  # of MLPs and experts
    ROPE_SCALING_REFUSALS = staticmethod(llama3_refusals)
    PARTIAL_ROTARY: ClassVar[bool] = False  # rotary embedding may apply to part of a head
    LOADS_ATTENTION_BIAS: ClassVar[bool] = False
    FP8_REFUSAL: ClassVar[str] = ""  # why engines cannot have weights of such a model in FP8

    def refusals(self, hf: HfConfig) -> list[str]:
        """Returns what would fail, or be silently wrong, with this config.json: missing keys, unsupported options."""
        problems = missing_keys(hf, self.REQUIRED_KEYS)
        if problems:
            return problems
        problems = self.own_refusals(hf) + common_refusals(hf, self.ROPE_SCALING_REFUSALS, self.PARTIAL_ROTARY)
        if hf.get("attention_bias") and not self.LOADS_ATTENTION_BIAS:
            problems.append("attention_bias puts biases on projections that are not loaded; it must be false")
        return problems

    def own_refusals(self, hf: HfConfig) -> list[str]:
        """Returns the problems with a config.json without missing keys that only this family has."""
        return []

    def architecture(self, hf: HfConfig) -> Architecture:
        """Reads a config.json that has no refusals."""
        return decoder_architecture(hf)

    def load_layer(
        self, layer: TransformerLayer, arch: Architecture, hf: Mapping[str, Tensor], place: RankPlace
    ) -> None:
        """Copies this rank's slices of one layer's HF tensors into Megatron's parameters: only slices and copies."""
        prefix = layer_prefix(layer.layer_number - 1)
        load_norms(layer, hf, prefix)
        self.load_attention(layer.self_attention, arch, hf, prefix + "self_attn.", place.tensor)
        load_feed_forward(layer, arch, hf, self.MLP, place, self.PROJECTIONS)

    load_attention = staticmethod(load_attention)

    def layer_tensors(self, arch: Architecture, index: int) -> Iterator[TensorSpec]:
        """Yields the HF tensors of layer `index`, counted from 0, in the order in which a random model draws them."""
        prefix = layer_prefix(index)
        yield from self.attention_tensors(arch, prefix + "self_attn.")
        yield from layer_norms(arch, prefix)
        yield from feed_forward_tensors(arch, index, self.MLP, self.PROJECTIONS)

    attention_tensors = staticmethod(attention_tensors)

    def text_part(self, hf: HfConfig) -> HfConfig:
        """Returns the keys of config.json as a text-only model has them."""
        return hf

    def stored_name(self, name: str) -> str:
        """Returns what checkpoints call a tensor of the text part that other families call `name`."""
        return name

    def stored(self, hf: Mapping[str, Tensor], name: str) -> Tensor:
        """Returns the tensor that other families call `name`, or a view of where it lies."""
        return hf[self.stored_name(name)]

    def tiny_options(self, sizes: TinySizes) -> dict[str, object]:
        """Returns the keys of a tiny model's config.json that add to or replace the common ones."""
        return {}
