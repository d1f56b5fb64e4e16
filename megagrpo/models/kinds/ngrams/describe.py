"""Embeddings of n-grams by their numbers (SGLang's models/qwen4_exp.py, Qwen4ExpPLELayer).

A layer's table stays in its file: it is frozen, no parameter, not published, and not exported from
memory. Its rows are chosen by hashes, one for each head of each length of n-grams.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from megagrpo.models.config_json import HfConfig, end_tokens
from megagrpo.models.tensors import HfTensors, Kind, TensorSpec, layer_prefix

if TYPE_CHECKING:
    from megagrpo.models.kinds.ngrams.layer import NGramRows

_MODULE = "ple."  # of files, in a layer
_KINDS: tuple[Kind, ...] = ("centered norm", "matrix", "convolution")  # by dimensions
TABLE = "ple.ple_embedding."  # likewise: the table, and numbers that config.json determines
_WORD = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15  # of SplitMix64 (Steele et al., 2014)
_OF_LAYERS = 10007  # between seeds


@dataclass(frozen=True)
class NGrams:
    """Holds the layers that add rows of a table to their streams, and how rows are chosen."""

    layers: tuple[int, ...]  # counted from 0
    width: int  # of all heads' rows of a token
    longest: int  # tokens of an n-gram
    heads: int  # rows for n-grams of each length from 2 on
    kernel: int  # tokens of the convolution, `longest` apart
    least: int  # no head has fewer rows
    multiple: int  # of which rows of a table are a multiple
    parts: int  # tensors of a table
    seed: int
    vocabulary: int
    end: int  # the token that n-grams do not cross

    @classmethod
    def read(cls, hf: HfConfig) -> NGrams | None:
        """Reads a config.json that has its keys; None if no layer has a table."""
        if not hf["ple_layer_ids"]:
            return None
        return cls(
            layers=tuple(sorted({number - 1 for number in hf["ple_layer_ids"]})),
            width=hf.get("ple_embed_dim") or hf["hidden_size"],
            longest=hf["ngram_size"],
            heads=hf["heads_per_ngram"],
            kernel=hf["ple_conv_kernel_size"],
            least=hf["ngram_vocab_size_base"],
            multiple=hf["make_ngram_vocab_size_divisible_by"],
            parts=hf["split_ngram_parts"],
            seed=hf.get("seed", 1234),
            vocabulary=hf["vocab_size"],
            end=end_tokens(hf)[0],
        )

    @property
    def hashes(self) -> int:
        """Counts the rows of a token."""
        return (self.longest - 1) * self.heads

    def sizes(self, index: int) -> list[int]:
        """Returns the rows of each head in the table of layer `index`: primes, of which no layer
        has another's."""
        first = self.layers.index(index) * self.hashes
        return list(_primes(self.least, first + self.hashes)[first:])

    def multipliers(self, index: int) -> list[int]:
        """Returns the odd numbers that a hash multiplies tokens by, from the last one back."""
        seed = self.seed + _OF_LAYERS * self.layers.index(index)
        half = max(1, ((1 << 63) - 1) // self.vocabulary // 2)
        places = range(1, self.longest + 1)
        return [2 * (_mixed(seed + _GAMMA * place) % half) + 1 for place in places]

    def table(self, index: int) -> Iterator[TensorSpec]:
        """Yields the tensors of a layer's table, row after row."""
        rows = -(-sum(self.sizes(index)) // self.multiple) * self.multiple
        part = -(-rows // self.parts)
        prefix = f"{layer_prefix(index)}{TABLE}ngram_embedding.shard_"
        for number, start in enumerate(range(0, rows, part)):
            shape = (min(part, rows - start), self.width // self.hashes)
            yield TensorSpec(f"{prefix}{number}.weight", shape, "matrix", trained=False)

    def hashing(self, index: int) -> dict[str, list[int]]:
        """Returns the numbers of a layer's hashes, by the tensors that files may have of them, and the
        table's scale, which only a table in FP8 has."""
        prefix = layer_prefix(index) + TABLE
        return {
            prefix + "layer_multipliers": self.multipliers(index),
            prefix + "ngram_heads_vocab_sizes": self.sizes(index),
            prefix + "ngram_embedding.weight_scale": [1],
        }

    def shapes(self, hidden: int, streams: int) -> dict[str, tuple[int, ...]]:
        """Returns the other tensors of a layer, by their names in it."""
        wide = hidden * streams
        return {
            "key_proj.weight": (wide, self.width),
            "value_proj.weight": (hidden, self.width),
            **{f"norm_{name}.weight": (wide,) for name in ("key", "query", "conv")},
            "conv1d.weight": (wide, 1, self.kernel),
        }

    def tensors(self, hidden: int, streams: int, prefix: str) -> Iterator[TensorSpec]:
        """Yields these; prefix: of the layer."""
        for name, shape in self.shapes(hidden, streams).items():
            yield TensorSpec(f"{prefix}{_MODULE}{name}", shape, _KINDS[len(shape) - 1])

    def load(self, rows: NGramRows, hf: HfTensors) -> None:
        """Copies the HF tensors of a layer, which every rank has whole."""
        for name, parameter in rows.named_parameters():
            parameter.copy_(hf[_MODULE + name.replace("/", ".")])


def _mixed(number: int) -> int:
    number = (number + _GAMMA) & _WORD
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & _WORD
    return number ^ (number >> 31)


@cache
def _primes(least: int, count: int) -> tuple[int, ...]:
    """Returns the first primes that are not less."""
    found: list[int] = []
    number = max(least, 2)
    while len(found) < count:
        if all(number % divisor for divisor in range(2, math.isqrt(number) + 1)):
            found.append(number)
        number += 1
    return tuple(found)
