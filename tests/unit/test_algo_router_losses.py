"""Losses of routers: values of uniform and collapsed routing, gradients by hand; z is in dist/test_router_bias.py."""

import pytest
import torch

from examples.laptop.recipe import TinyModelConfig
from megagrpo.algo.router_losses import balance_part, chosen_experts
from megagrpo.check.problems import layout_problems
from megagrpo.config.schema import ActorConfig
from megagrpo.models.table import architecture_of
from megagrpo.tools.certify.tiny_model import hf_config

EXPERTS, TOP_K, LENGTHS = 6, 2, (5, 1, 9)


def balance(logits: torch.Tensor, sequence: torch.Tensor, lengths: torch.Tensor, sigmoid: bool) -> torch.Tensor:
    counts = chosen_experts(logits, sequence, len(lengths), TOP_K)
    return balance_part(logits, sequence, counts, lengths, TOP_K, sigmoid)


def by_hand(logits: torch.Tensor, sequence: torch.Tensor, sigmoid: bool) -> torch.Tensor:
    """Equations 17 to 20, a sequence after the other, in float64."""
    total = torch.zeros((), dtype=torch.float64)
    for number, length in enumerate(LENGTHS):
        own = logits[sequence == number].double()
        scores = own.sigmoid() if sigmoid else own.softmax(1)
        for expert in range(EXPERTS):
            took = sum(expert in row.topk(TOP_K).indices for row in scores)
            f = EXPERTS / (TOP_K * length) * took
            total = total + f * (scores[:, expert] / scores.sum(1)).sum() / length
    return total


@pytest.fixture
def tokens() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits [T, E] of three sequences' tokens, mixed, with padding among them; to which each belongs; lengths."""
    generator = torch.Generator().manual_seed(0)
    sequence = torch.repeat_interleave(torch.arange(4), torch.tensor([*LENGTHS, 4]))  # 3: padding
    sequence = sequence[torch.randperm(len(sequence), generator=generator)]
    logits = 2 * torch.randn(len(sequence), EXPERTS, generator=generator)
    return logits.requires_grad_(), sequence, torch.tensor(LENGTHS)


@pytest.mark.parametrize("sigmoid", [False, True])
def test_balance_has_the_value_and_gradient_of_its_equations(tokens, sigmoid: bool):
    logits, sequence, lengths = tokens
    expected = by_hand(logits, sequence, sigmoid)
    [gradient] = torch.autograd.grad(expected, logits)
    value = balance(logits, sequence, lengths, sigmoid)
    assert float(value.detach()) == pytest.approx(float(expected.detach()), rel=1e-6)
    [found] = torch.autograd.grad(value, logits)
    assert torch.allclose(found, gradient, rtol=0, atol=1e-5 * float(gradient.abs().max()))
    assert gradient.abs().max() > 1e-3 and not found[sequence == 3].any(), "padding has no part in it"


def test_balanced_routing_is_1_and_one_expert_for_all_is_the_worst():
    even = 1e-3 * torch.eye(EXPERTS)  # every token prefers another expert by a hair
    loss = balance_part(even, torch.zeros(6, dtype=torch.int64), torch.full((1, 6), 2), torch.tensor([6]), 2, False)
    assert float(loss) == pytest.approx(1.0)
    collapsed = torch.zeros(6, EXPERTS)
    collapsed[:, :TOP_K] = 50.0
    worst = balance(collapsed, torch.zeros(6, dtype=torch.int64), torch.tensor([6]), False)
    assert float(worst) == pytest.approx(EXPERTS / TOP_K)


def test_a_model_without_experts_is_refused():
    config = ActorConfig.model_validate({"router_losses": {"balance": 1e-4}})
    refused = ["actor.router_losses: a qwen3 model has no experts to route to; remove it"]
    for family, problems in (("qwen3", refused), ("qwen3_moe", [])):
        arch = architecture_of(hf_config(TinyModelConfig(path="x", family=family)))
        assert layout_problems(arch, config) == problems
