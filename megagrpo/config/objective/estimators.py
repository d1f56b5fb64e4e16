"""Advantage estimators: fields, formula, requirements and exclusions of each.

To add one: write its variant here and name it in AdvantageConfig, then write its function and its
row in ESTIMATORS of algo/estimators.py. tests/unit/test_algo_config.py finds a variant without a row.
"""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from megagrpo.config.fields import PositiveFloat, PositiveFraction, Variant
from megagrpo.config.objective.own import OwnFunction


class Estimator(Variant):
    """Holds what an estimator needs and refuses; its own fields are in the subclass."""

    # refuses rewards that are normalized by the group already
    normalizes_by_group: ClassVar[bool] = False
    # over all unmasked tokens of the batch; refuses whiten_advantages
    whitens: ClassVar[bool] = False
    # refuses reward steps that its greedy baseline does not get
    needs_greedy_response: ClassVar[bool] = False
    # the scores of several graders, one by one; refuses what changes only their sum
    reads_parts: ClassVar[bool] = False
    # a token learns from the rewards behind it; the others read the sum over a rollout
    has_returns: ClassVar[bool] = False
    # needs the policy's log-probabilities before the step, and the sums of its squared probabilities
    needs_squares: ClassVar[bool] = False

    @property
    def whitens_tokens(self) -> bool:
        """Returns whether its values are whitened over the step's tokens afterwards."""
        return self.whitens

    @property
    def refuses_group_of_one(self) -> tuple[str, str] | None:
        """Why train.group_size 1 cannot work, and the remedy; None if it can."""
        return None


class _ComparesResponses(Estimator):
    """Subtracts what other responses to the same prompt got, so that a group with one valid
    response needs a rule."""

    name: str
    single_sample: Literal["zero", "raw"] = "zero"
    """Advantage in a group with one valid response, for optimal_token_baseline also of tokens that
    only one response is long enough to have: 0, or its raw reward as in verl."""

    @property
    def refuses_group_of_one(self) -> tuple[str, str] | None:
        if self.single_sample == "raw":
            return None
        return (
            f"advantage {self.name} compares responses to one prompt: with train.group_size 1 it "
            "is always 0 and nothing is learned",
            "raise group_size or set algorithm.advantage.single_sample: raw",
        )


_EPS = "Constant to add to the standard deviation, in units of the reward."


class GrpoAdvantage(_ComparesResponses):
    """(r - mean) / (std + eps). DeepSeekMath, arXiv 2402.03300."""

    formula = "(r - mean) / (std + eps)"
    normalizes_by_group = True

    name: Literal["grpo"] = "grpo"
    eps: PositiveFloat = Field(default=1e-6, description=_EPS)


class DrGrpoAdvantage(_ComparesResponses):
    """r - mean. arXiv 2503.20783."""

    formula = "r - mean"
    aggregations = ("seq-mean-token-sum", "seq-mean-token-sum-norm")
    aggregation_advice = (
        "Dr. GRPO divides by a constant (seq-mean-token-sum-norm); {aggregation} divides by response "
        "lengths"
    )

    name: Literal["dr_grpo"] = "dr_grpo"


class GrpoPassKAdvantage(Estimator):
    """Only the best response learns: best - second best, over (std + eps) if `normalize`. arXiv
    2503.19595."""

    formula = "r_best - r_second for the best response, else 0"
    normalizes_by_group = True

    name: Literal["grpo_passk"] = "grpo_passk"
    normalize: bool = True
    """Divide by the group's standard deviation plus eps."""
    eps: PositiveFloat = Field(default=1e-6, description=_EPS)

    @property
    def refuses_group_of_one(self) -> tuple[str, str] | None:
        return (
            "advantage grpo_passk compares the best two responses of a prompt",
            "train.group_size must be at least 2",
        )


class RlooAdvantage(_ComparesResponses):
    """r minus the mean of the other responses. arXiv 2402.14740."""

    formula = "r - mean of the others"
    normalizes_by_group = True

    name: Literal["rloo"] = "rloo"


class MaxRlAdvantage(_ComparesResponses):
    """(r - mean) / mean, or 0 if the mean is not positive. For rewards of 0 and 1, or rewards that
    are never negative. arXiv 2602.02710."""

    formula = "(r - mean) / mean"
    normalizes_by_group = True

    name: Literal["maxrl"] = "maxrl"


class ReinforcePlusPlusAdvantage(Estimator):
    """Discounted return per token, whitened over the batch. arXiv 2501.03262."""

    formula = "whiten(sum_k gamma^k R_(t+k))"
    has_returns = True
    whitens = True

    name: Literal["reinforce_plus_plus"] = "reinforce_plus_plus"
    gamma: PositiveFraction = 1.0
    """Discount per sampled token."""


class ReinforceAdvantage(Estimator):
    """Discounted return per token. With `reward.mean: group` and `reward.std: group` it is ROLL's
    grpo, in which `reward_clip` and the token-level KL come next."""

    formula = "sum_k gamma^k R_(t+k)"
    has_returns = True

    name: Literal["reinforce"] = "reinforce"
    gamma: PositiveFraction = 1.0
    """Discount per sampled token."""


class ReinforcePlusPlusBaselineAdvantage(_ComparesResponses):
    """r - mean, whitened over all tokens of the batch. arXiv 2501.03262."""

    formula = "whiten(r - mean)"
    whitens = True

    name: Literal["reinforce_plus_plus_baseline"] = "reinforce_plus_plus_baseline"


class RemaxAdvantage(Estimator):
    """Return per token minus the reward of a greedy response to the same prompt. arXiv
    2310.10505."""

    formula = "sum_k R_(t+k) - r_greedy"
    needs_greedy_response = True

    name: Literal["remax"] = "remax"


class OpoAdvantage(_ComparesResponses):
    """r minus the length-weighted mean. arXiv 2505.23585."""

    formula = "r - sum T r / sum T"

    name: Literal["opo"] = "opo"


class OptimalTokenAdvantage(_ComparesResponses):
    """Return per token minus the mean of the group's at the same sampled token, weighted by W, the
    policy's squared gradients up to there: sum of 1 - 2 p + sum p^2. arXiv 2602.07078."""

    formula = "G_t - sum W_t G_t / sum W_t"
    has_returns = True
    needs_squares = True

    name: Literal["optimal_token_baseline"] = "optimal_token_baseline"


class GdpoAdvantage(_ComparesResponses):
    """Normalize the score of each grader by its group, add them with the weights in
    `reward.graders`, and whiten the sum over the step. arXiv 2601.05242."""

    formula = "whiten(sum_k w_k (r_k - mean_k) / (std_k + eps))"
    whitens = True
    reads_parts = True

    name: Literal["gdpo"] = "gdpo"
    eps: PositiveFloat = Field(default=1e-6, description=_EPS)
    whiten_over: Literal["tokens", "responses"] = "tokens"
    """Compute mean and standard deviation over trained tokens, as in verl, or over responses, as in
    the paper, TRL and NeMo-RL."""

    @property
    def whitens_tokens(self) -> bool:
        return self.whiten_over == "tokens"

    @property
    def shown_formula(self) -> str:
        return f"{self.formula} over {self.whiten_over}"


class GpgAdvantage(_ComparesResponses):
    """alpha (r - mean), alpha = B / responses in non-degenerate groups. arXiv 2504.02546."""

    formula = "alpha (r - mean)"

    name: Literal["gpg"] = "gpg"
    alpha: Literal["non_degenerate", "nonzero_reward"] = "non_degenerate"
    """Responses that divide alpha: those in groups whose rewards differ, and single ones if `raw`, or
    those with a reward other than 0, as in verl."""


class OwnAdvantage(OwnFunction, Estimator):
    """Your function, `name: "mine.py:mad"`. It gets EstimatorInputs (algo/estimators.py) and
    returns an advantage per response, [N], or per token, [T]. See [extend](../extend.md)."""

    formula = "own"
    has_returns = True  # it gets the rewards of tokens
    key = "algorithm.advantage"

    name: Literal["own"] = "own"


AdvantageConfig = Annotated[
    GrpoAdvantage
    | DrGrpoAdvantage
    | GrpoPassKAdvantage
    | RlooAdvantage
    | MaxRlAdvantage
    | ReinforceAdvantage
    | ReinforcePlusPlusAdvantage
    | ReinforcePlusPlusBaselineAdvantage
    | RemaxAdvantage
    | OpoAdvantage
    | OptimalTokenAdvantage
    | GdpoAdvantage
    | GpgAdvantage
    | OwnAdvantage,
    Field(discriminator="name"),
]
