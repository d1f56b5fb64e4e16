"""What mixes residual streams, by its numbers: what every kind of it answers. No torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from megagrpo.models.costs import FP32, LayerCost, Share
from megagrpo.models.tensors import HfTensors, TensorSpec

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_layer import TransformerLayer
    from torch.nn import Module


@dataclass(frozen=True)
class ResidualStreams(ABC):
    """Holds the number of residual streams, which one module mixes around each part of a layer.

    Every rank has its tensors whole, as parameters of the files' names.
    """

    NORMS: ClassVar[bool]  # each part of a layer has its own before it
    ON_GPUS: ClassVar[str]  # why engines need GPUs
    # a layer's modules, around what mixes tokens and around what feeds them, by what begins their
    # tensors' names in its files
    PLACES: ClassVar[Mapping[str, str]]
    HEAD: ClassVar[str]  # begins the names of what contracts the streams
    SUFFIX: ClassVar[str] = ""  # ends the names of tensors
    COPIES: ClassVar[int]  # of the streams, in float32 at once

    streams: int
    # the last norm reads a learned sum of the streams; else their mean
    has_head: bool = field(default=True, kw_only=True)

    @abstractmethod
    def place(self, hidden: int, prefix: str, in_layer: bool) -> Iterator[TensorSpec]:
        """Yields the tensors of a place of a layer, or of what contracts the streams; prefix: of
        their names."""

    @property
    @abstractmethod
    def products(self) -> int:
        """Counts the multiply-adds of a place for each number of a token's streams."""

    def cost(self, at: Share) -> LayerCost:
        """Returns the cost of both places of a layer for a micro-batch."""
        wide = self.streams * at.hidden_size * at.part
        return LayerCost(
            # the streams before each place, and what its part gives
            kept=2 * (wide + at.hidden_size * at.part) * at.width,
            transient=self.COPIES * wide * FP32,
            flops=4 * wide * self.products,
            sent={},
        )

    def tensors(self, hidden: int, prefix: str) -> Iterator[TensorSpec]:
        """Yields the tensors of a layer; prefix: of the layer."""
        for begin in self.PLACES.values():
            yield from self.place(hidden, prefix + begin, in_layer=True)

    def head_tensors(self, hidden: int) -> Iterator[TensorSpec]:
        """Yields the tensors of what contracts the streams."""
        if self.has_head:
            yield from self.place(hidden, self.HEAD, in_layer=False)

    def load(self, layer: TransformerLayer, hf: HfTensors) -> None:
        """Copies the HF tensors of a layer."""
        for module, begin in self.PLACES.items():
            self._load(layer.get_submodule(module), hf.under(begin))

    def load_head(self, head: Module, hf: HfTensors) -> None:
        """Copies the HF tensors of what contracts the streams."""
        if self.has_head:
            self._load(head, hf.under(self.HEAD))

    def _load(self, module: Module, hf: HfTensors) -> None:
        for name, parameter in module.named_parameters(recurse=False):
            parameter.copy_(hf[name + self.SUFFIX])
