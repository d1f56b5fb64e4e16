"""Copies in batches: every copy once, wherever it lies, with the digest that it has alone."""

import base64
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megagrpo.weights.copies.recorder import Copy, Specs, record_whole
from megagrpo.weights.copies.views import Box
from megagrpo.weights.digests import batches as digest_batches
from megagrpo.weights.digests.batches import CopyBatches, constant_steps
from megagrpo.weights.digests.digest import batched_digest, slice_digest
from megagrpo.weights.engines.loader import EngineEnd

EXPERTS, INNER, HIDDEN = 6, 4, 5
REQUEST = {"specs": "", "allow_computed": False, "dummy_start": False}


@given(st.lists(st.integers(0, 30), max_size=30).map(sorted))
def test_runs_are_constant_and_hold_every_number_once(ascending):
    runs = list(constant_steps(ascending))
    assert sorted(k for run in runs for k in run) == list(range(len(ascending)))
    for run in runs:
        assert len({ascending[b] - ascending[a] for a, b in pairwise(run)}) <= 1


def hf_tensors(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    shapes = {f"{e}.{name}": (INNER, HIDDEN) for e in range(EXPERTS) for name in ("gate", "up")}
    shapes |= {f"{e}.down": (HIDDEN, INNER) for e in range(EXPERTS)} | {"norm": (HIDDEN,)}
    return {name: torch.randn(shape, generator=draw).to(dtype) for name, shape in shapes.items()}


def recorded(hf: dict[str, torch.Tensor], live: dict[str, torch.Tensor]) -> list[Copy]:
    """The copies of a loader, which are made, too."""

    def load(tensors) -> None:
        for name, tensor in tensors.items():
            target(live, name).copy_(tensor)

    load(hf)
    return record_whole(load, specs(hf, torch.float32), live).copies


def target(live: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """The view of a parameter into which an HF tensor belongs.

    Engines have w13 [experts, 2 * inner, hidden] and w2 [experts, hidden, inner]; trainers two parameters an expert.
    """
    if name == "norm":
        return live["norm"]
    expert, kind = name.split(".")
    if "w13" in live:
        fc1, fc2 = live["w13"][int(expert)], live["w2"][int(expert)]
    else:
        fc1, fc2 = live[f"{expert}.fc1"], live[f"{expert}.fc2"]
    return fc2 if kind == "down" else fc1.chunk(2)[kind == "up"]


def engine_parameters(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    shapes = {"w13": (EXPERTS, 2 * INNER, HIDDEN), "w2": (EXPERTS, HIDDEN, INNER), "norm": (HIDDEN,)}
    return {name: torch.zeros(shape, dtype=dtype) for name, shape in shapes.items()}


def trainer_parameters(one_storage: bool) -> dict[str, torch.Tensor]:
    """Each on its own, or one after the other in a flat buffer."""
    shapes = {"norm": (HIDDEN,)}
    for e in range(EXPERTS):
        shapes |= {f"{e}.fc1": (2 * INNER, HIDDEN), f"{e}.fc2": (HIDDEN, INNER)}
    if not one_storage:
        return {name: torch.zeros(shape) for name, shape in shapes.items()}
    sizes = [torch.Size(shape).numel() for shape in shapes.values()]
    parts = torch.zeros(3 + sum(sizes))[3:].split(sizes)
    return {name: part.view(shape) for part, (name, shape) in zip(parts, shapes.items(), strict=True)}


def specs(hf: dict[str, torch.Tensor], dtype: torch.dtype) -> Specs:
    """Of tensors that are published in dtype."""
    return {name: (tuple(tensor.shape), dtype) for name, tensor in hf.items()}


def digests(batches: CopyBatches, live: dict[str, torch.Tensor], count: int, dtype: torch.dtype) -> tuple[list, int]:
    """By copy, and how many batches it took."""
    found, calls = [None] * count, 0
    for box, values, indices, published, firsts in batches.views(live):
        assert published == dtype
        calls += 1
        for index, digest in zip(indices, batched_digest(values.to(dtype), box, firsts).tolist(), strict=True):
            assert found[index] is None
            found[index] = digest
    return found, calls


@pytest.mark.parametrize(
    ("live", "calls"),
    [
        pytest.param(engine_parameters(torch.float32), 4, id="grouped experts"),
        pytest.param(trainer_parameters(one_storage=True), 4, id="flat buffer"),
        pytest.param(trainer_parameters(one_storage=False), 3 * EXPERTS + 1, id="separate parameters"),
    ],
)
def test_batches_have_the_digests_of_their_copies(live, calls):
    hf = hf_tensors(torch.float32)
    copies = recorded(hf, live)
    for dtype in (torch.float32, torch.bfloat16):
        expected = [int(slice_digest(hf[copy.hf].to(dtype), copy.box)) for copy in copies]
        assert digests(CopyBatches(copies, specs(hf, dtype)), live, len(copies), dtype) == (expected, calls)


def test_experts_in_one_tensor_are_one_batch_in_whatever_order_they_lie():
    hf = {"experts": torch.randn(EXPERTS, 2 * INNER, HIDDEN, generator=torch.Generator().manual_seed(0))}
    live = {"w13": torch.zeros(EXPERTS, 2 * INNER, HIDDEN)}

    def load(tensors) -> None:
        for place, expert in enumerate((3, 1, 0, 2, 5, 4)):
            for half, part in zip(tensors["experts"][expert].chunk(2), live["w13"][place].chunk(2), strict=True):
                part.copy_(half)

    load(hf)
    copies = record_whole(load, specs(hf, torch.float32), live).copies
    assert len(copies) == 2 * EXPERTS and {copy.size for copy in copies} == {(1, INNER, HIDDEN)}
    for dtype in (torch.float32, torch.bfloat16):
        expected = [int(slice_digest(hf["experts"][copy.box.slices].to(dtype), copy.box)) for copy in copies]
        batches = CopyBatches(copies, specs(hf, dtype))
        assert digests(batches, live, len(copies), dtype) == (expected, 2), (
            "gate and up, whatever the number of experts"
        )


def test_casts_come_in_parts(monkeypatch):
    hf, live = hf_tensors(torch.float32), engine_parameters(torch.float32)
    copies = recorded(hf, live)
    half, single = (CopyBatches(copies, specs(hf, dtype)) for dtype in (torch.bfloat16, torch.float32))
    whole, calls = digests(half, live, len(copies), torch.bfloat16)
    monkeypatch.setattr(digest_batches, "_CAST_ELEMENTS", 2 * INNER * HIDDEN)
    assert digests(half, live, len(copies), torch.bfloat16) == (whole, EXPERTS // 2 * 3 + 1)
    assert digests(single, live, len(copies), torch.float32)[1] == calls


def test_batches_follow_parameters_to_other_storages():
    hf, live = hf_tensors(torch.float32), trainer_parameters(one_storage=True)
    copies = recorded(hf, live)
    batches = CopyBatches(copies, specs(hf, torch.float32))
    before, few = digests(batches, live, len(copies), torch.float32)
    apart = {name: tensor.clone() for name, tensor in live.items()}
    after, many = digests(batches, apart, len(copies), torch.float32)
    assert after == before and many > few
    live["0.fc1"].neg_()  # and look at live values, not at those of the last call
    changed, calls = digests(batches, live, len(copies), torch.float32)
    assert calls == few
    assert {copies[k].hf for k in range(len(copies)) if changed[k] != before[k]} == {"0.gate", "0.up"}


class Engine(torch.nn.Module):
    """Experts in bfloat16 and what engines keep in float32: routers' biases; a padded row that the loader clears."""

    def __init__(self):
        super().__init__()
        for name, tensor in engine_parameters(torch.bfloat16).items():
            self.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))
        for layer in range(3):
            bias = torch.zeros(EXPERTS + 1)
            self.register_parameter(f"bias{layer}", torch.nn.Parameter(bias, requires_grad=False))

    def load_weights(self, weights) -> None:
        live = dict(self.named_parameters())
        for name, tensor in weights:
            if name.startswith("bias"):
                live[name].data[:EXPERTS].copy_(tensor)
                live[name].data[EXPERTS:].zero_()
            else:
                target({key: value.data for key, value in live.items()}, name).copy_(tensor)


class Kept(dict):
    """A mailbox inside this process."""

    has = dict.__contains__
    set = dict.__setitem__


def test_an_engine_answers_in_the_order_of_its_copies_and_names_what_no_digest_can_see():
    hf = hf_tensors(torch.bfloat16) | {f"bias{k}": torch.arange(EXPERTS).bfloat16() for k in range(3)}
    engine = Engine()
    store = Kept({REQUEST["specs"]: {name: (tuple(tensor.shape), "bfloat16") for name, tensor in hf.items()}})
    side = EngineEnd(engine)
    record = side.record(REQUEST, store)
    copies = store[record["copies"]]
    engine.load_weights(hf.items())

    def answer() -> tuple[list[int], list[str]]:
        found = side.digest()
        return np.frombuffer(base64.b64decode(found["digests"]), "<i8").tolist(), found["problems"]

    boxes = [(name, Box(start, size)) for name, start, size, *_ in copies]
    expected = [int(slice_digest(hf[name], box)) for name, box in boxes]
    assert not record["problems"] and answer() == (expected, [])
    engine.w13[3, 1, 2] += 1
    engine.bias1[2] += 1e-3  # rounds back to the published value
    engine.bias2[EXPERTS] = 1
    digests, problems = answer()
    wrong = [copy[0] for copy, a, b in zip(copies, digests, expected, strict=True) if a != b]
    assert wrong == ["3.gate"]
    assert problems == [
        f"parameter bias1, HF tensor bias1 [0:{EXPERTS}]: holds values that torch.bfloat16 cannot represent",
        "parameter bias2: elements that the loader sets to 0.0 hold something else",
    ]
