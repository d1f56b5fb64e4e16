"""Gated residual by its numbers (SGLang's layers/hyperconnection.py, class GatedResidual)."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from megagrpo.models.kinds.streams import ResidualStreams
from megagrpo.models.tensors import Kind, TensorSpec


@dataclass(frozen=True)
class GatedResidual(ResidualStreams):
    """Holds the number of residual streams, and the rank of the gates between them."""

    NORMS = False  # the gates have the norms of a layer's parts
    ON_GPUS = (
        "SGLang's sparse attention has a forward for CUDA and XPU only (QSAIndexer of its "
        "layers/attention/qsa/qsa_indexer.py)"
    )
    PLACES: ClassVar = {"hc_attn": "attn_hyper_connection.", "hc_ffn": "mlp_hyper_connection."}
    HEAD = "model.hyper_connection_mixer."  # the model's last norm is in it
    SUFFIX = ".weight"
    COPIES = 4

    rank: int

    def shapes(self, hidden: int, injects: bool) -> dict[str, tuple[int, ...]]:
        """Returns the tensors of one place, by their names in it."""
        wide = self.streams * hidden
        shapes: dict[str, tuple[int, ...]] = {
            "hc_norm": (wide,),
            "input_mix_weight_down": (self.rank, wide),
            "input_mix_weight_up": (wide, self.rank),
        }
        return shapes | ({"block_inject_weight": (self.streams, wide)} if injects else {})

    def place(self, hidden: int, prefix: str, in_layer: bool) -> Iterator[TensorSpec]:
        """Yields the tensors of gates."""
        for name, shape in self.shapes(hidden, in_layer).items():
            kind: Kind = "matrix" if len(shape) > 1 else "centered norm"
            yield TensorSpec(f"{prefix}{name}{self.SUFFIX}", shape, kind)

    @property
    def products(self) -> int:
        return 2 * self.rank + self.streams
