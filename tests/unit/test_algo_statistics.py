"""Exact statistics: right to the last bits against rational arithmetic, for any size of number."""

from dataclasses import astuple
from fractions import Fraction
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from megagrpo.algo.estimators import discounted_returns
from megagrpo.algo.statistics import (
    alone,
    by_row,
    exact_group_sums,
    exact_row_sums,
    group_statistics,
    moments,
    row_counts,
)

FINITE = st.floats(-4e307, 4e307)
MODERATE = st.floats(-1e6, 1e6)


def statistics_of(values: list[float], groups: list[int], num_groups: int, valid=None):
    values, groups = (torch.tensor(values, dtype=torch.float64), torch.tensor(groups, dtype=torch.int64))
    valid = torch.ones(len(values), dtype=torch.bool) if valid is None else torch.tensor(valid, dtype=torch.bool)
    return group_statistics(values, groups, num_groups, valid, alone)


@given(st.lists(MODERATE, min_size=1, max_size=30))
def test_against_rational_arithmetic(values):
    stats = statistics_of(values, [0] * len(values), 1)
    exact = [Fraction(v) for v in values]
    mean = sum(exact) / len(exact)
    largest = max(abs(v) for v in exact)
    assert abs(Fraction(float(stats.mean)) - mean) <= largest * Fraction(2) ** -80 + abs(mean) * Fraction(2) ** -51
    if len(values) > 1:
        variance = sum((v - mean) ** 2 for v in exact) / (len(exact) - 1)
        bound = variance * Fraction(2) ** -49 + (largest * Fraction(2) ** -51) ** 2
        assert abs(Fraction(float(stats.std)) ** 2 - variance) <= bound
    assert (float(stats.min), float(stats.max), int(stats.count)) == (min(values), max(values), len(values))


@given(st.lists(st.tuples(FINITE, st.integers(0, 3), st.booleans()), max_size=25))
def test_never_nan(samples):
    """Constant, huge, tiny, mixed, single and empty groups."""
    values, groups, valid = [list(x) for x in zip(*samples, strict=True)] if samples else ([], [], [])
    stats = statistics_of(values, groups, 4, valid=valid)
    for x in (stats.mean, stats.std, stats.min, stats.max):
        assert not torch.isnan(x).any() and torch.isfinite(stats.mean).all()
    assert (stats.degenerate | (stats.count > 1)).all() and (stats.mean[stats.count == 0] == 0).all()


def test_degenerate_is_about_the_range_and_not_the_std():
    values = [0.7] * 6 + [0.1, 0.1 + 1e-9] + [1000.1] * 7 + [5.0]
    groups = [0] * 6 + [1] * 2 + [2] * 7 + [3]
    stats = statistics_of(values, groups, 5)
    assert stats.degenerate.tolist() == [True, False, True, True, True]  # group 4 is empty


def test_invalid_values_are_left_out_even_nan():
    values = [1.0, float("nan"), 3.0, float("inf")]
    stats = statistics_of(values, [0, 0, 0, 1], 2, valid=[True, False, True, False])
    assert stats.mean.tolist() == [2.0, 0.0] and stats.count.tolist() == [2, 0]
    assert stats.std[0].item() == pytest.approx(2**0.5)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_valid_value_that_is_not_finite_is_an_error(bad):
    with pytest.raises(AssertionError, match="not finite"):
        statistics_of([1.0, bad], [0, 0], 1)


def test_cancellation_is_exact():
    values = torch.tensor([1e16, 1.0, -1e16, 2.0**-30], dtype=torch.float64)
    groups = torch.zeros(4, dtype=torch.int64)
    total, along = exact_group_sums(values, groups, torch.tensor([7]), alone)
    assert float(total) == 1.0 + 2.0**-30 and int(along) == 7


@pytest.mark.parametrize("size", [0, 1, 2, 1000, 2**16, 2**16 + 1, 200_000])
@pytest.mark.parametrize("scale", [1.0, 1e-300, 1e300, 0.0])
def test_moments_in_blocks_have_the_bits_of_one_group(size, scale):
    draw = torch.Generator().manual_seed(size)
    values = torch.randn(size, generator=draw, dtype=torch.float64) * scale + (0.1 if scale == 1 else 0.0)
    values[::7] *= 2.0**-40  # bits of all limbs
    ids, everything = torch.zeros(size, dtype=torch.int64), torch.ones(size, dtype=torch.bool)
    of_one = group_statistics(values, ids, 1, everything, alone)
    expected = [float(part) for part in (of_one.count, of_one.mean, of_one.std, of_one.min, of_one.max)]
    assert list(astuple(moments(values, alone))) == expected
    assert moments(values.flip(0), alone) == moments(values, alone)


@pytest.mark.parametrize("size", [0, 1, 1000, 2**16 + 1])
def test_moments_of_values_that_count_several_times_have_the_bits_of_repeated_ones(size):
    draw = torch.Generator().manual_seed(size)
    values = torch.randn(size, generator=draw, dtype=torch.float64)
    values[::7] *= 2.0**-40
    times = torch.randint(0, 5, (size,), generator=draw)
    values[times == 0] = torch.nan
    assert moments(values, alone, times) == moments(values.repeat_interleave(times), alone)


@pytest.mark.parametrize("lengths", [[], [0], [3, 0, 70_000, 5, 0], [40_000, 40_000, 2**16, 1], [1] * 70_000])
def test_sums_of_rows_do_not_depend_on_the_runs_in_which_they_are_made(lengths):
    sizes, draw = torch.tensor(lengths, dtype=torch.int64), torch.Generator().manual_seed(0)
    values = torch.randn(int(sizes.sum()), generator=draw, dtype=torch.float64)
    rows = list(values.split(lengths)) if lengths else []
    one_by_one = [float(exact_row_sums(row, torch.tensor([len(row)]))) for row in rows[:9]]
    assert exact_row_sums(values, sizes).tolist()[:9] == one_by_one and len(exact_row_sums(values, sizes)) == len(rows)
    assert by_row((values > 0).long(), sizes, "sum").tolist() == [int((row > 0).sum()) for row in rows]
    assert row_counts(values > 0, sizes).tolist() == [int((row > 0).sum()) for row in rows]
    assert by_row(values, sizes, "amax").tolist() == [max([0.0, *row.tolist()]) for row in rows]


class Operations(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("gamma", [1.0, 0.99])
def test_returns_take_few_operations_and_none_for_each_position(gamma):
    """A position at a time, a response of a million tokens, most of them a tool's, would take a minute."""
    counted = []
    for length in (64, 4096):
        sampled = torch.arange(2 * length) % 16 == 0
        lengths, rewards = torch.tensor([length, length]), torch.tensor([8.0, -2.0])
        inputs = SimpleNamespace(rewards=rewards, token_rewards=None, sampled=sampled, lengths=lengths)
        with Operations() as operations:
            discounted_returns(inputs, gamma)
        counted.append(operations.count)
    assert counted[1] - counted[0] < 128, "of the doubled distances"
