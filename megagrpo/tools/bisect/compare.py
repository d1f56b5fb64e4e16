"""Compares two sides point by point: errors against bounds, flips of experts. Pure functions on
tensors."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from megagrpo.tools.bisect.compared_points import Point, Sizes


@dataclass(frozen=True)
class Bounds:
    """Differences allowed between two correct programs whose kernels are of different libraries.

    relative: to the values, before the first layer. head: of the one product of the output layer,
    which is accumulated in float32. flips: share of a layer's tokens that may take other experts
    because their scores are nearly equal.
    """

    relative: float
    head: float
    flips: float


BOUNDS = {"float32": Bounds(5e-6, 5e-6, 0.01), "bfloat16": Bounds(2e-2, 2e-3, 0.3)}


@dataclass(frozen=True)
class Difference:
    """The difference at one point.

    error: root mean square over tokens of |engine - trainer| / |value of the engine| (Euclidean);
    of log-probabilities, which have one value a token, over all together.
    """

    name: str
    says: str
    layer: int | None
    error: float
    bound: float
    largest: float  # absolute difference of one element
    worst_sequence: int  # of the token that differs most
    worst_token: int

    @property
    def beyond(self) -> bool:
        """Returns whether it is beyond its bound; NaN is beyond every bound."""
        return not self.error <= self.bound


@dataclass(frozen=True)
class Flips:
    """Number of tokens of one layer whose experts differ between the sides."""

    layer: int
    tokens: int
    flipped: int
    bound: float  # share of the tokens
    first: tuple[int, int] | None  # (sequence, token)

    @property
    def beyond(self) -> bool:
        """Returns whether they are more than near ties explain, by three standard deviations and
        one."""
        expected = self.bound * self.tokens
        return self.flipped > 1 + expected + 3 * math.sqrt(expected)


def bound_at(relative: float, depth: int) -> float:
    """Returns the bound after `depth` layers: independent rounding errors add up like a random
    walk."""
    return relative * math.sqrt(1 + depth)


def compare_points(
    points: Sequence[Point],
    engine: Mapping[str, Tensor],
    trainer: Mapping[str, Tensor],
    sizes: Sizes,
    bounds: Bounds,
) -> tuple[list[Difference], list[Flips], list[str]]:
    """Returns differences at the points that both sides have, in order, flips by layer, and notes
    on unequal shapes.

    Values are [tokens, width] of all sequences, or of the patches or features of all images.
    """
    differences = list[Difference]()
    flips = list[Flips]()
    notes = list[str]()
    for point in (point for point in points if point.name in engine and point.name in trainer):
        ours = trainer[point.name]
        theirs = engine[point.name]
        lengths = sizes[point.unit]
        if ours.shape != theirs.shape:
            notes.append(
                f"{point.name}: {list(theirs.shape)} in the engine, "
                f"{list(ours.shape)} in the trainers"
            )
        elif point.layout == "map":
            flipped = torch.nonzero((ours != theirs).any(1)).flatten().tolist()
            assert point.layer is not None
            first = _position(flipped[0], lengths) if flipped else None
            flips.append(Flips(point.layer, len(ours), len(flipped), bounds.flips, first))
        else:
            bound = bound_at(bounds.relative, point.depth)
            differences.append(
                difference(point.name, point.says, theirs, ours, lengths, bound, point.layer)
            )
    return differences, flips, notes


def difference(
    name: str,
    says: str,
    engine: Tensor,
    trainer: Tensor,
    lengths: Sequence[int],
    bound: float,
    layer: int | None = None,
) -> Difference:
    """Compares [tokens, width], or [tokens], of both sides."""
    theirs = engine.double().reshape(len(engine), -1)
    apart = trainer.double().reshape(theirs.shape) - theirs
    by_token = apart.square().sum(1)
    size = theirs.square().sum(1)
    if theirs.shape[1] == 1:
        error = math.sqrt(float(by_token.sum() / size.sum().clamp(min=1e-300)))
        relative = by_token
    else:
        # a token of values near zero is measured by a thousandth of the others' size
        relative = by_token / (size + 1e-6 * size.mean()).clamp(min=1e-300)
        error = math.sqrt(float(relative.mean()))
    worst = _position(int(relative.nan_to_num(nan=math.inf).argmax()), lengths)
    return Difference(name, says, layer, error, bound, float(apart.abs().max()), *worst)


def _position(flat: int, lengths: Sequence[int]) -> tuple[int, int]:
    """Returns (sequence, token) of a token of all sequences."""
    sequence, end = next((row, end) for row, end in enumerate(accumulate(lengths)) if flat < end)
    return sequence, flat - end + lengths[sequence]
