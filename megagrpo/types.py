"""The data that flows through the loop: Prompt -> RolloutGroup(Sample) -> Batch -> MicroBatch ->
metrics.

Dimensions: this rank has N samples with T tokens in all, prompts included; a micro-batch has b rows
and s columns, and t trained tokens. Per-token values are flat, [T]: one sample after the other,
without padding. Index t belongs to tokens[t]; only `targets` in batching/microbatch.py shifts.
Log-probabilities are natural logarithms.
"""

import json
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np

if TYPE_CHECKING:  # this file loads without torch
    import torch
    from torch import Tensor

IMAGE_TEXT = "<image>"  # the place of an image in a prompt's text
# of a score and of a token's reward, either way, as of other numbers (config/fields.py): advantages
# in float32 hold its products with weights and scales
_LARGEST_SCORE = 1e9
# The optimizer updates of one pass over a step's groups: for each update the groups that it trains
# on, ascending, as in Batch.group_ids.
Pass = tuple[tuple[int, ...], ...]
Updates = tuple[Pass, ...]  # all updates of a step, over all ranks


class WithArrays:
    """Converts fields of a dataclass from any sequence to numpy arrays, and compares their values.

    A token's id and log-probability take 8 bytes. As Python numbers in tuples they took 83.
    """

    _types: ClassVar[dict[str, type]] = {}  # by field; a field that is None stays None

    def __post_init__(self) -> None:
        for name, kind in self._types.items():
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, np.asarray(value, dtype=kind))

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and all(
            np.array_equal(mine, getattr(other, name)) for name, mine in vars(self).items()
        )

    __hash__ = None  # type: ignore[assignment]  # as for every class that defines __eq__


def parts_of(message: dict) -> list:
    """Returns the parts of a message's content, which may be one text or missing."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return [{"text": content}]
    return content


def words_of(message: dict) -> str:
    """Returns the texts of a message, with `<image>` for each image, and its tool calls as JSON."""
    calls = [json.dumps(call, ensure_ascii=False) for call in message.get("tool_calls", ())]
    text = "".join(str(part.get("text", IMAGE_TEXT)) for part in parts_of(message))
    return "\n".join([text, *calls])


@dataclass(frozen=True)
class ImageRef:
    """One image of a prompt. A store (data/images.py) has the bytes."""

    key: str  # hex sha256 of the bytes that engines receive: PNG of the resized RGB image
    start: int  # index of the image's first token in the prompt, placeholders expanded
    grid: tuple[int, int, int]  # patches in time, height, width; t*h*w / merge^2 tokens


@dataclass(frozen=True, eq=False)
class Prompt(WithArrays):
    """One problem of a data file, with its reference answer and grader."""

    _types: ClassVar[dict[str, type]] = {
        "token_ids": np.int32,
        "short_ids": np.int32,
        "demonstration": np.int32,
    }

    id: int  # line in the data file, from 0; numbered over all files if there are several
    text: str  # the tokenized text, chat template included
    token_ids: np.ndarray  # [T] int32
    answer: str  # the reference answer, passed to the grader
    grader: str | None = None  # replaces the experiment's grader for this prompt
    location: str = ""  # file:line, for messages
    source: str = ""  # the name of the row's source, for metrics by source
    # the object in column data.extra_key, for graders with `extra_info`
    extra: dict[str, object] = field(default_factory=dict)
    images: tuple[ImageRef, ...] = ()  # in the order of their tokens
    # int32, the ids that engines receive, with one pad per image; None: token_ids
    short_ids: np.ndarray | None = None
    # the chat behind `text`, an image as {"type": "image"}; []: there is no chat template
    messages: list[dict] = field(default_factory=list)
    tools: list[dict] = field(default_factory=list)  # the row's tools, for the chat template
    # names of the teachers that score the responses, with weights that sum to 1
    teachers: tuple[tuple[str, float], ...] = ()
    # by loss component, a factor of its tokens' weights; 1 for a component that is not named
    weights: dict[str, float] = field(default_factory=dict)
    demonstration: np.ndarray | None = None  # [T] int32, a response to learn from

    @property
    def question(self) -> str | list[dict]:
        """Returns the messages, or the text if there is no chat template."""
        return self.messages or self.text

    @property
    def words(self) -> str:
        """Returns the words of the last message, or the text if there is no chat template."""
        return words_of(self.messages[-1]) if self.messages else self.text

    def reasoning_begun(self, end: str) -> str:
        """Returns the tag that begins the reasoning which `end` ends, such as <think>, if the
        prompt's text ends with it, else ""."""
        begin = end.replace("/", "", 1)
        return begin if self.text.rstrip().endswith(begin) else ""

    def answer_in(self, response: str, end: str) -> str:
        """Returns the part of a response behind its reasoning, which the text `end` ends; "" if the
        reasoning is not closed. A response without reasoning is all answer; so is any if `end` is
        ""."""
        if not end:
            return response
        begin = end.replace("/", "", 1)
        _, closed, answer = (self.reasoning_begun(end) + response).rpartition(end)
        is_open = not closed if begin == end else begin in answer
        return "" if is_open else answer

    @property
    def transcript(self) -> str:
        """Returns the words; if there are several messages, the words of all, each after its
        role."""
        if len(self.messages) < 2:
            return self.words
        return "\n\n".join(f"{message['role']}: {words_of(message)}" for message in self.messages)


@dataclass(frozen=True, eq=False)
class TeacherScores(WithArrays):
    """A row's teachers' scores of a response of T tokens, at its sampling temperature.

    Several teachers score as a mixture: log sum_i w_i p_i.
    """

    _types: ClassVar[dict[str, type]] = {
        "logprobs": np.float32,
        "top_ids": np.int32,
        "top_logprobs": np.float32,
    }

    logprobs: np.ndarray  # [T] float32, of the sampled tokens; 0 on a tool's tokens
    # [T, k] int32, tokens that distillation compares: the most probable ones of the policy or of
    # the teacher; None for reverse_kl
    top_ids: np.ndarray | None = None
    top_logprobs: np.ndarray | None = None  # [T, k] float32, of `top_ids` under the teachers
    loss: str = ""  # the loss of algorithm.distillation that needs the scores


@dataclass(frozen=True, eq=False)
class Sample(WithArrays):
    """One response of T tokens as the engine returned it. It is never tokenized again.

    A rollout may have several samples: paths through a tree of turns. A token that two of them
    share is trained on in the first one; in the other it is context, part of `prompt_ids` or off
    the loss mask.
    """

    _types: ClassVar[dict[str, type]] = {
        "token_ids": np.int32,
        "logprobs": np.float32,
        "loss_mask": np.bool_,
        "prompt_ids": np.int32,
    }

    index: int  # within the group, from 0, one rollout after the other
    token_ids: np.ndarray  # [T] int32, the token that ended the response included
    # [T] float32, of the sampled tokens after temperature, by the engine; 0 for a tool's tokens
    logprobs: np.ndarray
    finish_reason: str  # "stop" | "length"
    weight_version: int  # steps finished by the weights that sampled the first token
    text: str  # decoded without special tokens, for the grader
    # [T] bool, False on a tool's tokens; None: every token was sampled
    loss_mask: np.ndarray | None = None
    # (token, version), ascending: from this token on, newer weights sampled the rest
    newer: tuple[tuple[int, int], ...] = ()
    # [prompt + T - 1, MoE layers, k] uint8 or int16: the engine's experts for every token of prompt
    # and response except the last, which it never read; actor.routing_replay: rollout
    routed_experts: np.ndarray | None = None
    # index of the rollout within the group; None: `index`, since each rollout has one sample
    rollout: int | None = None
    prompt_ids: np.ndarray | None = None  # int32, the tokens before; None: the group's prompt
    # tokens at the start that an earlier sample of the rollout has: context, in no loss component
    shared: int = 0
    teacher: TeacherScores | None = None  # None: the row has no teacher

    @property
    def rollout_index(self) -> int:
        """Returns the index of the sample's rollout within the group."""
        return self.index if self.rollout is None else self.rollout

    @property
    def num_candidates(self) -> int | None:
        """Returns how many tokens besides the sampled one teachers scored at each position; None
        without scores."""
        if self.teacher is None:
            return None
        if self.teacher.top_ids is None:
            return 0
        return self.teacher.top_ids.shape[1]

    def token_versions(self) -> np.ndarray:
        """Returns the version of the weights that sampled each token, [T] int32; a tool's tokens
        repeat the previous one."""
        versions = np.full(len(self.token_ids), self.weight_version, np.int32)
        for start, version in self.newer:
            versions[start:] = version
        return versions


@dataclass(frozen=True)
class Outcome:
    """A grader's verdict on one response: a score, or the reason why there is none."""

    # "score" | "error" | "timeout"; "" until graders have judged it; of a part also "none": its grader
    # leaves the score to others
    status: str
    value: float = 0.0  # the score; meaningful only for status "score"
    detail: str = ""  # why there is no score, or the grader's note on it
    # the outcomes of several graders by name; {} for a single one
    parts: "dict[str, Outcome]" = field(default_factory=dict)
    # (index of a response token, reward), ascending: shares of the score that belong to parts of
    # the response
    token_rewards: tuple[tuple[int, float], ...] = ()
    # what ended a rollout with an environment, one of agents/environments.py ENDS; "" without one
    end: str = ""
    turn_rewards: tuple[float, ...] = ()  # one per turn that an environment answered

    def __post_init__(self) -> None:
        # a model may write such a number, and sums of finite ones may be infinite or none
        shares = (reward for _, reward in self.token_rewards)
        for score in (self.value, *shares, *self.turn_rewards):
            if self.ok and not abs(score) <= _LARGEST_SCORE:
                detail = f"the score {score} is beyond {_LARGEST_SCORE:g}"
                vars(self).update(status="error", detail=detail)

    @property
    def ok(self) -> bool:
        """Returns whether there is a score."""
        return self.status == "score"


@dataclass(frozen=True)
class RolloutGroup:
    """The G rollouts of one prompt, which are each other's baseline, with their outcomes.

    Most rollouts have one sample.
    """

    # the prompt's index in the run, over all epochs; in an evaluation, among its prompts
    group_id: int
    prompt: Prompt
    samples: tuple[Sample, ...]  # in order of their index, [G] if every rollout has one
    outcomes: tuple[Outcome, ...]  # [G], one per rollout
    # only with advantage "remax": a response at temperature 0, never trained on
    greedy: Sample | None = None
    greedy_outcome: Outcome | None = None

    @property
    def rollouts(self) -> tuple[tuple[Sample, ...], ...]:
        """Returns the samples of each rollout, [G]."""
        rollouts: list[list[Sample]] = [[] for _ in self.outcomes]
        for sample in self.samples:
            rollouts[sample.rollout_index].append(sample)
        return tuple(map(tuple, rollouts))

    def is_scored(
        self, every_row: bool, loss: str, num_candidates: int, graders: frozenset[str]
    ) -> bool:
        """Returns whether the samples have the teachers' scores that this loss needs, and the
        outcomes those of these graders.

        every_row: rows that name no teacher need scores too.
        """
        expected = num_candidates if every_row or self.prompt.teachers else None
        return all(
            sample.num_candidates == expected
            and (sample.teacher is None or sample.teacher.loss == loss)
            for sample in self.samples
        ) and all(graders <= outcome.parts.keys() for outcome in self.outcomes if outcome.ok)

    def for_other_ranks(self) -> "RolloutGroup":
        """Returns the group without experts and texts, for ranks that do not sample.

        They get the experts of their own layers with the batch; the leader grades and records the
        texts.
        """
        bare = (replace(sample, routed_experts=None, text="") for sample in self.samples)
        return replace(self, samples=tuple(bare))

    def is_of(self, oldest: int) -> bool:
        """Returns whether weights of this version or newer ones sampled all tokens; a rollout that
        failed may have none."""
        return all(
            sample.weight_version >= oldest for sample in self.samples if len(sample.token_ids)
        )


# An engine's load: the used share of the KV cache, and the requests that run, that wait, and that
# were retracted for lack of cache.
LOADS = ("kv_use", "running", "waiting", "retracted")


# of a publish: weights will be written; are verified; caches come back; were written in part
EngineEvent = Literal["update", "ready", "wake", "lost"]


@dataclass(frozen=True)
class EngineInfo:
    """The state of one engine as the rollout service reports it."""

    id: str
    url: str  # of the HTTP server; "" while starting
    # "starting" | "stale" (weights not verified) | "ready" | "asleep" | "draining" | "dead"
    state: str
    weight_version: int | None  # last verified by a trainer; None: unknown
    incarnation: int  # number of starts
    restarts: int  # counted against rollout.max_restarts
    pid: int  # of the first server process; 0 while starting
    reason: str  # of the last death; "" before
    # the maxima since the weights were verified: see LOADS
    load: dict[str, float] = field(default_factory=dict, hash=False)
    # at the last look; {}: it did not answer
    load_now: dict[str, float] = field(default_factory=dict, hash=False)
    cache_tokens: int | None = None  # capacity of the KV caches; None: unknown
    # whether it gets requests: from the first weights that were verified in this incarnation, also
    # while newer ones are written, until it sleeps, is drained or ends
    serves: bool = False
    model: str = ""  # "teacher-NAME" or "judge-NAME", which is not trained; "": it samples

    @property
    def alive(self) -> bool:
        """Returns whether the engine answers, so that weights may be published to it."""
        return self.state in ("stale", "ready", "asleep")


@dataclass(frozen=True)
class ReferenceStates:
    """The reference model's side of the exact KL: last hidden states of this rank's R trained
    positions.

    H: hidden size, V: padded vocabulary size. Empty before the last pipeline stage.
    """

    hidden: "Tensor"  # [R, H], on the host
    # [T] int64, on the host: the row of `hidden` that predicts tokens[t]; -1 if this rank has none
    index: "Tensor"
    output_weight: "Tensor | None"  # [V / tp, H]; None before the last stage


@dataclass(frozen=True)
class Rewards:
    """The graders' verdicts on the rollouts of the N samples of a Batch."""

    values: "Tensor"  # [N] float64, 0 if not valid
    valid: "Tensor"  # [N] bool, the outcome was a score
    # [N] float64, of the group's greedy response; only with advantage "remax"
    greedy: "Tensor | None" = None
    # [T] float64, shares of the values that belong to tokens; None: no grader has any
    tokens: "Tensor | None" = None
    # [N, K] float64, the scores of K graders, and the graders' weights [K]; None: nothing reads
    # them
    parts: "Tensor | None" = None
    weights: "Tensor | None" = None


@dataclass(frozen=True)
class Routing:
    """The experts of a Batch's tokens in the MoE layers of this stage; actor.routing_replay."""

    experts: "Tensor"  # [T, layers, k] uint8 or int16, 0 beyond `lengths`
    lengths: "Tensor"  # [N] int64, known tokens of each sample, from the first on


@dataclass(frozen=True)
class Correction:
    """Correction of the trainer/rollout mismatch; algo/correction.py."""

    weights: "Tensor | None" = None  # [T] float32, factors of the policy loss; None: 1
    # [T] bool, tokens of the loss's denominators; None: the loss mask
    counted: "Tensor | None" = None
    distilled: "Tensor | None" = None  # likewise of distillation's; None: those with a weight
    # [T] bool, the loss mask before tokens were rejected; None: none were
    before_rejection: "Tensor | None" = None


@dataclass(frozen=True)
class Streams:
    """The tokens of each loss component, and their teachers' scores; algorithm.streams."""

    # by component, rl included: [T] float32, 0 on tokens outside the component
    weights: "dict[str, Tensor]"
    # for distillation, see TeacherScores: [T], [T, k] and [T, k], 0 without a teacher
    teacher_logprobs: "Tensor | None" = None
    top_ids: "Tensor | None" = None
    top_logprobs: "Tensor | None" = None


@dataclass(frozen=True)
class Batch:
    """This data-parallel rank's samples of one step, on the host; each MicroBatch copies its own to
    the device."""

    # [N] int64, an order that no layout changes: RolloutGroup.group_id * (most samples of a group)
    # + index, or -1 - group_id for a demonstration
    sample_ids: "Tensor"
    # [N] int64: the number of the group in the step, from 0 to num_groups - 1
    group_ids: "Tensor"
    num_groups: int  # over all ranks
    tokens: "Tensor"  # [T] int32
    lengths: "Tensor"  # [N] int64, tokens of prompt + response
    prompt_lengths: "Tensor"  # [N] int64, tokens
    loss_mask: "Tensor"  # [T] bool, the tokens sampled by the policy
    rollout_logprobs: "Tensor"  # [T] float32, 0 off the response
    rewards: Rewards
    truncated: "Tensor"  # [N] bool, the response ended by length
    # [T] int32, weight versions between sampling and training; None: all are 0
    lags: "Tensor | None" = None
    advantages: "Tensor | None" = None  # [T] float32, 0 off the loss mask
    # [T] float32, by the actor before the first update of the step
    old_logprobs: "Tensor | None" = None
    # [T] float32, sums over the vocabulary of squared probabilities, with old_logprobs; only for an
    # estimator that needs them
    squares: "Tensor | None" = None
    ref_logprobs: "Tensor | None" = None  # [T] float32, by the reference model
    chosen: "Tensor | None" = None  # [T] bool, the tokens that a CovarianceLoss treats apart
    reference: ReferenceStates | None = None  # KL estimator "full", instead of ref_logprobs
    correction: Correction = Correction()
    routing: Routing | None = None
    streams: Streams | None = None  # None: only rl, on all tokens of the loss mask
    updates: Updates = ()  # (): only for forwards
    # [M] int64, numbers of the samples of each rollout, which are neighbors; None: one each. Read
    # by algo/rollouts.py
    rollout_sizes: "Tensor | None" = None
    images: tuple[tuple[ImageRef, ...], ...] = ()  # [N], by sample; (): no sample has any

    @property
    def starts(self) -> "Tensor":
        """Index of each sample's first token, [N] int64."""
        return self.lengths.cumsum(0) - self.lengths

    @property
    def rl_mask(self) -> "Tensor":
        """The tokens of the component rl, [T] bool."""
        if self.streams is None:
            return self.loss_mask
        return self.loss_mask & (self.streams.weights["rl"] != 0)

    @property
    def trained_mask(self) -> "Tensor":
        """The tokens of any component, and all others of the loss mask, [T] bool."""
        mask = self.loss_mask
        if self.streams is not None:
            for component, weights in self.streams.weights.items():
                if component != "rl":
                    mask = mask | (weights != 0)
        return mask

    @property
    def num_updates(self) -> int:
        """Number of optimizer updates of the step, in all its passes over the groups."""
        return sum(map(len, self.updates))


def on_device(tensor: "Tensor", device: "torch.device") -> "Tensor":
    """Copies a host tensor to `device` without waiting for it."""
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor


@dataclass(frozen=True)
class Targets:
    """The R positions of a micro-batch whose next token is trained on, and those tokens.

    Under context parallelism only the positions in this rank's part.
    """

    flat: "Tensor"  # [R] int64, ascending: indices of the positions in the flattened [b, s]
    rows: "Tensor"  # [R] int64, the sample of each next token
    columns: "Tensor"  # [R] int64, the index of each next token in its sample


@dataclass(frozen=True)
class MicroImages:
    """The k distinct images of a micro-batch, and where their features go; always on the host."""

    refs: tuple[ImageRef, ...]  # [k]; their features are F rows, one image after the other
    rows: "Tensor"  # [p] int64: the row of each feature among the F
    # [p] int64, ascending: where each feature goes in this context-parallel rank's flattened [b, s]
    places: "Tensor"


_ON_HOST = ("target_places", "members", "places", "trained", "num_trained")


@dataclass(frozen=True)
class MicroBatch:
    """The input of one forward pass: samples of a Batch, padded [b, s] or as one packed row [1, s].

    Under context parallelism the fields up to `target_order` are this rank's part, [b, s / context]
    and R of the t trained tokens; the fields after it are of all parts. On the host until `to`.
    """

    tokens: "Tensor"  # [b, s] int64, 0 as padding
    positions: "Tensor"  # [b, s] int64, from 0 in every sequence
    # [k + 1] int32 if packed: starts of the k sequences and the end; else None
    cu_seqlens: "Tensor | None"
    rows: "Tensor"  # [b, s] int64, the sample that each position belongs to; -1 for padding
    columns: "Tensor"  # [b, s] int64, the index in the sample; -1 for padding
    targets: Targets
    target_places: "Tensor"  # [R] int64, always on the host: the targets' tokens in the Batch
    target_order: "Tensor"  # [R] int64, the places of the same tokens in `trained`
    members: "Tensor"  # [n] int64, ascending: the samples; always on the host, as the next three
    # int64, indices of the samples' tokens in the Batch, one sample after the other
    places: "Tensor"
    trained: "Tensor"  # [t] int64, those of them that a component of the loss trains on
    num_trained: "Tensor"  # [n] int64, of each sample
    sizes: tuple[int, ...]  # tokens of each sequence, padding included, of all context ranks
    context: int = 1  # context-parallel ranks that share it
    # [3, b, s] int64, in time, height, width; only for vision-language models
    rope_positions: "Tensor | None" = None
    images: MicroImages | None = None  # None for a text-only model

    def to(self, device: "torch.device") -> "MicroBatch":
        """Returns the micro-batch on `device`, without waiting for the copies."""

        def moved(holder: "MicroBatch | Targets") -> "dict[str, Tensor]":
            return {
                name: on_device(value, device)
                for name, value in vars(holder).items()
                if hasattr(value, "device") and name not in _ON_HOST
            }

        targets = Targets(**moved(self.targets))
        return MicroBatch(**(vars(self) | moved(self) | {"targets": targets}))

    def at_trained(self, values: "Tensor") -> "Tensor":
        """Returns the values of the t trained tokens on its device, from values [T] of the Batch."""
        return on_device(values[self.trained], self.rows.device)

    def at_targets(self, values: "Tensor") -> "Tensor":
        """Returns the values of the R targets on its device, from values [T, ...] of the Batch."""
        return on_device(values[self.target_places], self.rows.device)


@dataclass(frozen=True)
class RewardMoments:
    """Moments of all valid rewards so far."""

    count: int = 0  # rewards
    mean: float = 0.0
    # root of the sum of squared deviations from the mean: squares of huge rewards overflow
    root: float = 0.0


@dataclass(frozen=True)
class AlgoState:
    """State that the algorithm carries from step to step. Functions return a new one."""

    reward_moments: RewardMoments = RewardMoments()
    kl_coef: float | None = None  # the adaptive KL coefficient; None before the first step


@dataclass(frozen=True, eq=False)
class RowResults(WithArrays):
    """Results of the last group of each of the data's R rows, and the rows drawn ahead.

    For data.curriculum. Takes 24 bytes per row.
    """

    _types: ClassVar[dict[str, type]] = {
        "last_step": np.int32,
        "times_seen": np.int32,
        "pass_rate": np.float64,  # in float32, 1/10 would be above a limit of 0.1
        "reward_mean": np.float64,
        "drawn": np.int32,
    }

    last_step: np.ndarray  # [R] int32, the step that consumed the row's last group; 0: none yet
    times_seen: np.ndarray  # [R] int32, groups of the row so far
    pass_rate: np.ndarray  # [R] float64, the fraction of its scored responses that passed
    reward_mean: np.ndarray  # [R] float64, of its scored responses
    drawn: np.ndarray  # [D] int32, rows of the groups TrainState.data_cursor, + 1, ...


@dataclass
class TrainState:
    """Everything in a checkpoint besides weights and optimizer."""

    step: int = 0  # steps finished; also the version of the weights
    data_cursor: int = 0  # prompts consumed so far, over all epochs
    algo_state: AlgoState = AlgoState()
    # Dynamic sampling: this rank's groups for the next step. A checkpoint has those of all ranks.
    surplus: list[RolloutGroup] = field(default_factory=list)
    # rollout.max_staleness: finished groups that no step has consumed, all or this leader's. Only in
    # a checkpoint, since the source has them while the run goes on.
    ahead: list[RolloutGroup] = field(default_factory=list)
    curriculum: RowResults | None = None  # data.curriculum; None: none, or before its first step
