"""Kimi Delta Attention (arXiv 2510.26692) by its numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megagrpo.models.config_json import HfConfig
from megagrpo.models.costs import FP32, LayerCost, Share
from megagrpo.models.kinds.recurrence import FLA_CHUNK, Recurrence, recurrent_cost
from megagrpo.models.tensors import HfTensors, Kind, Shard, TensorSpec, load_groups

if TYPE_CHECKING:
    from megagrpo.models.kinds.kda.layer import KimiDeltaAttention

_SIZES = ("num_heads", "head_dim", "short_conv_kernel_size")
_LAYERS = ("kda_layers", "full_attn_layers")


def linear_refusals(hf: HfConfig, first: int) -> list[str]:
    """Returns what linear_attn_config lacks, and why its lists are not of layers from `first` on."""
    linear = hf["linear_attn_config"] or {}
    if lacking := [key for key in (*_SIZES, *_LAYERS) if key not in linear]:
        return [f"linear_attn_config lacks {', '.join(lacking)}"]
    kinds = [set(linear[key]) for key in _LAYERS]
    last = first + hf["num_hidden_layers"] - 1
    if all(kinds) and not kinds[0] & kinds[1] and kinds[0] | kinds[1] == {*range(first, last + 1)}:
        return []
    return [
        f"kda_layers and full_attn_layers of linear_attn_config must have each of the layers "
        f"{first} to {last} in one of them, and neither be empty"
    ]


@dataclass(frozen=True)
class Kda(Recurrence):
    """Holds the sizes of Kimi Delta Attention, and the layers that have it in place of attention."""

    MODULE = "self_attn"
    OUTPUT = "o_proj"
    CUT_KEY = "linear_attn_config.num_heads"
    PACKAGES = ("fla",)
    TITLE = "Kimi Delta Attention"

    heads: int
    dim: int  # of a head: queries, keys, values, decays and gates
    kernel: int  # tokens of the convolutions
    layers: tuple[bool, ...]
    bound: float | None = None  # below decays' logarithms; None: they have none

    @classmethod
    def read(cls, hf: HfConfig, first: int) -> Kda:
        """Reads the linear_attn_config of a config.json, which counts layers from `first`."""
        linear = hf["linear_attn_config"]
        numbers = range(first, first + hf["num_hidden_layers"])
        return cls(
            heads=linear["num_heads"],
            dim=linear["head_dim"],
            kernel=linear["short_conv_kernel_size"],
            layers=tuple(number in linear["kda_layers"] for number in numbers),
            bound=linear.get("gate_lower_bound"),
        )

    @property
    def values(self) -> int:
        """Counts the outputs of all heads."""
        return self.heads * self.dim

    @property
    def channels(self) -> int:
        """Counts what the convolutions mix along the sequence: queries, keys and values."""
        return 3 * self.values

    @property
    def cut(self) -> int:
        """Counts what ranks divide: heads."""
        return self.heads

    @property
    def rows(self) -> int:
        return self.channels + self.heads

    @property
    def state_size(self) -> int:
        return self.values * self.dim

    def tensors(self, hidden: int, prefix: str, norm: Kind) -> Iterator[TensorSpec]:
        """Yields projections, of decays (f) and gates (g) in two steps, convolutions, decays and a
        norm."""
        values = self.values
        for name in "qkv":
            yield TensorSpec(f"{prefix}{name}_proj.weight", (values, hidden), "matrix")
        for name in "qkv":
            kernel = (values, 1, self.kernel)
            yield TensorSpec(f"{prefix}{name}_conv1d.weight", kernel, "convolution")
        # as in Kimi-Linear's engines, and in files of bounded decays
        shape = (1, 1, self.heads, 1) if self.bound is None else (self.heads,)
        yield TensorSpec(prefix + "A_log", shape, "bias", dtype="float32")
        yield TensorSpec(prefix + "dt_bias", (values,), "bias", dtype="float32")
        for name in "fg":
            yield TensorSpec(f"{prefix}{name}_a_proj.weight", (self.dim, hidden), "matrix")
            yield TensorSpec(f"{prefix}{name}_b_proj.weight", (values, self.dim), "matrix")
        yield TensorSpec(prefix + "b_proj.weight", (self.heads, hidden), "matrix")
        yield TensorSpec(prefix + "o_norm.weight", (self.dim,), "norm")
        yield TensorSpec(prefix + "o_proj.weight", (hidden, values), "matrix")

    def load(self, layer: KimiDeltaAttention, hf: HfTensors, shard: Shard) -> None:
        """Copies this rank's slices of HF tensors, whose rows stand kind by kind, into rows that
        stand head by head."""
        inputs = [hf[f"{name}_proj.weight"] for name in "qkvb"]
        load_groups(layer.in_proj.weight, inputs, self.heads, shard)
        kernels = [hf[f"{name}_conv1d.weight"] for name in "qkv"]
        load_groups(layer.conv1d, kernels, self.heads, shard)
        for name, down, up in (
            ("f", layer.decay_down, layer.decay_up),
            ("g", layer.gate_down, layer.gate_up),
        ):
            down.weight.copy_(hf[f"{name}_a_proj.weight"])
            up.weight.copy_(shard.rows(hf[f"{name}_b_proj.weight"]))
        layer.A_log.copy_(shard.rows(hf["A_log"].flatten()))
        layer.dt_bias.copy_(shard.rows(hf["dt_bias"]))
        layer.norm.copy_(hf["o_norm.weight"])
        layer.out_proj.weight.copy_(shard.columns(hf["o_proj.weight"]))

    def cost(self, at: Share) -> LayerCost:
        """Returns the cost of one for a micro-batch."""
        p = at.parallel
        heads = self.heads / p.tp
        values = heads * self.dim
        rows = 5 * values + heads
        # the rows; convolved queries, keys and values; products of a chunk's queries and keys; the
        # rule's output, normed and gated; narrow decays and gates; decays and beta, and sums of them
        kept = (rows + 6 * values + 2 * heads * FLA_CHUNK + 2 * self.dim / p.tp) * at.width
        kept += 2 * (values + heads) * FP32
        # of a token: products in its chunk; the state is read twice and written; decays and gates come
        # through a narrow projection, not from the hidden state as the other rows
        rule = 10 * FLA_CHUNK * values + 6 * values * self.dim
        narrow = 4 * self.dim * (at.hidden_size / p.tp + values) - 4 * at.hidden_size * values
        return recurrent_cost(at, rows, values, kept, rule + narrow, copies=5)
