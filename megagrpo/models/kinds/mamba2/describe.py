"""Mamba-2 (arXiv 2405.21060) by its numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megagrpo.models.config_json import HfConfig
from megagrpo.models.costs import FP32, LayerCost, Share
from megagrpo.models.kinds.recurrence import Recurrence, recurrent_cost
from megagrpo.models.tensors import HfTensors, Kind, Shard, TensorSpec, load_groups

if TYPE_CHECKING:
    from megagrpo.models.kinds.mamba2.layer import Mamba2Mixer

KERNEL_CHUNK = 128  # tokens that mamba-ssm's kernels compute at once


@dataclass(frozen=True)
class Mamba2(Recurrence):
    """Holds the sizes of Mamba-2, and the layers that have it in place of attention."""

    CUT_KEY = "n_groups"
    PACKAGES = ("mamba_ssm", "causal_conv1d")
    TITLE = "Mamba-2"

    heads: int
    head_dim: int
    groups: int  # of heads that share B and C
    state: int  # width of B and C
    kernel: int  # tokens of the convolution
    layers: tuple[bool, ...]

    @classmethod
    def read(cls, hf: HfConfig, layers: tuple[bool, ...]) -> Mamba2:
        """Reads a config.json that has its keys."""
        return cls(
            heads=hf["mamba_num_heads"],
            head_dim=hf["mamba_head_dim"],
            groups=hf["n_groups"],
            state=hf["ssm_state_size"],
            kernel=hf["conv_kernel"],
            layers=layers,
        )

    @property
    def values(self) -> int:
        """Counts the outputs of all heads."""
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Counts what the convolution mixes along the sequence: x, B and C."""
        return self.values + 2 * self.groups * self.state

    @property
    def cut(self) -> int:
        """Counts what ranks divide: groups, with their heads."""
        return self.groups

    @property
    def rows(self) -> int:
        return self.values + self.channels + self.heads

    @property
    def state_size(self) -> int:
        return self.values * self.state

    def tensors(self, hidden: int, prefix: str, norm: Kind) -> Iterator[TensorSpec]:
        """Yields projections, the convolution, decays, skips and a norm."""
        channels = self.channels
        yield TensorSpec(prefix + "in_proj.weight", (self.rows, hidden), "matrix")
        yield TensorSpec(prefix + "conv1d.weight", (channels, 1, self.kernel), "convolution")
        yield TensorSpec(prefix + "conv1d.bias", (channels,), "bias")
        yield TensorSpec(prefix + "A_log", (self.heads,), "bias", dtype="float32")  # as in engines
        yield TensorSpec(prefix + "D", (self.heads,), "bias")
        yield TensorSpec(prefix + "dt_bias", (self.heads,), "bias")
        yield TensorSpec(prefix + "gated_norm.weight", (self.values,), "norm")
        yield TensorSpec(prefix + "out_proj.weight", (hidden, self.values), "matrix")

    def load(self, layer: Mamba2Mixer, hf: HfTensors, shard: Shard) -> None:
        """Copies this rank's slices of HF tensors, whose rows stand kind by kind, into rows that
        stand group by group."""
        width = self.groups * self.state
        channels = (self.values, width, width)
        inputs = hf["in_proj.weight"].split((self.values, *channels, self.heads))
        load_groups(layer.in_proj.weight, inputs, self.groups, shard)
        for name, target in (("weight", layer.conv1d), ("bias", layer.conv_bias)):
            mixed = hf[f"conv1d.{name}"].split(channels)
            load_groups(target, mixed, self.groups, shard)
        for name in ("A_log", "D", "dt_bias"):
            getattr(layer, name).copy_(shard.rows(hf[name]))
        layer.norm.copy_(shard.rows(hf["gated_norm.weight"]))
        layer.out_proj.weight.copy_(shard.columns(hf["out_proj.weight"]))

    def cost(self, at: Share) -> LayerCost:
        """Returns the cost of one for a micro-batch."""
        p = at.parallel
        heads = self.heads / p.tp
        values = self.values / p.tp
        channels = self.channels / p.tp
        rows = self.rows / p.tp
        # the projection; convolved channels; the scan's output, and times its gate, normed; steps, and
        # the state at the end of each chunk
        kept = (rows + channels + 2 * values) * at.width
        kept += (heads + values * self.state / KERNEL_CHUNK) * FP32
        # of a token: B with C of each group and scores with values in its chunk, on average half; the
        # state is read and written
        groups = self.groups / p.tp
        scan = KERNEL_CHUNK * (groups * self.state + values) + 4 * values * self.state
        return recurrent_cost(at, rows, values, kept, scan, copies=3)
