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


def exchanged(values: torch.Tensor, a: tuple, b: tuple) -> torch.Tensor:
    moved = values.clone()
    moved[a], moved[b] = values[b], values[a]
    return moved


def changed(values: torch.Tensor, kind: str, dim: int, draw: Random) -> torch.Tensor:
    """Integers [...] of which something is as a faulty transfer would leave it; every side has n >= 4 elements."""
    n = values.shape[dim]
    a, b = draw.sample(range(n), 2)
    here = (slice(None),) * dim
    match kind:
        case "element":
            moved = values.clone()
            moved.view(-1)[draw.randrange(moved.numel())] ^= 1 << draw.randrange(15)
        case "elements":  # any two
            i, j = ((draw.randrange(n) for n in values.shape) for _ in range(2))
            moved = exchanged(values, tuple(i), tuple(j))
        case "slices":  # rows, columns, ...
            moved = exchanged(values, (*here, a), (*here, b))
        case "blocks":
            moved = exchanged(values, (*here, slice(0, n // 2)), (*here, slice(n - n // 2, n)))
        case "corners":  # blocks that share neither rows nor columns
            half = [n // 2 for n in values.shape]
            moved = exchanged(
                values,
                tuple(slice(0, h) for h in half),
                tuple(slice(n - h, n) for n, h in zip(values.shape, half, strict=True)),
            )
        case "shift":
            moved = values.roll(draw.randrange(1, n), dim)
        case "flat shift":  # a copy that begins too late
            moved = values.flatten().roll(draw.randrange(1, 9)).view(values.shape)
        case "reversal":
            moved = values.flip(dim)
        case "transposition":  # of any two dimensions, read in the old shape
            moved = values.transpose(dim, draw.randrange(values.dim())).contiguous().view(values.shape)
        case "stale":  # a part from another time
            moved = values.clone()
            moved[(*here, slice(a, n))] += draw.randrange(1, 5)
        case "skipped":
            moved = values.clone()
            moved[(*here, slice(a, n))] = 0
        case "repeated":  # one slice in the place of another too
            moved = values.clone()
            moved[(*here, a)] = values[(*here, b)]
        case "negated":
            moved = values ^ torch.iinfo(values.dtype).min
    return moved


KINDS = "element elements slices blocks corners shift flat_shift reversal transposition stale skipped repeated negated"


@settings(max_examples=600)
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
    moved = changed(values, kind.replace("_", " "), draw.randrange(len(shape)), draw)
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
