"""Normalization, clip and token-level KL in ROLL's and verl's orders, and rewards of tokens: values and gradients."""

from types import SimpleNamespace

import pytest
import torch

from megagrpo.algo.estimators import discounted_returns
from megagrpo.algo.loss import count_denominators, objective
from megagrpo.algo.statistics import alone
from megagrpo.config.algorithm import AlgorithmConfig
from tests.unit.algo_inputs import batch_of, loss_inputs, with_advantages
from tests.unit.golden_cases import cases, close, tensor

FILE = "reward_order.json"
PPO = {"loss": {"name": "ppo_clip", "clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "dual_clip": 3.0}}
F64 = torch.float64


def of_roll(params: dict) -> dict:
    """ROLL's grpo: rewards normalized by the group, then clipped, then token KL, then returns to go."""
    reward = {"mean": "group", "std": "group", "clip": params["reward_clip"]}
    kl = {"reward_coef": params["kl_coef"], "estimator": "k1"} if params["kl_coef"] else {}
    more = {"whiten_advantages": params["whiten_advantages"], "advantage_clip": params["advantage_clip"]}
    return {"advantage": {"name": "reinforce"}, "reward": reward, "kl": kl, **more}


def of_verl(params: dict) -> dict:
    kl = {"reward_coef": params["kl_coef"], "estimator": "k1"} if params["kl_coef"] else {}
    return {"advantage": {"name": "remax"}, "kl": kl}


def solved(case: dict, options: dict) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Our advantages, loss, and its gradient by the log-probabilities."""
    inputs = {name: tensor(values) for name, values in case["inputs"].items()}
    mask, old = inputs["response_mask"] > 0, inputs["old_log_probs"]
    more = {"greedy_rewards": inputs["reward_baselines"]} if "reward_baselines" in inputs else {}
    more |= {"old_logprobs": old.float(), "ref_logprobs": inputs["ref_log_probs"].float()}
    batch = batch_of(inputs["rewards"], case["inputs"]["group"], mask, **more)
    algorithm = AlgorithmConfig(**options, **PPO)
    advantages = with_advantages(batch, algorithm)[0].advantages
    new, zero = inputs["log_probs"].requires_grad_(), torch.zeros_like(old)
    counted = count_denominators(mask.sum(1), alone, 1.0)
    value, _ = objective(loss_inputs(new, zero, mask, advantages.double(), old, zero), algorithm, counted)
    return advantages, value, torch.autograd.grad(value, new)[0]


@pytest.mark.parametrize("case", cases(FILE, where=lambda case: case["params"]["order"] == "roll_grpo"))
def test_rolls_grpo_with_clip_and_token_kl(case):
    advantages, value, gradient = solved(case, of_roll(case["params"]))
    mask, outputs = tensor(case["inputs"]["response_mask"]) > 0, case["outputs"]
    close(advantages, outputs["advantages"], atol=2e-6, where=mask)
    close(value, outputs["loss"])
    close(gradient, outputs["grad_log_prob"])


@pytest.mark.parametrize("case", cases(FILE, ("convention",)))
def test_rolls_second_clip_is_left_out(case):
    """ROLL clips the last token's reward again after the KL: at most the KL there, and only where the clip is met."""
    plain = {**case, "params": {**case["params"], "whiten_advantages": False}}
    advantages, _, _ = solved(plain, of_roll(plain["params"]))
    kl = tensor(case["inputs"]["old_log_probs"]) - tensor(case["inputs"]["ref_log_probs"])
    if not case["params"]["whiten_advantages"]:
        mask = tensor(case["inputs"]["response_mask"]) > 0
        apart = (advantages - tensor(case["outputs"]["advantages"]))[mask].abs().max()
        assert 1e-3 < apart <= case["params"]["kl_coef"] * kl.abs().max()


@pytest.mark.parametrize("case", cases(FILE, where=lambda case: case["params"]["order"] == "verl_remax"))
def test_verls_remax_with_kl_in_the_reward(case):
    advantages, value, gradient = solved(case, of_verl(case["params"]))
    close(advantages, case["outputs"]["advantages"], where=tensor(case["inputs"]["response_mask"]) > 0)
    close(value, case["outputs"]["loss"])
    close(gradient, case["outputs"]["grad_log_prob"])


def test_the_order_matters():
    """The clip before the group's normalization, as `grpo` has it, and after it: rewards of 0 .. 100 differ."""
    rewards, mask = (torch.tensor([0.0, 90.0, 100.0, 80.0], dtype=F64), torch.ones(4, 1, dtype=torch.bool))
    batch = batch_of(rewards, [0, 0, 0, 0], mask)
    before = {"advantage": {"name": "grpo"}, "reward": {"clip": 10.0}}
    after = {"advantage": {"name": "reinforce"}, "reward": {"mean": "group", "std": "group", "clip": 10.0}}
    first, second = (
        with_advantages(batch, AlgorithmConfig(**options))[0].advantages[:, 0] for options in (before, after)
    )
    assert first.tolist() == pytest.approx([-1.5, 0.5, 0.5, 0.5], abs=1e-5)
    assert second.tolist() == pytest.approx(((rewards - rewards.mean()) / rewards.std()).tolist(), abs=1e-5)


def process(options: dict, **more) -> torch.Tensor:
    """Advantages of two responses of three tokens in one group; their rewards are 2 (of it 0.5 at token 0) and 1."""
    tokens = torch.tensor([[0.5, 0.0, 0.25], [0.0, 0.0, 0.0]], dtype=F64)
    given = {"mask": torch.ones(2, 3, dtype=torch.bool), "token_scores": tokens} | more
    batch = batch_of(torch.tensor([2.0, 1.0], dtype=F64), [0, 0], given.pop("mask"), **given)
    return with_advantages(batch, AlgorithmConfig(**options))[0].advantages


def test_rewards_of_tokens_in_closed_form():
    assert process({"advantage": {"name": "dr_grpo"}}).tolist() == [[0.5] * 3, [-0.5] * 3]  # of the sums, 2 and 1
    returns = process({"advantage": {"name": "reinforce"}})
    assert returns.tolist() == [[2.0, 1.5, 1.5], [1.0, 1.0, 1.0]]  # the 1.25 for the whole is at the last token
    discounted = process({"advantage": {"name": "reinforce", "gamma": 0.5}})
    assert discounted.tolist() == [[0.875, 0.75, 1.5], [0.25, 0.5, 1.0]]
    baseline = {"greedy_rewards": torch.tensor([0.5, 0.5], dtype=F64)}
    assert process({"advantage": {"name": "remax"}}, **baseline).tolist() == [[1.5, 1.0, 1.0], [0.5, 0.5, 0.5]]


def test_reward_steps_act_on_the_sum_and_scale_on_every_part():
    steps = {"advantage": {"name": "reinforce"}, "reward": {"scale": 2.0, "shift": 1.0}}
    assert process(steps).tolist() == [[5.0, 4.0, 4.0], [3.0, 3.0, 3.0]]  # 2 * 2 + 1, of it 2 * 0.5 at token 0
    normalized = {"advantage": {"name": "reinforce"}, "reward": {"mean": "group"}}
    assert process(normalized).tolist() == [[0.5, 0.0, 0.0], [-0.5, -0.5, -0.5]]


def test_rewards_of_tokens_with_kl_and_a_masked_token():
    old, ref = (torch.tensor([[-1.0, -1.0, -1.0], [-1.0, -1.0, -1.0]]), torch.tensor([[-2.0, -1.0, -1.5], [-1.0] * 3]))
    more = {"old_logprobs": old, "ref_logprobs": ref, "mask": torch.tensor([[1, 0, 1], [1, 1, 1]]) > 0}
    kl = {"reward_coef": 0.1, "estimator": "k1"}
    found = process({"advantage": {"name": "reinforce"}, "kl": kl}, **more)
    assert found.tolist()[0] == pytest.approx([2.0 - 0.1 - 0.05, 0.0, 1.5 - 0.05])
    assert found.tolist()[1] == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("gamma", [1.0, 0.97])
def test_returns_are_those_of_a_walk_from_the_end(gamma: float):
    """Rows of up to 300 tokens with holes, rows without a sampled token, prompts of other lengths."""
    chance = torch.Generator().manual_seed(0)
    lengths = torch.tensor([300, 1, 7, 40, 64, 3])
    sampled = torch.rand(int(lengths.sum()), generator=chance) > 0.3
    sampled[300], sampled[-3:] = True, False
    scores = torch.randn(len(sampled), generator=chance, dtype=torch.float64) * sampled
    rewards = torch.randn(6, generator=chance, dtype=torch.float64)
    inputs = SimpleNamespace(rewards=rewards, token_rewards=scores, lengths=lengths, sampled=sampled)
    found, right, end = discounted_returns(inputs, gamma), [], 0
    for length, reward in zip(lengths.tolist(), rewards.tolist(), strict=True):
        start, end = end, end + length
        carry, row = None, []
        for t in reversed(range(start, end)):
            if sampled[t]:
                carry = float(scores[t]) + (reward if carry is None else gamma * carry)
            row.append(carry if sampled[t] else 0.0)
        right += row[::-1]
    assert found.tolist() == pytest.approx(right, rel=1e-12, abs=1e-12)
    inputs.token_rewards = None
    if gamma == 1.0:
        expected = rewards.repeat_interleave(lengths) * sampled
        assert torch.equal(discounted_returns(inputs, gamma), expected)  # the same bits at each token
