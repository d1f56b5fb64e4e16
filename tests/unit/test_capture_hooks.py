"""What an engine's hooks keep of its modules: values as they were, each once."""

import pytest
import torch
from torch import Tensor, nn

from megagrpo.weights.engines.hooks import Recorder, Tap


class _Norm(nn.Module):
    def forward(self, hidden: Tensor, residual: Tensor | None = None):
        if residual is None:
            return hidden * 2
        residual += hidden  # in place, as fused kernels do
        return residual * 2, residual


def test_hooks_copy_before_the_next_module_writes_over_it():
    model = nn.ModuleDict({"norm": _Norm()})
    taps = [
        Tap("sum", "norm", "out", 1),
        Tap("in", "norm", "in"),
        Tap("none", "norm", "out", 7),
        Tap("x", "gone", "out"),
    ]
    recorder = Recorder(dict(model.named_modules()), taps)
    assert recorder.missing == ["gone"]
    residual = torch.ones(3)
    model["norm"](torch.ones(3), residual)
    residual.zero_()
    recorder.remove()
    model["norm"](torch.ones(3), residual)
    assert [t.tolist() for t in recorder.seen["sum"]] == [[2.0, 2.0, 2.0]]
    assert [t.tolist() for t in recorder.seen["in"]] == [[1.0, 1.0, 1.0]]
    assert recorder.seen["none"] == []
    assert recorder.problems == ["norm: out 7 is no tensor"]


class _FusedNorm(_Norm):
    def forward_with_allreduce_fusion(self, hidden: Tensor, residual: Tensor | None = None, fused: bool = True):
        return (hidden + residual, hidden * 3) if fused else self(hidden, residual)


@pytest.mark.parametrize("fused", [True, False])
def test_a_norm_that_is_fused_with_an_all_reduce_is_seen_once(fused):
    model = nn.ModuleDict({"norm": _FusedNorm()})
    taps = [Tap("normed", "norm", "out"), Tap("sum", "norm", "out", 1)]
    recorder = Recorder(dict(model.named_modules()), taps)
    normed, total = model["norm"].forward_with_allreduce_fusion(torch.ones(3), torch.ones(3), fused=fused)
    recorder.remove()
    model["norm"].forward_with_allreduce_fusion(torch.ones(3), torch.ones(3), fused=fused)
    assert [t.tolist() for t in recorder.seen["normed"]] == [normed.tolist()]
    assert [t.tolist() for t in recorder.seen["sum"]] == [total.tolist()]
