"""Every loss, KL form and aggregation: closed-form value and gradient; shares add up; masked tokens leak nothing."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megagrpo.algo.kl import kl_penalty
from megagrpo.algo.loss import Denominators, count_denominators, objective
from megagrpo.algo.policy_loss import token_loss
from megagrpo.algo.statistics import alone
from megagrpo.config.algorithm import AlgorithmConfig
from megagrpo.config.objective.policy_loss import (
    CispoLoss,
    DppoLoss,
    DroLoss,
    GmpoLoss,
    GpgLoss,
    GspoLoss,
    PpoClipLoss,
    SapoLoss,
)
from tests.unit.algo_inputs import aggregate, loss_inputs, policy_inputs

AGGREGATIONS = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
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
    """Of four sequences with means of log(old / new) of 0.3, 0.3, 0.1 and 0.3, only the second has A < 0 beyond 0.2."""
    log_ratio = torch.tensor([[-0.5, -0.1], [-0.5, -0.1], [-0.3, 0.1], [-0.5, -9.0]], dtype=torch.float64)
    adv = torch.tensor([[1.0], [-1.0], [-1.0], [1.0]], dtype=torch.float64).expand(4, 2)
    mask = torch.tensor([[True, True]] * 3 + [[True, False]])
    logp, zeros = log_ratio.clone().requires_grad_(), torch.zeros(4, 2, dtype=torch.float64)
    inputs = loss_inputs(logp, zeros, mask, adv, zeros, zeros)
    value, sums = objective(
        inputs, AlgorithmConfig(loss={"name": "gpg"}, off_policy_limit=0.2), Denominators(7, 4, 1.0)
    )
    assert sums["policy/clip_fraction_off_policy"].item() == 2
    value.backward()
    left = [[1.0, 1.0], [0.0, 0.0], [-1.0, -1.0], [1.0, 0.0]]
    assert torch.allclose(-7 * logp.grad, torch.tensor(left).double())


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


def test_log_ratio_is_clamped_without_gradient_and_counted():
    logp = torch.tensor([[60.0, 0.5]], dtype=torch.float64, requires_grad=True)
    zero = torch.zeros(1, 2, dtype=torch.float64)
    inputs = loss_inputs(logp, zero, zero + 1, zero - 1, zero, zero)
    algorithm = AlgorithmConfig(loss={"name": "ppo_clip", "clip_ratio_high": 1e9})
    loss, sums = objective(inputs, algorithm, Denominators(2, 1, 1.0))
    loss.backward()
    assert logp.grad[0, 0] == 0 and logp.grad[0, 1] != 0 and float(sums["policy/clamped_fraction"]) == 1
    assert loss.item() == pytest.approx((math.exp(20) + math.exp(0.5)) / 2)


X = 0.7
KL_CASES = [  # estimator, value, gradient
    ("k1", X, 1.0),
    ("abs", X, 1.0),
    ("k2", X * X / 2, X),
    ("k3", math.exp(-X) + X - 1, 1 - math.exp(-X)),
    ("k1+", X, X),
    ("abs+", X, X),
    ("k3+", math.exp(-X) + X - 1, X),
]


@pytest.mark.parametrize(("estimator", "value", "gradient"), KL_CASES)
@pytest.mark.parametrize("sign", [1, -1])
def test_kl(estimator, value, gradient, sign):
    logp = torch.tensor(sign * X - 2, dtype=torch.float64, requires_grad=True)
    kl = kl_penalty(logp, torch.tensor(-2.0).double(), estimator)
    kl.backward()
    if sign < 0:
        value = {"k1": -X, "k1+": -X}.get(estimator, math.exp(X) - X - 1 if estimator.startswith("k3") else value)
        gradient = {"k1": 1.0, "abs": -1.0, "k3": 1 - math.exp(X)}.get(estimator, -X)
    assert (kl.item(), logp.grad.item()) == pytest.approx((value, gradient), rel=1e-12)


def test_kl_limits():
    x = torch.tensor([-50.0, -3.0, 50.0], dtype=torch.float64, requires_grad=True)
    kl = kl_penalty(x, torch.zeros(3).double(), "k3", value_clamp=10.0)
    kl.sum().backward()
    assert kl.tolist() == pytest.approx([10.0, 10.0, 10.0]) and x.grad.tolist() == [0.0, 0.0, 0.0]
    near_zero = float(kl_penalty(torch.tensor(1e-6), torch.tensor(0.0), "k3"))
    assert near_zero == pytest.approx(5e-13, rel=1e-2)


def test_kl_importance_weighs_by_the_ratio():
    logp = torch.tensor([[-1.0]], dtype=torch.float64, requires_grad=True)
    one = torch.ones_like(logp).detach()
    inputs = loss_inputs(logp, 0 * one, one, 0 * one, -1.5 * one, -1.5 * one, ref_logprobs=-2 * one)
    kl = {"loss_coef": 0.5, "estimator": "k3+", "importance": True}
    loss, _ = objective(inputs, AlgorithmConfig(kl=kl), Denominators(1, 1, 1.0))
    loss.backward()
    ratio = math.exp(0.5)
    assert (loss.item(), logp.grad.item()) == pytest.approx((0.5 * ratio * math.exp(-1), 0.5 * ratio * 1.0))


def test_full_kl_and_entropy_enter_with_their_coefficients():
    one = torch.ones(1, 2, dtype=torch.float64)
    entropy, full = (2 * one).requires_grad_(), (3 * one).requires_grad_()
    inputs = loss_inputs(one.clone().requires_grad_(), entropy, one, 0 * one, one, one, full_kl=full)
    algorithm = AlgorithmConfig(kl={"loss_coef": 0.1, "estimator": "full"}, entropy_coef=0.01)
    loss, sums = objective(inputs, algorithm, Denominators(2, 1, 1.0))
    loss.backward()
    assert loss.item() == pytest.approx(0.3 - 0.02)
    assert entropy.grad.tolist() == [[-0.005] * 2] and full.grad.tolist() == [[0.05] * 2]
    found = [float(sums[name]) for name in ("loss/kl", "policy/entropy", "tokens")]
    assert found == pytest.approx([0.3, 4.0, 2.0])


MATRIX = torch.tensor([[1.0, 2.0, 9.0], [4.0, 9.0, 9.0], [9.0, 9.0, 9.0]], dtype=torch.float64)
MASK = torch.tensor([[True, True, False], [True, False, False], [False, False, False]])
C = 10.0
AGGREGATED = {  # value, gradient of the tokens of row 0 and of row 1
    "token-mean": (7 / 3, 1 / 3, 1 / 3),
    "seq-mean-token-sum": (7 / 2, 1 / 2, 1 / 2),
    "seq-mean-token-mean": ((1.5 + 4) / 2, 1 / 4, 1 / 2),
    "seq-mean-token-sum-norm": (7 / 20, 1 / 20, 1 / 20),
}


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_aggregation(name):
    matrix = MATRIX.clone().requires_grad_()
    loss = aggregate(matrix, MASK, name, count_denominators((MASK > 0).sum(1), alone, C))
    loss.backward()
    value, first, second = AGGREGATED[name]
    assert loss.item() == pytest.approx(value)
    assert matrix.grad.tolist() == [pytest.approx(row) for row in ([first, first, 0], [second, 0, 0], [0, 0, 0])]


def test_rejected_tokens_may_stay_in_every_denominator():
    """Two of four tokens were rejected: with counted_tokens the others weigh 1/4 each, not 1/2; metrics see those."""
    trained, counted = (
        torch.tensor([[1.0, 1.0, 0.0, 0.0]], dtype=torch.float64),
        torch.ones(1, 4, dtype=torch.float64),
    )
    zeros, logprobs = torch.zeros_like(counted), torch.zeros_like(counted).requires_grad_()
    inputs = loss_inputs(logprobs, zeros, trained, counted, zeros, zeros, counted_tokens=counted.sum(1))
    for aggregation in ("seq-mean-token-mean", "token-mean"):
        denominators = count_denominators((counted > 0).sum(1), alone, C)
        loss, sums = objective(inputs, AlgorithmConfig(aggregation=aggregation), denominators)
        (gradient,) = torch.autograd.grad(loss, logprobs)
        assert loss.item() == pytest.approx(-0.5) and gradient.tolist() == [[-0.25, -0.25, 0, 0]]
        assert float(sums["policy/ratio"] / sums["tokens"]) == 1.0


# Properties of the whole objective

LOSSES = [
    PpoClipLoss(dual_clip=3.0),
    GspoLoss(),
    GmpoLoss(),
    DppoLoss(),
    DppoLoss(divergence="kl", against="old", low=0.02, high=0.02),
    CispoLoss(),
    GpgLoss(),
    SapoLoss(),
    DRO,
]


def algorithm_of(loss, aggregation) -> AlgorithmConfig:
    kl = {"loss_coef": 0.1, "estimator": "k3+"}
    return AlgorithmConfig(loss=loss, aggregation=aggregation, kl=kl, entropy_coef=0.01)


def random_inputs(seed: int, n: int, width: int) -> dict[str, torch.Tensor]:
    """As [n, width]."""
    generator = torch.Generator().manual_seed(seed)

    def normal() -> torch.Tensor:
        return torch.randn(n, width, generator=generator, dtype=torch.float64)

    old, near = normal() - 2, 0.3 * normal()
    return {
        "logprobs": old + near,
        "entropy": normal().abs(),
        "loss_mask": (torch.rand(n, width, generator=generator) > 0.4).double(),
        "advantages": normal(),
        "old_logprobs": old,
        "rollout_logprobs": old + 0.1 * normal(),
        "ref_logprobs": old + 0.1 * normal(),
        "policy_weights": normal().abs(),
    }


def denominators_of(inputs: dict) -> Denominators:
    return count_denominators((inputs["loss_mask"] > 0).sum(1), alone, C)


def solve(inputs: dict, algorithm, denominators) -> tuple[float, torch.Tensor, dict]:
    logp = inputs["logprobs"].clone().requires_grad_()
    loss, sums = objective(loss_inputs(**inputs | {"logprobs": logp}), algorithm, denominators)
    (gradient,) = torch.autograd.grad(loss, logp)
    return loss.item(), gradient, {name: float(value) for name, value in sums.items()}


def pick(inputs: dict, rows) -> dict:
    return {name: value[rows] for name, value in inputs.items()}


@given(
    seed=st.integers(0, 10**6),
    n=st.integers(1, 6),
    width=st.integers(1, 7),
    loss=st.sampled_from(LOSSES),
    aggregation=st.sampled_from(AGGREGATIONS),
)
def test_invariances(seed, n, width, loss, aggregation):
    """Permutation, any split into micro-batches, and an added all-masked sequence full of NaN change nothing."""
    inputs, algorithm = random_inputs(seed, n, width), algorithm_of(loss, aggregation)
    denominators = denominators_of(inputs)
    value, gradient, sums = solve(inputs, algorithm, denominators)
    assert math.isfinite(value) and (gradient[inputs["loss_mask"] == 0] == 0).all()

    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    permuted = solve(pick(inputs, order), algorithm, denominators)
    assert permuted[0] == pytest.approx(value, rel=1e-12, abs=1e-12)
    torch.testing.assert_close(permuted[1], gradient[order], rtol=1e-12, atol=1e-14)

    cut = seed % (n + 1)  # one part may be empty
    parts = [solve(pick(inputs, slice(*ends)), algorithm, denominators) for ends in ((0, cut), (cut, n))]
    assert parts[0][0] + parts[1][0] == pytest.approx(value, rel=1e-12, abs=1e-12)
    torch.testing.assert_close(torch.cat([parts[0][1], parts[1][1]]), gradient, rtol=1e-12, atol=1e-14)
    assert {k: parts[0][2][k] + parts[1][2][k] for k in sums} == pytest.approx(sums, rel=1e-9, abs=1e-9)

    padded = pick(inputs, [*range(n), 0])  # a copy
    for name, tensor in padded.items():
        tensor[-1] = 0.0 if name == "loss_mask" else math.nan
    assert denominators_of(padded) == denominators
    added = solve(padded, algorithm, denominators)
    assert added[0] == pytest.approx(value, rel=1e-12, abs=1e-12) and (added[1][-1] == 0).all()
    torch.testing.assert_close(added[1][:-1], gradient, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.name)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_nothing_unmasked_is_zero_not_nan(loss, aggregation):
    inputs = random_inputs(0, 3, 4) | {"loss_mask": torch.zeros(3, 4, dtype=torch.float64)}
    value, gradient, _ = solve(inputs, algorithm_of(loss, aggregation), denominators_of(inputs))
    assert value == 0.0 and (gradient == 0).all()


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.name)
def test_weights_multiply_the_policy_term_only(loss):
    inputs, denominators = random_inputs(1, 3, 4), Denominators(7, 3, C)
    algorithm = algorithm_of(loss, "token-mean")
    zeros = torch.zeros(3, 4, dtype=torch.float64)
    without = solve(inputs | {"policy_weights": zeros}, algorithm, denominators)
    no_policy = inputs | {"policy_weights": None, "advantages": zeros}
    no_policy = solve(no_policy, algorithm_of(GpgLoss(), "token-mean"), denominators)
    assert without[0] == pytest.approx(no_policy[0]) and without[0] != 0
    torch.testing.assert_close(without[1], no_policy[1])
