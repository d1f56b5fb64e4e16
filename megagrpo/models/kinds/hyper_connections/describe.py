"""Manifold-constrained hyper-connections (mHC; Xie et al., 2026) by their numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megagrpo.models.config_json import HfConfig
from megagrpo.models.costs import FP32, LayerCost, Share
from megagrpo.models.tensors import TensorSpec

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_layer import TransformerLayer
    from torch import Tensor
    from torch.nn import Module

_PLACES = ("hc_attn", "hc_ffn")  # around what mixes tokens, and around what feeds them
HEAD = "model.hc_head."  # what contracts the streams before the model's last norm


@dataclass(frozen=True)
class HyperConnections:
    """Holds the number of residual streams, and how their mixing is made doubly stochastic."""

    streams: int
    iterations: int  # of Sinkhorn and Knopp, over rows and columns
    eps: float
    has_head: bool = True  # the last norm reads a learned sum of the streams; else their mean

    @classmethod
    def read(cls, hf: HfConfig, has_head: bool = True) -> HyperConnections:
        """Reads a config.json that has its keys."""
        return cls(hf["hc_mult"], hf["hc_sinkhorn_iters"], float(hf["hc_eps"]), has_head)

    @property
    def outputs(self) -> int:
        """Counts the numbers of a token at a place: shares into the part, shares out of it, and a
        square that mixes the streams."""
        return (2 + self.streams) * self.streams

    def tensors(self, hidden: int, prefix: str) -> Iterator[TensorSpec]:
        """Yields the tensors of a layer; prefix: of the layer. Engines compute with float32."""
        for place in _PLACES:
            yield from self.mixing(hidden, f"{prefix}{place}.", self.outputs, 3)

    def mixing(self, hidden: int, prefix: str, rows: int, scales: int) -> Iterator[TensorSpec]:
        """Yields the tensors of one mixing."""
        columns = self.streams * hidden
        yield TensorSpec(prefix + "fn", (rows, columns), "matrix", dtype="float32")
        yield TensorSpec(prefix + "base", (rows,), "bias", dtype="float32")
        yield TensorSpec(prefix + "scale", (scales,), "norm", dtype="float32")

    def load(self, layer: TransformerLayer, hf: Mapping[str, Tensor], prefix: str) -> None:
        """Copies the HF tensors of a layer, which every rank has whole; prefix: of the layer."""
        for place in _PLACES:
            load_mixing(layer.get_submodule(place), hf, f"{prefix}{place}.")

    def cost(self, at: Share) -> LayerCost:
        """Returns the cost of both places of a layer for a micro-batch."""
        wide = self.streams * at.hidden_size * at.part
        return LayerCost(
            # the streams before each place, and what its part gives
            kept=2 * (wide + at.hidden_size * at.part) * at.width,
            transient=3 * wide * FP32,
            flops=4 * wide * (self.outputs + self.streams),
            sent={},
        )


def load_mixing(module: Module, hf: Mapping[str, Tensor], prefix: str) -> None:
    """Copies the HF tensors of one mixing."""
    for name in ("fn", "base", "scale"):
        module.get_parameter(name).copy_(hf[prefix + name])
