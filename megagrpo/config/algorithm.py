"""The `algorithm` section. Options of an estimator, a loss or a reward step are fields of its own
variant."""

import json
from collections.abc import Callable
from typing import Literal, get_args

from pydantic import Field, model_validator

from megagrpo.config.fields import (
    Aggregation,
    Number,
    PositiveFloat,
    PositiveInt,
    Rule,
    Section,
    named,
)
from megagrpo.config.objective.correction import MismatchConfig
from megagrpo.config.objective.estimators import AdvantageConfig, GrpoAdvantage, MaxRlAdvantage
from megagrpo.config.objective.kl import KlConfig
from megagrpo.config.objective.own import (
    FunctionName,
    OwnArguments,
    OwnFunction,
    own_function,
    with_names_of_functions,
)
from megagrpo.config.objective.policy_loss import (
    CovarianceLoss,
    GpgLoss,
    PolicyLossConfig,
    PpoClipLoss,
)
from megagrpo.config.objective.reward_shaping import RewardShapingConfig
from megagrpo.config.objective.streams import DistillationConfig, StreamConfig, Writer


class DynamicSampling(Section):
    """Train only on groups whose responses differ in the metric, and sample until the batch is
    full. DAPO, arXiv 2503.14476."""

    metric: Literal["reward", "shaped_reward"] = "reward"
    """Use the grader's reward, or the reward after scaling and overlong shaping."""
    max_num_gen_batches: PositiveInt = 10
    """Most prompt batches that a step may sample before the run stops."""
    filter: FunctionName | None = None
    """Your own function instead, "mine.py:keep". It is called as keep(values, **args) with the
    metrics of a group, without responses that have none. Return true to keep the group."""
    args: OwnArguments = Field(default={})
    """Keyword arguments for `filter`."""

    def load_filter(self) -> Callable[[list[float]], object] | None:
        """Returns the filter with its arguments, if there is one. Raises ValueError."""
        if self.filter is None:
            return None
        key = "algorithm.dynamic_sampling"
        return own_function(f"{key}.filter", self.filter, "values", json.dumps(self.args))

    @property
    def dropped(self) -> str:
        """Says which groups a step is made without."""
        if self.filter:
            return f"groups that {self.filter} drops"
        return f"groups of equal {self.metric}"

    def problems(self) -> list[Rule]:
        return [Rule(self.args and not self.filter, "args without filter", "name the filter")]


class AlgorithmConfig(Section):
    """What a step computes from rewards and log-probabilities."""

    advantage: AdvantageConfig = GrpoAdvantage()
    """Advantage estimator."""
    loss: PolicyLossConfig = PpoClipLoss()
    """Policy loss per token."""
    aggregation: Aggregation = "token-mean"
    """How token losses become one number. Denominators are counted over all ranks."""
    loss_scale_factor: PositiveFloat | None = None
    """C in seq-mean-token-sum-norm, in tokens. Default: `sampling.max_response_tokens`."""
    kl: KlConfig = KlConfig()
    entropy_coef: Number = 0.0
    """Coefficient of the entropy bonus. Above 0 it keeps the policy random."""
    reward: RewardShapingConfig = RewardShapingConfig()
    whiten_advantages: bool = False
    """Scale advantages to mean 0 and variance 1 over the step's tokens."""
    advantage_clip: PositiveFloat | None = None
    """Limit advantages to [-advantage_clip, advantage_clip]."""
    mask_truncated: bool = False
    """Leave responses that reached the length limit out of the rl loss. They still count in the
    statistics."""
    off_policy_limit: PositiveFloat | None = None
    """Leave a response with a negative advantage out of the policy loss where the mean of
    log(rollout / new) over its tokens is above this. Off-policy sequence masking, arXiv 2512.02556,
    which compares with the engine's probabilities; slime's `--use-opsm` with the actor's."""
    mismatch: MismatchConfig = MismatchConfig()
    old_logprobs: Literal["trainer", "engine"] = "trainer"
    """Whose log-probabilities the ratio divides by. engine: saves a forward per step if it has
    several updates. The clip range then bounds engine-trainer differences and staleness, too."""
    dynamic_sampling: DynamicSampling | None = None
    distillation: DistillationConfig | None = None
    streams: list[StreamConfig] = Field(default=[])
    """Loss components besides rl, and the tokens for each. Without an entry of its own, rl
    has weight 1 on all tokens that the policy sampled, and so has distillation if there is a
    `distillation` section."""

    _named = model_validator(mode="before")(with_names_of_functions)

    def problems(self) -> list[Rule]:
        advantage, reward = self.advantage, self.reward
        missed = reward.turned_on(besides_greedy=True)
        changes_sum = [f"reward.{step}" for step in reward.turned_on()]
        changes_sum += ["kl.reward_coef"] if self.kl.reward_coef else []
        below_0 = self._below_0()
        engine_ratio = getattr(self.loss, "against", "") == "rollout"
        return [
            *self._stream_problems(),
            Rule(
                engine_ratio and self.mismatch.weight is not None,
                "loss dppo against rollout weighs tokens by actor / engine, and so does mismatch.weight",
                "remove mismatch.weight, or write against: old",
            ),
            Rule(
                isinstance(self.loss, CovarianceLoss)
                and self.distillation is not None
                and self.distillation.loss == "reverse_kl",
                f"loss {self.loss.name} chooses tokens by their advantages, and distillation.loss reverse_kl has "
                "advantages of its own",
                "use another loss in one of them",
            ),
            Rule(
                self.old_logprobs == "engine" and self.needs_old_logprobs,
                "old_logprobs engine: mismatch.weight, mismatch.reject, kl.reward_coef, kl.adaptive and "
                "advantage optimal_token_baseline need the trainer's, too",
                "remove them, or take trainer",
            ),
            Rule(
                self.old_logprobs == "engine" and isinstance(self.loss, GpgLoss),
                "old_logprobs engine with loss gpg, which has no ratio",
                "remove it, or use another loss",
            ),
            Rule(
                self.kl.reference_every and not self.uses_reference,
                "kl.reference_every moves a reference, but no KL is charged",
                "set kl.loss_coef or kl.reward_coef, or remove reference_every",
            ),
            Rule(
                reward.normalizes_by_group and advantage.normalizes_by_group,
                f"reward.mean/std: group with advantage {advantage.name} normalizes by the group twice",
                "use batch, running or none",
            ),
            Rule(
                missed and advantage.needs_greedy_response,
                f"{named(f'reward.{step}' for step in missed)} would change the rewards but not "
                f"{advantage.name}'s greedy baseline, which only reward.scale and shift reach",
                "remove what is named first",
            ),
            Rule(
                changes_sum and advantage.reads_parts,
                f"{named(changes_sum)} would change the sum of the graders' scores, but advantage "
                f"{advantage.name} normalizes each score by itself",
                "remove what is named first",
            ),
            Rule(
                isinstance(advantage, MaxRlAdvantage) and below_0,
                f"{named(below_0)} can make the mean reward of a group 0 or less, and advantage "
                f"{advantage.name} learns nothing from such a group",
                "remove what is named first, or use another advantage",
            ),
            Rule(
                self.whiten_advantages and advantage.whitens,
                f"advantage {advantage.name} is whitened already",
                "remove whiten_advantages",
            ),
            Rule(
                self.loss_scale_factor is not None
                and self.aggregation != "seq-mean-token-sum-norm",
                f"loss_scale_factor belongs to seq-mean-token-sum-norm; aggregation is {self.aggregation}",
                "remove one of them",
            ),
        ]

    def _below_0(self) -> list[str]:
        """Returns the settings that can make rewards of 0 and 1 negative."""
        reward = self.reward
        settings = {
            "reward.shift": reward.shift < 0,
            "reward.overlong": reward.overlong is not None,
            "reward.mean": reward.mean != "none",
            "kl.reward_coef": self.kl.reward_coef > 0,
        }
        return [name for name, can in settings.items() if can]

    def _stream_problems(self) -> list[Rule]:
        named_ones = {stream.component for stream in self.streams if stream.weight}
        rl_settings = {
            "mask_truncated": self.mask_truncated,
            "advantage_clip": self.advantage_clip,
            "whiten_advantages": self.whiten_advantages,
            "entropy_coef": self.entropy_coef,
            "kl.loss_coef": self.kl.loss_coef,
            "kl.reward_coef": self.kl.reward_coef,
        }
        unread = [name for name, value in rl_settings.items() if value]
        trained = any(map(self.has_tokens, ("rl", *self.components)))
        return [
            Rule(
                "distillation" in named_ones and self.distillation is None,
                "streams names distillation, and there is no distillation section",
                "add distillation: {}, or remove the stream",
            ),
            Rule(
                "reference_kl" in named_ones and (self.kl.coef or self.kl.estimator == "full"),
                "a stream of reference_kl beside kl.loss_coef, "
                "kl.reward_coef or estimator full: the KL is of one of them",
                "set the coefficients to 0 and an estimator of sampled tokens, or remove the stream",
            ),
            Rule(
                not trained,
                "streams gives no component a token with a weight above 0: no weight would change",
                "remove the entry with weight 0, or name another component",
            ),
            Rule(
                trained and not self.has_tokens("rl") and unread,
                f"{named(unread)}: of component rl, to which streams gives no token",
                "remove what is named first",
            ),
        ]

    @property
    def own_functions(self) -> dict[str, str]:
        """Returns the user's functions by the keys that name them."""
        sections = (self.loss, self.advantage)
        found = {each.key: each.function for each in sections if isinstance(each, OwnFunction)}
        if self.dynamic_sampling and self.dynamic_sampling.filter:
            found["algorithm.dynamic_sampling.filter"] = self.dynamic_sampling.filter
        return found

    @property
    def own_loaders(self) -> list[Callable[[], object]]:
        """Returns what loads the user's functions, each of which raises ValueError."""
        found = [each.load for each in (self.loss, self.advantage) if isinstance(each, OwnFunction)]
        groups = self.dynamic_sampling
        return [*found, *([groups.load_filter] if groups else [])]

    @property
    def components(self) -> tuple[str, ...]:
        """The components that have tokens, rl first; none if that is rl alone, on every token."""
        if not self.streams and self.distillation is None:
            return ()
        found = ["rl"] + ["distillation"] * (self.distillation is not None)
        found += [stream.component for stream in self.streams if stream.weight]
        return tuple(dict.fromkeys(found))

    def weight_of(self, component: str, writer: Writer, source: str) -> float:
        """Returns the weight of a token of this writer in a row of this source, before the row's
        own."""
        by_default = component == "rl" or (component == "distillation" and self.distillation)
        weight = float(writer == "policy" and bool(by_default))
        for stream in self.streams:
            if stream.component == component and stream.fits(writer, source):
                weight = stream.weight
        return weight

    def has_tokens(self, component: str) -> bool:
        """Returns whether tokens of any writer, in rows of any source, have a weight above 0."""
        sources = {"", *(source for stream in self.streams for source in stream.sources)}
        return any(
            self.weight_of(component, writer, source)
            for writer in get_args(Writer)
            for source in sources
        )

    @property
    def uses_reference(self) -> bool:
        """Returns whether a reference model is kept."""
        return self.kl.coef > 0 or "reference_kl" in self.components

    def moved_reference(self, step: int) -> int:
        """Returns the step whose weights are the reference after `step` steps; 0: those of the
        start, or no reference is kept."""
        every = self.kl.reference_every
        return step // every * every if every and self.uses_reference else 0

    @property
    def measures_kl_before_update(self) -> bool:
        """Returns whether the KL to the reference is needed before the first update of a step."""
        return self.kl.reward_coef > 0 or self.kl.adaptive is not None

    @property
    def needs_old_logprobs(self) -> bool:
        """Returns whether advantages need old log-probabilities."""
        reads = self.mismatch.corrects or self.advantage.needs_squares
        return reads or self.measures_kl_before_update

    def computes_old_logprobs(self, updates: int) -> bool:
        """Returns whether a step of `updates` updates begins with the actor's forward, which gives
        old log-probabilities."""
        compares = updates > 1 or isinstance(self.loss, CovarianceLoss)
        return (compares and self.old_logprobs == "trainer") or self.needs_old_logprobs

    @property
    def corrects_staleness(self) -> bool:
        """Returns whether the loss takes into account which probabilities a token was sampled by."""
        engines = self.old_logprobs == "engine" or getattr(self.loss, "against", "") == "rollout"
        return self.mismatch.corrects or engines

    @property
    def needs_greedy_response(self) -> bool:
        """Returns whether every prompt gets one more response, at temperature 0."""
        return self.advantage.needs_greedy_response

    @property
    def whitens(self) -> bool:
        """Returns whether advantages are shifted and scaled to mean 0 and variance 1 over the
        step's tokens."""
        return self.whiten_advantages or self.advantage.whitens_tokens

    @property
    def advice(self) -> list[str]:
        """Combinations that run but are probably not meant."""
        out = [
            variant.aggregation_advice.format(
                name=variant.name,
                papers=" or ".join(variant.aggregations),
                aggregation=self.aggregation,
            )
            for variant in (self.loss, self.advantage)
            if variant.aggregations is not None and self.aggregation not in variant.aggregations
        ]
        loss = self.loss
        plain = isinstance(loss, PpoClipLoss) and loss.dual_clip is None
        if self.old_logprobs == "engine" and plain:
            out.append(
                "old_logprobs engine: ppo_clip without dual_clip bounds no ratio to the engine's where "
                "the advantage is negative; set loss.dual_clip, such as 3.0"
            )
        in_loss = self.kl.loss_coef or "reference_kl" in self.components
        if in_loss and self.kl.estimator == "k1":
            out.append("the gradient of k1 as a loss is 0 in expectation; use k2, k3 or k1+")
        if self.distillation is not None and self.distillation.loss.endswith("_sum"):
            out.append(
                f"distillation.loss {self.distillation.loss} moves a policy away from a teacher that it "
                f"equals; use {self.distillation.candidates}"
            )
        if self.dynamic_sampling is not None and self.components:
            out.append(
                "dynamic_sampling drops groups by their rewards, and with them demonstrations and teachers' scores"
            )
        if self.dynamic_sampling and self.advantage.reads_parts:
            out.append(
                "dynamic_sampling leaves out groups whose sums are equal, of which "
                f"{self.advantage.name} learns if single scores differ"
            )
        return out

    @property
    def formula(self) -> str:
        """Returns the loss of this configuration in one line of the papers' notation."""
        weight = self.mismatch.weight
        reject = self.mismatch.reject
        clip = self.advantage_clip
        loss = self.loss.shown_formula
        terms = [f"w {loss}" if weight else loss]
        if self.kl.loss_coef:
            terms.append(f"{self.kl.loss_coef:g} KL_{self.kl.estimator}")
        if self.entropy_coef:
            terms.append(f"({-self.entropy_coef:g}) H")
        advantage = self.advantage.shown_formula
        if self.whiten_advantages or clip:
            advantage = f"({advantage})"
        advantage = f"whitened {advantage}" if self.whiten_advantages else advantage
        left_out = [
            "responses cut by length" if self.mask_truncated else "",
            reject.formula if reject else "",
            self.dynamic_sampling.dropped if self.dynamic_sampling else "",
        ]
        reward = f"r = {self.reward.formula}"
        if self.advantage.reads_parts:
            reward = "r_k, w_k = score and weight of grader k"
        if self.kl.reward_coef:
            reward += f" - {self.kl.reward_coef:g} sum_t KL_{self.kl.estimator}"
        parts = [
            f"{_AGGREGATION_FORMULAS[self.aggregation]} [{' + '.join(terms)}]",
            f"w = {weight.formula}" if weight else "",
            f"A = {advantage}" + (f" in [-{clip:g}, {clip:g}]" if clip else ""),
            reward,
            f"without {', '.join(filter(None, left_out))}" if any(left_out) else "",
            f"distillation = {self.distillation.formula}" if self.distillation else "",
            *(stream.formula for stream in self.streams),
        ]
        return ", ".join(filter(None, parts))


_AGGREGATION_FORMULAS: dict[Aggregation, str] = {
    "token-mean": "1/N_tok sum_it",
    "seq-mean-token-sum": "1/N_seq sum_it",
    "seq-mean-token-mean": "1/N_seq sum_i 1/T_i sum_t",
    "seq-mean-token-sum-norm": "1/(N_seq C) sum_it",
}
