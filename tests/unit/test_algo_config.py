"""The algorithm section: impossible combinations are refused with the reason, presets are the papers' settings."""

from typing import get_args

import pytest

from megagrpo.algo.estimators import ESTIMATORS
from megagrpo.algo.policy_loss import POLICY_LOSSES
from megagrpo.algo.reward_shaping import REWARD_STEPS
from megagrpo.config.algorithm import AlgorithmConfig
from megagrpo.config.load import PRESETS as PRESET_FOLDER
from megagrpo.config.objective.estimators import AdvantageConfig
from megagrpo.config.objective.policy_loss import PolicyLossConfig
from megagrpo.config.objective.reward_shaping import REWARD_STEP_CONFIGS
from tests.experiments import experiment

ESTIMATOR_CONFIGS, POLICY_LOSS_CONFIGS = (get_args(get_args(union)[0]) for union in (AdvantageConfig, PolicyLossConfig))
NO_RL, NO_DISTILLATION = ({"component": name, "weight": 0.0} for name in ("rl", "distillation"))
REFUSED = [  # options, part of the reason
    ({"advantage": {"name": "rloo", "eps": 1e-6}}, "eps"),  # leave-one-out divides by no std
    ({"advantage": {"name": "grpo"}, "reward": {"mean": "group"}}, "twice"),
    ({"advantage": {"name": "rloo"}, "reward": {"std": "group"}}, "twice"),
    ({"advantage": {"name": "grpo_passk"}, "reward": {"mean": "group", "std": "group"}}, "twice"),
    ({"advantage": {"name": "reinforce_plus_plus"}, "whiten_advantages": True}, "whitened already"),
    ({"advantage": {"name": "remax"}, "reward": {"mean": "batch"}}, "greedy baseline"),
    ({"advantage": {"name": "remax"}, "reward": {"clip": 1.0}}, "greedy baseline"),
    ({"advantage": {"name": "remax"}, "reward": {"overlong": {}}}, "greedy baseline"),
    *(
        ({"advantage": {"name": "gdpo"}, section: options}, f"{section}.{key} would change the sum")
        for section, key, options in (
            ("reward", "scale", {"scale": 2.0}),
            ("reward", "overlong", {"overlong": {}}),
            ("reward", "mean", {"mean": "group"}),
            ("reward", "clip", {"clip": 1.0}),
            ("kl", "reward_coef", {"reward_coef": 0.1}),
        )
    ),
    ({"advantage": {"name": "gdpo"}, "whiten_advantages": True}, "whitened already"),
    ({"mismatch": {"weight": {"name": "tis", "floor": 2.0}}}, "not below cap"),
    ({"loss_scale_factor": 100.0}, "seq-mean-token-sum-norm"),
    ({"kl": {"loss_coef": 0.1, "reward_coef": 0.1}}, "charged twice"),
    ({"kl": {"reward_coef": 0.1, "estimator": "full"}}, "form for the loss"),
    ({"kl": {"reward_coef": 0.1, "estimator": "k3+"}}, "form for the loss"),
    ({"kl": {"loss_coef": 0.1, "importance": True}}, "none of them"),
    ({"kl": {"loss_coef": 0.1, "estimator": "k1", "value_clamp": 10.0}}, "belongs to k3"),
    ({"kl": {"adaptive": {"target": 0.1, "horizon": 1e4}}}, "starting coefficient"),
    ({"kl": {"loss_coef": 0.1, "estimator": "full", "adaptive": {"target": 0.1, "horizon": 1e4}}}, "sampled tokens"),
    ({"mismatch": {"weight": {"name": "icepop", "low": 5.0, "high": 2.0}}}, "no weight for perfect agreement"),
    ({"mismatch": {"reject": {"low": 1.5, "high": 2.0}}}, "rejects perfect agreement"),
    ({"mismatch": {"weight": {"name": "icepop", "low": 1.5, "high": 2.0}}}, "no weight for perfect agreement"),
    (
        {"kl": {"reward_coef": 0.1}, "streams": [{"component": "rl", "weight": 0.0}, {"component": "cross_entropy"}]},
        "kl.reward_coef: of component rl",
    ),
    ({"loss": {"name": "ppo_clip", "dual_clip": 1.0}}, "greater than 1"),
    ({"loss": {"name": "ppo"}}, "ppo_clip"),
    ({"advantage": {"name": "gae"}}, "grpo"),
    ({"streams": [{"component": "distillation"}]}, "there is no distillation section"),
    ({"streams": [{"component": "rl", "written_by": ["tool"]}]}, "component rl is of tokens that the policy sampled"),
    ({"streams": [{"component": "reference_kl"}], "kl": {"loss_coef": 0.1}}, "a stream of reference_kl beside kl.loss"),
    *(
        ({"advantage": {"name": "maxrl"}} | options, f"{key} can make the mean reward of a group 0 or less")
        for key, options in (
            ("reward.shift", {"reward": {"shift": -1.0}}),
            ("reward.overlong", {"reward": {"overlong": {}}}),
            ("reward.mean", {"reward": {"mean": "batch"}}),
            ("kl.reward_coef", {"kl": {"reward_coef": 0.1}}),
        )
    ),
    ({"distillation": {"top_k": 64}}, "reads no top_k"),
    ({"distillation": {"logprob_min": -3.0}}, "reads no logprob_min"),
    ({"reward": {"eps": 1e-3}}, "eps is added to a std"),
    ({"streams": [NO_RL]}, "gives no component a token"),
    ({"streams": [NO_RL, {"component": "cross_entropy", "weight": 0.0}]}, "gives no component a token"),
    ({"streams": [NO_RL, NO_DISTILLATION], "distillation": {}}, "gives no component a token"),
    *(
        ({"distillation": {}, "streams": [NO_RL]} | options, f"{key}: of component rl")
        for key, options in (
            ("advantage_clip", {"advantage_clip": 1.0}),
            ("whiten_advantages", {"whiten_advantages": True}),
            ("entropy_coef", {"entropy_coef": 0.1}),
            ("mask_truncated", {"mask_truncated": True}),
            ("kl.loss_coef", {"kl": {"loss_coef": 0.1}}),
        )
    ),
]


@pytest.mark.parametrize(("options", "reason"), REFUSED)
def test_refused(options, reason):
    with pytest.raises(ValueError, match=reason):
        AlgorithmConfig(**options)


def problems(options: dict, max_response_tokens: int = 512, **train) -> str:
    """Why the algorithm section does not go together with others; "" if it does."""
    train = {"num_prompts_per_step": 4, "num_updates_per_step": 1, **train}
    whole = {"algorithm": options, "train": train, "sampling": {"max_response_tokens": max_response_tokens}}
    try:
        experiment(**whole)
    except ValueError as exc:
        return str(exc)
    return ""


ACCEPTED = [
    {"advantage": {"name": "maxrl"}, "reward": {"scale": 2.0, "shift": 1.0, "std": "batch", "clip": 1.0}},
    {"distillation": {"loss": "student_topk", "top_k": 64, "logprob_min": -3.0}},
    {"reward": {"std": "batch", "eps": 1e-3}, "advantage": {"name": "dr_grpo"}},
    {"streams": [NO_RL | {"sources": ["code"]}], "advantage_clip": 1.0},
    {"streams": [NO_RL, {"component": "rl", "sources": ["code"]}], "entropy_coef": 0.1},
    {"streams": [NO_RL, {"component": "cross_entropy", "written_by": ["tool"]}]},
    {"distillation": {}, "streams": [NO_RL]},
]


@pytest.mark.parametrize("options", ACCEPTED)
def test_accepted(options):
    AlgorithmConfig(**options)


RAW = {"advantage": {"name": "grpo", "single_sample": "raw"}}
REINFORCE, REMAX = ({"advantage": {"name": name}} for name in ("reinforce_plus_plus", "remax"))
COMPARING = ("grpo", "dr_grpo", "grpo_passk", "rloo", "maxrl", "opo", "gpg")
COMPARING += ("reinforce_plus_plus_baseline",)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        *(({"advantage": {"name": name}}, "group_size") for name in COMPARING),
        (REINFORCE | {"reward": {"mean": "group"}}, "group_size 1 makes every reward 0"),
        (REMAX | {"dynamic_sampling": {}}, "dynamic_sampling"),
        *((options, "") for options in (RAW, REINFORCE, REMAX)),
    ],
)
def test_group_of_one_is_refused_if_it_teaches_nothing(options, reason):
    found = problems(options, group_size=1)
    assert reason in found if reason else not found
    assert not problems(options, group_size=2)


def test_the_adaptive_coefficient_stays_positive():
    options = {"kl": {"loss_coef": 0.1, "adaptive": {"target": 0.1, "horizon": 100}}}
    assert not problems(options, num_prompts_per_step=1, group_size=499)
    assert "too short for 500 responses" in problems(options, num_prompts_per_step=1, group_size=500)


def test_overlong_buffer_must_fit_and_is_a_fifth_of_the_longest_response_by_default():
    options = {"reward": {"overlong": {"buffer_tokens": 100}}}
    assert not problems(options, 100)
    assert "every response would be punished" in problems(options, 99)
    overlong = AlgorithmConfig(reward={"overlong": {}}).reward.overlong
    assert [overlong.buffer(longest) for longest in (20480, 8, 4)] == [4096, 1, 0]
    assert not problems({"reward": {"overlong": {}}}, 4)


TWO = {"graders": [{"grader": "math"}, {"grader": "format", "weight": 0.5}]}


def test_gdpo_needs_the_scores_of_several_graders_for_every_row():
    def of(data: dict | None = None, reward: dict = TWO, **train) -> str:
        sections = {"algorithm": {"advantage": {"name": "gdpo"}}, "reward": reward, "train": train}
        try:
            config = experiment(data={"path": "d"} | (data or {}), **sections)
        except ValueError as exc:
            return str(exc)
        assert config.graders_apart == {"math": 1.0, "format": 0.5}
        return ""

    assert not of()
    by_source = {"source_key": "s", "grader_by_source": {"a": "math"}}
    own = {"path": None, "sources": [{"source": "a", "path": "d", "grader": "math"}]}
    for data in ({"grader_key": "g"}, by_source, own):
        assert "all of which score every row" in of(data)
    one = {"graders": TWO["graders"][:1]}
    for reward in ({}, one, TWO | {"group_grader": "rank"}):
        assert "name two or more in reward.graders" in of(reward=reward)
    assert "group_size" in of(group_size=1)


def test_gdpos_formula_and_advice():
    gdpo = AlgorithmConfig(advantage={"name": "gdpo", "whiten_over": "responses"})
    assert gdpo.formula.endswith(
        "A = whiten(sum_k w_k (r_k - mean_k) / (std_k + eps)) over responses, r_k, w_k = score and weight of grader k"
    )
    assert gdpo.advice == [] and not gdpo.whitens
    (advice,) = AlgorithmConfig(advantage={"name": "gdpo"}, dynamic_sampling={}).advice
    assert "sums are equal" in advice


def test_what_must_be_computed_before_the_advantages():
    assert not AlgorithmConfig().needs_old_logprobs and not AlgorithmConfig().uses_reference
    with_kl = AlgorithmConfig(kl={"loss_coef": 0.1})
    assert with_kl.uses_reference and not with_kl.needs_old_logprobs
    for options in (
        {"kl": {"reward_coef": 0.1}},
        {"kl": {"loss_coef": 0.1, "adaptive": {"target": 0.1, "horizon": 1e4}}},
        {"mismatch": {"weight": {"name": "tis"}}},
        {"mismatch": {"reject": {"high": 2.0}}},
        {"advantage": {"name": "optimal_token_baseline"}},
    ):
        assert AlgorithmConfig(**options).needs_old_logprobs
        with pytest.raises(ValueError, match="need the trainer's, too"):
            AlgorithmConfig(**options, old_logprobs="engine")
    assert AlgorithmConfig(advantage={"name": "remax"}).needs_greedy_response
    for loss in ("clip_cov", "kl_cov"):  # they choose tokens before the first update
        assert AlgorithmConfig(loss={"name": loss}).computes_old_logprobs(1)
        assert not AlgorithmConfig(loss={"name": loss}, old_logprobs="engine").computes_old_logprobs(2)
    assert not AlgorithmConfig().computes_old_logprobs(1)


def test_advice_and_formula():
    gspo = AlgorithmConfig(loss={"name": "gspo"})
    assert "seq-mean-token-mean" in gspo.advice[0]
    assert AlgorithmConfig(kl={"loss_coef": 0.1, "estimator": "k1"}).advice
    formula = "1/N_tok sum_it [-min(rho A, clip(rho) A)], A = (r - mean) / (std + eps), r = reward"
    assert AlgorithmConfig().formula == formula
    reward = {"scale": 2, "shift": -1, "overlong": {}, "mean": "batch", "std": "batch", "clip": 5}
    fields = {name for step in REWARD_STEP_CONFIGS for name in step.model_fields}
    assert reward.keys() == fields - {"eps"}, "the formula below shows what each of them does"
    options = {"whiten_advantages": True, "advantage_clip": 3, "mask_truncated": True, "dynamic_sampling": {}}
    options |= {"mismatch": {"weight": {"name": "tis"}, "reject": {"high": 2}}, "kl": {"reward_coef": 0.1}}
    everything = AlgorithmConfig(advantage={"name": "rloo"}, reward=reward, entropy_coef=0.01, **options)
    assert everything.formula == (
        "1/N_tok sum_it [w -min(rho A, clip(rho) A) + (-0.01) H], w = old / rollout of the token "
        "in [0, 2], "
        f"A = whitened ({everything.advantage.formula}) in [-3, 3], "
        "r = (2 reward -1 - overlong - mean of batch) / (std of batch + eps) in [-5, 5] - 0.1 "
        "sum_t KL_k3, "
        "without responses cut by length, responses of mean old / rollout outside [0, 2], groups "
        "of equal reward"
    )
    banded = AlgorithmConfig(mismatch={"weight": {"name": "icepop", "low": 0.5, "high": 5}})
    assert "w = old / rollout if old / rollout in [0.5, 5], else 0" in banded.formula
    for advantage in ESTIMATOR_CONFIGS:
        for loss in POLICY_LOSS_CONFIGS:
            names = [
                {"name": "m:f" if (name := each.model_fields["name"].default) == "own" else name}
                for each in (advantage, loss)
            ]
            assert AlgorithmConfig(advantage=names[0], loss=names[1]).formula


@pytest.mark.parametrize(
    "functions, variants",
    [(ESTIMATORS, ESTIMATOR_CONFIGS), (POLICY_LOSSES, POLICY_LOSS_CONFIGS), (REWARD_STEPS, REWARD_STEP_CONFIGS)],
)
def test_every_choice_has_a_function(functions, variants):
    assert set(functions) == set(variants)


def test_presets_are_of_papers():
    papers = {path.stem: path.read_text() for path in PRESET_FOLDER.glob("*.yaml")}
    assert set(papers) == {
        "cispo",
        "dapo",
        "dppo",
        "dr_grpo",
        "gdpo",
        "gmpo",
        "gspo",
        "grpo",
        "maxrl",
        "reinforce_pp",
        "remax",
        "rloo",
    }
    assert all("arXiv" in text for text in papers.values())
