"""The optimal token baseline in closed form, and the squared gradients that weigh it."""

from dataclasses import replace

import pytest
import torch

from megagrpo.algo.estimators import EstimatorInputs, optimal_token_baseline, squared_gradients
from megagrpo.algo.statistics import alone, group_statistics
from megagrpo.config.algorithm import AlgorithmConfig
from megagrpo.config.objective.estimators import OptimalTokenAdvantage
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
    short = replace(batch, truncated=torch.tensor([False, True, False]), rollout_logprobs=batch.old_logprobs.float())
    masked = solve(short, advantage=options, mask_truncated=True, mismatch={"weight": {"name": "tis"}})
    assert masked.tolist() == [pytest.approx(row, rel=1e-6) for row in (expected[0], [0] * 4, expected[2])]
    constant = solve(
        replace(batch, rewards=replace(batch.rewards, values=torch.full((3,), 0.7).double())), advantage=options
    )
    assert not constant.any()


def test_optimal_token_baseline_of_a_rank_is_that_of_the_whole():
    """A group of equal rewards, of which only another rank has rewards of tokens, and one long response in another."""
    lengths, ids, rewards = torch.tensor([4, 4, 40, 3]), torch.tensor([0, 0, 1, 1]), torch.tensor([1, 1, 1, 0]).double()
    squares, reduced, options = torch.arange(1, 52).double(), [], OptimalTokenAdvantage(name="optimal_token_baseline")

    def record(tensor: torch.Tensor, op: str) -> torch.Tensor:
        reduced.append(tensor)
        return tensor

    def of(rows: slice, tokens: slice, early: torch.Tensor | None, reduce) -> torch.Tensor:
        own, valid = rewards[rows], torch.ones(len(rewards[rows]), dtype=torch.bool)
        last = own if early is None else own - torch.tensor([0.5, 0, 0, 0])
        stats = group_statistics(rewards, ids, 2, torch.ones(4, dtype=torch.bool), alone)
        rest = (ids[rows], valid, lengths[rows], torch.ones(len(squares[tokens]), dtype=torch.bool), stats, reduce)
        inputs = EstimatorInputs(last, early, own, None, None, None, *rest, squared_gradients=squares[tokens])
        return optimal_token_baseline(inputs, options)

    early = torch.zeros(51).double()
    early[1] = 0.5
    whole = of(slice(None), slice(None), early, record)
    assert whole[4:8].any(), "the other response's rewards came earlier"
    assert max(map(torch.numel, reduced)) <= 4 * 2 * (4 + 40), "sums for tokens that a group has, on each rank"
    # what all ranks reduce is the same on each
    assert torch.equal(of(slice(1, None), slice(4, None), None, lambda tensor, op: reduced.pop(0)), whole[4:])


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
