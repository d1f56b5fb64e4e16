"""Mamba-2 in chunks is its recurrence, token by token; so are its gradients, and a layer of packed sequences."""

import sys
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from megagrpo.actor.host import prepare_host

prepare_host("cpu")

from megagrpo.models.kinds.mamba2 import layer as mamba2  # noqa: E402  Megatron needs a prepared host
from tests.gradients import assert_gradients_agree  # noqa: E402

SEQUENCES, LENGTH, HEADS, GROUPS, WIDTH, STATE = 2, 150, 6, 2, 8, 16  # more than four chunks


def inputs() -> list[Tensor]:
    """x, steps, decays, B, C and skips: states that last for tens of tokens."""
    draw = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(SEQUENCES, LENGTH, *shape, generator=draw)

    steps, decay = F.softplus(normal(HEADS)), -0.1 * torch.rand(HEADS, generator=draw)
    skip = torch.randn(HEADS, generator=draw)
    tensors = [normal(HEADS, WIDTH), steps, decay, normal(GROUPS, STATE), normal(GROUPS, STATE), skip]
    return [t.requires_grad_() for t in tensors]


def by_token(x: Tensor, steps: Tensor, decay: Tensor, into: Tensor, out_of: Tensor, skip: Tensor) -> Tensor:
    """The recurrence of arXiv 2405.21060."""
    state = torch.zeros(SEQUENCES, HEADS, WIDTH, STATE, dtype=x.dtype)
    outputs = []
    for t in range(LENGTH):
        b, c = (g[:, t].repeat_interleave(HEADS // GROUPS, 1)[:, :, None] for g in (into, out_of))
        step = steps[:, t, :, None, None]
        state = (step * decay[:, None, None]).exp() * state + step * x[:, t, ..., None] * b
        outputs.append((state * c).sum(-1) + skip[:, None] * x[:, t])
    return torch.stack(outputs, 1)


def test_chunks_are_the_recurrence():
    exact = [t.detach().double().requires_grad_() for t in inputs()]
    expected = by_token(*exact)
    found_inputs = inputs()
    found = mamba2._scan(*found_inputs, None)
    assert found.shape == expected.shape
    assert (found.double() - expected).abs().max() / expected.abs().max() < 1e-6
    assert_gradients_agree(found, found_inputs, expected, exact)


@pytest.mark.parametrize("length", [1, 32, 33])
def test_a_token_sees_no_later_one(length: int):
    tensors = [t.detach() for t in inputs()]
    sliced = [t[:, :length] if t.dim() > 1 else t for t in tensors]
    whole, start = mamba2._scan(*tensors, None), mamba2._scan(*sliced, None)
    assert torch.allclose(start, whole[:, :length], atol=1e-5)


def parts(t: Tensor, numbers: Tensor) -> tuple[Tensor, ...]:
    """The sequences of a packed row whose tokens have these numbers."""
    return t.split(numbers[0].bincount().tolist(), 1)


def causal_conv1d_fn(x, weight, bias=None, seq_idx=None, initial_states=None, return_final_states=False,
                     final_states_out=None, activation=None):  # fmt: skip
    """Takes what causal-conv1d's takes: x [b, channels, T], with numbers channels beside each other."""
    assert activation == "silu" and seq_idx.dtype == torch.int32 and x.stride(1) == 1
    rows = parts(x.transpose(1, 2), seq_idx)
    return torch.cat([mamba2.convolve(p, weight[:, None], bias, None) for p in rows], 1).transpose(1, 2)


def mamba_chunk_scan_combined(x, dt, A, B, C, chunk_size, D=None, z=None, dt_bias=None,  # noqa: N803  its names
                              initial_states=None, seq_idx=None, cu_seqlens=None, dt_softplus=False):  # fmt: skip
    """Likewise mamba-ssm's: x [b, T, heads, d], dt [b, T, heads], B and C [b, T, groups, n]."""
    assert z is None and dt_bias is None and not dt_softplus, "dt is what the state takes"
    assert A.dtype == D.dtype == torch.float32 and seq_idx.dtype == torch.int32
    rows = zip(*(parts(t, seq_idx) for t in (x, dt, B, C)), strict=True)
    return torch.cat([mamba2._scan(x, dt, A, b, c, D, None) for x, dt, b, c in rows], 1)


def test_kernels_of_gpus_get_the_borders(monkeypatch):
    """Which a CPU does not have: functions of their signatures that start anew at borders."""
    for name, function in (
        ("causal_conv1d", causal_conv1d_fn),
        ("mamba_ssm.ops.triton.ssd_combined", mamba_chunk_scan_combined),
    ):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**{function.__name__: function}))
    tensors = [t.detach()[:1] if t.dim() > 1 else t.detach() for t in inputs()]
    borders = torch.tensor([0, 40, 41, LENGTH], dtype=torch.int32)
    x, weight, bias = tensors[0].flatten(2), torch.rand(HEADS * WIDTH, 1, 4), torch.rand(HEADS * WIDTH)
    convolved = mamba2._convolve_kernel(x, weight, bias, borders)
    found = mamba2._scan_kernel(*tensors, borders)
    for start, end in ((0, 40), (40, 41), (41, LENGTH)):
        part = slice(None), slice(start, end)
        assert torch.equal(convolved[part], mamba2.convolve(x[part], weight, bias, None))
        expected = mamba2._scan(*(t[part] if t.dim() > 1 else t for t in tensors), None)
        assert torch.equal(found[part], expected)
    kept = mamba2._scan(*tensors, None)
    assert not torch.allclose(found[:, 41:], kept[:, 41:], atol=1e-3), "else borders hide nothing"
