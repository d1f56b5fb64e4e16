"""The digest: additive, position-dependent, and blind to no single change."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megagrpo.weights import digest
from megagrpo.weights.digest import slice_digest
from megagrpo.weights.views import Box

SHAPE = (10, 12)
MASK = (1 << 64) - 1
INTEGERS = {torch.float32: torch.int32, torch.bfloat16: torch.int16}
dtypes = st.sampled_from(sorted(INTEGERS, key=str))


def whole(values: torch.Tensor) -> int:
    return int(slice_digest(values, Box((0,) * values.dim(), tuple(values.shape))))


def odd(dimension: int, index: int) -> int:
    x = (index + (dimension + 1) * 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ x >> 27) * 0x94D049BB133111EB) & MASK
    return (x ^ x >> 31) | 1


def by_hand(values: torch.Tensor) -> int:
    """The definition, in Python integers."""
    rows = values.contiguous().view(torch.int16).tolist()
    return sum(odd(0, i) * odd(1, j) * bits for i, row in enumerate(rows) for j, bits in enumerate(row)) & MASK


@pytest.fixture
def values() -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)


def random_bits(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Any bit patterns: NaN, infinities and signed zeros among them."""
    integer, generator = INTEGERS[dtype], torch.Generator().manual_seed(seed)
    limits = torch.iinfo(integer)
    return torch.randint(limits.min, limits.max, shape, generator=generator, dtype=torch.int64).to(integer).view(dtype)


def test_definition(values):
    assert whole(values) & MASK == by_hand(values)


def test_adds_up_over_any_split_and_memory_layout(values):
    parts = [Box((0, 0), (10, 5)), Box((0, 5), (3, 7)), Box((3, 5), (7, 7))]
    transposed = values.t().contiguous().t()
    views = [transposed[b.start[0] : b.start[0] + b.size[0], b.start[1] : b.start[1] + b.size[1]] for b in parts]
    assert int(sum(slice_digest(view, box) for view, box in zip(views, parts, strict=True))) == whole(values)


@given(dtype=dtypes, seed=st.integers(0, 10**6), cut=st.tuples(*(st.integers(1, n - 1) for n in (3, 5, 7))))
def test_adds_up_in_three_dimensions(dtype, seed, cut):
    tensor = random_bits(dtype, (3, 5, 7), seed)
    total = 0
    for corner in ((a, b, c) for a in (0, 1) for b in (0, 1) for c in (0, 1)):
        start = tuple(c * k for c, k in zip(corner, cut, strict=True))
        stop = tuple(n if c else k for c, k, n in zip(corner, cut, tensor.shape, strict=True))
        part = tensor[tuple(slice(a, b) for a, b in zip(start, stop, strict=True))]
        total += int(slice_digest(part, Box(start, tuple(b - a for a, b in zip(start, stop, strict=True)))))
    assert total & MASK == whole(tensor) & MASK


def test_chunks_do_not_change_it(values, monkeypatch):
    expected = whole(values)
    for size in (1, 7, 12, 50):
        monkeypatch.setattr(digest, "_CHUNK", size)
        assert whole(values) == expected


@given(dtype=dtypes, place=st.integers(0, 119), bit=st.integers(0, 31), seed=st.integers(0, 10**6))
def test_every_single_bit_flip_changes_it(dtype, place, bit, seed):
    values = random_bits(dtype, SHAPE, seed)
    before, bits = whole(values), values.view(INTEGERS[dtype]).flatten()
    width = 8 * values.element_size()
    flip = 1 << (bit % width)
    bits[place] ^= flip - (1 << width) if flip == 1 << (width - 1) else flip
    assert whole(values) != before


@given(
    dtype=dtypes, places=st.lists(st.integers(0, 119), min_size=2, max_size=2, unique=True), seed=st.integers(0, 10**6)
)
def test_every_exchange_of_two_elements_changes_it(dtype, places, seed):
    values = random_bits(dtype, SHAPE, seed)
    before, flat = whole(values), values.view(INTEGERS[dtype]).flatten()
    if flat[places[0]] == flat[places[1]]:
        return
    flat[places] = flat[places[::-1]]
    assert whole(values) != before


@given(dtype=dtypes, seed=st.integers(0, 10**6), kind=st.sampled_from(["rows", "columns", "roll", "transpose", "flip"]))
def test_every_rearrangement_changes_it(dtype, seed, kind):
    values = random_bits(dtype, (12, 12), seed).view(INTEGERS[dtype])
    a, b = seed % 12, (seed + 1 + seed % 11) % 12
    match kind:
        case "rows":
            moved = values.clone()
            moved[[a, b]] = moved[[b, a]]
        case "columns":
            moved = values.clone()
            moved[:, [a, b]] = moved[:, [b, a]]
        case "roll":
            moved = values.roll(1 + seed % 11, seed % 2)
        case "transpose":
            moved = values.t().contiguous()
        case "flip":
            moved = values.flip(seed % 2)
    assert whole(moved.view(dtype)) != whole(values.view(dtype))


@given(dtype=dtypes, seed=st.integers(0, 10**6))
def test_changes_that_cancel_in_every_row_and_column_are_noticed(dtype, seed):
    """+d and -d at the corners of a rectangle: row sums and column sums stay as they were."""
    values = random_bits(dtype, SHAPE, seed).view(INTEGERS[dtype]) // 2
    d, (i, k), (j, m) = 1 + seed % 1000, (seed % 5, 5 + seed % 5), (seed % 6, 6 + seed % 6)
    changed = values.clone()
    changed[i, j] += d
    changed[k, m] += d
    changed[i, m] -= d
    changed[k, j] -= d
    assert whole(changed.view(dtype)) != whole(values.view(dtype))


def test_zero_signs_change_it():
    assert whole(torch.tensor([0.0])) != whole(torch.tensor([-0.0]))


def test_scalars_and_empty_slices():
    assert int(slice_digest(torch.tensor(2.0), Box((), ()))) == int(torch.tensor(2.0).view(torch.int32))
    assert int(slice_digest(torch.empty(0, 4), Box((3, 0), (0, 4)))) == 0
