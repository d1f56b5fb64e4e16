"""Manifold-constrained hyper-connections (mHC; Xie et al., 2026) by their numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from megagrpo.models.config_json import HfConfig
from megagrpo.models.kinds.streams import ResidualStreams
from megagrpo.models.tensors import TensorSpec


@dataclass(frozen=True)
class HyperConnections(ResidualStreams):
    """Holds the number of residual streams, and how their mixing is made doubly stochastic."""

    NORMS = True
    ON_GPUS = "SGLang mixes residual streams by TileLang's kernels only (its kernels/ops/layernorm/mhc.py)"
    PLACES: ClassVar = {"hc_attn": "hc_attn.", "hc_ffn": "hc_ffn."}
    HEAD = "model.hc_head."
    COPIES = 3

    iterations: int  # of Sinkhorn and Knopp, over rows and columns
    eps: float

    @classmethod
    def read(cls, hf: HfConfig, has_head: bool = True) -> HyperConnections:
        """Reads a config.json that has its keys."""
        return cls(hf["hc_mult"], hf["hc_sinkhorn_iters"], float(hf["hc_eps"]), has_head=has_head)

    @property
    def outputs(self) -> int:
        """Counts the numbers of a token at a place: shares into the part, shares out of it, and a
        square that mixes the streams."""
        return (2 + self.streams) * self.streams

    def place(self, hidden: int, prefix: str, in_layer: bool) -> Iterator[TensorSpec]:
        """Yields the tensors of one mixing, with which engines compute in float32."""
        rows, scales = (self.outputs, 3) if in_layer else (self.streams, 1)
        columns = self.streams * hidden
        yield TensorSpec(prefix + "fn", (rows, columns), "matrix", dtype="float32")
        yield TensorSpec(prefix + "base", (rows,), "bias", dtype="float32")
        yield TensorSpec(prefix + "scale", (scales,), "norm", dtype="float32")

    @property
    def products(self) -> int:
        return self.outputs + self.streams
