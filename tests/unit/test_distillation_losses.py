"""Losses of distillation: closed forms, what verl computes, and where each of them ends."""

import math
from typing import get_args

import pytest
import torch

from megagrpo.algo.loss import candidate_gaps
from megagrpo.algo.policy_loss import token_loss
from megagrpo.config.objective.policy_loss import GmpoLoss, PpoClipLoss
from megagrpo.config.objective.streams import DistillationConfig
from tests.unit.algo_inputs import loss_inputs, policy_inputs
from tests.unit.golden_cases import cases, close, tensor
from tests.unit.test_streams import algorithm_of, loss_of

LOSSES = get_args(DistillationConfig.model_fields["loss"].annotation)
SUMS = [loss for loss in LOSSES if loss.endswith("_sum")]
GMPO = GmpoLoss(clip_ratio_low=0.2, clip_ratio_high=0.3)


@pytest.mark.parametrize("loss", LOSSES[1:])
def test_candidates_are_compared_as_distributions_are(loss: str):
    """Over the whole vocabulary the sums are the two KL divergences, whose gradients by the logits
    are known: p (log p / q - KL), and p - q."""
    logits = torch.tensor([0.3, -1.0, 0.5, 0.0], dtype=torch.float64, requires_grad=True)
    policy = logits.log_softmax(0)
    teacher = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64).log()
    gaps = candidate_gaps(policy[None], teacher[None], DistillationConfig(loss=loss, top_k=4))
    (gradient,) = torch.autograd.grad(gaps.sum(), logits)
    p, q = policy.detach().exp(), teacher.exp()
    gap = p.log() - teacher
    if loss.startswith("student_topk"):
        kl, by_logits = (p * gap).sum(), p * (gap - (p * gap).sum())
    else:
        kl, by_logits = -(q * gap).sum(), p - q
    torch.testing.assert_close(gaps[0], kl)
    torch.testing.assert_close(gradient, by_logits)


@pytest.mark.parametrize("case", cases("distillation.json"))
def test_candidates_as_verl_compares_them(case: dict):
    student = tensor(case["inputs"]["student_topk"]).requires_grad_()
    params = case["params"]
    options = DistillationConfig(
        loss="teacher_topk_sum" if params["loss_mode"] == "forward" else "student_topk_sum",
        top_k=student.shape[-1],
        logprob_min=params["log_prob_min"],
    )
    gaps = candidate_gaps(student, tensor(case["inputs"]["teacher_topk"]), options)
    (gradient,) = torch.autograd.grad(gaps.sum(), student)
    close(gaps, case["outputs"]["losses"])
    close(gradient, case["outputs"]["grad_student_topk"])


def share(ahead: float, behind: float) -> float:
    """A token's share of the generalized KL from two log-probabilities."""
    p, q = math.exp(ahead), math.exp(behind)
    return p * (ahead - behind) - p + q


def test_candidates_of_two_of_many_tokens():
    """Value and gradient by the policy's log-probabilities: p log(p / q), and p - q."""
    policy = torch.tensor([[-0.5, -3.0]], dtype=torch.float64, requires_grad=True)
    teacher = torch.tensor([[-1.5, -2.0]], dtype=torch.float64)
    p, q = policy.detach().exp(), teacher.exp()
    for loss, of_one, by_policy in (
        ("student_topk", share, p * (policy.detach() - teacher)),
        ("teacher_topk", lambda p, q: share(q, p), p - q),
    ):
        gaps = candidate_gaps(policy, teacher, DistillationConfig(loss=loss, top_k=2))
        (gradient,) = torch.autograd.grad(gaps.sum(), policy)
        assert gaps.item() == pytest.approx(of_one(-0.5, -1.5) + of_one(-3.0, -2.0)) and gaps > 0
        torch.testing.assert_close(gradient, by_policy)


def test_candidates_are_limited():
    """An improbable candidate counts as one of logprob_min, and a token as at most loss_max; but
    what only the policy finds improbable keeps value and gradient."""
    policy = torch.tensor([[-0.1, -50.0, -60.0]], dtype=torch.float64, requires_grad=True)
    teacher = torch.tensor([[-9.0, -0.2, -70.0]], dtype=torch.float64)
    plain = math.exp(-4) * (-4 + 0.1) + math.exp(-0.2) * (-0.2 + 4)
    whole = share(-4, -0.1) + share(-0.2, -50.0)
    gradient = [math.exp(-0.1) - math.exp(-4), math.exp(-50) - math.exp(-0.2), 0.0]
    at_limit = [0.0, 0.0, 0.0]
    for loss, limit, value, by_policy in (
        ("teacher_topk_sum", None, plain, [-math.exp(-4), 0.0, 0.0]),
        ("teacher_topk_sum", 1.5, 1.5, at_limit),
        ("teacher_topk", None, whole, gradient),
        ("teacher_topk", 1.5, 1.5, at_limit),
    ):
        options = DistillationConfig(loss=loss, top_k=3, logprob_min=-4.0, loss_max=limit)
        gaps = candidate_gaps(policy, teacher, options)
        (found,) = torch.autograd.grad(gaps.sum(), policy)
        assert gaps.item() == pytest.approx(value)
        assert found[0].tolist() == pytest.approx(by_policy)


def expected_loss(logits: torch.Tensor, teacher: torch.Tensor, loss: str, k: int) -> torch.Tensor:
    """The distillation loss of one position: every token is sampled once, in a row of its own, and
    weighs as much as it is probable. logits, and the teacher's log-probabilities: [V]."""
    policy = logits.log_softmax(0)
    sampled = policy[:, None]
    top = (policy if loss.startswith("student_topk") else teacher).topk(k).indices
    algorithm = algorithm_of(distillation={"loss": loss} | ({} if loss == "reverse_kl" else {"top_k": k}))
    gaps = None
    if loss != "reverse_kl":
        gaps = candidate_gaps(policy[top][None], teacher[top][None], algorithm.distillation)
        gaps = gaps.expand(len(policy))[:, None]
    zeros, old = torch.zeros_like(sampled).detach(), sampled.detach()
    more = {"teacher_logprobs": teacher[:, None], "candidate_gaps": gaps}
    weights = {"rl": zeros, "distillation": old.exp()}
    inputs = loss_inputs(sampled, zeros, zeros + 1, zeros, old, old, weights=weights, **more)
    return loss_of(inputs, algorithm, {"distillation": 1})[0]


def kl_between(logits: torch.Tensor, teacher: torch.Tensor) -> float:
    policy = logits.detach().log_softmax(0)
    return float((policy.exp() * (policy - teacher)).sum())


def descended(start: torch.Tensor, teacher: torch.Tensor, loss: str, lr: float) -> float:
    """Returns the KL to the teacher after 60 steps of Adam."""
    logits = start.clone().requires_grad_()
    adam = torch.optim.Adam([logits], lr=lr)
    for _ in range(60):
        adam.zero_grad()
        expected_loss(logits, teacher, loss, 4).backward()
        adam.step()
    return kl_between(logits, teacher)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("seed", range(3))
def test_the_teacher_is_where_distillation_ends(loss: str, seed: int):
    """The expected gradient at the teacher is 0, a student that begins there stays, and one that
    begins elsewhere comes nearer. The plain sums, kept for comparison, leave the teacher."""
    generator = torch.Generator().manual_seed(seed)
    teacher, start = (2 * torch.randn(12, generator=generator) for _ in range(2))
    teacher = teacher.log_softmax(0)
    logits = teacher.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(expected_loss(logits, teacher, loss, 4), logits)
    stayed, apart = descended(teacher, teacher, loss, 0.02), kl_between(start, teacher)
    if loss in SUMS:
        assert gradient.abs().max() > 0.01 and stayed > 0.01
        return
    assert gradient.abs().max() < 1e-6 and stayed < 1e-3
    assert descended(start, teacher, loss, 0.1) < 0.6 * apart


def test_check_advises_against_the_plain_sums():
    advice = {loss: algorithm_of(distillation={"loss": loss}).advice for loss in LOSSES}
    for loss in SUMS:
        (said,) = advice[loss]
        assert said.endswith(f"use {loss.removesuffix('_sum')}"), said
    assert not any(advice[loss] for loss in LOSSES if loss not in SUMS)


def test_gmpo_learns_from_the_advantage_of_each_token():
    """Those of distillation differ by token; their mean, here 0, would teach nothing."""
    old = torch.full((1, 4), -1.0, dtype=torch.float64)
    adv = torch.tensor([[2.0, -1.0, 3.0, -4.0]], dtype=torch.float64)
    mask = torch.ones_like(old, dtype=torch.bool)
    gradients = []
    for options in (GMPO, PpoClipLoss()):
        logp = old.clone().requires_grad_()
        token_loss(policy_inputs(logp, old, adv, mask), options).value.sum().backward()
        gradients.append(logp.grad[0].tolist())
    assert gradients == [[-2.0, 1.0, -3.0, 4.0]] * 2
    logp = (old + torch.tensor([[0.1, -0.5, 0.6, 0.2]])).requires_grad_()
    found = token_loss(policy_inputs(logp, old, adv, mask), GMPO)
    found.value.sum().backward()
    ratio = math.exp((0.1 - 0.2 + 0.3 + 0.2) / 4)  # each clipped by the sign of its own advantage
    assert found.value.tolist() == pytest.approx([-2 * ratio, ratio, -3 * ratio, 4 * ratio])
    assert logp.grad[0].tolist() == pytest.approx([-2 * ratio, 0.0, 0.0, 4 * ratio])
    assert found.clipped["low"].tolist() == [False, True, False, False]
    assert found.clipped["high"].tolist() == [False, False, True, False]


def test_gmpo_clips_nothing_without_an_advantage():
    old = torch.zeros(1, 2)
    inputs = policy_inputs(torch.tensor([[1.0, -1.0]]), old, old, torch.ones(1, 2, dtype=torch.bool))
    clipped = token_loss(inputs, GMPO).clipped
    assert not clipped["low"].any() and not clipped["high"].any()
