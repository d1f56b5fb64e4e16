"""Compares two sides point by point and names the first that differs beyond its bound. Pure functions on tensors."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from megagrpo.bisect.points import Point


@dataclass(frozen=True)
class Bounds:
    """Says what two right programs may differ by, whose kernels are of different libraries.

    relative: to the values, before the first layer. head: of the one product of the output layer, which is accumulated
    in float32. flips: share of a layer's tokens that may take other experts, for their scores are nearly equal.
    """

    relative: float
    head: float
    flips: float


BOUNDS = {"float32": Bounds(5e-6, 5e-6, 0.01), "bfloat16": Bounds(2e-2, 2e-3, 0.3)}


@dataclass(frozen=True)
class Difference:
    """Holds what was found at one point.

    error: root mean square over tokens of |engine - trainer| / |value of the engine| (Euclidean); of log-probabilities,
    which have one value a token, of all together.
    """

    name: str
    says: str
    layer: int | None
    error: float
    bound: float
    largest: float  # absolute difference of one element
    worst_sequence: int  # of the token that differs most
    worst_token: int
    tokens: int  # compared; those that a flip of experts has reached are left out, and of 0 nothing is known

    @property
    def beyond(self) -> bool:
        """Tells whether it is beyond its bound; NaN is beyond every bound."""
        return not self.error <= self.bound


@dataclass(frozen=True)
class Flips:
    """Counts the tokens of one layer whose experts differ between the sides."""

    layer: int
    tokens: int  # that are compared: no flip of an earlier layer has reached them
    flipped: int
    bound: float  # share of the tokens
    first: tuple[int, int] | None  # (sequence, token)

    @property
    def beyond(self) -> bool:
        """Tells whether they are more than near ties explain, by three standard deviations and one."""
        expected = self.bound * self.tokens
        return self.flipped > 1 + expected + 3 * math.sqrt(expected)


def bound_at(relative: float, depth: int) -> float:
    """Returns the bound after so many layers: independent rounding errors add up like a random walk."""
    return relative * math.sqrt(1 + depth)


def compare_points(
    points: Sequence[Point],
    engine: Mapping[str, Tensor],
    trainer: Mapping[str, Tensor],
    lengths: Sequence[int],
    bounds: Bounds,
    forced: bool,
) -> tuple[list[Difference], list[Flips], list[str]]:
    """Returns the differences at the points that both sides have, in order, flips by layer, and what does not match.

    Values are [tokens, width] of all sequences, whose lengths are given. A token whose experts differ computes
    something else from there on, and so do all later tokens of its sequence, which attend to it: unless the trainers
    were `forced` to take the engine's experts, these are left out of what comes behind. Forced, their map is what they
    would have chosen.
    """
    unreached = torch.ones(sum(lengths), dtype=torch.bool)
    differences: list[Difference] = []
    flips: list[Flips] = []
    notes: list[str] = []
    for point in points:
        ours, theirs = trainer.get(point.name), engine.get(point.name)
        if ours is None or theirs is None:
            continue
        if ours.shape != theirs.shape:
            notes.append(f"{point.name}: {list(theirs.shape)} in the engine, {list(ours.shape)} in the trainers")
            continue
        if point.layout == "map":
            differs = (ours != theirs).any(1)
            found = torch.nonzero(differs & unreached).flatten().tolist()
            assert point.layer is not None
            where = _place(found[0], lengths) if found else None
            flips.append(Flips(point.layer, int(unreached.sum()), len(found), bounds.flips, where))
            if not forced:
                unreached = unreached & ~_from_first(differs & unreached, lengths)
            continue
        bound = bound_at(bounds.relative, point.depth)
        differences.append(difference(point.name, point.says, point.layer, theirs, ours, lengths, bound, unreached))
    return differences, flips, notes


def difference(
    name: str,
    says: str,
    layer: int | None,
    engine: Tensor,
    trainer: Tensor,
    lengths: Sequence[int],
    bound: float,
    counted: Tensor | None = None,
) -> Difference:
    """Compares [tokens, width] of both sides where `counted` [tokens] bool, by default everywhere."""
    counted = torch.ones(len(engine), dtype=torch.bool) if counted is None else counted
    at = torch.nonzero(counted).flatten()
    if not len(at):
        return Difference(name, says, layer, 0.0, bound, 0.0, 0, 0, 0)
    theirs, apart = engine[at].double(), (trainer[at].double() - engine[at].double())
    by_token, size = apart.square().sum(1), theirs.square().sum(1)
    if theirs.shape[1] == 1:
        error = math.sqrt(float(by_token.sum() / size.sum().clamp(min=1e-300)))
        relative = by_token
    else:
        # a token of values near zero is measured by a thousandth of the others' size
        relative = by_token / (size + 1e-6 * size.mean()).clamp(min=1e-300)
        error = math.sqrt(float(relative.mean()))
    worst = int(at[int(relative.nan_to_num(nan=math.inf).argmax())])
    sequence, token = _place(worst, lengths)
    return Difference(name, says, layer, error, bound, float(apart.abs().max()), sequence, token, len(at))


def first_flips_beyond(flips: Sequence[Flips]) -> Flips | None:
    """Returns the flips of the first layer that has more than near ties explain."""
    return next((found for found in flips if found.beyond), None)


def first_beyond(differences: Sequence[Difference]) -> Difference | None:
    """Returns the first difference beyond its bound."""
    return next((found for found in differences if found.beyond), None)


def last_within(differences: Sequence[Difference]) -> Difference | None:
    """Returns the last place before the first difference beyond its bound, None when that is the first place."""
    before: Difference | None = None
    for found in differences:
        if found.beyond:
            return before
        before = found if found.tokens else before
    return before


def _place(flat: int, lengths: Sequence[int]) -> tuple[int, int]:
    for sequence, end in enumerate(accumulate(lengths)):
        if flat < end:
            return sequence, flat - end + lengths[sequence]
    raise IndexError(f"token {flat} of {sum(lengths)}")


def _from_first(flags: Tensor, lengths: Sequence[int]) -> Tensor:
    """Returns True from the first True of every sequence to its end."""
    return torch.cat([part.int().cummax(0).values.bool() for part in flags.split(list(lengths))])
