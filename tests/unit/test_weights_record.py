"""The recorder: whatever views a loader takes, running its copies by hand gives the parameters that it would give."""

import pytest
import torch
from torch import Tensor, nn

from megagrpo.weights.copies.recorder import coverage_problems, record, record_whole
from megagrpo.weights.copies.views import Box

HF = {"a": (8, 6), "b": (8, 6), "c": (12,), "e": (3, 4, 5)}
SPECS = {name: (shape, torch.float32) for name, shape in HF.items()}


def values() -> dict[str, Tensor]:
    """Every element of all tensors is another."""
    sizes = [torch.Size(shape).numel() for shape in HF.values()]
    parts = torch.arange(sum(sizes), dtype=torch.float32).split(sizes)
    return {name: part.view(shape) for part, (name, shape) in zip(parts, HF.items(), strict=True)}


def replay(copies, hf, parameters) -> None:
    for copy in copies:
        copy.view(parameters).copy_(hf[copy.hf][copy.box.slices])


def halves(hf, p):  # tensor-parallel rows and columns
    p["x"].copy_(hf["a"].chunk(2, 0)[1])
    p["y"].copy_(hf["b"].chunk(2, 1)[1])


def fused(hf, p):  # two tensors, one after the other, in one parameter
    p["x"][:8].copy_(hf["a"])
    p["x"].narrow(0, 8, 8).copy_(hf["b"])


def interleaved(hf, p):  # by head: two rows of a, then two of b
    target = p["x"].view(4, 4, 6)
    target[:, :2].copy_(hf["a"].view(4, 2, 6))
    target[:, 2:].copy_(hf["b"].view(4, 2, 6))


def transposed(hf, p):
    p["x"].copy_(hf["a"].t().contiguous())
    p["y"].copy_(hf["e"].permute(2, 0, 1)[1:3])


def through_temporaries(hf, p):
    buffer = torch.empty(8, 6, dtype=torch.float64)
    buffer.copy_(hf["a"][:, :])
    p["x"].copy_(buffer.to(torch.float32).view(4, 2, 6)[1:3].reshape(4, 6))
    p["y"].copy_(hf["b"].t().clone().t()[2:4])


def padded(hf, p):
    p["x"][:12].copy_(hf["c"])
    p["x"][12:].zero_()


def padded_by_zeros(hf, p):  # as the towers of Qwen2.5-VL, to sizes that kernels take; the last rank's may be all zeros
    p["x"].copy_(torch.cat([hf["a"][6:], hf["a"].new_zeros(3, 6)]).bfloat16().float()[1:])
    p["y"].copy_(torch.zeros(2, 6, device=hf["a"].device))


def concatenated(hf, p):  # as DeepSeek's q_a_proj and kv_a_proj_with_mqa; along columns, cast and transposed
    p["x"].copy_(torch.cat([hf["a"], hf["b"]]))
    p["y"].copy_(torch.cat([hf["b"], hf["a"][:, 2:5]], dim=-1).double().t())


def cut_from_concatenations(hf, p):
    joined = torch.cat([hf["a"], hf["b"].to(torch.bfloat16).float(), hf["a"][:2]])
    p["x"].copy_(joined[5:17, 1:4])  # the end of a, all of b, the beginning of a
    p["y"].copy_(joined.t().contiguous()[2:4, 9:15])  # of b alone
    p["z"].copy_(torch.cat([hf["e"][:, 1:3], hf["e"][:, :2]], 1).permute(2, 0, 1)[1:, :, 1:])


def through_a_temporary_used_twice(hf, p):
    temporary = torch.empty(4, 6)
    temporary[:2].copy_(hf["a"][:2])  # elements of which no copy is made
    temporary.copy_(hf["a"][4:8])
    p["x"].copy_(temporary)


CASES = [
    (through_a_temporary_used_twice, {"x": (4, 6)}),
    (concatenated, {"x": (16, 6), "y": (9, 8)}),
    (cut_from_concatenations, {"x": (12, 3), "y": (2, 6), "z": (4, 3, 3)}),
    (halves, {"x": (4, 6), "y": (8, 3)}),
    (fused, {"x": (16, 6)}),
    (interleaved, {"x": (16, 6)}),
    (transposed, {"x": (6, 8), "y": (2, 3, 4)}),
    (through_temporaries, {"x": (4, 6), "y": (2, 6)}),
    (padded, {"x": (16,)}),
    (padded_by_zeros, {"x": (4, 6), "y": (2, 6)}),
]


@pytest.mark.parametrize(("load", "shapes"), CASES, ids=[load.__name__ for load, _ in CASES])
def test_replayed_copies_equal_a_real_load(load, shapes):
    loaded = {name: torch.zeros(shape) for name, shape in shapes.items()}
    load(values(), loaded)
    parameters = {name: torch.zeros(shape) for name, shape in shapes.items()}
    copies = record_whole(lambda hf: load(hf, parameters), SPECS, parameters).copies
    assert all(not p.any() for p in parameters.values()), "recording must not touch the parameters"
    replay(copies, values(), parameters)
    for name in shapes:
        assert torch.equal(parameters[name], loaded[name])


def test_parameters_that_share_one_buffer_are_told_apart():
    buffer = torch.zeros(10 + 96)
    parameters = {"x": buffer[5:53].view(8, 6), "y": buffer[53:101].view(8, 6)}

    def load(hf):
        parameters["x"].copy_(hf["a"])
        parameters["y"].copy_(hf["b"])

    copies = record_whole(load, SPECS, parameters).copies
    assert [(c.hf, c.parameter, c.offset) for c in copies] == [("a", "x", 0), ("b", "y", 0)]
    replay(copies, values(), parameters)
    assert torch.equal(parameters["y"], values()["b"]) and not buffer[:5].any() and not buffer[101:].any()


def test_what_a_loader_concatenates_is_noted_as_belonging_together():
    parameters = {"x": torch.zeros(16, 6), "y": torch.zeros(12)}

    def load(hf):
        joined = torch.cat([hf["b"], hf["a"]])
        torch.cat([hf["a"], hf["e"].view(10, 6)])  # goes nowhere
        parameters["x"].copy_(joined)
        parameters["y"].copy_(torch.cat([hf["c"][6:], hf["c"][:6]]))  # of one tensor

    assert record(load, SPECS, parameters).together == {("a", "b")}


def test_meta_parameters_and_tied_names():
    model = nn.Linear(6, 8, bias=False, device="meta")
    parameters = {"embedding": model.weight, "head": model.weight}
    copies = record_whole(lambda hf: model.weight.data.copy_(hf["a"]), SPECS, parameters).copies
    assert [(c.hf, c.parameter) for c in copies] == [("a", "embedding")]

    def twice(hf):  # as SGLang's vision-language models load a tied output layer
        for tensor in parameters.values():
            tensor.data.copy_(hf["a"])

    assert record_whole(twice, SPECS, parameters).copies == copies


def test_constants_are_recorded_with_their_value():
    parameters = {"x": torch.ones(16)}
    recording = record(lambda hf: padded(hf, parameters), SPECS, parameters)
    assert [(f.parameter, f.offset, f.size, f.value) for f in recording.fills] == [("x", 12, (4,), 0.0)]
    assert parameters["x"].all() and not coverage_problems(recording, parameters)


# what is copied, the parameter's shape, how the message goes on after "parameter x is filled"
UNTRACEABLE = [
    (lambda hf: hf["a"] + 1, (8, 6), "from aten.add.Tensor of HF tensor a"),
    (lambda hf: torch.cat([hf["a"], torch.ones(8, 6, device="meta")]), (16, 6), "from aten.cat.default of HF tensor a"),
    (lambda hf: torch.zeros(8, 6, device="meta").add_(1), (8, 6), "from a tensor that is no HF tensor"),
    (lambda hf: torch.zeros(8, 6, device="meta").add_(hf["a"]), (8, 6), "from aten.add_.Tensor of HF tensor a"),
    (lambda hf: torch.cat([joined(hf), hf["a"]]), (24, 6), "from aten.cat.default of HF tensor a"),
    (lambda hf: joined(hf).view(-1), (96,), r"from shape .96,. .* no range of a concatenation .16, 6. of HF tensor a"),
    (lambda hf: joined(hf)[:1].expand(8, 6), (8, 6), "from .* no range of a concatenation"),
    (lambda hf: joined(hf)[:8] * 2, (8, 6), "from aten.mul.Tensor of HF tensor a"),
    (lambda hf: hf["a"].clone().mul_(2), (8, 6), "from aten.mul_.Tensor of HF"),
    (lambda hf: torch.ones(8, 6), (8, 6), "from a tensor that is no HF tensor"),
    (lambda hf: hf["a"][0], (8, 6), "by broadcasting a"),
]


def joined(hf) -> Tensor:
    return torch.cat([hf["a"], hf["b"]])


@pytest.mark.parametrize(
    ("load", "shape", "message"),
    [
        (lambda hf, x: x[:7].copy_(hf["a"][:7]), (8, 6), "parameter x .8, 6.: 6 of 48 elements are never written"),
        (lambda hf, x: (x.copy_(hf["a"]), x[:2].copy_(hf["b"][:2])), (8, 6), "parameter x .* written twice"),
        (lambda hf, x: (x[:5].copy_(hf["a"][:5]), x[:3].copy_(hf["b"][:3])), (8, 6), "parameter x .* written twice"),
        (lambda hf, x: x.add_(hf["a"]), (8, 6), "parameter x is written by aten.add_.Tensor"),
        (lambda hf, x: x.copy_(hf["a"][::2]), (4, 6), "HF tensor a .*every 2th element"),
        (lambda hf, x: x.copy_(hf["a"].view(-1)[3:17]), (14,), "HF tensor a"),
        *(
            (lambda hf, x, source=source: x.copy_(source(hf)), shape, f"parameter x is filled {message}")
            for source, shape, message in UNTRACEABLE
        ),
    ],
)
def test_what_cannot_be_traced_is_named(load, shape, message):
    x = torch.zeros(shape)
    with pytest.raises(ValueError, match=message):
        record_whole(lambda hf: load(hf, x), SPECS, {"x": x})


def test_interleaved_writes_are_checked_element_by_element():
    x = torch.zeros(16, 6)

    def load(hf):
        x[::2].copy_(hf["a"])
        x[1::2].copy_(hf["b"])

    assert len(record_whole(load, SPECS, {"x": x}).copies) == 2


def test_boxes_subtract_into_disjoint_rests():
    whole, hole = Box((0, 0), (6, 5)), Box((2, 1), (3, 2))
    rests = whole.subtract(hole)
    count = torch.zeros(6, 5, dtype=torch.int64)
    for box in [*rests, hole]:
        count[box.slices] += 1
    assert (count == 1).all()
    assert whole.subtract(Box((6, 0), (1, 5))) == [whole] and not hole.subtract(whole)


def test_a_parameter_computed_of_itself_after_copies_is_computed_from_their_tensors():
    """As SGLang's decays of Mamba: this rank's rows are copied, and then A = -exp(A_log) in their place."""
    x = torch.zeros(4, 6)

    def load(hf):
        x.copy_(hf["a"][:4])
        x.copy_(-torch.exp(x.float()))

    recording = record(load, SPECS, {"x": x}, allow_computed=True)
    assert recording.computed["x"].hf == {"a"} and recording.copies == []
    assert coverage_problems(recording, {"x": x}) == []
    with pytest.raises(ValueError, match="parameter x is filled from its own copies"):
        record_whole(load, SPECS, {"x": x})
