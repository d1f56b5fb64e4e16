"""Gated delta nets (arXiv 2412.06464) by their numbers."""

from __future__ import annotations

from dataclasses import dataclass

from megagrpo.models.config_json import HfConfig
from megagrpo.models.costs import FP32, LayerCost, Share
from megagrpo.models.kinds.gated_delta import cost
from megagrpo.models.points import Row


@dataclass(frozen=True)
class GatedDelta:
    """Holds the sizes of linear attention, and the layers that have it in place of attention."""

    key_heads: int
    value_heads: int  # a multiple
    key_dim: int  # of a head; of queries, too
    value_dim: int
    kernel: int  # tokens of the convolution
    layers: tuple[bool, ...]
    grouped: bool = False  # rows of files stand key head by key head; else kind by kind

    @classmethod
    def read(cls, hf: HfConfig, layers: tuple[bool, ...], grouped: bool) -> GatedDelta:
        """Reads a config.json that has its keys."""
        return cls(
            key_heads=hf["linear_num_key_heads"],
            value_heads=hf["linear_num_value_heads"],
            key_dim=hf["linear_key_head_dim"],
            value_dim=hf["linear_value_head_dim"],
            kernel=hf["linear_conv_kernel_dim"],
            layers=layers,
            grouped=grouped,
        )

    @property
    def channels(self) -> int:
        """Counts what the convolution mixes along the sequence: queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    def cost(self, at: Share) -> LayerCost:
        """Returns the cost of one for a micro-batch."""
        return cost.layer(self, at)

    def state_bytes(self, ranks: int, width: int) -> int:
        """Returns the bytes of one request's states in one rank of an engine, of all layers: the
        last inputs of each convolution, and the recurrent state in float32."""
        inputs = self.channels * (self.kernel - 1) * width
        state = self.value_heads * self.value_dim * self.key_dim * FP32
        return sum(self.layers) * (inputs + state) // ranks

    def points(self, module: str) -> list[Row]:
        """Returns what bisect compares inside a layer."""
        trainer = "self_attention.out_proj"
        return [("attention_out", "gated delta net", "linear_attn.out_proj", trainer, "whole")]
