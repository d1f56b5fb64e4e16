"""Gated residual by its numbers (SGLang's layers/hyperconnection.py, class GatedResidual)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from megagrpo.models.costs import FP32, LayerCost, Share
from megagrpo.models.tensors import Kind, TensorSpec

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_layer import TransformerLayer
    from torch import Tensor
    from torch.nn import Module

# around what mixes tokens, and around what feeds them: by their names here and in files
_PLACES = {"hc_attn": "attn_hyper_connection.", "hc_ffn": "mlp_hyper_connection."}
_HEAD = "model.hyper_connection_mixer."  # the model's last norm and contraction


@dataclass(frozen=True)
class GatedResidual:
    """Holds the number of residual streams, and the rank of the gates between them."""

    has_head: ClassVar[bool] = True  # a learned sum of the streams
    NORMS: ClassVar[bool] = False  # the gates have the norms of a layer's parts
    ON_GPUS: ClassVar[str] = (
        "SGLang's sparse attention has a forward for CUDA and XPU only (QSAIndexer of its "
        "layers/attention/qsa/qsa_indexer.py)"
    )

    streams: int
    rank: int

    def tensors(self, hidden: int, prefix: str) -> Iterator[TensorSpec]:
        """Yields the tensors of a layer; prefix: of the layer."""
        for place in _PLACES.values():
            yield from self._place(hidden, prefix + place, injects=True)

    def head_tensors(self, hidden: int) -> Iterator[TensorSpec]:
        """Yields the tensors of what contracts the streams."""
        yield from self._place(hidden, _HEAD, injects=False)

    def shapes(self, hidden: int, injects: bool) -> dict[str, tuple[int, ...]]:
        """Returns the tensors of one place, by their names in it."""
        wide = self.streams * hidden
        shapes: dict[str, tuple[int, ...]] = {
            "hc_norm": (wide,),
            "input_mix_weight_down": (self.rank, wide),
            "input_mix_weight_up": (wide, self.rank),
        }
        return shapes | ({"block_inject_weight": (self.streams, wide)} if injects else {})

    def _place(self, hidden: int, prefix: str, injects: bool) -> Iterator[TensorSpec]:
        for name, shape in self.shapes(hidden, injects).items():
            kind: Kind = "matrix" if len(shape) > 1 else "centered norm"
            yield TensorSpec(f"{prefix}{name}.weight", shape, kind)

    def load(self, layer: TransformerLayer, hf: Mapping[str, Tensor], prefix: str) -> None:
        """Copies the HF tensors of a layer, which every rank has whole; prefix: of the layer."""
        for own, place in _PLACES.items():
            _load(layer.get_submodule(own), hf, prefix + place)

    def load_head(self, head: Module, hf: Mapping[str, Tensor]) -> None:
        """Copies those of what contracts the streams."""
        _load(head, hf, _HEAD)

    def cost(self, at: Share) -> LayerCost:
        """Returns the cost of both places of a layer for a micro-batch."""
        wide = self.streams * at.hidden_size * at.part
        return LayerCost(
            # the streams before each place, and what its part gives
            kept=2 * (wide + at.hidden_size * at.part) * at.width,
            transient=4 * wide * FP32,
            flops=4 * wide * (2 * self.rank + self.streams),
            sent={},
        )


def _load(place: Module, hf: Mapping[str, Tensor], prefix: str) -> None:
    for name, parameter in place.named_parameters():
        parameter.copy_(hf[f"{prefix}{name}.weight"])
