"""The `algorithm.streams` and `algorithm.distillation` sections: which tokens each component of the
loss is made of."""

from typing import Literal

from pydantic import Field

from megagrpo.config.fields import NonNegativeFloat, Number, PositiveFloat, Rule, Section, named

Component = Literal["rl", "distillation", "cross_entropy", "reference_kl"]
Writer = Literal["policy", "tool", "data"]
LOGPROB_MIN = -10.0  # verl's log_prob_min_clamp
TOP_K = 16


class DistillationConfig(Section):
    """On-policy distillation from `teachers`, a loss component on rows that have a teacher."""

    loss: Literal[
        "reverse_kl", "student_topk", "teacher_topk", "student_topk_sum", "teacher_topk_sum"
    ] = "reverse_kl"
    """reverse_kl: the policy loss with A = log p_teacher - log p_old for the sampled token.
    student_topk: sum of p (log p - log p_teacher) - p + p_teacher over the top_k tokens that are
    most probable for the policy. teacher_topk: sum of p_teacher (log p_teacher - log p) - p_teacher
    + p over those of the teacher. _sum: without the last two terms, as in verl, so the gradient at
    the teacher is not 0."""
    top_k: int = Field(default=TOP_K, ge=1, le=256)
    """Tokens per position that every loss except reverse_kl compares."""
    logprob_min: Number = LOGPROB_MIN
    """Smallest log-probability of the teacher, and with _sum of the policy. Smaller ones count as
    this value, so tokens that both find less probable count 0."""
    loss_max: PositiveFloat | None = None
    """Largest loss per token, without a gradient beyond it. In reverse_kl, the largest advantage
    either way."""

    def problems(self) -> list[Rule]:
        given = {"top_k": self.top_k != TOP_K, "logprob_min": self.logprob_min != LOGPROB_MIN}
        unread = [name for name, differs in given.items() if differs]
        return [
            Rule(
                self.loss == "reverse_kl" and unread,
                f"loss reverse_kl compares the sampled token alone and reads no {named(unread)}",
                "remove it, or choose a loss of several tokens such as student_topk",
            )
        ]

    @property
    def num_candidates(self) -> int:
        """Tokens of each position that teachers score beside the sampled one."""
        return 0 if self.loss == "reverse_kl" else self.top_k

    @property
    def candidates(self) -> str:
        """The loss whose tokens teachers score: those of a plain sum are of the loss without _sum."""
        return self.loss.removesuffix("_sum")

    @property
    def formula(self) -> str:
        """The loss of a token, as AlgorithmConfig.formula writes it."""
        return {
            "reverse_kl": "policy loss of A = log p_T - log p_old",
            "student_topk": f"sum_top{self.top_k} [p (log p - log p_T) - p + p_T]",
            "teacher_topk": f"sum_top{self.top_k} [p_T (log p_T - log p) - p_T + p]",
            "student_topk_sum": f"sum_top{self.top_k} p (log p - log p_T)",
            "teacher_topk_sum": f"sum_top{self.top_k} p_T (log p_T - log p)",
        }[self.loss]


class StreamConfig(Section):
    """Tokens for one loss component. If several entries fit a token, the last one counts. A
    component is divided by the number of its tokens in the update, over all ranks."""

    component: Component
    """rl: the loss in `loss`, `advantage`, `kl` and `entropy_coef`. distillation: the loss in
    `distillation`. cross_entropy: -log p. reference_kl: `kl.estimator` against the
    reference (see `kl`)."""
    weight: NonNegativeFloat = 1.0
    """Weight of these tokens. 0 leaves them out. Row weights in `data.weight_key` multiply it."""
    written_by: list[Writer] = Field(default=["policy"], min_length=1)
    """Writers of the tokens: the policy, a tool between its turns, or data (a demonstration in
    `data.demonstration_key`)."""
    sources: list[str] = Field(default=[])
    """Sources of the rows. Default: all."""

    def fits(self, writer: Writer, source: str) -> bool:
        """Returns whether a token of this writer in a row of this source is one of its own."""
        return writer in self.written_by and (not self.sources or source in self.sources)

    @property
    def formula(self) -> str:
        """Its tokens and their weight, as AlgorithmConfig.formula writes them."""
        where = ", ".join([*self.written_by, *self.sources])
        return f"{self.component} {self.weight:g} on {where}"

    def problems(self) -> list[Rule]:
        sampled_only = self.component in ("rl", "distillation")
        others = [writer for writer in self.written_by if writer != "policy"]
        return [
            Rule(
                sampled_only and others,
                f"component {self.component} is of tokens that the policy sampled, and "
                f"written_by names {named(others)}",
                "use cross_entropy for those",
            )
        ]
