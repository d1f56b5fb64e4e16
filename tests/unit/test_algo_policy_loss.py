"""Policy losses in closed form: value and gradient of a token, and of a sequence."""

import math
from dataclasses import replace

import pytest
import torch

from megagrpo.algo.loss import Denominators, count_denominators, objective
from megagrpo.algo.policy_loss import chosen_tokens, token_loss
from megagrpo.algo.statistics import alone
from megagrpo.config.algorithm import AlgorithmConfig
from megagrpo.config.objective.policy_loss import (
    CispoLoss,
    ClipCovLoss,
    DppoLoss,
    DroLoss,
    GmpoLoss,
    GpgLoss,
    GspoLoss,
    KlCovLoss,
    PpoClipLoss,
    SapoLoss,
)
from tests.unit.algo_inputs import aggregate, batch_of, loss_inputs, policy_inputs

OLD = -1.0


def value_and_gradient(options, ratio: float, advantage: float) -> tuple[float, float]:
    """Loss of a single token whose probability ratio is `ratio`, and d loss / d logp."""
    logp = torch.tensor([[OLD + math.log(ratio)]], dtype=torch.float64, requires_grad=True)
    old, adv = torch.full_like(logp, OLD), torch.full_like(logp, advantage)
    loss = token_loss(policy_inputs(logp, old, adv, torch.ones_like(logp, dtype=torch.bool)), options).value.sum()
    loss.backward()
    return loss.item(), logp.grad.item()


def logp_of(ratio: float) -> float:
    return OLD + math.log(ratio)


def gate(ratio: float, tau: float) -> float:
    return 1 / (1 + math.exp(-tau * (ratio - 1)))


CLIP = PpoClipLoss(clip_ratio_low=0.2, clip_ratio_high=0.3)
DUAL = PpoClipLoss(clip_ratio_low=0.2, clip_ratio_high=0.3, dual_clip=3.0)
GSPO = GspoLoss(clip_ratio_low=0.2, clip_ratio_high=0.3)
GMPO = GmpoLoss(clip_ratio_low=0.2, clip_ratio_high=0.3)
TV = DppoLoss(against="old", low=0.1, high=0.2, ratio_limit=1.4)
CISPO = CispoLoss(clip_ratio_low=0.2, clip_ratio_high=0.3)
DRO = DroLoss(beta=0.3)
CASES = [  # options, ratio, advantage, value, gradient
    (CLIP, 1.1, 2.0, -2.2, -2.2),
    (CLIP, 1.5, 2.0, -2.6, 0.0),  # above 1 + high: the reward is capped
    (CLIP, 0.5, 2.0, -1.0, -1.0),  # below 1 - low with A > 0: unclipped, pulls back up
    (CLIP, 0.5, -2.0, 1.6, 0.0),  # below 1 - low with A < 0
    (CLIP, 1.5, -2.0, 3.0, 3.0),  # clip-higher does not protect A < 0 ...
    (DUAL, 5.0, -2.0, 6.0, 0.0),  # ... the dual clip does, at c |A|
    (DUAL, 2.0, -2.0, 4.0, 4.0),
    (DUAL, 5.0, 2.0, -2.6, 0.0),
    (GSPO, 1.1, 2.0, -2.2, -2.2),
    (GSPO, 1.5, 2.0, -2.6, 0.0),
    (GSPO, 0.5, -2.0, 1.6, 0.0),
    (GMPO, 1.1, 2.0, -2.2, -2.2),
    (GMPO, 1.5, 2.0, -2.0 * math.exp(0.3), 0.0),  # log 1.5 > 0.3
    (GMPO, 0.5, 2.0, -1.0, -1.0),
    (GMPO, 0.5, -2.0, 2.0 * math.exp(-0.2), 0.0),
    (TV, 1.1, 2.0, -1.1 * 2.0 * logp_of(1.1), -2.2),
    (TV, 1.5, 2.0, -1.4 * 2.0 * logp_of(1.5), -2.8),  # the weight is limited, the gradient alive
    (TV, 1.6, 2.0, 0.0, 0.0),  # p is 0.22 above q
    (TV, 0.5, 2.0, -0.5 * 2.0 * logp_of(0.5), -1.0),  # far below, and A pulls back up
    (TV, 0.5, -2.0, 0.0, 0.0),
    (TV, 1.6, -2.0, 1.4 * 2.0 * logp_of(1.6), 2.8),
    (CISPO, 1.1, 2.0, -1.1 * 2.0 * logp_of(1.1), -2.2),
    (CISPO, 1.5, 2.0, -1.3 * 2.0 * logp_of(1.5), -2.6),  # clipped weight, gradient alive
    (CISPO, 0.5, -2.0, 0.8 * 2.0 * logp_of(0.5), 1.6),
    (GpgLoss(), 1.5, 2.0, -2.0 * logp_of(1.5), -2.0),
    (SapoLoss(), 1.5, 2.0, -gate(1.5, 1.0) * 8.0, -8.0 * gate(1.5, 1.0) * (1 - gate(1.5, 1.0)) * 1.5),
    (SapoLoss(), 0.5, -2.0, gate(0.5, 1.05) * 8 / 1.05, 8.0 * gate(0.5, 1.05) * (1 - gate(0.5, 1.05)) * 0.5),
    (DRO, 1.5, 2.0, -2.0 * logp_of(1.5) + 0.15 * math.log(1.5) ** 2, -2.0 + 0.3 * math.log(1.5)),
    (DRO, 0.5, -2.0, 2.0 * logp_of(0.5) + 0.15 * math.log(0.5) ** 2, 2.0 + 0.3 * math.log(0.5)),
]


@pytest.mark.parametrize(("options", "ratio", "advantage", "value", "gradient"), CASES)
def test_token_loss(options, ratio, advantage, value, gradient):
    assert value_and_gradient(options, ratio, advantage) == pytest.approx((value, gradient), rel=1e-9, abs=1e-12)


def test_gmpo_has_the_gradient_of_the_paper():
    """Equation 4 of one sequence with one advantage: -A exp(mean of clipped log-ratios)."""
    mask = torch.tensor([[True, True, False, True]])
    old = torch.tensor([[-1.0, -2.0, -3.0, -0.5]], dtype=torch.float64)
    for advantage in (2.0, -2.0):
        logp = (old + torch.tensor([[0.1, 0.5, 9.0, -0.4]])).requires_grad_()
        adv = torch.full_like(old, advantage)
        value = token_loss(policy_inputs(logp, old, adv, mask), GMPO).value[None]
        counts = count_denominators(mask.sum(1), alone, 1.0)
        loss = aggregate(value, mask, "seq-mean-token-mean", counts)
        (gradient,) = torch.autograd.grad(loss, logp)
        clipped = [0.1, 0.3, -0.4] if advantage > 0 else [0.1, 0.5, -0.2]
        inside = [1, 0, 0, 1] if advantage > 0 else [1, 1, 0, 0]
        right = -advantage * math.exp(sum(clipped) / 3)
        assert loss.item() == pytest.approx(right)
        assert gradient[0].tolist() == pytest.approx([right / 3 * each for each in inside])


def test_an_off_policy_sequence_is_left_out():
    """Of four sequences with means of log(rollout / new) of 0.3, 0.3, 0.1 and 0.3, only the second has A < 0 beyond
    0.2: in the first update, whose old probabilities are the new ones."""
    log_ratio = torch.tensor([[-0.5, -0.1], [-0.5, -0.1], [-0.3, 0.1], [-0.5, -9.0]], dtype=torch.float64)
    adv = torch.tensor([[1.0], [-1.0], [-1.0], [1.0]], dtype=torch.float64).expand(4, 2)
    mask = torch.tensor([[True, True]] * 3 + [[True, False]])
    logp, zeros = log_ratio.clone().requires_grad_(), torch.zeros(4, 2, dtype=torch.float64)
    inputs = loss_inputs(logp, zeros, mask, adv, logp.detach(), zeros)
    value, sums = objective(
        inputs, AlgorithmConfig(loss={"name": "gpg"}, off_policy_limit=0.2), Denominators(7, 4, 1.0)
    )
    assert sums["policy/clip_fraction_off_policy"].item() == 2
    value.backward()
    left = [[1.0, 1.0], [0.0, 0.0], [-1.0, -1.0], [1.0, 0.0]]
    assert torch.allclose(-7 * logp.grad, torch.tensor(left).double())


@pytest.mark.parametrize(
    ("options", "ratio", "advantage", "value", "gradient"),
    [
        (ClipCovLoss(), 1.1, 2.0, 0.0, 0.0),
        (KlCovLoss(kl_coef=0.5), 1.5, 2.0, -3.0 + 0.5 * math.log(1.5), -3.0 + 0.5),  # never clipped
        (KlCovLoss(kl_coef=0.5), 0.5, -2.0, 1.0 + 0.5 * math.log(2), 1.0 - 0.5),
        (KlCovLoss(kl_coef=0.5), 1.0, -2.0, 2.0, 2.0),  # the first update of a step
    ],
)
def test_losses_by_covariance(options, ratio, advantage, value, gradient):
    """A chosen token, and one that is not: it has ppo_clip's loss, or the policy gradient's without a clip."""
    logp = torch.full((1, 2), logp_of(ratio), dtype=torch.float64).requires_grad_()
    tensors = torch.full_like(logp, OLD), torch.full_like(logp, advantage), torch.ones_like(logp, dtype=torch.bool)
    chosen = torch.tensor([True, False])
    found = token_loss(replace(policy_inputs(logp, *tensors), chosen=chosen), options)
    found.value.sum().backward()
    plain = value_and_gradient(PpoClipLoss(), ratio, advantage)
    if isinstance(options, KlCovLoss):
        plain = -ratio * advantage, -ratio * advantage
    assert found.value.tolist() == pytest.approx([value, plain[0]])
    assert logp.grad[0].tolist() == pytest.approx([gradient, plain[1]])
    assert found.clipped["covariance"].tolist() == [True, False]


def chosen_by(options, old: list[list[float]], advantages: list[float], ids=None, **more) -> torch.Tensor:
    """The chosen tokens [n, S] of responses with these log-probabilities and one advantage each."""
    logprobs, rewards = torch.tensor(old), torch.tensor(advantages, dtype=torch.float64)
    given = {"advantages": rewards.float()[:, None].expand_as(logprobs), "old_logprobs": logprobs} | more
    if ids is not None:
        given["sample_ids"] = torch.tensor(ids)
    mask = torch.ones_like(logprobs)
    return chosen_tokens(batch_of(rewards, [0] * len(mask), mask, **given), options, alone).view(mask.shape)


TWO = [[-1.0, -3.0, -0.5], [-2.0, -0.5, -1.0]], [1.0, -1.0]  # covariances 0.33, -1.67, 0.83; 0.67, -0.83, -0.33


def test_covariances_choose_tokens():
    largest = {1: [[0, 0, 1], [0, 0, 0]], 2: [[0, 0, 1], [1, 0, 0]], 3: [[1, 0, 1], [1, 0, 0]]}
    for count, chosen in largest.items():
        assert chosen_by(KlCovLoss(fraction=(count + 0.1) / 6), *TWO).tolist() == torch.tensor(chosen).bool().tolist()
    assert chosen_by(KlCovLoss(), *TWO).sum() == 1, "at least one"
    between = ClipCovLoss(low=0.4, high=0.7, fraction=1.0)
    assert chosen_by(between, *TWO).nonzero().tolist() == [[1, 0]], "all candidates, and nothing else"
    of_three = chosen_by(ClipCovLoss(low=0.3, high=1.0, fraction=0.34), *TWO)
    assert of_three.sum() == 2 and not (of_three & ~torch.tensor(largest[3]).bool()).any()
    assert not chosen_by(ClipCovLoss(low=2.0), *TWO).any()
    # without the trainer's, by the log-probabilities of the engine, which the ratio divides by, too
    engine = {"old_logprobs": None, "rollout_logprobs": torch.tensor(TWO[0])}
    assert torch.equal(chosen_by(between, *TWO, **engine), chosen_by(between, *TWO))


def test_draws_depend_on_ids_and_places_only():
    old, advantages = [[-1.0] * 500] * 8, [1.0, 1.0, 1.0, 1.0, -1.0, -1.0, -1.0, -1.0]
    for options in (KlCovLoss(fraction=0.1), ClipCovLoss(low=-1.0, fraction=0.1)):  # all covariances are 0
        chosen = chosen_by(options, old, advantages)
        assert chosen.sum() == 400, "equal ones do not come together"
        assert all(20 < number < 80 for number in chosen.sum(1).tolist()), "no row comes first"
        assert 10 < int(chosen[:, :50].sum()) < 80, "and no place"
        order = [5, 2, 7, 0, 1, 6, 3, 4]
        moved = chosen_by(options, old, [advantages[i] for i in order], order)
        assert torch.equal(moved, chosen[order])
        later = chosen_by(options, old, advantages, [number + 8 for number in range(8)])
        assert (later & chosen).sum() < 100, "another step draws others"


def test_gspo_uses_one_ratio_per_sequence():
    logp = torch.tensor([[-1.0, -2.0, -9.0], [-1.0, -1.0, -1.0]], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([[-1.2, -2.4, 0.0], [-1.0, -1.0, -1.0]], dtype=torch.float64)
    mask = torch.tensor([[True, True, False], [True, True, True]])
    adv = torch.tensor([[1.0], [2.0]], dtype=torch.float64).expand(2, 3)
    options = GspoLoss(clip_ratio_low=0.9, clip_ratio_high=9.0)
    value = token_loss(policy_inputs(logp, old, adv, mask), options).value.view(2, 3)
    s = math.exp((0.2 + 0.4) / 2)  # the masked token's log-ratio of -9 is not in the mean
    assert value[0, :2].tolist() == pytest.approx([-s, -s]) and value[1].tolist() == [-2.0] * 3
    loss = aggregate(value, mask, "seq-mean-token-mean", count_denominators((mask > 0).sum(1), alone, 1.0))
    loss.backward()
    # d/d logp_t of -(1/2) s_i A_i, s_i = exp(mean log-ratio): s_i A_i / (2 T_i), the paper's gradient
    assert logp.grad[0].tolist() == pytest.approx([-s / 4, -s / 4, 0.0])


@pytest.mark.parametrize(
    ("clamp", "log_ratio", "expected"), [("both", 50.0, 20.0), ("above", 50.0, 10.0), ("both", -50.0, -20.0)]
)
def test_gspo_limits_the_mean_log_ratio(clamp, log_ratio, expected):
    logp = torch.full((1, 3), log_ratio, dtype=torch.float64, requires_grad=True)
    options = GspoLoss(clip_ratio_low=1.0, clip_ratio_high=1e9, clamp=clamp)
    zeros = torch.zeros_like(logp)
    value = token_loss(policy_inputs(logp, zeros, zeros - 1, logp == logp), options).value
    assert value[0].item() == pytest.approx(math.exp(expected))
    value.sum().backward()
    assert not logp.grad.any()  # as verl's, which clamps the sum with its gradient
