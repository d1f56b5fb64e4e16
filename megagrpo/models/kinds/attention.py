"""What every kind of attention answers, and the answers of one whose queries see every key."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar

from megagrpo.models.points import Row, under
from megagrpo.models.tensors import Cut

if TYPE_CHECKING:
    from megagrpo.config.actor import ParallelConfig


class Attention:
    """Mixes the tokens of a sequence at a cost that grows with the square of its length.

    Costs are of one layer; FLOPs are two a multiply-add.
    """

    MODULE: ClassVar[str] = "self_attn"  # of files, in a layer

    heads: int

    @property
    def engine_module(self) -> str:
        """Returns SGLang's module of it in a layer; "": the layer itself."""
        return self.MODULE

    def cuts(self, p: ParallelConfig) -> Iterator[Cut]:
        """Yields what ranks of trainers divide."""
        yield Cut("num_attention_heads", self.heads, "tp", p.tp)

    def recomputed(self, engine: bool, scaled: bool) -> list[str]:
        """Returns Megatron's names of what is cheap to compute again."""
        return []

    @property
    def pair_flops(self) -> float:
        """Returns the FLOPs of a query with one key: score and sum."""
        raise NotImplementedError

    @property
    def decode_pair_flops(self) -> float:
        """Returns the same in an engine."""
        return self.pair_flops

    @property
    def most_keys(self) -> float:
        """Returns how many keys a query sees at most."""
        return math.inf

    @property
    def limited_share(self) -> float:
        """Returns the part of the layers in which it sees no more than `most_keys`."""
        return 1.0

    @property
    def index_flops(self) -> float:
        """Returns the FLOPs of an indexer for a query and a key; each rank computes all of them."""
        return 0.0

    @property
    def absorbed_weights(self) -> int:
        """Counts the weights that an engine copies, which ranks divide as they divide heads."""
        return 0

    def index_bytes(self, num_layers: int) -> int:
        """Returns the bytes of one token in one rank's cache, of all layers, that an indexer
        reads."""
        return 0

    def repeated_weights(self, hidden_size: int, ranks: int) -> int:
        """Counts the weights of key/value heads that an engine's ranks hold several times."""
        return 0

    def points(self) -> list[Row]:
        """Returns what bisect compares inside a layer."""
        says = "output projection of attention"
        output: Row = ("attention_out", says, "o_proj", "linear_proj", "whole")
        return [
            (
                name,
                says,
                under(self.engine_module, engine),
                under("self_attention", trainer),
                layout,
            )
            for name, says, engine, trainer, layout in [*self.inner_points(), output]
        ]

    def inner_points(self) -> list[Row]:
        """Returns what goes into attention's output projection."""
        raise NotImplementedError
