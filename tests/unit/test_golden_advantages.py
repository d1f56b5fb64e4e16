"""Advantages against the numbers of verl, slime, ROLL, miles and NeMo-RL."""

from dataclasses import replace

import pytest
import torch

from megagrpo.algo.reward_shaping import ShapedRewards, normalize
from megagrpo.config.algorithm import AlgorithmConfig
from megagrpo.config.objective.reward_shaping import RewardShapingConfig
from megagrpo.types import AlgoState
from tests.unit.algo_inputs import batch_of, reward_inputs, with_advantages
from tests.unit.golden_cases import cases, close, load, tensor

FILE = "advantages.json"
RAW = {"single_sample": "raw"}
ADVANTAGES = {  # the reference's estimator -> ours, in its convention for groups of one
    "grpo": {"name": "grpo", **RAW},
    "grpo_vectorized": {"name": "grpo", **RAW},
    "grpo_nostd": {"name": "dr_grpo", **RAW},
    "grpo_vectorized_nostd": {"name": "dr_grpo", **RAW},
    "grpo_passk": {"name": "grpo_passk"},
    "grpo_passk_nostd": {"name": "grpo_passk", "normalize": False},
    "rloo": {"name": "rloo", **RAW},
    "rloo_vectorized": {"name": "rloo", "single_sample": "zero"},
    "opo": {"name": "opo", **RAW},
    "gpg": {"name": "gpg", "alpha": "nonzero_reward", **RAW},
    "reinforce_plus_plus_baseline": {"name": "reinforce_plus_plus_baseline", **RAW},
}


def estimated(rewards: torch.Tensor, mask: torch.Tensor, groups: list, advantage: dict, **more) -> torch.Tensor:
    """Our advantages [n, S] by these options."""
    names = sorted(set(map(repr, groups)))  # an explicit id for every distinct name: nothing is cast to an integer
    batch = batch_of(rewards, [names.index(repr(g)) for g in groups], mask, **more)
    return with_advantages(batch, AlgorithmConfig(advantage=advantage), mask.shape[1])[0].advantages


def of_responses(inputs: dict, **advantage) -> torch.Tensor:
    """Those [n] of one reward a response."""
    rewards = tensor(inputs["rewards"])
    return estimated(rewards, torch.ones(len(rewards), 1, dtype=torch.bool), inputs["group"], advantage)[:, 0]


def of_tokens(inputs: dict, **advantage) -> torch.Tensor:
    """Those [n, S] of rewards that are given by token."""
    mask = tensor(inputs["response_mask"]) > 0
    return estimated(tensor(inputs["token_level_rewards"]).sum(1), mask, inputs["index"], advantage)


def advantages_of(case: dict) -> torch.Tensor:
    """Our advantages [B, T] under the options that mean the same."""
    inputs, name = case["inputs"], case["params"]["estimator"]
    token_rewards, mask = tensor(inputs["token_level_rewards"]), tensor(inputs["response_mask"]) > 0
    more = {"token_scores": token_rewards * mask}  # rewards on every token there
    if name.startswith("reinforce_plus_plus_g"):
        advantage = {"name": "reinforce_plus_plus", "gamma": case["params"]["gamma"]}
        return estimated((token_rewards * mask).sum(1), mask, inputs["index"], advantage, **more)
    if name == "remax":
        more["greedy_rewards"] = tensor(inputs["reward_baselines"])
        return estimated((token_rewards * mask).sum(1), mask, inputs["index"], {"name": "remax"}, **more)
    return of_tokens(inputs, **ADVANTAGES[name])


def theirs(case: dict, outputs: dict) -> torch.Tensor:
    mask = tensor(case["inputs"]["response_mask"])
    if "advantages" in outputs:
        return tensor(outputs["advantages"])
    per_response = outputs.get("advantage_per_response_f64", outputs["advantage_per_response"])
    return tensor(per_response)[:, None] * mask


def matches(case: dict, outputs: dict) -> None:
    mask = tensor(case["inputs"]["response_mask"]) > 0
    mine, reference = advantages_of(case), theirs(case, outputs)
    rewards = tensor(case["inputs"]["token_level_rewards"])
    noise = max(2 * outputs.get("max_abs_f32_vs_f64_run", 0), 1e-6)  # what float32 cost the reference
    if case["params"]["estimator"] == "grpo_vectorized_nostd":
        noise = max(noise, mean_rounding(rewards))  # not measured there
    close(mine, reference.tolist(), rtol=2e-5 if rewards.abs().max() > 100 else 1e-5, atol=noise, where=mask)


def mean_rounding(rewards: torch.Tensor) -> float:
    """Half the distance of float32 numbers at the rewards' size: what storing a mean in float32 costs."""
    return float(rewards.abs().max()) * 2.0**-24


def by_response(case):
    return "estimator" in case["params"]


@pytest.mark.parametrize("case", cases(FILE, ("reference", "convention"), by_response))
def test_references_and_conventions_under_their_options(case):
    matches(case, case["outputs"])


@pytest.mark.parametrize(
    "case", cases(FILE, ("defect",), lambda c: by_response(c) and set(c["defects"]) <= {"D1", "D2", "D6"})
)
def test_variance_and_credit_defects_give_the_expected_value(case):
    """D1 variance floor, D2 one-pass float32 variance, D6 credit cut at tool tokens: `expected` is the right answer."""
    matches(case, {**case["outputs"]["expected"], "max_abs_f32_vs_f64_run": 2e-6})
    mask = tensor(case["inputs"]["response_mask"]) > 0
    assert (advantages_of(case) - theirs(case, case["outputs"]))[mask].abs().max() > 1e-3, "no defect to show"


@pytest.mark.parametrize("case", cases(FILE, ("defect",), lambda c: by_response(c) and c["defects"] == ["N1"]))
def test_constant_groups_are_exactly_zero(case):
    """N1: float32 mean noise over eps = 1e-6 becomes an advantage; constant rewards say nothing, so 0 is right."""
    mine = advantages_of(case)[:, 0]
    rewards, groups = tensor(case["inputs"]["token_level_rewards"]).sum(1), case["inputs"]["index"]
    constant = [
        i for i, g in enumerate(groups) if len({float(r) for r, h in zip(rewards, groups, strict=True) if h == g}) == 1
    ]
    alone_in_group = {i for i in constant if groups.count(groups[i]) == 1}
    assert [i for i in constant if mine[i] != 0 and i not in alone_in_group] == []
    assert tensor(case["outputs"]["advantage_per_response"])[constant].abs().max() > 0, "no defect to show"


@pytest.mark.parametrize("case", cases(FILE, ("error",), by_response))
def test_pass_at_k_errors_become_a_refusal_at_start(case):
    """The reference raises in the middle of training for a group of one; here train.group_size 1 is refused before."""
    assert case["params"]["estimator"].startswith("grpo_passk")
    refused = AlgorithmConfig(advantage={"name": "grpo_passk"}).advantage.refuses_group_of_one
    assert "at least 2" in " ".join(refused)
    singles = [i for i, g in enumerate(case["inputs"]["index"]) if case["inputs"]["index"].count(g) == 1]
    assert advantages_of(case)[singles].abs().sum() == 0  # one valid response left of many: nothing to compare


@pytest.mark.parametrize("case", cases(FILE, ("reference", "defect"), lambda c: "compute_advantage" in c["source"]))
def test_no_std_flag_is_never_ignored(case):
    """D23: a flag that is silently ignored. Here division by std is the estimator's name, so dr_grpo cannot divide."""
    if "raises" in case["outputs"]:  # a TypeError in mid-run; an option that an estimator does not have, at start
        with pytest.raises(ValueError, match="optimal_token_baseline"):
            AlgorithmConfig(advantage={"name": case["params"]["adv_estimator"], "normalize": False})
        return
    mine = of_tokens(case["inputs"], name="dr_grpo")
    right = next(c for c in load(FILE) if c["case"] == "trainer_dispatch_nostd.0.grpo")
    if case["status"] == "reference":
        close(mine[:, 0], right["outputs"]["advantage_per_response"])
    else:
        assert (mine[:, 0] - tensor(case["outputs"]["advantage_per_response"])).abs().max() > 1e-2
    with pytest.raises(ValueError, match="norm_adv_by_std_in_grpo"):
        AlgorithmConfig(advantage={"name": "dr_grpo", "norm_adv_by_std_in_grpo": False})


@pytest.mark.parametrize("case", cases(FILE, ("defect",), lambda c: c["defects"] == ["N2"]))
def test_groups_are_never_merged(case):
    """N2: ids "1" and "01", 1.25 and 1.75 are different groups; negative ids are no error."""
    expected = case["outputs"]["expected"]["advantage_per_response"]
    close(of_tokens(case["inputs"], **ADVANTAGES["grpo"])[:, 0], expected)


@pytest.mark.parametrize("case", cases("gdpo.json", ("reference", "convention")))
def test_gdpo(case):
    """verl whitens over tokens and keeps the scores of groups of one; NeMo-RL and TRL whiten over responses."""
    inputs, weights, outputs = case["inputs"], case["params"]["weights"], case["outputs"]
    parts, mask = tensor(inputs["parts"]), tensor(inputs["response_mask"]) > 0
    advantage = {"name": "gdpo", "whiten_over": "responses", "eps": case["params"].get("eps", 1e-6)}
    if case["source"].startswith("verl"):
        advantage |= {"whiten_over": "tokens", **RAW}
    more = {"parts": parts, "weights": tensor(weights or [1.0] * parts.shape[1])}
    mine = estimated(parts.sum(1), mask, inputs["index"], advantage, **more)
    rtol = 2e-4 if case["source"].startswith("trl") else 1e-5  # see its notes
    close(mine[:, 0], outputs["advantage_per_response_f64"], rtol=rtol)
    assert (mine == mine[:, :1] * mask).all()


# Reward normalization and plain per-response rewards of the other frameworks.


def normalized(inputs: dict, **options) -> torch.Tensor:
    rewards = tensor(inputs["rewards"])
    groups = reward_inputs(torch.tensor(inputs["group"]))
    return normalize(ShapedRewards(rewards, AlgoState(), {}), groups, RewardShapingConfig(**options)).values


def tolerance_of(inputs: dict) -> dict:
    """Their mean of 1000.1-sized rewards is rounded to float32, then divided by a std of 0.13."""
    rewards = tensor(inputs["rewards"])
    if rewards.abs().max() < 100:
        return {"rtol": 1e-5, "atol": 1e-5}
    return {"rtol": 2e-5, "atol": 1.1 * mean_rounding(rewards) / min(float(rewards[:4].std()), 1.0)}


@pytest.mark.parametrize(
    "case", cases(FILE, ("reference",), lambda c: c["source"].startswith("roll") and "norm_mean_type" in c["params"])
)
def test_roll_reward_normalization(case):
    params = case["params"]
    mine = normalized(case["inputs"], mean=params["norm_mean_type"] or "none", std=params["norm_std_type"] or "none")
    close(mine, case["outputs"]["advantage_per_response"], **tolerance_of(case["inputs"]))


@pytest.mark.parametrize(
    "case", cases(FILE, ("reference", "convention"), lambda c: c["source"].startswith(("slime", "miles")))
)
def test_slime_and_miles(case):
    mine = of_responses(case["inputs"], name="grpo" if case["params"]["std"] else "dr_grpo")
    close(mine, case["outputs"]["advantage_per_response"], **tolerance_of(case["inputs"]))


@pytest.mark.parametrize(
    "case", cases(FILE, ("defect",), lambda c: c["case"].startswith("xf.") and "rewards" in c["inputs"])
)
def test_per_response_defects(case):
    """D9 NaN for n = 1, D15 wrong shape, D16 KeyError, D21 leave-one-out std blow-up, N8 a short group takes all."""
    inputs = case["inputs"]
    if "D16" in case["defects"]:  # running moments need no such key
        rewards = {"rewards": inputs["rewards"], "group": [0] * len(inputs["rewards"])}
        assert normalized(rewards, mean="running", std="running").tolist() == [0.0] * len(inputs["rewards"])
        return
    shape, groups = tensor(inputs["rewards"]).shape, inputs["group"]
    for name in ("grpo", "dr_grpo", "rloo"):
        mine = of_responses(inputs, name=name).double()
        assert torch.isfinite(mine).all() and mine.shape == shape
        for of_group in (mine[[g == group for g in groups]] for group in set(groups)):
            assert abs(float(of_group.sum())) < 1e-5, "every group, short ones too, is its own"
            assert len(of_group) > 1 or of_group.item() == 0
        assert mine.abs().max() < 3 or name == "dr_grpo", "no near-constant group blows up"
    both = normalized(inputs, mean="batch", std="group")
    assert both.shape == shape and torch.isfinite(both).all()


def nemo_without_leave_one_out(case):
    if not case["source"].startswith("nemo") or case["params"]["leave_one_out"]:
        return False
    return not case["case"].startswith("xf.offset1000")  # D2 again, one-pass variance in float32: off by a factor of 2


@pytest.mark.parametrize("case", cases(FILE, ("convention",), nemo_without_leave_one_out))
def test_nemo_without_leave_one_out(case):
    """With leave_one_out its std is over the others (D21), which is not offered."""
    outputs, informative = case["outputs"], tensor(case["outputs"]["std"]) > 1e-4
    mine = of_responses(case["inputs"], name="grpo")
    close(mine, outputs["advantage_per_response"], **tolerance_of(case["inputs"]), where=informative)


@pytest.mark.parametrize("case", cases("optimal_token_baseline.json"))
def test_optimal_token_baseline(case):
    """Also with verl's weights for the mismatch. Its plain function aligns positions, ours and its tir_ sampled tokens;
    without its zero tail a token that one response has gets 0."""
    inputs = case["inputs"]
    mask, rewards = tensor(inputs["response_mask"]) > 0, tensor(inputs["token_level_rewards"])
    more = {"token_scores": rewards, "old_logprobs": tensor(inputs["old_log_probs"])}
    more["squares"] = tensor(inputs["sum_pi_squared"])
    batch = batch_of(rewards.sum(1), inputs["index"], mask, **more)
    if "rollout_is_weights" in inputs:  # icepop's, whose ratio is the weight
        ratio = tensor(inputs["rollout_is_weights"]).flatten()
        batch = replace(batch, rollout_logprobs=batch.old_logprobs - ratio.log())
    options = {
        "name": "optimal_token_baseline",
        "single_sample": "raw" if case["params"]["handle_zero_tail"] else "zero",
    }
    weight = {"name": "icepop", "low": 0.0, "high": 100.0} if "rollout_is_weights" in inputs else None
    algorithm = AlgorithmConfig(advantage=options, mismatch={"weight": weight})
    mine = with_advantages(batch, algorithm, mask.shape[1])[0].advantages
    close(mine, case["outputs"]["advantages"], where=mask)
