"""Mamba-2 in chunks is its recurrence, token by token; so are its gradients, and a layer of packed sequences."""

import inspect

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from megagrpo.actor.host import prepare_host

prepare_host("cpu")

from megagrpo.cpu import recurrences  # noqa: E402
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
    found = mamba2.scan(*found_inputs, None)
    assert found.shape == expected.shape
    assert (found.double() - expected).abs().max() / expected.abs().max() < 1e-6
    assert_gradients_agree(found, found_inputs, expected, exact)


@pytest.mark.parametrize("length", [1, 32, 33])
def test_a_token_sees_no_later_one(length: int):
    tensors = [t.detach() for t in inputs()]
    sliced = [t[:, :length] if t.dim() > 1 else t for t in tensors]
    whole, start = mamba2.scan(*tensors, None), mamba2.scan(*sliced, None)
    assert torch.allclose(start, whole[:, :length], atol=1e-5)


@pytest.mark.parametrize(
    ("name", "released"),
    [
        ("causal_conv1d_fn", "x weight bias seq_idx initial_states return_final_states final_states_out activation"),
        (
            "mamba_chunk_scan_combined",
            "x dt A B C chunk_size D z dt_bias initial_states seq_idx cu_seqlens dt_softplus",
        ),
    ],
)
def test_kernels_of_gpus_take_what_their_stand_ins_take(name: str, released: str):
    parameters = inspect.signature(getattr(recurrences, name)).parameters.values()
    named = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}
    assert named <= {*released.split()[len(parameters) - len(named) :]}


def test_sequences_begin_anew_at_borders():
    tensors = [t.detach()[:1] if t.dim() > 1 else t.detach() for t in inputs()]
    borders = torch.tensor([0, 40, 41, LENGTH], dtype=torch.int32)
    x, weight, bias = tensors[0].flatten(2), torch.rand(HEADS * WIDTH, 1, 4), torch.rand(HEADS * WIDTH)
    convolved = mamba2._convolved(x, weight, bias, borders)
    found = mamba2.scan(*tensors, borders)
    for start, end in ((0, 40), (40, 41), (41, LENGTH)):
        part = slice(None), slice(start, end)
        assert torch.allclose(convolved[part], mamba2._convolved(x[part], weight, bias, None), atol=1e-6)
        expected = mamba2.scan(*(t[part] if t.dim() > 1 else t for t in tensors), None)
        assert torch.allclose(found[part], expected, atol=1e-6)
    kept = mamba2.scan(*tensors, None)
    assert not torch.allclose(found[:, 41:], kept[:, 41:], atol=1e-3), "else borders hide nothing"
