"""The gated delta rule in chunks is its recurrence, token by token; and so are its gradients. With a decay
for each channel it is Kimi Delta Attention's."""

import inspect

import pytest
import torch
from torch import Tensor

from megagrpo.actor.host import prepare_host

prepare_host("cpu")

from megagrpo.cpu import recurrences  # noqa: E402
from megagrpo.models.kinds.gated_delta import layer as gated_delta  # noqa: E402  Megatron needs a prepared host
from tests.gradients import assert_gradients_agree  # noqa: E402

SEQUENCES, LENGTH, HEADS, KEYS, VALUES = 2, 150, 3, 16, 8  # more than four chunks
DECAYS = [(), (KEYS,)]  # one a head, one a channel


def inputs(*channels: int) -> list[Tensor]:
    """Queries, keys, values, decay, of each of the channels if there are some, and beta: states that last for tens
    of tokens."""
    draw = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(SEQUENCES, LENGTH, HEADS, *shape, generator=draw)

    decay = -0.1 * torch.rand(SEQUENCES, LENGTH, HEADS, *channels, generator=draw)
    tensors = [normal(KEYS), normal(KEYS), normal(VALUES), decay, normal().sigmoid()]
    return [t.requires_grad_() for t in tensors]


def by_token(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """The recurrence of arXiv 2412.06464, equation 10, or 2510.26692, equation 1, with unit queries and keys."""

    def unit(t: Tensor) -> Tensor:
        return t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt()

    query, key = unit(query) * KEYS**-0.5, unit(key)
    state = torch.zeros(SEQUENCES, HEADS, VALUES, KEYS, dtype=query.dtype)
    outputs = []
    for t in range(LENGTH):
        k, strength = key[:, t, :, None], beta[:, t, :, None, None]
        state = decay[:, t].view(SEQUENCES, HEADS, 1, -1).exp() * state
        state = state + strength * (value[:, t, ..., None] - state @ k.mT) @ k
        outputs.append((state @ query[:, t, ..., None])[..., 0])
    return torch.stack(outputs, 1)


@pytest.mark.parametrize("channels", DECAYS)
def test_chunks_are_the_recurrence(channels: tuple[int, ...]):
    exact = [t.detach().double().requires_grad_() for t in inputs(*channels)]
    expected = by_token(*exact)
    found_inputs = inputs(*channels)
    found = gated_delta.delta_rule(*found_inputs, None)
    assert found.shape == expected.shape
    assert torch.allclose(found.double(), expected, atol=2e-6)
    assert_gradients_agree(found, found_inputs, expected, exact)


@pytest.mark.parametrize("channels", DECAYS)
@pytest.mark.parametrize("length", [1, 32, 33])
def test_a_token_sees_no_later_one(length: int, channels: tuple[int, ...]):
    tensors = [t.detach() for t in inputs(*channels)]
    whole = gated_delta.delta_rule(*tensors, None)
    start = gated_delta.delta_rule(*(t[:, :length] for t in tensors), None)
    assert torch.allclose(start, whole[:, :length], atol=1e-6)


def test_channels_that_decay_alike_are_a_gated_delta_net():
    *tensors, decay, beta = [t.detach() for t in inputs()]
    expected = gated_delta.delta_rule(*tensors, decay, beta, None)
    found = gated_delta.delta_rule(*tensors, decay[..., None].expand(-1, -1, -1, KEYS), beta, None)
    assert torch.allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize("lasting", [1e-4, 20.0])
def test_decays_of_any_size_overflow_nothing(lasting: float):
    """A channel that forgets in a token beside channels that never do, as trained models have them."""
    tensors = [t.detach() for t in inputs(KEYS)]
    tensors[3] = tensors[3] * torch.logspace(-3, 3, KEYS) * lasting
    expected = by_token(*(t.double() for t in tensors))
    assert torch.allclose(gated_delta.delta_rule(*tensors, None).double(), expected, atol=2e-6)


@pytest.mark.parametrize(
    ("name", "released"),
    [
        ("causal_conv1d", "x weight bias residual initial_state output_final_state activation backend cu_seqlens"),
        (
            "chunk_gated_delta_rule",
            "q k v g beta scale initial_state output_final_state use_qk_l2norm_in_kernel cu_seqlens",
        ),
    ],
)
def test_kernels_of_gpus_take_what_their_stand_ins_take(name: str, released: str):
    parameters = inspect.signature(getattr(recurrences, name)).parameters.values()
    named = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}
    assert named <= {*released.split()[len(parameters) - len(named) :]}


@pytest.mark.parametrize("channels", DECAYS)
def test_sequences_begin_anew_at_borders(channels: tuple[int, ...]):
    tensors = [t.detach()[:1] for t in inputs(*channels)]
    borders = torch.tensor([0, 40, 41, LENGTH], dtype=torch.int32)
    x, weight = tensors[0].flatten(2), torch.rand(HEADS * KEYS, 1, 4)
    convolved = gated_delta.convolve(x, weight, borders)
    found = gated_delta.delta_rule(*tensors, borders)
    for start, end in ((0, 40), (40, 41), (41, LENGTH)):
        part = slice(None), slice(start, end)
        assert torch.allclose(convolved[part], gated_delta.convolve(x[part], weight, None), atol=1e-6)
        expected = gated_delta.delta_rule(*(t[part] for t in tensors), None)
        assert torch.allclose(found[part], expected, atol=1e-6)
    kept = gated_delta.delta_rule(*tensors, None)
    assert not torch.allclose(found[:, 41:], kept[:, 41:], atol=1e-3), "else borders hide nothing"
