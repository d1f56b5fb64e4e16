"""Every loss, KL form and aggregation: closed-form value and gradient; shares add up; masked tokens leak nothing."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megagrpo.algo.kl import adapted_kl_coef, kl_penalty, with_current_kl_coef
from megagrpo.algo.loss import Denominators, count_denominators, objective
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
from megagrpo.types import AlgoState
from tests.unit.algo_inputs import aggregate, loss_inputs

AGGREGATIONS = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


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
    DroLoss(),
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


def test_an_adapted_coefficient_stays_above_0():
    """Of a KL long below its target: at 0 the next step would keep no reference, and it would stay 0."""
    algorithm = AlgorithmConfig(kl={"loss_coef": 0.1, "adaptive": {"target": 0.2, "horizon": 0.5}})
    coef = 0.1
    for _ in range(500):
        coef = adapted_kl_coef(coef, 0.0, 2, algorithm.kl.adaptive)
    assert with_current_kl_coef(algorithm, AlgoState(kl_coef=coef)).uses_reference
