"""Compressed attention over packed sequences of unequal lengths: each by itself, and not as wide as the longest."""

import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from examples.laptop.recipe import TinyModelConfig
from megagrpo.actor.host import prepare_host
from megagrpo.config.actor import ParallelConfig
from megagrpo.models.costs import Share
from megagrpo.models.table import architecture_of
from megagrpo.tools.certify.tiny_model import hf_config
from tests.made_tensors import Made

prepare_host("cpu")

from megatron.core import parallel_state as mpu  # noqa: E402  Megatron needs a prepared host

from megagrpo.models.build import _in_bfloat16 as in_bfloat16  # noqa: E402  likewise
from megagrpo.models.kinds.compressed import layer  # noqa: E402  likewise
from megagrpo.models.kinds.compressed.layer import CompressedMixer  # noqa: E402  likewise
from megagrpo.models.kinds.grouped_query.layer import PackedSequences  # noqa: E402  likewise
from megagrpo.models.kinds.indexed.layer import best_keys  # noqa: E402  likewise

HIDDEN = 64


@pytest.fixture(params=[1, 2, 3])
def mixer(request, monkeypatch) -> CompressedMixer:
    """A layer with a window only, one with chosen keys behind it, and one with all of them."""
    alone = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    monkeypatch.setattr(mpu, "get_context_parallel_group", lambda: alone)
    monkeypatch.setattr(mpu, "get_tensor_model_parallel_group", lambda: alone)
    arch = architecture_of(hf_config(TinyModelConfig(path="x", family="deepseek_v4", hidden_size=HIDDEN)))
    config = SimpleNamespace(
        hidden_size=HIDDEN, params_dtype=torch.bfloat16, tensor_model_parallel_size=1, sequence_parallel=False,
        layernorm_epsilon=1e-6,
    )  # fmt: skip
    mixer = CompressedMixer(config, request.param, arch.attention)
    found = {name: parameter.dtype for name, parameter in mixer.named_parameters()}
    kept = {name for name in found if name == "attn_sink" or name.endswith("ape")}  # as engines have them
    in_bfloat16(mixer)
    assert {name for name, dtype in found.items() if dtype == torch.float32} == kept
    assert {name: parameter.dtype for name, parameter in mixer.named_parameters()} == found
    mixer.float()
    draw = torch.Generator().manual_seed(request.param)
    for parameter in mixer.parameters():
        parameter.data.normal_(0.0, 0.3, generator=draw)
    return mixer


def packed(mixer: CompressedMixer, hidden: Tensor, lengths: list[int]) -> Tensor:
    borders = torch.tensor([0, *lengths]).cumsum(0).int()
    return mixer(hidden, packed_seq_params=PackedSequences.make(borders, lengths, 1))[0]


def test_sequences_do_not_see_each_other(mixer):
    """Outputs and gradients of sequences behind each other are those of each alone."""
    lengths = [3, 40, 1, 17, 8]
    hidden = torch.randn(sum(lengths), 1, HIDDEN, generator=torch.Generator().manual_seed(0))
    together, apart = (hidden.clone().requires_grad_() for _ in range(2))
    found = packed(mixer, together, lengths)
    expected = torch.cat([packed(mixer, part, [len(part)]) for part in apart.split(lengths)])
    assert torch.allclose(found, expected, atol=1e-5)
    found.square().sum().backward()
    expected.square().sum().backward()
    assert torch.allclose(together.grad, apart.grad, rtol=1e-4, atol=1e-4)


def test_parts_of_a_sequence_see_the_same_keys(mixer, monkeypatch):
    """Context-parallel ranks have two parts; blocks of neighbors have all keys that their queries see."""
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(40, HIDDEN, generator=draw)
    [expected] = attended(mixer, hidden)
    monkeypatch.setattr(layer, "BLOCK", 6)
    for own in (torch.arange(40), torch.cat((torch.arange(10), torch.arange(30, 40)))):
        [found] = attended(mixer, hidden, own)
        assert torch.allclose(found, expected[own], atol=1e-5)


def attended(mixer: CompressedMixer, hidden: Tensor, own: Tensor | None = None) -> list[Tensor]:
    """What a rank with some places of one sequence computes of it."""
    whole_sequences, kept = layer.whole_sequences, []

    def of_rank(packed, rows, keys):
        for *each, position, every in whole_sequences(packed, rows, keys):
            places = position if own is None else own
            kept.append(mixer._sequence(*(t[places] for t in each), places, every))
            yield [*each, position, every]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layer, "whole_sequences", of_rank)
        packed(mixer, hidden[:, None], [len(hidden)])
    return kept


def test_work_in_a_window_grows_with_the_length(mixer, monkeypatch):
    """Behind the window with its square, over the tokens of a key; plans count the half before each query."""
    monkeypatch.setattr(layer, "BLOCK", 16)

    def flops(length: int) -> int:
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            packed(mixer, torch.zeros(length, 1, HIDDEN), [length])
        return counter.get_total_flops()

    sizes, ratio = mixer._sizes, mixer._ratio
    bend = flops(512) - 2 * flops(256)  # 0 of what is linear
    index = 2 * sizes.index_heads * sizes.index_dim * (ratio == 4)
    pair = (sizes.pair_flops + index) / ratio if ratio else 0.0
    assert bend == pair * (512**2 - 2 * 256**2)


class Peak(TorchDispatchMode):
    """Counts the most bytes at once that operators have returned and somebody holds."""

    def __init__(self):
        super().__init__()
        self.held: dict[int, int] = {}
        self.most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            storage = t.untyped_storage() if isinstance(t, Tensor) else None
            if storage is not None and storage._cdata not in self.held:
                self.held[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self.held.pop, storage._cdata)
        self.most = max(self.most, sum(self.held.values()))
        return out


@pytest.mark.parametrize("mixer", [2], indirect=True)
def test_plans_count_what_a_block_holds(mixer):
    """Of a layer with chosen keys, which has the most."""
    length, sizes = 1024, mixer._sizes
    hidden = torch.zeros(length, 1, HIDDEN, requires_grad=True)
    out = packed(mixer, hidden, [length])
    with Peak() as mode:
        out.sum().backward()
    planned = sizes.cost(Share(HIDDEN, ParallelConfig(), length, length, 4)).transient
    assert 0.8 * mode.most < planned < 1.2 * mode.most


class Largest(TorchDispatchMode):
    """Counts the elements of the largest tensor that an operator returns."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        sizes = [t.numel() for t in tree_leaves(out) if isinstance(t, Tensor)]
        self.elements = max([self.elements, *sizes])
        return out


def test_a_long_sequence_does_not_widen_short_ones(mixer):
    def largest(lengths: list[int]) -> int:
        hidden = torch.zeros(sum(lengths), 1, HIDDEN, requires_grad=True)
        with Largest() as mode:
            packed(mixer, hidden, lengths).sum().backward()
        return mode.elements

    long, short = [256], [4] * 64
    assert largest(long + short) <= 2 * largest(long)


def test_keys_are_chosen_without_another_copy_of_the_products():
    """Of 262,144 tokens of GLM-5.3-Flash a block's are 8.6 GB."""
    queries, keys = torch.arange(32)[:, None], torch.arange(32)
    draw = torch.Generator().manual_seed(0)
    products, weights = torch.randn(32, 8, 32, generator=draw), torch.randn(32, 8, 1, generator=draw)
    scores = (products.clamp(min=0) * weights).sum(1).masked_fill(keys > queries, -torch.inf)
    with Made() as made:
        chosen = best_keys(products, weights, keys <= queries, 4)
    for query in range(32):
        assert set(chosen[query].nonzero()[:, 0].tolist()) == set(
            scores[query].topk(min(4, query + 1)).indices.tolist()
        )
    large = [t for t in tree_leaves(made.results) if t.numel() >= products.numel()]
    assert large and all(t.data_ptr() == products.data_ptr() for t in large)
