"""Experts are summed in float32 and rounded once, in whatever order they come."""

import pytest
import torch
from megatron.core.transformer.moe import moe_utils, token_dispatcher
from torch.utils._python_dispatch import TorchDispatchMode

from megagrpo.actor.host import prepare_host
from megagrpo.models.layers import combine

TOKENS, HIDDEN, EXPERTS, TOP_K = 128, 64, 16, 8
HALF_ULP = 2.0**-8  # of bfloat16, relative


def routed(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows [n, h] of bfloat16 in the order of experts, the token [n] of each, and its sums in float64 [tokens, h]."""
    draw = torch.Generator().manual_seed(seed)
    experts = torch.rand(TOKENS, EXPERTS, generator=draw).argsort(1)[:, :TOP_K]
    chosen = torch.zeros(TOKENS, EXPERTS, dtype=torch.bool).scatter_(1, experts, True)
    tokens = torch.arange(TOKENS).expand(EXPERTS, -1).masked_select(chosen.T)
    rows = torch.randn(len(tokens), HIDDEN, generator=draw).bfloat16()
    exact = torch.zeros(TOKENS, HIDDEN, dtype=torch.float64).index_add(0, tokens, rows.double())
    return rows, tokens, exact


def worst(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float(((found.double() - exact).abs() / exact.abs().clamp_min(1e-3)).max())


def test_megatron_calls_it():
    prepare_host("cpu")
    assert token_dispatcher.unpermute is combine.unpermute


class Added(TorchDispatchMode):
    """Notes by which operators, and in which types, values are added up."""

    def __init__(self):
        super().__init__()
        self.seen: set[tuple[str, torch.dtype]] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__.rstrip("_")
        if name in ("scatter_add", "index_add", "index_put"):
            self.seen.add((name, args[0].dtype))
        return func(*args, **(kwargs or {}))


def test_it_adds_in_float32_and_rounds_once():
    rows, tokens, exact = routed()
    with Added() as added:
        found = combine.unpermute(rows, tokens, exact.shape)
    assert added.seen == {("index_add", torch.float32)}, "on a GPU scatter_add of bfloat16 rounds after each addition"
    assert found.dtype is torch.bfloat16
    assert worst(found, exact) <= HALF_ULP * (1 + 2**-8)  # of the sum in float32 too


def test_on_a_gpu_it_adds_in_one_order_in_every_run():
    """index_add and scatter_add are atomic there (torch.use_deterministic_algorithms lists them)."""
    rows, tokens, exact = routed()
    with Added() as added:
        found = combine.unpermute(rows.to("meta"), tokens.to("meta"), exact.shape)
    assert found.dtype is torch.bfloat16 and added.seen == {("index_put", torch.float32)}


def test_the_order_of_experts_does_not_matter_but_where_float32_is_halfway_between_two_values():
    rows, tokens, exact = routed()
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(1))
    found, again = (combine.unpermute(rows[o], tokens[o], exact.shape) for o in (slice(None), order))
    assert int((found != again).sum()) <= TOKENS * HIDDEN / 1000


def test_gradients_are_those_of_a_sum():
    rows, tokens, _ = routed()
    rows.requires_grad_()
    given = torch.randn(TOKENS, HIDDEN).bfloat16()
    combine.unpermute(rows, tokens, given.shape).backward(given)
    assert torch.equal(rows.grad, given[tokens])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_not_bfloat16_is_left_to_megatron(dtype):
    rows, tokens, _ = routed()
    shape = torch.Size((TOKENS, HIDDEN))
    assert torch.equal(
        combine.unpermute(rows.to(dtype), tokens, shape), moe_utils.unpermute(rows.to(dtype), tokens, shape)
    )
