"""Gated delta nets (arXiv 2412.06464) by their numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megagrpo.models.config_json import HfConfig
from megagrpo.models.costs import FP32, LayerCost, Share
from megagrpo.models.kinds.recurrence import FLA_CHUNK, Recurrence, recurrent_cost
from megagrpo.models.tensors import HfTensors, Kind, Shard, TensorSpec, load_groups

if TYPE_CHECKING:
    from torch import Tensor

    from megagrpo.models.kinds.gated_delta.layer import GatedDeltaNet


@dataclass(frozen=True)
class GatedDelta(Recurrence):
    """Holds the sizes of linear attention, and the layers that have it in place of attention."""

    CUT_KEY = "linear_num_key_heads"
    PACKAGES = ("fla",)
    TITLE = "gated delta net"

    key_heads: int
    value_heads: int  # a multiple
    key_dim: int  # of a head; of queries, too
    value_dim: int
    kernel: int  # tokens of the convolution
    layers: tuple[bool, ...]
    grouped: bool = False  # rows of files stand key head by key head; else kind by kind
    sigmoid_gate: bool = False  # of the output; else silu

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
            sigmoid_gate=hf.get("output_gate_type") == "sigmoid",
        )

    @property
    def channels(self) -> int:
        """Counts what the convolution mixes along the sequence: queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def cut(self) -> int:
        """Counts what ranks divide: key heads, with their value heads."""
        return self.key_heads

    @property
    def rows(self) -> int:
        return self.channels + self.value_heads * (self.value_dim + 2)

    @property
    def state_size(self) -> int:
        return self.value_heads * self.value_dim * self.key_dim

    def tensors(self, hidden: int, prefix: str, norm: Kind) -> Iterator[TensorSpec]:
        """Yields projections, the convolution, decays and a norm."""
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

    def load(self, layer: GatedDeltaNet, hf: HfTensors, shard: Shard) -> None:
        """Copies this rank's slices of HF tensors, whose rows stand mostly kind by kind, into rows
        that stand key head by key head."""
        heads = self.key_heads
        keys = heads * self.key_dim

        def by_kind(mixed: Tensor) -> list[Tensor]:
            return [mixed[:keys], mixed[keys : 2 * keys], mixed[2 * keys :]]

        names = ("qkvz", "ba") if self.grouped else ("qkv", "z", "b", "a")
        inputs = [hf[f"in_proj_{name}.weight"] for name in names]
        rows = inputs if self.grouped else by_kind(inputs[0]) + inputs[1:]
        load_groups(layer.in_proj.weight, rows, heads, shard)
        load_groups(layer.conv1d, by_kind(hf["conv1d.weight"]), heads, shard)
        layer.A_log.copy_(shard.rows(hf["A_log"]))
        layer.dt_bias.copy_(shard.rows(hf["dt_bias"]))
        layer.norm.copy_(hf["norm.weight"])
        layer.out_proj.weight.copy_(shard.columns(hf["out_proj.weight"]))

    def cost(self, at: Share) -> LayerCost:
        """Returns the cost of one for a micro-batch."""
        p = at.parallel
        heads = self.value_heads / p.tp
        values = heads * self.value_dim
        keys = heads * self.key_dim  # each is repeated for the value heads that share it
        rows = self.rows / p.tp
        # input of the convolution; queries, keys and values, each in one piece; the system of a chunk;
        # the rule's output, gates and their product; decay and beta, and sums of them
        kept = (self.channels / p.tp + 2 * keys + 4 * values + heads * FLA_CHUNK) * at.width
        kept += 4 * heads * FP32
        # of a token: products in its chunk; the state is read twice and written
        rule = 2 * FLA_CHUNK * (3 * keys + 2 * values) + 6 * keys * self.value_dim
        return recurrent_cost(at, rows, values, kept, rule, copies=5)
