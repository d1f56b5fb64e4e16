"""What layers that keep a state in place of keys and values answer by their numbers. No torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar

from megagrpo.models.costs import FP32, LayerCost, Share
from megagrpo.models.points import Row
from megagrpo.models.tensors import Cut

if TYPE_CHECKING:
    from megagrpo.config.actor import ActorConfig, ParallelConfig
    from megagrpo.models.fields import Fields, Kernels

FLA_CHUNK = 64  # tokens that flash-linear-attention's kernels compute at once


class Recurrence(ABC):
    """Mixes the tokens of a sequence through a state, at a cost that grows with the length."""

    MODULE: ClassVar[str] = "linear_attn"  # in a layer; a family may store it under another name
    OUTPUT: ClassVar[str] = "out_proj"  # its output projection there
    CUT_KEY: ClassVar[str]  # of config.json, what ranks divide
    PACKAGES: ClassVar[tuple[str, ...]]  # that GPUs need
    TITLE: ClassVar[str]

    kernel: int  # tokens of the convolution
    layers: tuple[bool, ...]  # those that have it in place of attention

    @property
    @abstractmethod
    def channels(self) -> int:
        """Counts what the convolution mixes along the sequence."""

    @property
    @abstractmethod
    def cut(self) -> int:
        """Counts what ranks divide."""

    @property
    @abstractmethod
    def rows(self) -> int:
        """Counts the outputs of the first projection."""

    @property
    @abstractmethod
    def state_size(self) -> int:
        """Counts the elements of the state of a layer."""

    def fields(self, actor: ActorConfig, kernels: Kernels) -> Fields:
        """Returns the fields of Megatron's TransformerConfig; the layer gets the sizes. Checkpoints
        would take layers for alike, and refuse to be written where they are not."""
        return {"hetereogenous_dist_checkpoint": True}

    def cuts(self, p: ParallelConfig) -> Iterator[Cut]:
        """Yields what tensor- and context-parallel ranks divide."""
        yield Cut(self.CUT_KEY, self.cut, "tp x cp", p.tp * p.cp)

    def recomputed(self, engine: bool, scaled: bool) -> list[str]:
        """Returns Megatron's names of what is cheap to compute again."""
        return []

    def state_bytes(self, ranks: int, width: int) -> int:
        """Returns the bytes of one request's states in one rank of an engine, of all layers: the
        last inputs of each convolution, and the recurrent state in float32."""
        inputs = self.channels * (self.kernel - 1) * width
        return sum(self.layers) * (inputs + self.state_size * FP32) // ranks

    def points(self) -> list[Row]:
        """Returns what bisect compares inside a layer."""
        module = f"{self.MODULE}.{self.OUTPUT}"
        return [("attention_out", self.TITLE, module, "self_attention.out_proj", "whole")]


def recurrent_cost(
    at: Share, rows: float, values: float, kept: float, mixed: float, copies: int
) -> LayerCost:
    """Returns the cost of a layer, from numbers of a token and a tensor-parallel rank.

    rows, values: inputs and outputs of the mixing. kept: bytes for the backward. mixed: FLOPs of
    the mixing. copies: of the values, in float32 at once.
    """
    p = at.parallel
    return LayerCost(
        kept=kept * at.whole,
        transient=(2 * rows * at.width + copies * values * FP32) * at.whole + at.gathered,
        flops=(2 * at.hidden_size * (rows + values) + mixed) * at.whole,
        sent={
            "tp": at.gathers(2),
            "cp": (rows + values) * at.whole * at.width * (p.cp - 1) / p.cp,
        },
    )
