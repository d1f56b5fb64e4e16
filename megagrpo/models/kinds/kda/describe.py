"""Kimi Delta Attention (arXiv 2510.26692) by its numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from megagrpo.models.config_json import HfConfig
from megagrpo.models.costs import FP32, LayerCost, Share
from megagrpo.models.kinds.recurrence import FLA_CHUNK, Recurrence, recurrent_cost
from megagrpo.models.tensors import Shard, TensorSpec, load_groups

if TYPE_CHECKING:
    from torch import Tensor

    from megagrpo.models.architecture import Architecture
    from megagrpo.models.kinds.kda.layer import KimiDeltaAttention


@dataclass(frozen=True)
class Kda(Recurrence):
    """Holds the sizes of Kimi Delta Attention, and the layers that have it in place of attention."""

    MODULE: ClassVar[str] = "self_attn"
    OUTPUT: ClassVar[str] = "o_proj"
    CUT_KEY: ClassVar[str] = "linear_attn_config.num_heads"
    PACKAGES: ClassVar[tuple[str, ...]] = ("fla",)
    TITLE: ClassVar[str] = "Kimi Delta Attention"

    heads: int
    dim: int  # of a head: queries, keys, values, decays and gates
    kernel: int  # tokens of the convolutions
    layers: tuple[bool, ...]

    @classmethod
    def read(cls, linear: HfConfig, layers: tuple[bool, ...]) -> Kda:
        """Reads the linear_attn_config of a config.json."""
        kernel = linear["short_conv_kernel_size"]
        return cls(linear["num_heads"], linear["head_dim"], kernel, layers)

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

    def tensors(self, arch: Architecture, prefix: str) -> Iterator[TensorSpec]:
        """Yields projections, of decays (f) and gates (g) in two steps, convolutions, decays and a
        norm."""
        hidden, values = arch.hidden_size, self.values
        for name in "qkv":
            yield TensorSpec(f"{prefix}{name}_proj.weight", (values, hidden), "matrix")
        for name in "qkv":
            kernel = (values, 1, self.kernel)
            yield TensorSpec(f"{prefix}{name}_conv1d.weight", kernel, "convolution")
        # as in engines
        yield TensorSpec(prefix + "A_log", (1, 1, self.heads, 1), "bias", dtype="float32")
        yield TensorSpec(prefix + "dt_bias", (values,), "bias", dtype="float32")
        for name in "fg":
            yield TensorSpec(f"{prefix}{name}_a_proj.weight", (self.dim, hidden), "matrix")
            yield TensorSpec(f"{prefix}{name}_b_proj.weight", (values, self.dim), "matrix")
        yield TensorSpec(prefix + "b_proj.weight", (self.heads, hidden), "matrix")
        yield TensorSpec(prefix + "o_norm.weight", (self.dim,), "norm")
        yield TensorSpec(prefix + "o_proj.weight", (hidden, values), "matrix")

    def load(
        self, layer: KimiDeltaAttention, hf: Mapping[str, Tensor], prefix: str, shard: Shard
    ) -> None:
        """Copies this rank's slices of HF tensors, whose rows stand kind by kind, into rows that
        stand head by head."""
        inputs = [hf[f"{prefix}{name}_proj.weight"] for name in "qkvb"]
        load_groups(layer.in_proj.weight, inputs, self.heads, shard)
        kernels = [hf[f"{prefix}{name}_conv1d.weight"] for name in "qkv"]
        load_groups(layer.conv1d, kernels, self.heads, shard)
        for name, down, up in (
            ("f", layer.decay_down, layer.decay_up),
            ("g", layer.gate_down, layer.gate_up),
        ):
            down.weight.copy_(hf[f"{prefix}{name}_a_proj.weight"])
            up.weight.copy_(shard.rows(hf[f"{prefix}{name}_b_proj.weight"]))
        layer.A_log.copy_(shard.part(hf[prefix + "A_log"], 2).flatten())
        layer.dt_bias.copy_(shard.rows(hf[prefix + "dt_bias"]))
        layer.norm.copy_(hf[prefix + "o_norm.weight"])
        layer.out_proj.weight.copy_(shard.columns(hf[prefix + "o_proj.weight"]))

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
