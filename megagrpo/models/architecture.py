"""What a model is made of: the numbers that all families have, and its kinds of layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from megagrpo.models.kinds.experts.describe import Experts
from megagrpo.models.kinds.gated_delta.describe import GatedDelta
from megagrpo.models.kinds.grouped_query.describe import GroupedQuery
from megagrpo.models.kinds.indexed.describe import LightningIndexer
from megagrpo.models.kinds.latent.describe import LatentAttention
from megagrpo.models.kinds.vision.describe import Vision

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
