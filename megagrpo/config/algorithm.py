"""The `algorithm` section. Options of an algorithm live in that algorithm's own model; formulas are in the algo package."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from megagrpo.config.section import Section

KL_ERROR_LIMIT = (
    0.2  # how far from its target the adaptive KL coefficient sees the divergence; arXiv 1909.08593, section 2.2
)

Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
PositiveInt = Annotated[int, Field(ge=1)]
SingleSample = Literal[
    "zero", "raw"
]  # advantage of a group with one valid response: 0, or its raw reward as verl's loops do
Scope = Literal["none", "group", "batch", "running"]
Aggregation = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


class GrpoAdvantage(Section):
    """(r - mean) / (std + eps). DeepSeekMath, arXiv 2402.03300."""

    name: Literal["grpo"] = "grpo"
    std_ddof: Literal[0, 1] = 1
    eps: Positive = 1e-6
    single_sample: SingleSample = "zero"


class DrGrpoAdvantage(Section):
    """r - mean. arXiv 2503.20783."""

    name: Literal["dr_grpo"] = "dr_grpo"
    single_sample: SingleSample = "zero"


class GrpoPassKAdvantage(Section):
    """Best response alone: best - second best, over (std + eps) when normalised. arXiv 2503.19595."""

    name: Literal["grpo_passk"] = "grpo_passk"
    normalise: bool = True
    std_ddof: Literal[0, 1] = 1
    eps: Positive = 1e-6


class RlooAdvantage(Section):
    """r minus the mean of the others. arXiv 2402.14740."""

    name: Literal["rloo"] = "rloo"
    single_sample: SingleSample = "zero"


class ReinforcePlusPlusAdvantage(Section):
    """Discounted return of every token, whitened over the batch. arXiv 2501.03262."""

    name: Literal["reinforce_plus_plus"] = "reinforce_plus_plus"
    gamma: Annotated[float, Field(gt=0, le=1)] = 1.0


class ReinforcePlusPlusBaselineAdvantage(Section):
    """r - mean, whitened over all tokens of the batch. arXiv 2501.03262."""

    name: Literal["reinforce_plus_plus_baseline"] = "reinforce_plus_plus_baseline"
    single_sample: SingleSample = "zero"


class RemaxAdvantage(Section):
    """r minus the reward of a greedy response to the same prompt. arXiv 2310.10505."""

    name: Literal["remax"] = "remax"


class OpoAdvantage(Section):
    """r minus the length-weighted mean. arXiv 2505.23585."""

    name: Literal["opo"] = "opo"
    single_sample: SingleSample = "zero"


class GpgAdvantage(Section):
    """alpha (r - mean), alpha = B / responses in non-degenerate groups. arXiv 2504.02546."""

    name: Literal["gpg"] = "gpg"
    alpha: Literal["non_degenerate", "nonzero_reward"] = (
        "non_degenerate"  # nonzero_reward: B / responses with r != 0, as verl
    )
    single_sample: SingleSample = "zero"


AdvantageConfig = (
    GrpoAdvantage
    | DrGrpoAdvantage
    | GrpoPassKAdvantage
    | RlooAdvantage
    | ReinforcePlusPlusAdvantage
    | ReinforcePlusPlusBaselineAdvantage
    | RemaxAdvantage
    | OpoAdvantage
    | GpgAdvantage
)


class PpoClipLoss(Section):
    """arXiv 1707.06347; clip_ratio_high > clip_ratio_low is DAPO's clip-higher; dual clip is arXiv 1912.09729."""

    name: Literal["ppo_clip"] = "ppo_clip"
    clip_ratio_low: Annotated[float, Field(gt=0, le=1)] = 0.2
    clip_ratio_high: Positive = 0.2
    dual_clip: Annotated[float, Field(gt=1)] | None = None  # c: a negative advantage's loss is at most c |A|


class GspoLoss(Section):
    """One importance ratio per sequence. arXiv 2507.18071."""

    name: Literal["gspo"] = "gspo"
    clip_ratio_low: Annotated[float, Field(gt=0, le=1)] = 3e-4
    clip_ratio_high: Positive = 4e-4
    clamp: Literal["both", "above"] = "both"  # the mean log-ratio to +-20, or only above, at 10, as verl


class CispoLoss(Section):
    """Clipped importance weights, every token keeps its gradient. arXiv 2506.13585."""

    name: Literal["cispo"] = "cispo"
    clip_ratio_low: Annotated[float, Field(gt=0, le=1)] = 1.0
    clip_ratio_high: NonNegative = 4.0


class GpgLoss(Section):
    """-log p A. arXiv 2504.02546."""

    name: Literal["gpg"] = "gpg"


class SapoLoss(Section):
    """A sigmoid gate instead of the clip. arXiv 2511.20347."""

    name: Literal["sapo"] = "sapo"
    tau_positive: Positive = 1.0
    tau_negative: Positive = 1.05


PolicyLossConfig = PpoClipLoss | GspoLoss | CispoLoss | GpgLoss | SapoLoss


class AdaptiveKl(Section):
    """beta <- beta (1 + clip(KL / target - 1, +-0.2) responses / horizon). arXiv 1909.08593."""

    target: Positive
    horizon: Positive  # responses


class KlConfig(Section):
    """KL to the reference, the initial weights. Both coefficients 0: no reference is kept."""

    loss_coef: NonNegative = 0.0  # as a term of the loss
    reward_coef: NonNegative = 0.0  # token by token inside the reward ("add_token_level_kl")
    estimator: Literal["k1", "abs", "k2", "k3", "k1+", "abs+", "k3+", "full"] = (
        "k3"  # "+": gradient of k2; full: whole vocabulary
    )
    value_clamp: Positive | None = None  # of k3's value; verl: 10
    importance: bool = False  # "+" forms: times sg[ratio], right off-policy too
    adaptive: AdaptiveKl | None = None

    @model_validator(mode="after")
    def _consistent(self):
        if self.loss_coef and self.reward_coef:
            raise ValueError(
                "loss_coef and reward_coef are both set: the KL would be charged twice; set one of them to 0"
            )
        if self.reward_coef and (self.estimator == "full" or self.estimator.endswith("+")):
            raise ValueError(
                f'estimator "{self.estimator}" is a form for the loss; with reward_coef use k1, abs, k2 or k3'
            )
        if self.importance and not self.estimator.endswith("+"):
            raise ValueError(
                f'importance corrects the gradient of the "+" estimators; "{self.estimator}" is none of them'
            )
        if self.value_clamp is not None and not self.estimator.startswith("k3"):
            raise ValueError(f'value_clamp belongs to k3; estimator is "{self.estimator}"')
        if self.adaptive and self.estimator == "full":
            raise ValueError(
                'adaptive measures the KL on the sampled tokens, which estimator "full" does not; use k1, abs, k2 or k3'
            )
        if self.adaptive and not (self.loss_coef or self.reward_coef):
            raise ValueError("adaptive needs a starting coefficient: set loss_coef or reward_coef")
        return self


class OverlongShaping(Section):
    """DAPO's soft length penalty: 0 up to max_response_tokens - buffer_tokens, then linear down to -factor. arXiv 2503.14476."""

    buffer_tokens: Annotated[int, Field(ge=0)] | None = (
        None  # default: a fifth of max_response_tokens, as in the paper; 0: off
    )
    factor: NonNegative = 1.0

    def buffer(self, max_response_tokens: int) -> int:
        return max_response_tokens // 5 if self.buffer_tokens is None else self.buffer_tokens


class RewardShapingConfig(Section):
    """What happens to the grader's reward before the advantage, in this order."""

    scale: Positive = 1.0  # r -> scale r + shift, of greedy baselines too
    shift: float = 0.0
    overlong: OverlongShaping | None = None
    mean: Scope = "none"  # subtracted
    std: Scope = "none"  # divided by; it is always about the mean of its own scope
    std_ddof: Literal[0, 1] = 1
    eps: Positive = 1e-6
    clip: Positive | None = None  # to +-clip


class TruncatedImportance(Section):
    """min(old / rollout, cap): of the token, of the whole sequence (product), or its geometric mean."""

    name: Literal["tis"]
    over: Literal["token", "sequence", "geometric"] = "token"
    cap: Positive = 2.0
    floor: NonNegative = 0.0
    self_normalise: bool = False  # to mean 1 over the step's tokens, or sequences

    @model_validator(mode="after")
    def _ordered(self):
        if self.floor >= self.cap:
            raise ValueError(f"floor {self.floor} is not below cap {self.cap}")
        return self


class Band(Section):
    """icepop: the ratio where it lies in [low, high], else 0. mis_mask: 1 there, else 0."""

    name: Literal["icepop", "mis_mask"]
    low: NonNegative = 0.5
    high: Positive = 5.0

    @model_validator(mode="after")
    def _ordered(self):
        if self.low >= self.high:
            raise ValueError(f"low {self.low} is not below high {self.high}")
        return self


class Rejection(Section):
    """Responses on which trainer and engine disagree too much leave the loss mask before tokens and sequences are counted."""

    measure: Literal["ratio", "k2", "k3"] = "ratio"  # old / rollout, or a KL estimate of it
    over: Literal["mean", "sum", "max", "token"] = "mean"  # mean of the log-ratio is the geometric mean of the ratio
    low: NonNegative = 0.0  # of the ratio; a KL estimate has an upper limit only
    high: Positive
    keep_denominator: bool = False  # still count what was rejected in the denominators

    @model_validator(mode="after")
    def _around_agreement(self):
        agreement = 1.0 if self.measure == "ratio" else 0.0
        if not self.low <= agreement <= self.high:
            raise ValueError(
                f"[low, high] = [{self.low}, {self.high}] rejects perfect agreement, {self.measure} = {agreement:g}"
            )
        return self


class MismatchConfig(Section):
    """Correction for engine and trainer giving the same token different probabilities."""

    weight: Annotated[TruncatedImportance | Band, Field(discriminator="name")] | None = None
    reject: Rejection | None = None


class DynamicSampling(Section):
    """DAPO: keep only groups that differ in the metric, ask for more until the batch is full. arXiv 2503.14476."""

    metric: Literal["reward", "shaped_reward"] = "reward"  # shaped_reward: scaled, after overlong shaping
    max_num_gen_batches: PositiveInt = 10


class AlgorithmConfig(Section):
    advantage: Annotated[AdvantageConfig, Field(discriminator="name")] = GrpoAdvantage()
    loss: Annotated[PolicyLossConfig, Field(discriminator="name")] = PpoClipLoss()
    aggregation: Aggregation = "token-mean"
    loss_scale_factor: Positive | None = None  # C of seq-mean-token-sum-norm; default: max_response_tokens
    kl: KlConfig = KlConfig()
    entropy_coef: float = 0.0
    reward: RewardShapingConfig = RewardShapingConfig()
    whiten_advantages: bool = False
    advantage_clip: Positive | None = None  # to +-advantage_clip
    mask_truncated: bool = False  # responses that ended by length are not trained on
    mismatch: MismatchConfig = MismatchConfig()
    dynamic_sampling: DynamicSampling | None = None

    @model_validator(mode="after")
    def _consistent(self):
        name, reward = self.advantage.name, self.reward
        if "group" in (reward.mean, reward.std) and name in ("grpo", "rloo", "grpo_passk"):
            raise ValueError(
                f"reward.mean/std: group with advantage {name} normalises by the group twice; use batch, running or none"
            )
        if name == "remax" and (reward.mean, reward.std, reward.clip, reward.overlong) != ("none", "none", None, None):
            raise ValueError(
                "reward.mean, std, clip and overlong change the rewards but not remax's greedy baseline; remove them"
            )
        if self.whiten_advantages and name.startswith("reinforce_plus_plus"):
            raise ValueError(f"advantage {name} is whitened already; remove whiten_advantages")
        if self.loss_scale_factor is not None and self.aggregation != "seq-mean-token-sum-norm":
            raise ValueError(f"loss_scale_factor belongs to seq-mean-token-sum-norm; aggregation is {self.aggregation}")
        return self

    def check_group_size(self, group_size: int) -> None:
        """Raise ValueError where the advantage cannot work with this many samples per prompt."""
        if group_size > 1:
            return
        if "group" in (self.reward.mean, self.reward.std):
            raise ValueError(
                "reward.mean/std: group with train.group_size 1 makes every reward 0; use batch, running or none"
            )
        if self.advantage.name == "grpo_passk":
            raise ValueError(
                "advantage grpo_passk compares the best two responses of a prompt; train.group_size must be at least 2"
            )
        if getattr(self.advantage, "single_sample", "raw") == "zero":
            raise ValueError(
                f"advantage {self.advantage.name} compares responses to one prompt: with train.group_size 1 it is always 0 and nothing "
                "is learned; raise group_size or set algorithm.advantage.single_sample: raw"
            )
        if self.dynamic_sampling:
            raise ValueError(
                "dynamic_sampling keeps groups whose responses differ; train.group_size must be at least 2"
            )

    def check_response_tokens(self, max_response_tokens: int) -> None:
        """Raise ValueError where an option does not fit the longest response."""
        overlong = self.reward.overlong
        if overlong is not None and overlong.buffer(max_response_tokens) > max_response_tokens:
            raise ValueError(
                f"algorithm.reward.overlong.buffer_tokens {overlong.buffer_tokens} is more than sampling.max_response_tokens "
                f"{max_response_tokens}: every response would be punished; DAPO's buffer is a fifth of the longest response"
            )

    def check_responses(self, num_responses: int) -> None:
        """Raise ValueError where the adaptive KL coefficient could become 0 or negative with this many responses a step."""
        adaptive = self.kl.adaptive
        if adaptive is not None and adaptive.horizon <= KL_ERROR_LIMIT * num_responses:
            raise ValueError(
                f"algorithm.kl.adaptive.horizon {adaptive.horizon:g} is too short for {num_responses} responses a step: the coefficient is "
                f"multiplied by 1 - {KL_ERROR_LIMIT} x {num_responses} / horizon at worst; use more than {KL_ERROR_LIMIT * num_responses:g}"
            )

    @property
    def uses_reference(self) -> bool:
        return self.kl.loss_coef > 0 or self.kl.reward_coef > 0

    @property
    def needs_old_logprobs(self) -> bool:
        """Whether the advantage does; several updates a step need them in any case."""
        kl_before_update = self.kl.reward_coef > 0 or self.kl.adaptive is not None
        return kl_before_update or self.mismatch.weight is not None or self.mismatch.reject is not None

    @property
    def needs_greedy_response(self) -> bool:
        return self.advantage.name == "remax"

    @property
    def advice(self) -> list[str]:
        """Combinations that run but are probably not meant."""
        out = []
        if self.loss.name == "gspo" and self.aggregation != "seq-mean-token-mean":
            out.append(
                f"gspo is the paper's objective with aggregation seq-mean-token-mean only; here it is {self.aggregation}"
            )
        if self.advantage.name == "dr_grpo" and self.aggregation in ("seq-mean-token-mean", "token-mean"):
            out.append(
                f"Dr. GRPO divides by a constant (seq-mean-token-sum-norm); {self.aggregation} divides by response lengths"
            )
        if self.kl.loss_coef and self.kl.estimator == "k1":
            out.append("the gradient of k1 as a loss is 0 in expectation; use k2, k3 or k1+")
        return out

    @property
    def formula(self) -> str:
        """What this configuration computes, in one line of the papers' notation."""
        reward = _REWARD_FORMULAS["kl" if self.kl.reward_coef else "plain"].format(
            beta=self.kl.reward_coef, k=self.kl.estimator
        )
        terms = [_LOSS_FORMULAS[self.loss.name]]
        if self.kl.loss_coef:
            terms.append(f"{self.kl.loss_coef:g} KL_{self.kl.estimator}")
        if self.entropy_coef:
            terms.append(f"({-self.entropy_coef:g}) H")
        advantage = _ADVANTAGE_FORMULAS[self.advantage.name]
        return f"{_AGGREGATION_FORMULAS[self.aggregation]} [{' + '.join(terms)}], A = {advantage}, {reward}"


_ADVANTAGE_FORMULAS = {
    "grpo": "(r - mean) / (std + eps)",
    "dr_grpo": "r - mean",
    "grpo_passk": "r_best - r_second for the best response, else 0",
    "rloo": "r - mean of the others",
    "reinforce_plus_plus": "whiten(sum_k gamma^k R_(t+k))",
    "reinforce_plus_plus_baseline": "whiten(r - mean)",
    "remax": "r - r_greedy",
    "opo": "r - sum T r / sum T",
    "gpg": "alpha (r - mean)",
}
_LOSS_FORMULAS = {
    "ppo_clip": "-min(rho A, clip(rho) A)",
    "gspo": "-min(s A, clip(s) A), s = exp(mean log rho)",
    "cispo": "-sg[clip(rho)] A log p",
    "gpg": "-A log p",
    "sapo": "-sigmoid(tau (rho - 1)) (4 / tau) A",
}
_AGGREGATION_FORMULAS = {
    "token-mean": "1/N_tok sum_it",
    "seq-mean-token-sum": "1/N_seq sum_it",
    "seq-mean-token-mean": "1/N_seq sum_i 1/T_i sum_t",
    "seq-mean-token-sum-norm": "1/(N_seq C) sum_it",
}
_REWARD_FORMULAS = {"plain": "r = reward", "kl": "r = reward - {beta:g} sum_t KL_{k}"}
