"""Every estimator: closed form, properties of a group, and the order of operations around it."""

import json
from dataclasses import asdict, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter
from torch.utils._python_dispatch import TorchDispatchMode

from megagrpo.algo.kl import with_current_kl_coef
from megagrpo.algo.reward_shaping import ShapedRewards, normalize
from megagrpo.algo.statistics import exact_row_sums
from megagrpo.config.algorithm import AlgorithmConfig
from megagrpo.config.objective.reward_shaping import RewardShapingConfig
from megagrpo.types import AlgoState, Batch, RewardMoments
from tests.unit import algo_inputs
from tests.unit.algo_inputs import of_policy, reward_inputs, with_advantages

EPS = 1e-6


def batch_of(rewards: list[float], groups: list[int], mask: list[list[int]] | None = None, **more) -> Batch:
    loss_mask = torch.tensor(mask if mask is not None else [[1]] * len(rewards)).reshape(len(rewards), -1)
    return algo_inputs.batch_of(torch.tensor(rewards, dtype=torch.float64), groups, loss_mask, **more)


def solve(batch: Batch, **options) -> tuple[torch.Tensor, dict]:
    result, _, metrics = with_advantages(batch, AlgorithmConfig(**options))
    return result.advantages, metrics


R, G = [1.0, 2.0, 6.0, 5.0, 5.0, 3.0], [0, 0, 0, 1, 1, 2]  # mean 3, std sqrt(7); constant; single
STD = 7**0.5 + EPS
CLOSED = [  # options of the estimator, advantages
    ({"name": "grpo"}, [-2 / STD, -1 / STD, 3 / STD, 0, 0, 0]),
    ({"name": "grpo", "single_sample": "raw"}, [-2 / STD, -1 / STD, 3 / STD, 0, 0, 3]),
    ({"name": "dr_grpo"}, [-2, -1, 3, 0, 0, 0]),
    ({"name": "dr_grpo", "single_sample": "raw"}, [-2, -1, 3, 0, 0, 3]),
    ({"name": "grpo_passk"}, [0, 0, 4 / STD, 0, 0, 0]),
    ({"name": "rloo"}, [1 - 4, 2 - 3.5, 6 - 1.5, 0, 0, 0]),
    ({"name": "rloo", "single_sample": "raw"}, [1 - 4, 2 - 3.5, 6 - 1.5, 0, 0, 3]),
    ({"name": "maxrl"}, [-2 / 3, -1 / 3, 1, 0, 0, 0]),
    ({"name": "maxrl", "single_sample": "raw"}, [-2 / 3, -1 / 3, 1, 0, 0, 3]),
    ({"name": "opo"}, [-2, -1, 3, 0, 0, 0]),  # one token each: the plain mean
    ({"name": "opo", "single_sample": "raw"}, [-2, -1, 3, 0, 0, 3]),
    ({"name": "gpg"}, [-4, -2, 6, 0, 0, 0]),  # alpha = 6 responses / 3 of them in groups that differ
    ({"name": "gpg", "single_sample": "raw"}, [-3, -1.5, 4.5, 0, 0, 4.5]),  # alpha = 6 / the 4 that learn
]


@pytest.mark.parametrize(("advantage", "expected"), CLOSED)
def test_closed_form(advantage, expected):
    advantages, _ = solve(batch_of(R, G), advantage=advantage)
    assert advantages[:, 0].tolist() == pytest.approx(expected, rel=1e-6)


def test_maxrl_without_a_positive_mean_is_0_and_never_beyond_the_group():
    batch = batch_of([-1.0, 1.0, 0.0, -1.0, -1e9, 1e9 + 1], [0, 0, 1, 1, 2, 2])
    advantages, metrics = solve(batch, advantage={"name": "maxrl"})
    assert advantages[:, 0].tolist() == [0, 0, 0, 0, -2, 2]
    assert metrics["group/nonpositive_fraction"] == 2 / 3


def of_graders(scores: list[list[float]], weights: list[float]) -> dict:
    return {"parts": torch.tensor(scores, dtype=torch.float64), "weights": torch.tensor(weights, dtype=torch.float64)}


def test_gdpo_normalizes_each_grader_by_itself():
    """Groups: equal sums of unequal scores; one grader without a difference; one left of two."""
    scores = [[1, 0], [0, 10], [0, 0], [1, 7], [0, 7], [3, 3], [9, 9]]
    valid = torch.tensor([True] * 6 + [False])
    mask = [[1, 1], [1, 0], [1, 0], [1, 1], [1, 0], [1, 0], [1, 1]]
    third, half = 1 / 3**0.5, 1 / 2**0.5  # a score over the standard deviation of 3 and of 2
    z = torch.tensor([2 - 0.5, -1 + 1.0, -1 - 0.5, 0, 0, 0]).double() * third
    z[3:5] = torch.tensor([1.0, -1.0]) * half
    groups = [0, 0, 0, 1, 1, 2, 2]
    more = of_graders(scores, [1.0, 0.5])
    batch = batch_of([0.0] * 7, groups, mask, valid=valid, **more)
    for over, counts in (("tokens", [2, 1, 1, 2, 1, 1]), ("responses", [1] * 6)):
        options = {"name": "gdpo", "whiten_over": over, "eps": 1e-12}
        advantages, _ = solve(batch, advantage=options)
        counted = z.repeat_interleave(torch.tensor(counts))
        white = (z - counted.mean()) / counted.std()
        assert advantages[:6, 0].tolist() == pytest.approx(white.tolist(), rel=1e-5, abs=1e-6)
        assert (advantages[torch.tensor(mask) == 0] == 0).all() and (advantages[6] == 0).all()
    raw, _ = solve(batch, advantage={"name": "gdpo", "single_sample": "raw"})
    assert raw[5, 0] > 1.5, "3 + 0.5 * 3, as in verl"
    plain = of_graders([[one, one] for one, _ in scores], [2.0, -1.0])
    batch = batch_of([0.0] * 7, groups, mask, valid=valid, **plain)
    rewards = batch_of([float(one) for one, _ in scores], groups, mask, valid=valid)
    whitened, _ = solve(rewards, advantage={"name": "grpo"}, whiten_advantages=True)
    twice, _ = solve(batch, advantage={"name": "gdpo"})
    assert torch.allclose(twice, whitened, atol=1e-6), "2 - 1 times the same grader is grpo"


def test_gdpo_does_not_see_a_graders_scale_or_one_that_says_nothing():
    generator = torch.Generator().manual_seed(0)
    scores = torch.randint(0, 5, (12, 2), generator=generator).double()

    def advantages(scores: torch.Tensor, weights: list[float]) -> torch.Tensor:
        more = of_graders(scores.tolist(), weights)
        batch = batch_of([0.0] * 12, [g for g in range(3) for _ in range(4)], **more)
        return solve(batch, advantage={"name": "gdpo", "eps": 1e-12})[0]

    plain = advantages(scores, [1.0, 0.5])
    scaled = advantages(scores * torch.tensor([1000.0, 1.0]) + 7, [1.0, 0.5])
    assert torch.allclose(plain, scaled, atol=1e-6)
    silent = torch.cat((scores, torch.full((12, 1), 0.7)), 1)
    assert torch.equal(plain, advantages(silent, [1.0, 0.5, 100.0])), "exactly 0, whatever it is"
    assert not torch.allclose(plain, advantages(scores, [1.0, 1.0]), atol=0.1)


def test_pass_at_k_ties_and_invalid():
    batch = batch_of([4.0, 4.0, 1.0, 3.0, 1.0, 0.0], [0, 0, 0, 1, 1, 1])
    advantages, _ = solve(batch, advantage={"name": "grpo_passk", "normalize": False})
    assert advantages[:, 0].tolist() == [0, 0, 0, 2, 0, 0]
    batch = replace(batch, rewards=replace(batch.rewards, valid=torch.tensor([True, False, True, True, False, False])))
    advantages, _ = solve(batch, advantage={"name": "grpo_passk", "normalize": False})
    assert advantages[:, 0].tolist() == [3, 0, 0, 0, 0, 0]


def test_opo_weighs_by_sampled_tokens():
    advantages, _ = solve(batch_of([1.0, 5.0], [0, 0], [[1, 1, 1, 0], [0, 1, 0, 0]]), advantage={"name": "opo"})
    assert advantages.tolist() == [[-1, -1, -1, 0], [0, 3, 0, 0]]  # baseline (3 * 1 + 1 * 5) / 4 = 2


def test_reinforce_plus_plus_carries_credit_across_tool_tokens():
    """The masked middle is skipped undiscounted; two responses, returns whitened over the 5 sampled tokens."""
    mask = [[1, 1, 0, 0, 1], [1, 0, 1, 0, 0]]
    advantages, _ = solve(batch_of([8.0, -2.0], [0, 0], mask), advantage={"name": "reinforce_plus_plus", "gamma": 0.5})
    returns = torch.tensor([2.0, 4.0, 8.0, -1.0, -2.0])
    white = (returns - returns.mean()) / returns.std()
    assert advantages[torch.tensor(mask) > 0].tolist() == pytest.approx(white.tolist(), rel=1e-5)
    assert (advantages[torch.tensor(mask) == 0] == 0).all()


def test_token_kl_in_the_reward_is_inside_the_statistics():
    old = torch.tensor([[-1.0, -2.0], [-1.0, -1.0]])
    ref = torch.tensor([[-1.5, -2.0], [-1.0, -2.0]])
    batch = batch_of([1.0, 2.0], [0, 0], [[1, 1], [1, 0]], old_logprobs=old, ref_logprobs=ref)
    kl = {"reward_coef": 0.1, "estimator": "k1"}
    advantages, metrics = solve(batch, advantage={"name": "dr_grpo"}, kl=kl)
    assert advantages[:, 0].tolist() == pytest.approx([-0.525, 0.525])  # rewards 1 - 0.1 * 0.5 and 2
    assert metrics["kl/reference_before_update"] == pytest.approx(0.5 / 3) and metrics["kl/coef"] == 0.1
    advantages, _ = solve(batch, advantage={"name": "reinforce_plus_plus"}, kl=kl)
    returns = torch.tensor([0.95, 1.0, 2.0])
    white = (returns - returns.mean()) / returns.std()
    assert advantages[torch.tensor([[1, 1], [1, 0]]) > 0].tolist() == pytest.approx(white.tolist())


def test_adaptive_kl_coefficient_is_used_then_changed():
    one = torch.ones(2, 1)
    batch = batch_of([0.0, 1.0], [0, 0], old_logprobs=-one, ref_logprobs=-2 * one)  # KL 1, five times the target
    adaptive = {"target": 0.2, "horizon": 10.0}
    algorithm = AlgorithmConfig(kl={"reward_coef": 0.1, "estimator": "k1", "adaptive": adaptive})
    assert with_current_kl_coef(algorithm, AlgoState()) is algorithm
    _, state, _ = with_advantages(batch, algorithm)
    assert state.kl_coef == pytest.approx(0.1 * (1 + 0.2 * 2 / 10))  # the error is clipped to 0.2
    current = with_current_kl_coef(algorithm, state)
    assert current.kl.reward_coef == state.kl_coef and current.kl.loss_coef == 0


def test_overlong_and_clip_come_before_the_estimator_and_advantage_clip_last():
    batch = batch_of([1.0, 1.0], [0, 0], [[1] * 8, [1] * 8], lengths=torch.tensor([8, 5]))
    options = {"reward": {"overlong": {"buffer_tokens": 4, "factor": 2.0}, "clip": 0.5}}
    options |= {"advantage": {"name": "dr_grpo"}}
    result, _, metrics = with_advantages(batch, AlgorithmConfig(**options), 8)
    assert metrics["reward/overlong_penalty"] == -1.25  # -2 at length 8, -0.5 at 5
    assert result.advantages[:, 0].tolist() == [-0.5, 0.5]  # -1 -> -0.5 and 0.5 -> 0.5
    result, _, _ = with_advantages(batch, AlgorithmConfig(**options, advantage_clip=0.1), 8)
    assert result.advantages[:, 0].tolist() == pytest.approx([-0.1, 0.1])


@pytest.mark.parametrize(
    ("name", "reward", "expected"),
    [
        ("dr_grpo", {"scale": 2.0, "shift": 5.0}, [-2.0, 2.0]),
        ("dr_grpo", {"scale": 2.0, "shift": 5.0, "clip": 8.0}, [-0.5, 0.5]),
        ("remax", {"scale": 0.5, "shift": -1.0}, [-0.5, 0.5]),
    ],
)
def test_scale_and_shift_come_first_and_reach_the_greedy_baseline(name, reward, expected):
    greedy = torch.tensor([2.0, 2.0], dtype=torch.float64) if name == "remax" else None
    batch = batch_of([1.0, 3.0], [0, 0], greedy_rewards=greedy)
    assert solve(batch, advantage={"name": name}, reward=reward)[0][:, 0].tolist() == expected


def test_invalid_truncated_and_rejected_samples_leave_the_mask():
    more = {"valid": torch.tensor([True, True, False, True]), "truncated": torch.tensor([False, True, False, False])}
    more |= {"old_logprobs": -torch.ones(4, 1), "rollout_logprobs": torch.tensor([[-1.0], [-1.0], [-1.0], [-4.0]])}
    batch = batch_of([1.0, 0.0, 9.0, 2.0], [0, 0, 0, 0], **more)
    mismatch = {"reject": {"high": 2.0}, "weight": {"name": "icepop", "low": 0.5, "high": 5.0}}
    algorithm = AlgorithmConfig(advantage={"name": "dr_grpo"}, mask_truncated=True, mismatch=mismatch)
    result, _, metrics = with_advantages(batch, algorithm)
    assert result.loss_mask[:, 0].tolist() == [1, 0, 0, 0] and result.correction.counted is None
    assert result.advantages[:, 0].tolist() == [0, 0, 0, 0]  # 1 - mean(1, 0, 2): the invalid 9 does not count
    assert result.correction.weights[:, 0].tolist() == [1, 0, 0, 0] and metrics["mismatch/rejected_fraction"] == 0.5
    keep = {"reject": {"high": 2.0, "keep_denominator": True}}
    result, _, _ = with_advantages(batch, AlgorithmConfig(mask_truncated=True, mismatch=keep))
    assert result.correction.counted[:, 0].tolist() == [True, False, False, True]


def test_groups_without_a_valid_response_are_dropped_and_counted():
    batch = batch_of([1.0, 0.0, 3.0, 4.0], [0, 0, 1, 1], valid=torch.tensor([True, True, False, False]))
    result, _, metrics = with_advantages(batch, AlgorithmConfig())
    assert metrics["group/dropped"] == 1 and metrics["group/degenerate_fraction"] == 0 and metrics["reward/mean"] == 0.5
    assert result.loss_mask[:, 0].tolist() == [1, 1, 0, 0] and result.advantages[2:].abs().sum() == 0


def test_running_moments_are_those_of_all_batches():
    state = AlgoState()
    parts = torch.randn(3, 10, dtype=torch.float64) * 5 + 100
    options = RewardShapingConfig(mean="running", std="running")
    zeros = torch.zeros(10, dtype=torch.int64)
    for i, part in enumerate(parts):
        out = normalize(ShapedRewards(part, state, {}), reward_inputs(zeros), options)
        state = out.state
        seen = parts[: i + 1].reshape(-1)
        torch.testing.assert_close(out.values, (part - seen.mean()) / (seen.std() + EPS), rtol=1e-12, atol=1e-12)
    assert state.reward_moments.count == 30


def test_the_state_survives_a_checkpoint_to_the_last_bit():
    moments = RewardMoments(count=30, mean=1 / 3, root=0.1 + 0.2)
    for saved in (AlgoState(reward_moments=moments, kl_coef=0.7 / 3), AlgoState()):
        assert TypeAdapter(AlgoState).validate_python(json.loads(json.dumps(asdict(saved)))) == saved


@pytest.mark.parametrize("scope", ["group", "batch", "running"])
def test_constant_rewards_normalize_to_zero(scope):
    rewards, ids = torch.full((6,), 0.7, dtype=torch.float64), torch.arange(6) // 3
    options = RewardShapingConfig(mean=scope, std=scope)
    out = normalize(ShapedRewards(rewards, AlgoState(), {}), reward_inputs(ids), options)
    assert out.values.tolist() == [0.0] * 6


def test_row_sums_do_not_depend_on_the_padding():
    values = torch.randn(5, 7, dtype=torch.float64) * torch.logspace(-9, 9, 7).double()
    wider = torch.cat((values, torch.zeros(5, 90, dtype=torch.float64)), 1)
    sums = exact_row_sums(values.flatten(), torch.full((5,), 7))
    assert torch.equal(sums, exact_row_sums(wider.flatten(), torch.full((5,), 97)))
    torch.testing.assert_close(sums, values.sum(1))


NAMES = (
    "grpo", "dr_grpo", "grpo_passk", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "opo", "gpg",
    "maxrl", "gdpo", "optimal_token_baseline",
)  # fmt: skip
REWARD = st.one_of(st.sampled_from([0.0, 1.0, 0.7, 1e-4, 1e30]), st.floats(-1e30, 1e30), st.floats(-2.0, 2.0))


@given(
    samples=st.lists(st.tuples(REWARD, st.integers(0, 2), st.booleans(), st.integers(0, 3)), min_size=1, max_size=14),
    name=st.sampled_from(NAMES),
    seed=st.integers(0, 99),
)
def test_properties(samples, name, seed):
    """Finite whatever the rewards; groups sum to 0; invariant to permutation and to an added all-masked sequence."""
    rewards, groups, valid, lengths = (list(x) for x in zip(*samples, strict=True))
    mask = [[int(t < length) for t in range(3)] for length in lengths]

    def advantages_of(rewards: list, groups: list, mask: list | None, valid: list) -> torch.Tensor:
        more = of_graders([[r, r < 0.5] for r in rewards], [1.0, 0.3]) if name == "gdpo" else {}
        if name == "optimal_token_baseline":
            more = of_policy([[0.3, 0.5, 0.9][: len(mask[0]) if mask else 1]] * len(rewards))
        batch = batch_of(rewards, groups, mask, valid=torch.tensor(valid), num_groups=3, **more)
        return solve(batch, advantage={"name": name})[0]

    advantages = advantages_of(rewards, groups, mask, valid)
    assert torch.isfinite(advantages).all() and (advantages[torch.tensor(mask) == 0] == 0).all()
    order = torch.randperm(len(rewards), generator=torch.Generator().manual_seed(seed)).tolist()
    moved = advantages_of(*([x[i] for i in order] for x in (rewards, groups, mask, valid)))
    assert torch.equal(moved, advantages[order])
    more = advantages_of([*rewards, 5.0], [*groups, 0], [*mask, [1, 1, 1]], [*valid, False])
    assert torch.equal(more[:-1], advantages) and (more[-1] == 0).all()
    if name in ("grpo", "dr_grpo", "rloo", "gpg"):
        scalar = advantages_of(rewards, groups, None, valid)[:, 0].double()
        for of_group in (scalar[torch.tensor(groups) == g] for g in set(groups)):
            assert abs(float(of_group.sum())) <= 1e-6 * max(float(of_group.abs().max()), 1e-30) * 14


class LargestResult(TorchDispatchMode):
    """The bytes of the largest tensor that an operation returns."""

    bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for each in result if isinstance(result, tuple | list) else [result]:
            if isinstance(each, torch.Tensor):
                self.bytes = max(self.bytes, each.numel() * each.element_size())
        return result


@pytest.mark.parametrize("advantage", ["grpo", "opo"])
def test_statistics_make_no_wide_numbers_for_each_token(advantage):
    """An advantage takes 4 bytes for each token."""
    count, width = 6, 40_000
    batch = batch_of([1.0, 2.0, 6.0, 5.0, 5.0, 3.0], [0, 0, 0, 1, 1, 1], mask=[[1] * width] * count)
    with LargestResult() as largest:
        solve(batch, advantage={"name": advantage})
    assert largest.bytes <= 4 * count * width
