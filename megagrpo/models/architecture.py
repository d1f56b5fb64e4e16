"""What a model is made of: the numbers that all families have, and its kinds of layers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from megagrpo.models.kinds.compressed.describe import CompressedAttention
from megagrpo.models.kinds.experts.describe import Experts
from megagrpo.models.kinds.gated_delta.describe import GatedDelta
from megagrpo.models.kinds.grouped_query.describe import GroupedQuery
from megagrpo.models.kinds.indexed.describe import LightningIndexer
from megagrpo.models.kinds.kda.describe import Kda
from megagrpo.models.kinds.latent.describe import LatentAttention
from megagrpo.models.kinds.mamba2.describe import Mamba2
from megagrpo.models.kinds.ngrams.describe import NGrams
from megagrpo.models.kinds.streams import ResidualStreams
from megagrpo.models.kinds.vision.describe import Vision
from megagrpo.models.tensors import (
    GATED_NAMES,
    PLAIN_NAMES,
    Cut,
    GatedNames,
    HfTensors,
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

    from megagrpo.config.actor import ParallelConfig

Attention: TypeAlias = GroupedQuery | LatentAttention | CompressedAttention
Recurrent: TypeAlias = GatedDelta | Kda | Mamba2
Part = Literal["mamba", "attention", "moe", "mlp"]


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
    recurrent: Recurrent | None = None  # keeps a state for keys and values; None: no layer does
    parts: tuple[Part, ...] = ()  # what each layer is; (): what mixes tokens, and what feeds them
    gated: bool = True  # MLPs and experts are silu(gate) times up; else relu(up) squared
    experts: Experts | None = None  # None: dense
    streams: ResidualStreams | None = None  # None: one residual stream
    ngrams: NGrams | None = None  # None: no layer has embeddings of n-grams
    vision: Vision | None = None  # None: a text-only model
    draft: bool = False  # with the multi-token-prediction layer, which proposes tokens to engines

    @property
    def is_moe(self) -> bool:
        """Tells whether layers have experts."""
        return self.experts is not None

    def has_experts(self, index: int) -> bool:
        """Tells whether layer `index`, counted from 0, has experts."""
        if self.parts:
            return self.parts[index] == "moe"
        return self.experts is not None and index >= self.experts.dense_layers

    def has_mlp(self, index: int) -> bool:
        """Tells whether layer `index`, counted from 0, has one MLP and no experts."""
        return self.parts[index] == "mlp" if self.parts else not self.has_experts(index)

    @property
    def routed(self) -> Experts:
        """Returns the experts of a model that has some."""
        assert self.experts is not None, "a dense model"
        return self.experts

    @property
    def routed_layers(self) -> list[int]:
        """Returns the layers with experts, counted from 0."""
        return [index for index in range(self.num_layers) if self.has_experts(index)]

    @property
    def expert_layers(self) -> int:
        """Counts the layers with experts."""
        return len(self.routed_layers)

    @property
    def has_dense_layers(self) -> bool:
        """Tells whether layers have one MLP and no experts."""
        return any(map(self.has_mlp, range(self.num_layers)))

    @property
    def mlp_names(self) -> GatedNames:
        """Returns the names of an MLP's projections."""
        return GATED_NAMES if self.gated else PLAIN_NAMES

    def mixer(self, index: int) -> Attention | Recurrent | None:
        """Returns what mixes the tokens of layer `index`, counted from 0; None: nothing does."""
        if self.parts and self.parts[index] in ("moe", "mlp"):
            return None
        if self.recurrent is not None and self.recurrent.layers[index]:
            return self.recurrent
        return self.attention

    @property
    def attention_layers(self) -> int:
        """Counts the layers whose cost grows with the square of a sequence, which keep keys and
        values."""
        return sum(self.mixer(index) is self.attention for index in range(self.num_layers))

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
    def kinds(self) -> list[Attention | Recurrent | Experts]:
        """Returns the kinds of parts that its layers have."""
        kinds = (self.attention, self.recurrent, self.experts)
        return [kind for kind in kinds if kind is not None]

    @property
    def plain_rotary(self) -> bool:
        """Tells whether Megatron's rotary embedding turns queries and keys: latent attention turns
        by itself, images have angles of their own, and some attention knows no positions."""
        turns = isinstance(self.attention, GroupedQuery) and self.attention.rotary.fraction > 0
        return turns and self.vision is None

    @property
    def num_streams(self) -> int:
        """Counts the residual streams, which stages send each other."""
        return 1 if self.streams is None else self.streams.streams

    @property
    def norms(self) -> bool:
        """Tells whether each part of a layer, and the output layer, has a norm of its own."""
        return self.streams is None or self.streams.NORMS

    @property
    def norm(self) -> Kind:
        """Returns the kind of a weight of the model's norms."""
        return "centered norm" if self.centered_norms else "norm"

    @property
    def takes_adapters(self) -> bool:
        """Tells whether models/layers/lora.py knows its layers."""
        plain = isinstance(self.attention, GroupedQuery) and not self.attention.output_gate
        experts = self.experts is None or self.experts.takes_adapters
        return plain and experts and self.recurrent is None and self.vision is None

    def layer_tensors(self, index: int) -> Iterator[TensorSpec]:
        """Yields the HF tensors of layer `index`, counted from 0, in the order in which a random
        model draws them."""
        prefix = layer_prefix(index)
        mixer = self.mixer(index)
        mixing: Iterator[TensorSpec] = iter(())
        norms = []
        if mixer is not None:
            inside = f"{prefix}{mixer.MODULE}."
            mixing = mixer.tensors(self.hidden_size, inside, self.norm)
            norms.append("input_layernorm")
        if self.has_experts(index) or self.has_mlp(index):
            norms.append("post_attention_layernorm")
        if mixer is self.attention:
            yield from mixing
        for name in norms if self.norms else ():
            yield TensorSpec(f"{prefix}{name}.weight", (self.hidden_size,), self.norm)
        if self.has_experts(index):
            yield from self.routed.tensors(self.hidden_size, prefix)
        elif self.has_mlp(index):
            sizes = self.hidden_size, self.ffn_size
            yield from mlp_tensors(*sizes, prefix + "mlp.", names=self.mlp_names)
        yield from mixing
        if self.streams is not None:
            yield from self.streams.tensors(self.hidden_size, prefix)
        if self.ngrams and index in self.ngrams.layers:
            yield from self.ngrams.tensors(self.hidden_size, self.num_streams, prefix)
        latent = self.latent
        if latent is not None and mixer is latent:
            yield from latent.index_tensors(self.hidden_size, prefix)

    def load_layer(self, layer: TransformerLayer, hf: HfTensors, place: RankPlace) -> None:
        """Copies this rank's slices of one layer's HF tensors into Megatron's parameters: only
        slices and copies."""
        index = layer.layer_number - 1
        hf = hf.under(layer_prefix(index))
        mixer = self.mixer(index)
        if mixer is not None:
            if self.norms:
                layer.input_layernorm.weight.copy_(hf["input_layernorm.weight"])
            mixer.load(layer.self_attention, hf.under(mixer.MODULE + "."), place.tensor)
        has_mlp = self.has_mlp(index)
        if self.norms and (has_mlp or self.has_experts(index)):
            layer.pre_mlp_layernorm.weight.copy_(hf["post_attention_layernorm.weight"])
        if self.has_experts(index):
            self.routed.load(layer.mlp, hf, place)
        elif has_mlp:
            weights = mlp_weights(layer.mlp)
            load_mlp(*weights, hf.under("mlp."), place.tensor, self.mlp_names)
        if self.streams is not None:
            self.streams.load(layer, hf)
        if self.ngrams and index in self.ngrams.layers:
            self.ngrams.load(layer.ple, hf)

    def cuts(self, p: ParallelConfig) -> Iterator[Cut]:
        """Yields which numbers of config.json ranks divide."""
        for kind in self.kinds:
            yield from kind.cuts(p)
        if self.has_dense_layers:
            yield Cut("intermediate_size", self.ffn_size, "tp", p.tp)
