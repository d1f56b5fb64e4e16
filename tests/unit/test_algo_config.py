"""The algorithm section: impossible combinations are refused with the reason, presets are the papers' settings."""

from typing import get_args

import pytest
import yaml

from megagrpo.config.algorithm import AlgorithmConfig
from megagrpo.config.load import PRESETS as PRESET_FOLDER
from megagrpo.config.objective.estimators import ESTIMATOR_CONFIGS
from megagrpo.config.objective.policy_loss import POLICY_LOSS_CONFIGS
from megagrpo.config.schema import ExperimentConfig
from megagrpo.config.section import Section

REFUSED = [  # options, part of the reason
    ({"advantage": {"name": "rloo", "eps": 1e-6}}, "eps"),  # leave-one-out divides by no std
    ({"advantage": {"name": "grpo"}, "reward": {"mean": "group"}}, "twice"),
    ({"advantage": {"name": "rloo"}, "reward": {"std": "group"}}, "twice"),
    ({"advantage": {"name": "grpo_passk"}, "reward": {"mean": "group", "std": "group"}}, "twice"),
    ({"advantage": {"name": "reinforce_plus_plus"}, "whiten_advantages": True}, "whitened already"),
    ({"advantage": {"name": "remax"}, "reward": {"mean": "batch"}}, "greedy baseline"),
    ({"advantage": {"name": "remax"}, "reward": {"clip": 1.0}}, "greedy baseline"),
    ({"advantage": {"name": "remax"}, "reward": {"overlong": {}}}, "greedy baseline"),
    ({"mismatch": {"weight": {"name": "tis", "floor": 2.0}}}, "not below cap"),
    ({"loss_scale_factor": 100.0}, "seq-mean-token-sum-norm"),
    ({"kl": {"loss_coef": 0.1, "reward_coef": 0.1}}, "charged twice"),
    ({"kl": {"reward_coef": 0.1, "estimator": "full"}}, "form for the loss"),
    ({"kl": {"reward_coef": 0.1, "estimator": "k3+"}}, "form for the loss"),
    ({"kl": {"loss_coef": 0.1, "importance": True}}, "none of them"),
    ({"kl": {"loss_coef": 0.1, "estimator": "k1", "value_clamp": 10.0}}, "belongs to k3"),
    ({"kl": {"adaptive": {"target": 0.1, "horizon": 1e4}}}, "starting coefficient"),
    ({"kl": {"loss_coef": 0.1, "estimator": "full", "adaptive": {"target": 0.1, "horizon": 1e4}}}, "sampled tokens"),
    ({"mismatch": {"weight": {"name": "icepop", "low": 5.0, "high": 2.0}}}, "not below"),
    ({"mismatch": {"reject": {"low": 1.5, "high": 2.0}}}, "rejects perfect agreement"),
    ({"loss": {"name": "ppo_clip", "dual_clip": 1.0}}, "greater than 1"),
    ({"loss": {"name": "ppo"}}, "ppo_clip"),
    ({"advantage": {"name": "gae"}}, "grpo"),
]


@pytest.mark.parametrize(("options", "reason"), REFUSED)
def test_refused(options, reason):
    with pytest.raises(ValueError, match=reason):
        AlgorithmConfig(**options)


@pytest.mark.parametrize(
    "name", ["grpo", "dr_grpo", "grpo_passk", "rloo", "opo", "gpg", "reinforce_plus_plus_baseline"]
)
def test_group_of_one_is_refused_where_it_teaches_nothing(name):
    algorithm = AlgorithmConfig(advantage={"name": name})
    with pytest.raises(ValueError, match="group_size"):
        algorithm.check_group_size(1)
    algorithm.check_group_size(2)


def test_group_normalised_rewards_need_groups():
    algorithm = AlgorithmConfig(advantage={"name": "reinforce_plus_plus"}, reward={"mean": "group"})
    with pytest.raises(ValueError, match="group_size 1 makes every reward 0"):
        algorithm.check_group_size(1)
    algorithm.check_group_size(2)


def test_the_adaptive_coefficient_stays_positive():
    algorithm = AlgorithmConfig(kl={"loss_coef": 0.1, "adaptive": {"target": 0.1, "horizon": 100}})
    algorithm.check_responses(499)
    with pytest.raises(ValueError, match="too short for 500 responses"):
        algorithm.check_responses(500)


def test_group_of_one_is_allowed_where_it_teaches():
    AlgorithmConfig(advantage={"name": "grpo", "single_sample": "raw"}).check_group_size(1)
    AlgorithmConfig(advantage={"name": "reinforce_plus_plus"}).check_group_size(1)
    AlgorithmConfig(advantage={"name": "remax"}).check_group_size(1)
    with pytest.raises(ValueError, match="dynamic_sampling"):
        AlgorithmConfig(advantage={"name": "remax"}, dynamic_sampling={}).check_group_size(1)


def test_overlong_buffer_must_fit():
    algorithm = AlgorithmConfig(reward={"overlong": {"buffer_tokens": 100}})
    algorithm.check_response_tokens(100)
    with pytest.raises(ValueError, match="every response would be punished"):
        algorithm.check_response_tokens(99)


def test_overlong_buffer_is_a_fifth_of_the_longest_response_by_default():
    algorithm = AlgorithmConfig(reward={"overlong": {}})
    assert [algorithm.reward.overlong.buffer(longest) for longest in (20480, 8, 4)] == [4096, 1, 0]
    algorithm.check_response_tokens(4)


def test_what_must_be_computed_before_the_advantages():
    assert not AlgorithmConfig().needs_old_logprobs and not AlgorithmConfig().uses_reference
    assert (
        AlgorithmConfig(kl={"loss_coef": 0.1}).uses_reference
        and not AlgorithmConfig(kl={"loss_coef": 0.1}).needs_old_logprobs
    )
    for options in (
        {"kl": {"reward_coef": 0.1}},
        {"kl": {"loss_coef": 0.1, "adaptive": {"target": 0.1, "horizon": 1e4}}},
        {"mismatch": {"weight": {"name": "tis"}}},
        {"mismatch": {"reject": {"high": 2.0}}},
    ):
        assert AlgorithmConfig(**options).needs_old_logprobs
    assert AlgorithmConfig(advantage={"name": "remax"}).needs_greedy_response


def test_advice_and_formula():
    gspo = AlgorithmConfig(loss={"name": "gspo"})
    assert "seq-mean-token-mean" in gspo.advice[0]
    assert AlgorithmConfig(kl={"loss_coef": 0.1, "estimator": "k1"}).advice
    assert (
        AlgorithmConfig().formula
        == "1/N_tok sum_it [-min(rho A, clip(rho) A)], A = (r - mean) / (std + eps), r = reward"
    )
    for advantage in ESTIMATOR_CONFIGS:
        for loss in POLICY_LOSS_CONFIGS:
            names = (advantage.model_fields["name"].default, loss.model_fields["name"].default)
            assert AlgorithmConfig(advantage={"name": names[0]}, loss={"name": names[1]}).formula


def sections(model: type[Section]) -> set[type[Section]]:
    """The section and all that its fields may hold."""
    found = {model}
    for info in model.model_fields.values():
        for part in _members(info.annotation):
            found |= sections(part)
    return found


def _members(annotation) -> list[type[Section]]:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return [annotation]
    return [member for argument in get_args(annotation) for member in _members(argument)]


def test_every_field_is_described_and_every_section_says_what_it_is():
    every = sections(AlgorithmConfig)
    assert {*ESTIMATOR_CONFIGS, *POLICY_LOSS_CONFIGS} < every
    bare = [f"{s.__name__}.{name}" for s in every for name, info in s.model_fields.items() if not info.description]
    assert bare == [] and [s.__name__ for s in every if not s.__doc__] == []


PRESETS = ("cispo", "dapo", "dr_grpo", "gspo", "grpo", "reinforce_pp", "remax", "rloo")


def test_every_preset_is_listed():
    assert {path.stem for path in PRESET_FOLDER.glob("*.yaml")} == set(PRESETS)


@pytest.mark.parametrize("name", PRESETS)
def test_preset(name):
    text = (PRESET_FOLDER / f"{name}.yaml").read_text()
    data = yaml.safe_load(text)
    assert set(data) <= set(ExperimentConfig.model_fields) and "arXiv" in text
    algorithm = AlgorithmConfig(**data["algorithm"])
    assert algorithm.advice == [] and algorithm.formula
    algorithm.check_group_size(8)
