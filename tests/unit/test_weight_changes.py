"""Changed elements of a message, as positions or as a mask: sizes as announced, bits as sent."""

import pytest
import torch

from megagrpo.weights.copies.views import ParameterSlice
from megagrpo.weights.wire.changes import ALL, LastSent, changes_bytes, count_tags, write_changes
from megagrpo.weights.wire.messages import Message

DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn)


def message(numel: int, dtype: torch.dtype, peer: int = 0, tag: int = 0) -> Message:
    return Message(peer, tag, dtype, (ParameterSlice("w", 0, (numel,), (1,)),))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", [1, 7, 8, 1001])
@pytest.mark.parametrize("share", [0.0, 0.002, 0.05, 0.3, 1.0])
def test_what_arrives_is_what_was_sent(dtype, numel, share):
    generator = torch.Generator().manual_seed(numel)
    one, last = message(numel, dtype), LastSent()
    values = torch.randn(numel, generator=generator).to(dtype)
    assert last.update(one, values) == (ALL, values)
    received = values.clone()
    for _ in range(3):  # what was sent last changes, too
        where = torch.rand(numel, generator=generator) < share
        values = torch.where(where, (-values.float()).to(dtype), values)
        count, content = last.update(one, values)
        if count == ALL:
            received = content.clone()
        elif count:
            assert content.nbytes == changes_bytes(count, numel, dtype) < one.num_bytes
            write_changes(one, count, content, received)
        assert torch.equal(received.view(torch.uint8), values.view(torch.uint8))
        assert last.counted() == (numel, int(where.sum()))


def test_few_changes_travel_as_positions_and_many_as_a_mask():
    assert changes_bytes(3, 1000, torch.bfloat16) == 3 * (2 + 4)
    assert changes_bytes(300, 1000, torch.bfloat16) == 300 * 2 + 125


def test_bits_are_compared_and_not_values():
    last, values = LastSent(), torch.tensor([0.0, float("nan"), 1.0] * 100)
    last.update(message(300, torch.float32), values)
    assert last.update(message(300, torch.float32), values.clone())[0] == 0, "NaN is what it was"
    values[0] = -0.0
    assert last.update(message(300, torch.float32), values)[0] == 1


def test_counts_have_tags_of_their_own():
    batch = [message(1, torch.float32, peer, tag) for peer, tag in ((1, 4), (2, 0), (1, 5))]
    tags = count_tags(batch)
    assert tags.keys() == {1, 2} and not set(tags.values()) & {0, 4, 5}
