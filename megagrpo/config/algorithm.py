"""The `algorithm` section. Options of an estimator, a loss or a reward step are fields of its own variant."""

from typing import Literal, Self

from pydantic import Field, model_validator

from megagrpo.config.objective.correction import MismatchConfig
from megagrpo.config.objective.estimators import AdvantageConfig, GrpoAdvantage
from megagrpo.config.objective.kl import KL_ERROR_LIMIT, KlConfig
from megagrpo.config.objective.policy_loss import PolicyLossConfig, PpoClipLoss
from megagrpo.config.objective.reward_shaping import RewardShapingConfig
from megagrpo.config.section import Section
from megagrpo.config.variant import Aggregation, Positive


class DynamicSampling(Section):
    """DAPO: keep only groups that differ in the metric, ask for more until the batch is full. arXiv 2503.14476."""

    metric: Literal["reward", "shaped_reward"] = Field(
        default="reward",
        description="In what the responses of a group must differ: the grader's reward, or that scaled and after "
        "overlong shaping.",
    )
    max_num_gen_batches: int = Field(
        default=10, ge=1, description="Batches of prompts a step may generate before the run stops."
    )


class AlgorithmConfig(Section):
    """Everything that decides what one step computes from its rewards and log-probabilities."""

    advantage: AdvantageConfig = Field(default=GrpoAdvantage(), description="Advantage estimator.")
    loss: PolicyLossConfig = Field(default=PpoClipLoss(), description="Policy loss of a token.")
    aggregation: Aggregation = Field(
        default="token-mean", description="How the losses of tokens become one number; divided once, over all ranks."
    )
    loss_scale_factor: Positive | None = Field(
        default=None,
        description="C of seq-mean-token-sum-norm, in tokens; null: sampling.max_response_tokens.",
    )
    kl: KlConfig = Field(default=KlConfig(), description="KL to the initial weights.")
    entropy_coef: float = Field(
        default=0.0, description="Coefficient of the entropy bonus; positive values keep the policy random."
    )
    reward: RewardShapingConfig = Field(
        default=RewardShapingConfig(), description="What happens to the grader's reward before the advantage."
    )
    whiten_advantages: bool = Field(
        default=False, description="Shifts and scales advantages to mean 0 and variance 1 over the step's tokens."
    )
    advantage_clip: Positive | None = Field(
        default=None, description="Limits advantages to [-advantage_clip, advantage_clip]; null: off."
    )
    mask_truncated: bool = Field(
        default=False, description="Leaves responses that ended by length out of the loss, not out of the statistics."
    )
    mismatch: MismatchConfig = Field(
        default=MismatchConfig(),
        description="Correction for engine and trainer giving the same token different probabilities.",
    )
    dynamic_sampling: DynamicSampling | None = Field(
        default=None, description="Trains only on groups whose responses differ; null: on all."
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        advantage, reward = self.advantage, self.reward
        if reward.normalises_by_group and advantage.normalises_by_group:
            raise ValueError(
                f"reward.mean/std: group with advantage {advantage.name} normalises by the group twice; "
                "use batch, running or none"
            )
        missed = reward.missed_by_greedy_baseline
        if advantage.needs_greedy_response and missed:
            raise ValueError(
                f"reward.{', reward.'.join(missed)}: changes the rewards but not {advantage.name}'s greedy baseline; "
                "leave it out"
            )
        if self.whiten_advantages and advantage.whitens:
            raise ValueError(f"advantage {advantage.name} is whitened already; remove whiten_advantages")
        if self.loss_scale_factor is not None and self.aggregation != "seq-mean-token-sum-norm":
            raise ValueError(f"loss_scale_factor belongs to seq-mean-token-sum-norm; aggregation is {self.aggregation}")
        return self

    def check_group_size(self, group_size: int) -> None:
        """Raises ValueError where the advantage cannot work with this many samples per prompt."""
        if group_size > 1:
            return
        if self.reward.normalises_by_group:
            raise ValueError(
                "reward.mean/std: group with train.group_size 1 makes every reward 0; use batch, running or none"
            )
        if self.advantage.refuses_group_of_one is not None:
            raise ValueError(self.advantage.refuses_group_of_one)
        if self.dynamic_sampling:
            raise ValueError(
                "dynamic_sampling keeps groups whose responses differ; train.group_size must be at least 2"
            )

    def check_response_tokens(self, max_response_tokens: int) -> None:
        """Raises ValueError where an option does not fit the longest response, in tokens."""
        overlong = self.reward.overlong
        if overlong is not None and overlong.buffer(max_response_tokens) > max_response_tokens:
            raise ValueError(
                f"algorithm.reward.overlong.buffer_tokens {overlong.buffer_tokens} is more than "
                f"sampling.max_response_tokens {max_response_tokens}: every response would be punished; "
                "DAPO's buffer is a fifth of the longest response"
            )

    def check_responses(self, num_responses: int) -> None:
        """Raises ValueError where the adaptive KL coefficient could reach 0 with this many responses a step."""
        adaptive = self.kl.adaptive
        if adaptive is not None and adaptive.horizon <= KL_ERROR_LIMIT * num_responses:
            raise ValueError(
                f"algorithm.kl.adaptive.horizon {adaptive.horizon:g} is too short for {num_responses} responses a "
                f"step: the coefficient is multiplied by 1 - {KL_ERROR_LIMIT} x {num_responses} / horizon at worst; "
                f"use more than {KL_ERROR_LIMIT * num_responses:g}"
            )

    @property
    def uses_reference(self) -> bool:
        """Whether a reference model is kept."""
        return self.kl.loss_coef > 0 or self.kl.reward_coef > 0

    @property
    def measures_kl_before_update(self) -> bool:
        """Whether the KL to the reference is needed before the first update of a step."""
        return self.kl.reward_coef > 0 or self.kl.adaptive is not None

    @property
    def needs_old_logprobs(self) -> bool:
        """Whether the advantages need old log-probabilities; several updates a step need them in any case."""
        corrects_mismatch = self.mismatch.weight is not None or self.mismatch.reject is not None
        return self.measures_kl_before_update or corrects_mismatch

    @property
    def needs_greedy_response(self) -> bool:
        """Whether every prompt gets one more response, at temperature 0."""
        return self.advantage.needs_greedy_response

    @property
    def whitens(self) -> bool:
        """Whether advantages are shifted and scaled to mean 0 and variance 1 over the step's tokens."""
        return self.whiten_advantages or self.advantage.whitens

    @property
    def advice(self) -> list[str]:
        """Combinations that run but are probably not meant."""
        out = [
            variant.aggregation_advice.format(aggregation=self.aggregation)
            for variant in (self.loss, self.advantage)
            if variant.aggregations is not None and self.aggregation not in variant.aggregations
        ]
        if self.kl.loss_coef and self.kl.estimator == "k1":
            out.append("the gradient of k1 as a loss is 0 in expectation; use k2, k3 or k1+")
        return out

    @property
    def formula(self) -> str:
        """What this configuration computes, in one line of the papers' notation."""
        terms = [self.loss.formula]
        if self.kl.loss_coef:
            terms.append(f"{self.kl.loss_coef:g} KL_{self.kl.estimator}")
        if self.entropy_coef:
            terms.append(f"({-self.entropy_coef:g}) H")
        reward = "r = reward"
        if self.kl.reward_coef:
            reward += f" - {self.kl.reward_coef:g} sum_t KL_{self.kl.estimator}"
        loss = f"{_AGGREGATION_FORMULAS[self.aggregation]} [{' + '.join(terms)}]"
        return f"{loss}, A = {self.advantage.formula}, {reward}"


_AGGREGATION_FORMULAS: dict[Aggregation, str] = {
    "token-mean": "1/N_tok sum_it",
    "seq-mean-token-sum": "1/N_seq sum_it",
    "seq-mean-token-mean": "1/N_seq sum_i 1/T_i sum_t",
    "seq-mean-token-sum-norm": "1/(N_seq C) sum_it",
}
