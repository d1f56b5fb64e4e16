"""The digest: additive, position-dependent, and blind to no single change."""

from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megagrpo.weights.copies.views import Box
from megagrpo.weights.digests import digest
from megagrpo.weights.digests.digest import batched_digest, slice_digest

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


def test_definition_in_chunks_of_any_size(values, monkeypatch):
    for size in (digest._CHUNK, 1, 7, 12, 50):
        monkeypatch.setattr(digest, "_CHUNK", size)
        assert whole(values) & MASK == by_hand(values)


def exchanged(values: torch.Tensor, a: tuple, b: tuple) -> torch.Tensor:
    moved = values.clone()
    moved[a], moved[b] = values[b], values[a]
    return moved


def replaced(values: torch.Tensor, index: tuple, new: torch.Tensor | int) -> torch.Tensor:
    moved = values.clone()
    moved[index] = new
    return moved


def changed(values: torch.Tensor, kind: str, dim: int, draw: Random) -> torch.Tensor:
    """Integers [...] of which something is as a faulty transfer would leave it; every side has n >= 4 elements."""
    n, here = values.shape[dim], (slice(None),) * dim
    (a, b), half = draw.sample(range(n), 2), [size // 2 for size in values.shape]
    i, j = (tuple(draw.randrange(size) for size in values.shape) for _ in range(2))
    first = tuple(slice(0, h) for h in half)
    last = tuple(slice(size - h, size) for size, h in zip(values.shape, half, strict=True))
    tail, other = (*here, slice(a, n)), draw.randrange(values.dim())
    bit = torch.tensor(1 << draw.randrange(8 * values.element_size())).to(values.dtype)
    return {
        "bit": lambda: replaced(values, i, values[i] ^ bit),
        "elements": lambda: exchanged(values, i, j),  # any two
        "slices": lambda: exchanged(values, (*here, a), (*here, b)),  # rows, columns, ...
        "blocks": lambda: exchanged(values, (*here, first[dim]), (*here, last[dim])),
        "corners": lambda: exchanged(values, first, last),  # blocks that share neither rows nor columns
        "shift": lambda: values.roll(draw.randrange(1, n), dim),
        "flat_shift": lambda: values.flatten().roll(draw.randrange(1, 9)).view(values.shape),  # begins too late
        "reversal": lambda: values.flip(dim),
        "transposition": lambda: values.transpose(dim, other).contiguous().view(values.shape),  # in the old shape
        "stale": lambda: replaced(values, tail, values[tail] + draw.randrange(1, 5)),  # a part from another time
        "skipped": lambda: replaced(values, tail, 0),
        "repeated": lambda: replaced(values, (*here, a), values[(*here, b)]),  # one slice instead of another too
        "negated": lambda: values ^ torch.iinfo(values.dtype).min,
    }[kind]()


KINDS = "bit elements slices blocks corners shift flat_shift reversal transposition stale skipped repeated negated"


@settings(max_examples=800)
@given(
    dtype=dtypes,
    shape=st.lists(st.integers(4, 9), min_size=1, max_size=3).flatmap(
        lambda shape: st.sampled_from([tuple(shape), (shape[0],) * len(shape)])  # cubes, for transpositions
    ),
    kind=st.sampled_from(KINDS.split()),
    few=st.booleans(),  # duplicates of a few values, or random bits
    seed=st.integers(0, 10**6),
)
def test_every_change_is_noticed_and_nothing_else(dtype, shape, kind, few, seed):
    draw = Random(seed)
    values = random_bits(dtype, shape, seed).view(INTEGERS[dtype])
    values = values % 3 if few else values
    moved = changed(values, kind, draw.randrange(len(shape)), draw)
    assert (whole(moved.view(dtype)) == whole(values.view(dtype))) == torch.equal(moved, values)


@pytest.mark.parametrize("dimensions", [1, 2, 3])
@pytest.mark.parametrize("content", ["dense", "exchanged"])
def test_the_chance_to_miss_a_change_has_the_bound_that_is_stated(dimensions, content):
    """Only 2^t, the power of two that divides a change, limits it: n = 64 - t bits are left, here 8 or 10."""
    n, trials = 8 if dimensions < 3 else 10, 4000
    shape, draw = (6,) * dimensions, torch.Generator().manual_seed(dimensions)
    missed = 0
    for _ in range(trials):
        if content == "dense":
            change = torch.randint(-2, 3, shape, generator=draw)
            change.view(-1)[0] = 1
        else:  # slices along every dimension: the worst
            change = torch.ones((), dtype=torch.int64)
            for _ in shape:
                change = change.unsqueeze(-1) * torch.tensor([1, 0, -1, 0, 0, 0])
        start = tuple(torch.randint(0, 10**6, (dimensions,), generator=draw).tolist())  # other odd numbers every time
        missed += not slice_digest(change << (64 - n), Box(start, shape))
    bound = n ** (dimensions - 1) * 2 ** (1 - n)
    assert missed / trials <= 1.5 * bound
    if content == "exchanged" and dimensions < 3:
        assert missed / trials >= bound / 2  # it is no idle one


def test_no_two_indices_share_a_multiplier():
    """Along one dimension exchanged rows would go unnoticed, along two a transposition."""
    odd_numbers = torch.cat([digest._odd(0, 1 << 20, k, torch.device("cpu"), 0) for k in range(3)])
    assert len(odd_numbers.unique()) == 3 << 20 and bool((odd_numbers & 1).all())


def test_exchanged_experts_are_noticed_slice_by_slice():
    """They have the same multipliers: it is by its name that each is compared."""
    experts = random_bits(torch.bfloat16, (5, *SHAPE), 0)
    before = batched_digest(experts, Box((0, 0), SHAPE))
    after = batched_digest(experts[[0, 3, 2, 1, 4]], Box((0, 0), SHAPE))
    assert (before != after).tolist() == [False, True, False, True, False]
    assert int(before.sum()) == int(after.sum())  # which a digest of the whole would have had to tell apart


@given(
    dtype=dtypes,
    shape=st.lists(st.integers(1, 7), min_size=0, max_size=3),
    count=st.integers(1, 5),
    seed=st.integers(0, 10**6),
)
def test_a_batch_is_its_slices_and_adds_up(dtype, shape, count, seed):
    draw = Random(seed)
    start, shape = tuple(draw.randrange(50) for _ in shape), tuple(shape)
    order = draw.sample(range(len(shape) + 1), len(shape) + 1)
    back = [order.index(k) for k in range(len(order))]
    values = random_bits(dtype, (count, *shape), seed).permute(order).contiguous().permute(back)  # any strides
    batch = batched_digest(values, Box(start, shape))
    assert batch.tolist() == [int(slice_digest(part.contiguous(), Box(start, shape))) for part in values]
    for dim, n in enumerate(shape):
        cut = draw.randrange(n + 1)
        later = tuple(a + cut * (k == dim) for k, a in enumerate(start))
        parts = [
            batched_digest(part, Box(corner, tuple(part.shape[1:])))
            for part, corner in zip(values.split([cut, n - cut], dim + 1), (start, later), strict=True)
        ]
        assert torch.equal(parts[0] + parts[1], batch)


@given(dtype=dtypes, seed=st.integers(0, 10**6))
def test_changes_that_cancel_in_every_row_and_column_are_noticed(dtype, seed):
    """+d and -d at the corners of a rectangle: row sums and column sums stay as they were."""
    values = random_bits(dtype, SHAPE, seed).view(INTEGERS[dtype]) // 2
    d, corners = (1 + seed % 1000, ([seed % 5, 5 + seed % 5] * 2, [seed % 6, 6 + seed % 6, 6 + seed % 6, seed % 6]))
    changed = values.clone()
    changed[corners] += torch.tensor([d, d, -d, -d], dtype=values.dtype)
    assert whole(changed.view(dtype)) != whole(values.view(dtype))


def test_scalars_signs_of_zero_and_empty_slices():
    assert whole(torch.tensor([0.0])) != whole(torch.tensor([-0.0]))
    assert int(slice_digest(torch.tensor(2.0), Box((), ()))) == int(torch.tensor(2.0).view(torch.int32))
    assert int(slice_digest(torch.empty(0, 4), Box((3, 0), (0, 4)))) == 0
