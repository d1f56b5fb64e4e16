"""Gated delta nets (arXiv 2412.06464) by their numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from megagrpo.models.config_json import HfConfig
from megagrpo.models.costs import FP32, LayerCost, Share
from megagrpo.models.kinds.gated_delta import cost
from megagrpo.models.points import Row
from megagrpo.models.tensors import Cut, Shard, TensorSpec, load_groups

if TYPE_CHECKING:
    from torch import Tensor

    from megagrpo.config.actor import ActorConfig, ParallelConfig
    from megagrpo.models.architecture import Architecture
    from megagrpo.models.fields import Fields, Kernels
    from megagrpo.models.kinds.gated_delta.layer import GatedDeltaNet


@dataclass(frozen=True)
class GatedDelta:
    """Holds the sizes of linear attention, and the layers that have it in place of attention."""

    MODULE: ClassVar[str] = "linear_attn"  # of files, in a layer
    CUT_KEY: ClassVar[str] = "linear_num_key_heads"  # of config.json, what ranks divide
    PACKAGES: ClassVar[tuple[str, ...]] = ("fla",)  # that GPUs need

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

    @property
    def cut(self) -> int:
        """Counts what ranks divide: key heads, with their value heads."""
        return self.key_heads

    def tensors(self, arch: Architecture, prefix: str) -> Iterator[TensorSpec]:
        """Yields projections, the convolution, decays and a norm."""
        hidden = arch.hidden_size
        heads = self.value_heads
        values = heads * self.value_dim
        inputs = {"qkv": self.channels, "z": values, "b": heads, "a": heads}
        if self.grouped:
            inputs = {"qkvz": self.channels + values, "ba": 2 * heads}
        for name, rows in inputs.items():
            yield TensorSpec(f"{prefix}in_proj_{name}.weight", (rows, hidden), "matrix")
        kernel = (self.channels, 1, self.kernel)
        yield TensorSpec(prefix + "conv1d.weight", kernel, "convolution")
        yield TensorSpec(prefix + "A_log", (heads,), "bias", dtype="float32")  # as in engines
        yield TensorSpec(prefix + "dt_bias", (heads,), "bias")
        yield TensorSpec(prefix + "norm.weight", (self.value_dim,), "norm")
        yield TensorSpec(prefix + "out_proj.weight", (hidden, values), "matrix")

    def load(
        self, layer: GatedDeltaNet, hf: Mapping[str, Tensor], prefix: str, shard: Shard
    ) -> None:
        """Copies this rank's slices of HF tensors, whose rows stand mostly kind by kind, into rows
        that stand key head by key head."""
        heads = self.key_heads
        keys = heads * self.key_dim

        def by_kind(mixed: Tensor) -> list[Tensor]:
            return [mixed[:keys], mixed[keys : 2 * keys], mixed[2 * keys :]]

        names = ("qkvz", "ba") if self.grouped else ("qkv", "z", "b", "a")
        inputs = [hf[f"{prefix}in_proj_{name}.weight"] for name in names]
        rows = inputs if self.grouped else by_kind(inputs[0]) + inputs[1:]
        load_groups(layer.in_proj.weight, rows, heads, shard)
        load_groups(layer.conv1d, by_kind(hf[prefix + "conv1d.weight"]), heads, shard)
        layer.A_log.copy_(shard.rows(hf[prefix + "A_log"]))
        layer.dt_bias.copy_(shard.rows(hf[prefix + "dt_bias"]))
        layer.norm.copy_(hf[prefix + "norm.weight"])
        layer.out_proj.weight.copy_(shard.columns(hf[prefix + "out_proj.weight"]))

    def cuts(self, p: ParallelConfig) -> Iterator[Cut]:
        """Yields what tensor- and context-parallel ranks divide."""
        yield Cut(self.CUT_KEY, self.key_heads, "tp x cp", p.tp * p.cp)

    def fields(self, arch: Architecture, actor: ActorConfig, kernels: Kernels) -> Fields:
        """Returns the fields of Megatron's TransformerConfig."""
        return {
            "linear_attention_freq": [int(layer) for layer in self.layers],
            "linear_num_key_heads": self.key_heads,
            "linear_num_value_heads": self.value_heads,
            "linear_key_head_dim": self.key_dim,
            "linear_value_head_dim": self.value_dim,
            "linear_conv_kernel_dim": self.kernel,
        }

    def recomputed(self, engine: bool, scaled: bool) -> list[str]:
        """Returns Megatron's names of what is cheap to compute again."""
        return []

    def cost(self, at: Share) -> LayerCost:
        """Returns the cost of one for a micro-batch."""
        return cost.layer(self, at)

    def state_bytes(self, ranks: int, width: int) -> int:
        """Returns the bytes of one request's states in one rank of an engine, of all layers: the
        last inputs of each convolution, and the recurrent state in float32."""
        inputs = self.channels * (self.kernel - 1) * width
        state = self.value_heads * self.value_dim * self.key_dim * FP32
        return sum(self.layers) * (inputs + state) // ranks

    def points(self) -> list[Row]:
        """Returns what bisect compares inside a layer."""
        trainer = "self_attention.out_proj"
        return [("attention_out", "gated delta net", "linear_attn.out_proj", trainer, "whole")]
