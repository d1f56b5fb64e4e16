"""Copies in batches: every copy once, wherever it lies, with the digest that it has alone."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megagrpo.weights import digest_batches
from megagrpo.weights.digest import batched_digest, slice_digest
from megagrpo.weights.digest_batches import CopyBatches, constant_steps
from megagrpo.weights.record import Copy, record_copies

EXPERTS, INNER, HIDDEN = 6, 4, 5


def test_long_runs_of_constant_steps():
    assert constant_steps([]) == []
    assert constant_steps([7]) == [range(1)]
    assert constant_steps([0, 2, 4, 6]) == [range(4)]
    assert constant_steps([3, 3, 9, 9, 15, 15]) == [range(0, 6, 2), range(1, 6, 2)]  # tied: the same place twice
    assert constant_steps([0, 1, 10, 11, 20, 21]) == [range(0, 6, 2), range(1, 6, 2)]
    assert constant_steps([0, 1, 2, 50, 51, 52]) == [range(3), range(3, 6)]
    assert constant_steps([0, 5, 7, 9]) == [range(2), range(2, 4)]


@given(st.lists(st.integers(0, 30), max_size=30).map(sorted))
def test_runs_are_constant_and_hold_every_number_once(ascending):
    runs = constant_steps(ascending)
    assert sorted(k for run in runs for k in run) == list(range(len(ascending)))
    for run in runs:
        assert len({ascending[b] - ascending[a] for a, b in pairwise(run)}) <= 1


def hf_tensors(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    shapes = {f"{e}.{name}": (INNER, HIDDEN) for e in range(EXPERTS) for name in ("gate", "up")}
    shapes |= {f"{e}.down": (HIDDEN, INNER) for e in range(EXPERTS)} | {"norm": (HIDDEN,)}
    return {name: torch.randn(shape, generator=draw).to(dtype) for name, shape in shapes.items()}


def recorded(hf: dict[str, torch.Tensor], live: dict[str, torch.Tensor], place) -> list[Copy]:
    """`place(live, name)`: the view of a parameter into which an HF tensor belongs. Copies are made, too."""

    def load(tensors) -> None:
        for name, tensor in tensors.items():
            place(live, name).copy_(tensor)

    load(hf)
    return record_copies(load, {name: (tuple(t.shape), t.dtype) for name, t in hf.items()}, live)


def grouped(live: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """As an engine keeps experts: w13 [experts, 2 * inner, hidden] and w2 [experts, hidden, inner]."""
    if name == "norm":
        return live["norm"]
    expert, kind = name.split(".")
    return live["w2"][int(expert)] if kind == "down" else live["w13"][int(expert)].chunk(2)[kind == "up"]


def sequential(live: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """As a trainer keeps them: two parameters an expert."""
    if name == "norm":
        return live["norm"]
    expert, kind = name.split(".")
    return live[f"{expert}.fc2"] if kind == "down" else live[f"{expert}.fc1"].chunk(2)[kind == "up"]


def engine_parameters(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    shapes = {"w13": (EXPERTS, 2 * INNER, HIDDEN), "w2": (EXPERTS, HIDDEN, INNER), "norm": (HIDDEN,)}
    return {name: torch.zeros(shape, dtype=dtype) for name, shape in shapes.items()}


def trainer_parameters(dtype: torch.dtype, one_storage: bool) -> dict[str, torch.Tensor]:
    """Each on its own, or one after the other in a flat buffer."""
    shapes = {"norm": (HIDDEN,)}
    for e in range(EXPERTS):
        shapes |= {f"{e}.fc1": (2 * INNER, HIDDEN), f"{e}.fc2": (HIDDEN, INNER)}
    if not one_storage:
        return {name: torch.zeros(shape, dtype=dtype) for name, shape in shapes.items()}
    flat = torch.zeros(1000, dtype=dtype)
    live, first = {}, 3
    for name, shape in shapes.items():
        size = torch.Size(shape).numel()
        live[name], first = flat[first : first + size].view(shape), first + size
    return live


def digests(batches: CopyBatches, live: dict[str, torch.Tensor], count: int, dtype: torch.dtype) -> tuple[list, int]:
    """By copy, and how many batches it took."""
    found, calls = [None] * count, 0
    for box, values, places in batches.views(live, dtype):
        calls += 1
        for place, digest in zip(places, batched_digest(values.to(dtype), box).tolist(), strict=True):
            assert found[place] is None
            found[place] = digest
    return found, calls


@pytest.mark.parametrize(
    ("live", "place", "calls"),
    [
        (engine_parameters(torch.float32), grouped, 3),
        (trainer_parameters(torch.float32, one_storage=True), sequential, 4),
        (trainer_parameters(torch.float32, one_storage=False), sequential, 2 * EXPERTS + 1),
    ],
    ids=["grouped experts", "flat buffer", "separate parameters"],
)
def test_batches_have_the_digests_of_their_copies(live, place, calls):
    hf = hf_tensors(torch.float32)
    copies = recorded(hf, live, place)
    batches = CopyBatches(copies)
    for dtype in (torch.float32, torch.bfloat16):
        expected = [int(slice_digest(hf[copy.hf].to(dtype), copy.box)) for copy in copies]
        assert digests(batches, live, len(copies), dtype) == (expected, calls)


def test_casts_come_in_parts(monkeypatch):
    hf, live = hf_tensors(torch.float32), engine_parameters(torch.float32)
    copies = recorded(hf, live, grouped)
    whole, calls = digests(CopyBatches(copies), live, len(copies), torch.bfloat16)
    monkeypatch.setattr(digest_batches, "_CAST_ELEMENTS", 2 * INNER * HIDDEN)
    assert digests(CopyBatches(copies), live, len(copies), torch.bfloat16) == (whole, EXPERTS + EXPERTS // 2 + 1)
    assert digests(CopyBatches(copies), live, len(copies), torch.float32)[1] == calls


def test_batches_follow_parameters_to_other_storages():
    hf, live = hf_tensors(torch.float32), trainer_parameters(torch.float32, one_storage=True)
    copies = recorded(hf, live, sequential)
    batches = CopyBatches(copies)
    before, few = digests(batches, live, len(copies), torch.float32)
    apart = {name: tensor.clone() for name, tensor in live.items()}
    after, many = digests(batches, apart, len(copies), torch.float32)
    assert after == before and many > few
    live["0.fc1"].neg_()  # and look at live values, not at those of the last call
    changed, calls = digests(batches, live, len(copies), torch.float32)
    assert calls == few
    assert {copies[k].hf for k in range(len(copies)) if changed[k] != before[k]} == {"0.gate", "0.up"}
