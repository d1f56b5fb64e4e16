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


def whole(values):
    return int(slice_digest(values, Box((0,) * values.dim(), tuple(values.shape)), tuple(values.shape)))


def by_hand(values) -> int:
    """The definition, in Python integers."""
    total = 0
    for index, bits in enumerate(values.contiguous().view(torch.int16).flatten().tolist()):
        x = (index + 0x9E3779B97F4A7C15) & MASK
        x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & MASK
        x = ((x ^ x >> 27) * 0x94D049BB133111EB) & MASK
        total += ((x ^ x >> 31) | 1) * ((bits & 0xFFFF) + 1)
    return total & MASK


@pytest.fixture
def values():
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)


def test_definition(values):
    assert whole(values) & MASK == by_hand(values)


def test_adds_up_over_any_split_and_memory_layout(values):
    parts = [Box((0, 0), (10, 5)), Box((0, 5), (3, 7)), Box((3, 5), (7, 7))]
    views = [
        values.t().contiguous().t()[b.start[0] : b.start[0] + b.size[0], b.start[1] : b.start[1] + b.size[1]]
        for b in parts
    ]
    total = sum(slice_digest(view, box, SHAPE) for view, box in zip(views, parts, strict=True))
    assert int(total) == whole(values)


def test_chunks_do_not_change_it(values, monkeypatch):
    expected = whole(values)
    for size in (1, 7, 12, 50):
        monkeypatch.setattr(digest, "_CHUNK", size)
        assert whole(values) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@given(place=st.integers(0, 119), bit=st.integers(0, 31))
def test_every_single_bit_flip_changes_it(dtype, place, bit):
    values = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1)).to(dtype)
    before = whole(values)
    bits = values.view(torch.int16 if dtype == torch.bfloat16 else torch.int32).flatten()
    mask = 1 << (bit % 16 if dtype == torch.bfloat16 else bit)
    bits[place] ^= (
        mask - (1 << 32)
        if mask == 1 << 31
        else (mask - (1 << 16) if dtype == torch.bfloat16 and mask == 1 << 15 else mask)
    )
    assert whole(values) != before


def test_swapped_elements_rows_and_zero_signs_change_it(values):
    before = whole(values)
    for swap in ((0, 1), (3, 9)):
        rows = values.clone()
        rows[list(swap)] = rows[list(reversed(swap))]
        assert whole(rows) != before
    flat = values.clone().flatten()
    flat[[4, 5]] = flat[[5, 4]]
    assert whole(flat.view(SHAPE)) != before
    assert whole(torch.tensor([0.0])) != whole(torch.tensor([-0.0]))


def test_scalars_and_single_elements():
    assert int(slice_digest(torch.tensor(2.0), Box((), ()), ())) == whole(torch.tensor([2.0]))
