"""Where each estimator, loss and divergence leads: expected gradients by enumeration of a small vocabulary.

Every group of three responses of one token is in the batch once, and weighs as much as it is probable. Distillation:
test_distillation_losses.py.
"""

from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor

from megagrpo.algo.loss import Denominators, LossInputs, objective
from megagrpo.config.algorithm import AlgorithmConfig
from tests.unit.algo_inputs import batch_of, loss_inputs, with_advantages

VOCABULARY, GROUP = 3, 3
GROUPS = torch.tensor(list(product(range(VOCABULARY), repeat=GROUP)))
CHOSEN = GROUPS.flatten()
OF_GROUP = torch.arange(len(GROUPS)).repeat_interleave(GROUP)
REWARDS = torch.tensor([0.0, 0.25, 1.0], dtype=torch.float64)
SOLVED = torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64)
START = torch.tensor([0.8, 0.1, -0.6], dtype=torch.float64)
REFERENCE = torch.tensor([-0.2, 0.7, 0.1], dtype=torch.float64).log_softmax(0)
COEF = 0.5
ESTIMATORS: dict[str, dict] = {
    "grpo": {},
    "dr_grpo": {},
    "grpo_passk": {"normalize": False},
    "rloo": {},
    "maxrl": {},
    "reinforce": {},
    "reinforce_plus_plus": {},
    "reinforce_plus_plus_baseline": {},
    "remax": {},
    "opo": {},
    "optimal_token_baseline": {},
    "gdpo": {"whiten_over": "responses"},
    "gpg": {},
}
LOSSES = ("ppo_clip", "gspo", "gmpo", "dppo", "cispo", "gpg", "sapo", "dro")
OF_REVERSE_KL = ("k2", "k1+", "abs+", "k3+", "full")  # their gradient is that of KL(policy, reference)


def algorithm_of(**section: object) -> AlgorithmConfig:
    """Without aggregation over lengths: every response is one token."""
    return AlgorithmConfig.model_validate(section)


def advantages_of(algorithm: AlgorithmConfig, rewards: Tensor, policy: Tensor, old: Tensor) -> Tensor:
    ones, more = torch.ones(len(CHOSEN), 1), {}
    if algorithm.advantage.needs_greedy_response:
        more["greedy_rewards"] = rewards[old.argmax()].expand(len(CHOSEN)).clone()
    if algorithm.advantage.reads_parts:
        more |= {"parts": torch.stack([rewards[CHOSEN]], 1), "weights": torch.ones(1, dtype=torch.float64)}
    if algorithm.kl.reward_coef:
        more |= {"old_logprobs": old[CHOSEN][:, None], "ref_logprobs": REFERENCE[CHOSEN][:, None]}
    if algorithm.advantage.needs_squares:
        squares = old.exp().square().sum().expand(len(CHOSEN), 1)
        more |= {"old_logprobs": old[CHOSEN][:, None], "squares": squares}
    batch = batch_of(rewards[CHOSEN].clone(), OF_GROUP.tolist(), ones, **more)
    return with_advantages(batch, algorithm)[0].advantages.double()


def expected_loss(logits: Tensor, algorithm: AlgorithmConfig, rewards: Tensor, old: Tensor | None = None) -> Tensor:
    """The loss that a step expects of groups drawn from `old`, log-probabilities [V]; default: the policy."""
    policy = logits.log_softmax(0)
    old = policy.detach() if old is None else old
    weights = (old[GROUPS].sum(1).exp() / GROUP)[OF_GROUP][:, None]
    entropy, full_kl = -(policy.exp() * policy).sum(), (policy.exp() * (policy - REFERENCE)).sum()
    inputs: LossInputs = loss_inputs(
        policy[CHOSEN][:, None],
        entropy.expand(len(CHOSEN))[:, None],
        torch.ones_like(weights),
        advantages_of(algorithm, rewards, policy.detach(), old),
        old[CHOSEN][:, None],
        old[CHOSEN][:, None],
        ref_logprobs=REFERENCE[CHOSEN][:, None],
        full_kl=full_kl.expand(len(CHOSEN))[:, None],
        weights={"rl": weights},
    )
    return objective(inputs, algorithm, Denominators(1, 1, 1.0))[0]


def gradient_of(value: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    logits = at.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(value(logits), logits)
    return gradient


def expected_gradient(at: Tensor, algorithm: AlgorithmConfig, rewards: Tensor, old: Tensor | None = None) -> Tensor:
    return gradient_of(lambda logits: expected_loss(logits, algorithm, rewards, old), at)


def descended(algorithm: AlgorithmConfig, rewards: Tensor, lr: float = 0.1, steps: int = 60) -> Tensor:
    """Probabilities [V] after steps of Adam, each from its own samples."""
    logits = START.clone().requires_grad_()
    adam = torch.optim.Adam([logits], lr=lr)
    for _ in range(steps):
        adam.zero_grad()
        expected_loss(logits, algorithm, rewards).backward()
        adam.step()
    return logits.detach().softmax(0)


def mean_reward(logits: Tensor) -> Tensor:
    return (logits.softmax(0) * REWARDS).sum()


def best_of_group(logits: Tensor) -> Tensor:
    """The expected largest reward of a group."""
    return (logits.log_softmax(0)[GROUPS].sum(1).exp() * REWARDS[GROUPS].amax(1)).sum()


def truncated_likelihood(logits: Tensor) -> Tensor:
    """log p of a correct response, its series after the first GROUP - 1 terms. arXiv 2602.02710, eq. 8: with the mean
    as baseline one term fewer than responses."""
    wrong = 1 - (logits.softmax(0) * SOLVED).sum()
    return -sum((wrong**k / k for k in range(1, GROUP)), torch.zeros(()))


@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_begins_with_the_gradient_of_the_reward(loss: str):
    """On-policy, with r - mean, which takes 1 / GROUP of it away."""
    algorithm = algorithm_of(loss={"name": loss}, advantage={"name": "dr_grpo"})
    wanted = -gradient_of(mean_reward, START) * (GROUP - 1) / GROUP
    torch.testing.assert_close(expected_gradient(START, algorithm, REWARDS), wanted, rtol=1e-6, atol=1e-7)
    assert descended(algorithm, REWARDS)[2] > 0.95


@pytest.mark.parametrize(
    ("estimator", "rewards", "goal"),
    [
        ("rloo", REWARDS, mean_reward),
        ("reinforce", REWARDS, mean_reward),
        ("remax", REWARDS, mean_reward),
        ("opo", REWARDS, lambda logits: mean_reward(logits) * (GROUP - 1) / GROUP),
        ("grpo_passk", REWARDS, lambda logits: best_of_group(logits) / GROUP),
        ("maxrl", SOLVED, truncated_likelihood),
    ],
)
def test_an_estimator_has_the_gradient_of_its_goal(estimator: str, rewards: Tensor, goal: Callable):
    algorithm = algorithm_of(advantage={"name": estimator} | ESTIMATORS[estimator])
    found = expected_gradient(START, algorithm, rewards)
    torch.testing.assert_close(found, -gradient_of(goal, START), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_every_estimator_ends_at_the_best_response(estimator: str):
    """Where all responses are the best one, or are worth the same, nothing is learned; from elsewhere descent leads
    there."""
    algorithm = algorithm_of(advantage={"name": estimator} | ESTIMATORS[estimator])
    for at, rewards in ((torch.tensor([-30.0, -30.0, 30.0], dtype=torch.float64), REWARDS), (START, REWARDS * 0 + 0.7)):
        assert expected_gradient(at, algorithm, rewards).abs().max() < 1e-6
    reached = descended(algorithm, REWARDS)
    assert best_of_group(reached.log()) > 0.97 and (reached[2] > 0.9 or estimator == "grpo_passk")


@pytest.mark.parametrize("estimator", ("k1", "abs", "k2", "k3", "k1+", "abs+", "k3+", "full"))
def test_every_divergence_ends_at_the_reference(estimator: str):
    """All but k1, whose gradient is 0 everywhere: `check` advises against it."""
    algorithm = algorithm_of(kl={"estimator": estimator, "loss_coef": 1.0}, advantage={"name": "dr_grpo"})
    constant = torch.zeros_like(REWARDS)
    assert expected_gradient(REFERENCE, algorithm, constant).abs().max() < 1e-7
    if estimator == "k1":
        assert expected_gradient(START, algorithm, constant).abs().max() < 1e-7
        assert any("k1" in said for said in algorithm.advice)
        return
    reached = descended(algorithm, constant, lr=0.02, steps=200)
    assert (reached - REFERENCE.exp()).abs().max() < 0.02
    if estimator in OF_REVERSE_KL:
        wanted = gradient_of(lambda logits: (logits.softmax(0) * (logits.log_softmax(0) - REFERENCE)).sum(), START)
        torch.testing.assert_close(expected_gradient(START, algorithm, constant), wanted, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("estimator", ("k1+", "abs+", "k3+"))
def test_importance_makes_a_divergence_right_off_policy(estimator: str):
    kl = {"estimator": estimator, "loss_coef": 1.0, "importance": True}
    algorithm = algorithm_of(kl=kl, advantage={"name": "dr_grpo"})
    old = torch.tensor([-0.5, 0.9, 0.2], dtype=torch.float64).log_softmax(0)
    wanted = gradient_of(lambda logits: (logits.softmax(0) * (logits.log_softmax(0) - REFERENCE)).sum(), START)
    constant = torch.zeros_like(REWARDS)
    torch.testing.assert_close(expected_gradient(START, algorithm, constant, old), wanted, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    "section",
    [
        {"entropy_coef": COEF},
        {"kl": {"reward_coef": COEF, "estimator": "k1"}},
        *({"kl": {"loss_coef": COEF, "estimator": estimator}} for estimator in OF_REVERSE_KL),
    ],
    ids=lambda section: str(next(iter(section.values()))),
)
def test_a_regularized_reward_ends_where_it_is_stated_to(section: dict):
    """At p proportional to exp(r / coef), times the reference if the divergence is from it."""
    algorithm = algorithm_of(advantage={"name": "rloo"}, **section)
    prior = torch.zeros_like(REFERENCE) if "entropy_coef" in section else REFERENCE
    optimum = prior + REWARDS / COEF
    assert expected_gradient(optimum, algorithm, REWARDS).abs().max() < 1e-6
    assert expected_gradient(START, algorithm, REWARDS).abs().max() > 0.01
    assert (descended(algorithm, REWARDS, 0.02, 200) - optimum.softmax(0)).abs().max() < 0.02


def test_dro_ends_at_its_closed_form_off_policy():
    """arXiv 2405.19107: log(p / old) = (r - V) / beta, whatever policy drew the responses."""
    old, beta = REFERENCE, 0.5
    value = beta * (old + REWARDS / beta).logsumexp(0)
    algorithm = algorithm_of(loss={"name": "dro", "beta": beta}, advantage={"name": "reinforce"})
    found = expected_gradient(old + REWARDS / beta, algorithm, REWARDS - value, old)
    assert found.abs().max() < 1e-6
    assert expected_gradient(old, algorithm, REWARDS - value, old).abs().max() > 0.01


def test_cross_entropy_ends_at_the_distribution_of_its_data():
    algorithm = algorithm_of(streams=[{"component": "cross_entropy"}])
    data = REFERENCE.exp()[:, None]

    def loss(logits: Tensor) -> Tensor:
        sampled, zeros = logits.log_softmax(0)[:, None], torch.zeros_like(data)
        weights = {"rl": zeros, "cross_entropy": data}
        inputs = loss_inputs(sampled, zeros, zeros + 1, zeros, sampled.detach(), sampled.detach(), weights=weights)
        return objective(inputs, algorithm, Denominators(1, 1, 1.0, {"cross_entropy": 1}))[0]

    assert gradient_of(loss, REFERENCE).abs().max() < 1e-7
    assert gradient_of(loss, START).abs().max() > 0.01
