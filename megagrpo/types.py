"""What flows through the loop: Prompt -> RolloutGroup(Sample) -> Batch -> MicroBatch -> metrics.

Position t of every [N, S] tensor is about tokens[:, t]; `targets` in microbatch.py is the one place that shifts.
"""

from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # config.py and this file load without torch
    from torch import Tensor


@dataclass(frozen=True)
class Prompt:
    """One problem: its stable id in the data file, its token ids, and what the grader needs."""

    id: int
    text: str
    token_ids: tuple[int, ...]
    answer: str
    grader: str | None = None  # overrides the experiment's grader for this line


@dataclass(frozen=True)
class Sample:
    """One response as the engine returned it: token ids are never re-tokenised."""

    index: int  # within its group
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]  # of token_ids, after temperature, by the engine
    finish_reason: str  # "stop" | "length"
    weight_version: int
    text: str
    loss_mask: tuple[int, ...] | None = None  # None: every response token was sampled; 0 marks tool output


@dataclass(frozen=True)
class Outcome:
    """What a grader said: a score, or why there is none."""

    status: str  # "score" | "error" | "timeout"
    value: float = 0.0  # meaningful for "score" only
    detail: str = ""

    @property
    def ok(self) -> bool:
        return self.status == "score"


@dataclass(frozen=True)
class RolloutGroup:
    """The answers to one prompt. `group_id` is dense over the step, 0..num_groups-1, over all data-parallel ranks."""

    group_id: int
    prompt: Prompt
    samples: tuple[Sample, ...]
    outcomes: tuple[Outcome, ...]  # one per sample
    greedy: Sample | None = None  # remax only: a response at temperature 0, never trained on
    greedy_outcome: Outcome | None = None


@dataclass(frozen=True)
class EngineInfo:
    """One engine as the rollout service describes it. It answers in the states "stale" (unverified weights) and "ready" only."""

    id: str
    url: str  # of its HTTP server; "" while starting
    state: str  # starting | stale | ready | draining | dead
    weight_version: int | None  # verified by a trainer
    incarnation: int  # counts its starts
    restarts: int
    pid: int
    reason: str  # of its last death

    @property
    def alive(self) -> bool:
        return self.state in ("stale", "ready")


@dataclass(frozen=True)
class ReferenceStates:
    """What the exact KL needs of the reference model: last hidden states of this rank's trained positions. Empty before the last stage."""

    hidden: "Tensor"  # [T, H]
    index: "Tensor"  # [N, S] int64, the row of `hidden` that predicts tokens[:, t]; -1 where there is none on this rank
    output_weight: "Tensor | None"  # [V / tp, H]


@dataclass(frozen=True)
class Batch:
    """This data-parallel rank's samples of one step, right-padded. N samples, S = longest prompt + response here."""

    sample_ids: "Tensor"  # [N] int64, group_id * group_size + index: the order that does not depend on the layout
    group_ids: "Tensor"  # [N] int64
    num_groups: int  # over all ranks
    tokens: "Tensor"  # [N, S] int64
    lengths: "Tensor"  # [N] int64, prompt + response
    prompt_lengths: "Tensor"  # [N] int64
    loss_mask: "Tensor"  # [N, S] float32, 1 on tokens that the policy sampled
    rollout_logprobs: "Tensor"  # [N, S] float32, 0 off the response
    rewards: "Tensor"  # [N] float64, the grader's; 0 where not valid
    valid: "Tensor"  # [N] bool, the outcome was a score
    truncated: "Tensor"  # [N] bool, ended by length
    greedy_rewards: "Tensor | None" = None  # [N] float64, remax
    advantages: "Tensor | None" = None  # [N, S] float32
    old_logprobs: "Tensor | None" = None  # [N, S] float32, the actor before the first update of the step
    ref_logprobs: "Tensor | None" = None  # [N, S] float32
    reference: ReferenceStates | None = None  # KL estimator "full", instead of ref_logprobs
    policy_weights: "Tensor | None" = None  # [N, S] float32, correction of the trainer/rollout mismatch
    denominator_mask: "Tensor | None" = None  # [N, S] bool, what N_tok and N_seq count; None: loss_mask

    def to(self, device) -> "Batch":
        moved = {f.name: v.to(device) for f in fields(self) if hasattr(v := getattr(self, f.name), "to")}
        return replace(self, **moved)


@dataclass(frozen=True)
class MicroBatch:
    """What one forward pass sees: rows of a Batch, laid out [b, s] padded or as one packed row [1, s].

    Under context parallelism [b, s / cp]: this rank's part; cu_seqlens, members and max_seqlen are of the whole.
    """

    tokens: "Tensor"  # [b, s] int64
    positions: "Tensor"  # [b, s] int64
    cu_seqlens: "Tensor | None"  # [k + 1] int32 when packed, else None
    rows: "Tensor"  # [b, s] int64, the Batch row each position belongs to; -1 padding
    columns: "Tensor"  # [b, s] int64, the Batch column; -1 padding
    members: "Tensor"  # [n] int64, ascending: the Batch rows in it
    max_seqlen: int = 0


@dataclass(frozen=True)
class RewardMoments:
    """Moments of all valid rewards so far. A root and not the sum itself: squares of huge rewards overflow."""

    count: int = 0  # rewards
    mean: float = 0.0
    root: float = 0.0  # of the sum of squared deviations from the mean


@dataclass(frozen=True)
class AlgoState:
    """What the algorithm carries from step to step; the functions that change it return a new one."""

    reward_moments: RewardMoments = RewardMoments()
    kl_coef: float | None = None  # reached by the adaptive KL coefficient; None before the first step


@dataclass
class TrainState:
    """Holds all that a checkpoint keeps beside weights and optimiser."""

    step: int = 0  # steps finished; also the version of the weights
    data_cursor: int = 0  # prompts consumed so far, over all epochs
    algo_state: AlgoState = AlgoState()
    # Dynamic sampling: groups for the next step, ids dense over all ranks. This rank's; in a checkpoint those of all.
    surplus: list[RolloutGroup] = field(default_factory=list)
