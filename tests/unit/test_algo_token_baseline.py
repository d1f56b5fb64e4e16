"""The optimal token baseline in closed form, and the squared gradients that weigh it."""

from dataclasses import replace

import pytest
import torch

from megagrpo.algo.estimators import squared_gradients
from megagrpo.config.algorithm import AlgorithmConfig
from megagrpo.types import Batch
from tests.unit.algo_inputs import batch_of, of_policy, with_advantages


def solve(batch: Batch, **options) -> torch.Tensor:
    return with_advantages(batch, AlgorithmConfig(**options))[0].advantages


def test_optimal_token_baseline_weighs_by_squared_gradients_so_far():
    """p 1/2: (1/2)^2 + (1/2)^2 = 1/2 a token. p 1/2 with the rest on many: 1/4. A token of a tool counts nothing."""
    mask = [[1, 0, 1, 1], [1, 1, 0, 0], [1, 1, 1, 1]]
    policy = of_policy([[0.5] * 4] * 2 + [[1.0] * 4])
    policy["squares"][1] = 0.25
    batch = batch_of(torch.tensor([1.0, 4.0, 7.0]).double(), [0, 0, 0], torch.tensor(mask), **policy)
    options = {"name": "optimal_token_baseline"}
    # W: 1/2, 1, 3/2; 1/4, 1/2; 0, 0, 0, 0. Baselines: (1/2 + 1) / (3/4) = 2, (1 + 2) / (3/2) = 2, 1; the last is alone
    expected = [[-1, 0, -1, 0], [2, 2, 0, 0], [5, 5, 6, 0]]
    assert solve(batch, advantage=options).tolist() == [pytest.approx(row) for row in expected]
    raw = solve(batch, advantage=options | {"single_sample": "raw"})
    assert raw[2].tolist() == pytest.approx([5, 5, 6, 7]) and torch.equal(raw[:2], solve(batch, advantage=options)[:2])
    weighted = replace(batch, rollout_logprobs=batch.old_logprobs.float() + torch.tensor(2.0).log())
    halved = solve(weighted, advantage=options, mismatch={"weight": {"name": "tis"}})
    assert halved.tolist() == [pytest.approx(row, rel=1e-6) for row in expected], "a common weight cancels"
    constant = solve(
        replace(batch, rewards=replace(batch.rewards, values=torch.full((3,), 0.7).double())), advantage=options
    )
    assert not constant.any()


@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_squared_gradients_are_those_of_the_logits(scale):
    """Also where p is near 1, and float32 has no 1 - 2 p + sum p^2."""
    logits = scale * torch.randn(50, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    tokens = torch.cat((logits[:25].argmax(1), torch.arange(25) % 9))
    logits.requires_grad_()
    logprobs = logits.log_softmax(1)
    own = logprobs.gather(1, tokens[:, None])
    (gradient,) = torch.autograd.grad(own.sum(), logits)
    more = {"old_logprobs": own.detach(), "squares": logprobs.detach().exp().square().sum(1, keepdim=True).float()}
    found = squared_gradients(batch_of(torch.zeros(50).double(), [0] * 50, torch.ones(50, 1), **more))
    right = gradient.square().sum(1)
    assert (found / right - 1).abs().max() < 1.001 and ((found - right).abs() < 2e-7).all()
    assert (found >= own.detach()[:, 0].expm1().square()).all()
