"""What a model is made of: the numbers that all families have, and its kinds of layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from megagrpo.models.kinds.experts.describe import Experts
from megagrpo.models.kinds.gated_delta.describe import GatedDelta
from megagrpo.models.kinds.grouped_query.describe import GroupedQuery
from megagrpo.models.kinds.indexed.describe import LightningIndexer
from megagrpo.models.kinds.latent.describe import LatentAttention
from megagrpo.models.kinds.vision.describe import Vision
from megagrpo.models.tensors import (
    Cut,
    Kind,
    RankPlace,
    TensorSpec,
    layer_prefix,
    load_mlp,
    mlp_tensors,
    mlp_weights,
)

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_layer import TransformerLayer
    from torch import Tensor

    from megagrpo.config.actor import ParallelConfig

Attention: TypeAlias = GroupedQuery | LatentAttention


@dataclass(frozen=True)
class Architecture:
    """Holds the numbers of one HF config.json that the actor needs, with the family's defaults
    filled in."""

    family: str
    hidden_size: int
    num_layers: int
    ffn_size: int  # intermediate width of a dense MLP
    vocab_size: int
    max_positions: int  # tokens
    rms_eps: float
    tied: bool  # the output layer is the input embedding
    attention: Attention
    centered_norms: bool = False  # RMSNorms multiply by 1 + weight
    delta: GatedDelta | None = None  # None: attention in every layer
    experts: Experts | None = None  # None: dense
    vision: Vision | None = None  # None: a text-only model
    draft: bool = False  # with the multi-token-prediction layer, which proposes tokens to engines

    @property
    def is_moe(self) -> bool:
        """Tells whether layers have experts."""
        return self.experts is not None

    def has_experts(self, index: int) -> bool:
        """Tells whether layer `index`, counted from 0, has experts."""
        return self.experts is not None and index >= self.experts.dense_layers

    @property
    def routed(self) -> Experts:
        """Returns the experts of a model that has some."""
        assert self.experts is not None, "a dense model"
        return self.experts

    @property
    def expert_layers(self) -> int:
        """Counts the layers with experts."""
        return sum(map(self.has_experts, range(self.num_layers)))

    @property
    def has_dense_layers(self) -> bool:
        """Tells whether layers have one MLP and no experts."""
        return not self.has_experts(0)

    def mixer(self, index: int) -> Attention | GatedDelta:
        """Returns what mixes the tokens of layer `index`, counted from 0."""
        if self.delta is not None and self.delta.layers[index]:
            return self.delta
        return self.attention

    @property
    def attention_layers(self) -> int:
        """Counts the layers whose cost grows with the square of a sequence, which keep keys and
        values."""
        return self.num_layers - (sum(self.delta.layers) if self.delta else 0)

    @property
    def latent(self) -> LatentAttention | None:
        """Returns latent attention; None if attention is of another kind."""
        return self.attention if isinstance(self.attention, LatentAttention) else None

    @property
    def indexer(self) -> LightningIndexer | None:
        """Returns what chooses the keys that a query sees; None: it sees every key before it."""
        latent = self.latent
        return latent.indexer if latent else None

    @property
    def kinds(self) -> list[Attention | GatedDelta | Experts]:
        """Returns the kinds of parts that its layers have."""
        return [kind for kind in (self.attention, self.delta, self.experts) if kind is not None]

    @property
    def plain_rotary(self) -> bool:
        """Tells whether Megatron's rotary embedding turns queries and keys: latent attention turns
        by itself, and images have angles of their own."""
        return isinstance(self.attention, GroupedQuery) and self.vision is None

    @property
    def norm(self) -> Kind:
        """Returns the kind of a weight of the model's norms."""
        return "centered norm" if self.centered_norms else "norm"

    @property
    def takes_adapters(self) -> bool:
        """Tells whether models/layers/lora.py knows its layers."""
        plain = isinstance(self.attention, GroupedQuery) and not self.attention.output_gate
        experts = self.experts is None or self.experts.takes_adapters
        return plain and experts and self.delta is None and self.vision is None

    def layer_tensors(self, index: int) -> Iterator[TensorSpec]:
        """Yields the HF tensors of layer `index`, counted from 0, in the order in which a random
        model draws them."""
        prefix = layer_prefix(index)
        mixer = self.mixer(index)
        mixing = mixer.tensors(self, f"{prefix}{mixer.MODULE}.")
        if mixer is self.attention:
            yield from mixing
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield TensorSpec(f"{prefix}{name}.weight", (self.hidden_size,), self.norm)
        if self.has_experts(index):
            yield from self.routed.tensors(self, prefix)
        else:
            yield from mlp_tensors(self.hidden_size, self.ffn_size, prefix + "mlp.")
        if mixer is self.delta:
            yield from mixing
        indexer = self.indexer
        if indexer is not None and indexer.source(index) == index:
            yield from indexer.tensors(self, prefix + "self_attn.indexer.")

    def load_layer(
        self, layer: TransformerLayer, hf: Mapping[str, Tensor], place: RankPlace
    ) -> None:
        """Copies this rank's slices of one layer's HF tensors into Megatron's parameters: only
        slices and copies."""
        index = layer.layer_number - 1
        prefix = layer_prefix(index)
        layer.input_layernorm.weight.copy_(hf[prefix + "input_layernorm.weight"])
        layer.pre_mlp_layernorm.weight.copy_(hf[prefix + "post_attention_layernorm.weight"])
        mixer = self.mixer(index)
        mixer.load(layer.self_attention, hf, f"{prefix}{mixer.MODULE}.", place.tensor)
        if self.has_experts(index):
            self.routed.load(layer.mlp, hf, prefix, place)
        else:
            load_mlp(*mlp_weights(layer.mlp), hf, prefix + "mlp.", place.tensor)

    def cuts(self, p: ParallelConfig) -> Iterator[Cut]:
        """Yields which numbers of config.json ranks divide."""
        for kind in self.kinds:
            yield from kind.cuts(p)
        if self.has_dense_layers:
            yield Cut("intermediate_size", self.ffn_size, "tp", p.tp)
