"""The data that flows through the loop: Prompt -> RolloutGroup(Sample) -> Batch -> MicroBatch ->
metrics.

Dimensions: N samples of this rank, T tokens of their prompts and responses, S tokens of the
longest; b rows and s columns of a micro-batch. Per-token values are flat, [T]: one sample after the
other, without padding. Index t belongs to tokens[t]; only `targets` in batching/microbatch.py
shifts. Log-probabilities are natural logarithms.
"""

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import numpy as np

if TYPE_CHECKING:  # this file loads without torch
    import torch
    from torch import Tensor

IMAGE_TEXT = "<image>"  # in a prompt's text: an image of the row's column comes here
# ascending: the groups that one optimizer update trains on, as in Batch.group_ids
GroupIds = tuple[int, ...]
Pass = tuple[GroupIds, ...]  # the updates of one pass over a step's groups
Updates = tuple[Pass, ...]  # all updates of a step, over all ranks


class WithArrays:
    """Converts fields of a dataclass from any sequence to numpy arrays, and compares by their
    values.

    A token's id and log-probability take 8 bytes; as Python numbers in tuples they took 83.
    """

    _types: ClassVar[dict[str, type]] = {}  # by field; None stays None

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
    return [{"text": content}] if isinstance(content, str) else content


def words_of(message: dict) -> str:
    """Returns the texts in the content of a message, with `<image>` for each image, and its calls
    of tools as JSON."""
    calls = [json.dumps(call, ensure_ascii=False) for call in message.get("tool_calls", ())]
    text = "".join(str(part.get("text", IMAGE_TEXT)) for part in parts_of(message))
    return "\n".join([text, *calls])


@dataclass(frozen=True)
class ImageRef:
    """One image of a prompt by its content; a store (data/images.py) has its bytes."""

    key: str  # sha256 of the bytes that engines get: PNG of the resized RGB image, hex
    start: int  # index of its first token in the prompt, placeholders expanded
    grid: tuple[int, int, int]  # patches: time, height, width; it takes t*h*w / merge^2 tokens


@dataclass(frozen=True, eq=False)
class Prompt(WithArrays):
    """One problem of a data file, with its reference answer and grader."""

    _types: ClassVar[dict[str, type]] = {
        "token_ids": np.int32,
        "short_ids": np.int32,
        "demonstration": np.int32,
    }

    id: int  # line in the data file, from 0; numbered over all files if there are several
    text: str  # as tokenized, chat template included
    token_ids: np.ndarray  # [T] int32
    answer: str  # the reference answer, passed to the grader
    grader: str | None = None  # replaces the experiment's grader for this prompt
    location: str = ""  # file:line, for messages
    source: str = ""  # name of its source, in metrics by source
    # of data.extra_key: for graders with `extra_info`
    extra: dict[str, object] = field(default_factory=dict)
    images: tuple[ImageRef, ...] = ()  # in the order of their tokens
    # int32, one pad an image: what engines are sent; None: token_ids
    short_ids: np.ndarray | None = None
    # of `text`, an image as {"type": "image"}; []: it has no chat template
    messages: list[dict] = field(default_factory=list)
    tools: list[dict] = field(default_factory=list)  # of its row, for the chat template
    # names and weights (they sum to 1) of the teachers that score its responses
    teachers: tuple[tuple[str, float], ...] = ()
    # by component of the loss: factors of the weights of its tokens; a component left out has 1
    weights: dict[str, float] = field(default_factory=dict)
    demonstration: np.ndarray | None = None  # [T] int32, a response to learn; None: it has none

    @property
    def question(self) -> str | list[dict]:
        """Returns its messages; its text without a chat template."""
        return self.messages or self.text

    @property
    def words(self) -> str:
        """Returns the words of its last message; its text without a chat template."""
        return words_of(self.messages[-1]) if self.messages else self.text

    @property
    def transcript(self) -> str:
        """Returns its words; of several messages, those of each behind its role."""
        if len(self.messages) < 2:
            return self.words
        return "\n\n".join(f"{one['role']}: {words_of(one)}" for one in self.messages)


@dataclass(frozen=True, eq=False)
class TeacherScores(WithArrays):
    """A response under its row's teachers, at the temperature it was sampled with: of T tokens.

    Of several teachers the mixture: log sum_i w_i p_i.
    """

    _types: ClassVar[dict[str, type]] = {
        "logprobs": np.float32,
        "top_ids": np.int32,
        "top_logprobs": np.float32,
    }

    logprobs: np.ndarray  # [T] float32, of the sampled tokens; 0 for a tool's
    # [T, k] int32, tokens that distillation compares: the most probable ones of the policy, or of
    # the teacher; None for reverse_kl
    top_ids: np.ndarray | None = None
    top_logprobs: np.ndarray | None = None  # [T, k] float32, of these under the teachers
    loss: str = ""  # of algorithm.distillation, for which they were asked


@dataclass(frozen=True, eq=False)
class Sample(WithArrays):
    """One response as the engine returned it; it is never tokenized again. T response tokens.

    A rollout may have several: paths through a tree of turns. A token that two of them share is
    trained on in the first one; in the other it is context, part of `prompt_ids` or off the loss
    mask.
    """

    _types: ClassVar[dict[str, type]] = {
        "token_ids": np.int32,
        "logprobs": np.float32,
        "loss_mask": np.bool_,
        "prompt_ids": np.int32,
    }

    index: int  # within its group, from 0: one rollout after the other
    token_ids: np.ndarray  # [T] int32, the token that ended the response included
    # [T] float32, of the sampled tokens after temperature, by the engine; 0 for a tool's tokens
    logprobs: np.ndarray
    finish_reason: str  # "stop" | "length"
    weight_version: int  # of the weights that sampled its first token: the number of finished steps
    text: str  # decoded without special tokens; what the grader sees
    # [T] bool, False on a tool's tokens; None: every token was sampled
    loss_mask: np.ndarray | None = None
    # (token, version), ascending: from this token on, newer weights sampled the rest
    newer: tuple[tuple[int, int], ...] = ()
    # [prompt + T - 1, MoE layers, k] uint8 or int16: the engine's experts of every token of prompt
    # and response except the last, which it never read; actor.routing_replay: rollout
    routed_experts: np.ndarray | None = None
    # index of its rollout within the group; None: its own index, one sample a rollout
    rollout: int | None = None
    prompt_ids: np.ndarray | None = None  # int32, what it continues; None: the group's prompt
    # tokens, from its first on, that an earlier sample of its rollout has: context, of no component
    shared: int = 0
    teacher: TeacherScores | None = None  # None: its row has no teacher

    @property
    def of_rollout(self) -> int:
        """Returns the index of its rollout within the group."""
        return self.index if self.rollout is None else self.rollout

    @property
    def num_candidates(self) -> int | None:
        """Returns the number of tokens beside its own that teachers scored at each position; None
        without scores."""
        if self.teacher is None:
            return None
        return 0 if self.teacher.top_ids is None else self.teacher.top_ids.shape[1]

    def token_versions(self) -> np.ndarray:
        """Returns the version of the weights that sampled each token, [T] int32; a tool's repeat
        the previous."""
        versions = np.full(len(self.token_ids), self.weight_version, np.int32)
        for start, version in self.newer:
            versions[start:] = version
        return versions


@dataclass(frozen=True)
class Outcome:
    """A grader's verdict on one response: a score, or the reason why there is none."""

    status: str  # "score" | "error" | "timeout"
    value: float = 0.0  # the score; meaningful for status "score" only
    detail: str = ""  # why there is no score, or the grader's note on it
    # of several graders, by name; {} for a single one
    parts: "dict[str, Outcome]" = field(default_factory=dict)
    # (index of a response token, reward), ascending: shares of the score that belong to parts of
    # the response
    token_rewards: tuple[tuple[int, float], ...] = ()
    # what ended a rollout with an environment, one of agents/environments.py ENDS; "" without one
    end: str = ""
    turn_rewards: tuple[float, ...] = ()  # of the turns that an environment answered

    @property
    def ok(self) -> bool:
        """Returns whether there is a score."""
        return self.status == "score"


@dataclass(frozen=True)
class RolloutGroup:
    """The G rollouts of one prompt, which are each other's baseline, with their outcomes; mostly a
    sample each."""

    # the index of its prompt in the run, over all epochs; in an evaluation, in its prompts
    group_id: int
    prompt: Prompt
    samples: tuple[Sample, ...]  # in order of their index, [G] if every rollout has one
    outcomes: tuple[Outcome, ...]  # [G], of the rollouts
    # only with advantage "remax": a response at temperature 0, never trained on
    greedy: Sample | None = None
    greedy_outcome: Outcome | None = None

    @property
    def rollouts(self) -> tuple[tuple[Sample, ...], ...]:
        """Returns the samples of each rollout, [G]."""
        found: list[list[Sample]] = [[] for _ in self.outcomes]
        for sample in self.samples:
            found[sample.of_rollout].append(sample)
        return tuple(map(tuple, found))

    def is_scored(self, every_row: bool, loss: str, num_candidates: int) -> bool:
        """Returns whether its samples have the scores of their row's teachers that this loss needs:
        of every row, or of rows that name some."""
        wanted = num_candidates if every_row or self.prompt.teachers else None
        return all(
            sample.num_candidates == wanted
            and (sample.teacher is None or sample.teacher.loss == loss)
            for sample in self.samples
        )

    def is_of(self, oldest: int) -> bool:
        """Returns whether all its tokens are of these weights or newer ones; a rollout that failed
        may have none."""
        return all(
            sample.weight_version >= oldest for sample in self.samples if len(sample.token_ids)
        )


# An engine's load: the share of its KV cache in use, and requests that run, that wait, and that it
# retracted for lack of cache.
LOADS = ("kv_use", "running", "waiting", "retracted")


@dataclass(frozen=True)
class EngineInfo:
    """The state of one engine as the rollout service reports it."""

    id: str
    url: str  # of its HTTP server; "" while starting
    # "starting" | "stale" (its weights are not verified) | "ready" | "asleep" | "draining" | "dead"
    state: str
    weight_version: int | None  # last verified by a trainer; None: unknown
    incarnation: int  # number of its starts
    restarts: int  # counted against rollout.max_restarts
    pid: int  # of its first server process; 0 while starting
    reason: str  # of its last death; "" before
    # most since its weights were verified: see LOADS
    load: dict[str, float] = field(default_factory=dict, hash=False)
    # at the last look; {}: it did not answer
    load_now: dict[str, float] = field(default_factory=dict, hash=False)
    cache_tokens: int | None = None  # that its caches hold; None: it did not say
    # whether it gets requests: from the first weights that were verified in this incarnation, also
    # while newer ones are written, until it sleeps, is drained or ends
    serves: bool = False
    teacher: str = ""  # that it scores for; "": it samples

    @property
    def alive(self) -> bool:
        """Returns whether it answers, so that weights may be published to it."""
        return self.state in ("stale", "ready", "asleep")


@dataclass(frozen=True)
class ReferenceStates:
    """The reference model's side of the exact KL: last hidden states of this rank's R trained
    positions.

    H: hidden size, V: padded vocabulary size. Empty before the last pipeline stage.
    """

    hidden: "Tensor"  # [R, H]
    # [T] int64, on the host: the row of `hidden` that predicts tokens[t]; -1 if on no row of this
    # rank
    index: "Tensor"
    output_weight: "Tensor | None"  # [V / tp, H]; None before the last stage


@dataclass(frozen=True)
class Rewards:
    """The graders' verdicts on the N samples of a Batch: those of their rollouts."""

    values: "Tensor"  # [N] float64, 0 if not valid
    valid: "Tensor"  # [N] bool, the outcome was a score
    # [N] float64, of the group's greedy response; only with advantage "remax"
    greedy: "Tensor | None" = None
    # [T] float64, shares of the values that belong to tokens; None: graders gave none
    tokens: "Tensor | None" = None
    # [N, K] float64, the scores of K graders, and their weights [K]; None: nothing reads them
    parts: "Tensor | None" = None
    weights: "Tensor | None" = None


@dataclass(frozen=True)
class Routing:
    """The experts of a Batch's tokens in the MoE layers of this pipeline stage;
    actor.routing_replay."""

    experts: "Tensor"  # [T, layers, k] uint8 or int16, 0 beyond `lengths`
    lengths: "Tensor"  # [N] int64, tokens of each sample whose experts are known, from its first on


@dataclass(frozen=True)
class Correction:
    """Correction of the trainer/rollout mismatch; algo/correction.py."""

    weights: "Tensor | None" = None  # [T] float32, factors of the policy loss; None: 1
    # [T] bool, tokens of the loss's denominators; None: the loss mask
    counted: "Tensor | None" = None
    # [T] bool, the loss mask before tokens were rejected; None: none were
    before_rejection: "Tensor | None" = None


@dataclass(frozen=True)
class Streams:
    """The tokens of each component of the loss, and their teachers' scores; algorithm.streams."""

    # by component, rl included: [T] float32, 0 on tokens that are not of it
    weights: "dict[str, Tensor]"
    # of distillation; see TeacherScores: [T], [T, k] and [T, k], 0 without a teacher
    teacher_logprobs: "Tensor | None" = None
    top_ids: "Tensor | None" = None
    top_logprobs: "Tensor | None" = None


@dataclass(frozen=True)
class Batch:
    """This data-parallel rank's samples of one step, on the host; each MicroBatch copies its own to
    the device."""

    # [N] int64, RolloutGroup.group_id * (most samples of a group) + index, of a demonstration
    # -1 - group_id: an order that no layout changes
    sample_ids: "Tensor"
    # [N] int64, dense: the order of the groups among those of the step, 0 .. num_groups - 1
    group_ids: "Tensor"
    num_groups: int  # over all ranks
    tokens: "Tensor"  # [T] int32
    lengths: "Tensor"  # [N] int64, tokens of prompt + response
    prompt_lengths: "Tensor"  # [N] int64, tokens
    loss_mask: "Tensor"  # [T] bool, the tokens that the policy sampled
    rollout_logprobs: "Tensor"  # [T] float32, 0 off the response
    rewards: Rewards
    truncated: "Tensor"  # [N] bool, the response ended by length
    # [T] int32, weight versions between sampling and training; None: all are 0
    lags: "Tensor | None" = None
    advantages: "Tensor | None" = None  # [T] float32, 0 off the loss mask
    # [T] float32, by the actor before the first update of the step
    old_logprobs: "Tensor | None" = None
    ref_logprobs: "Tensor | None" = None  # [T] float32, by the reference model
    reference: ReferenceStates | None = None  # KL estimator "full", instead of ref_logprobs
    correction: Correction = Correction()
    routing: Routing | None = None
    streams: Streams | None = None  # None: rl alone, on all tokens that the policy sampled
    updates: Updates = ()  # (): for forwards only
    # [M] int64, samples of each rollout, which are neighbors; None: one each. Read by
    # algo/rollouts.py
    rollout_sizes: "Tensor | None" = None
    images: tuple[tuple[ImageRef, ...], ...] = ()  # of each sample, [N]; (): none has any

    @property
    def starts(self) -> "Tensor":
        """Index of each sample's first token, [N] int64."""
        return self.lengths.cumsum(0) - self.lengths

    @property
    def rl_mask(self) -> "Tensor":
        """The tokens of the component rl, [T] bool."""
        return self.loss_mask if self.streams is None else self.loss_mask & self._of("rl")

    @property
    def trained_mask(self) -> "Tensor":
        """The tokens of any component, and all others of the loss mask, [T] bool."""
        mask = self.loss_mask
        others = () if self.streams is None else self.streams.weights.keys() - {"rl"}
        for component in others:
            mask = mask | self._of(component)
        return mask

    def _of(self, component: str) -> "Tensor":
        assert self.streams is not None
        return self.streams.weights[component] != 0

    @property
    def num_updates(self) -> int:
        """Number of optimizer updates of the step, in all its passes over the groups."""
        return sum(map(len, self.updates))


def on_device(tensor: "Tensor", device: "torch.device") -> "Tensor":
    """Copies a host tensor to `device` without waiting for it."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


@dataclass(frozen=True)
class Targets:
    """The R positions of a micro-batch whose next token is trained on, mostly one that the policy
    sampled, and the indices of those tokens.

    Under context parallelism only those in this rank's part.
    """

    flat: "Tensor"  # [R] int64, ascending: indices into the flattened [b, s]
    rows: "Tensor"  # [R] int64, the sample of the token that each predicts
    columns: "Tensor"  # [R] int64, its index in the sample


@dataclass(frozen=True)
class MicroImages:
    """The k distinct images of a micro-batch, and where their features go: always on the host."""

    refs: tuple[ImageRef, ...]  # [k], whose features are F rows, one image after the other
    rows: "Tensor"  # [p] int64: of a feature among the F
    # [p] int64, ascending: where it goes in the flattened [b, s] of this context-parallel rank
    places: "Tensor"


@dataclass(frozen=True)
class MicroBatch:
    """The input of one forward pass: samples of a Batch, laid out [b, s] padded or as one packed
    row [1, s].

    Under context parallelism [b, s / cp], this rank's part; fields after `targets` are of the
    whole. On the host until `to`; members and places stay there.
    """

    tokens: "Tensor"  # [b, s] int64, 0 as padding
    positions: "Tensor"  # [b, s] int64, from 0 in every sequence
    # [k + 1] int32 if packed: starts of the k sequences and the end; else None
    cu_seqlens: "Tensor | None"
    rows: "Tensor"  # [b, s] int64, the sample each position belongs to; -1 padding
    columns: "Tensor"  # [b, s] int64, the index in the sample; -1 padding
    targets: Targets
    members: "Tensor"  # [n] int64, ascending: the samples in it
    places: "Tensor"  # [t] int64, indices of their tokens in the Batch: one sample after the other
    grid: "Tensor"  # [t] int64, indices of the same tokens in the flattened [n, S]
    target_grid: "Tensor"  # [R] int64, indices of the targets in the flattened [n, S]
    longest: int  # S, of the whole Batch: a sum over a row has the same bits in every micro-batch
    max_seqlen: int = 0  # tokens of the longest sequence, padding included
    # [3, b, s] int64: in time, height, width; only of vision-language models
    rope_positions: "Tensor | None" = None
    images: MicroImages | None = None  # None: of a text-only model

    def to(self, device: "torch.device") -> "MicroBatch":
        """Returns it on `device`, without waiting."""

        def moved(of: "MicroBatch | Targets") -> "dict[str, Tensor]":
            tensors = {name: value for name, value in vars(of).items() if hasattr(value, "device")}
            return {
                n: on_device(tensor, device)
                for n, tensor in tensors.items()
                if n not in ("members", "places")
            }

        return MicroBatch(
            **(vars(self) | moved(self) | {"targets": Targets(**moved(self.targets))})
        )

    def padded(self, values: "Tensor") -> "Tensor":
        """Returns values [T, ...] of the Batch's tokens for the samples in it: [n, S, ...] on its
        device, 0 beyond their ends."""
        mine = on_device(values[self.places], self.grid.device)
        rest = values.shape[1:]
        return (
            mine.new_zeros(len(self.members) * self.longest, *rest)
            .index_copy(0, self.grid, mine)
            .view(-1, self.longest, *rest)
        )


@dataclass(frozen=True)
class RewardMoments:
    """Moments of all valid rewards so far; the root of the sum, because squares of huge rewards
    overflow."""

    count: int = 0  # rewards
    mean: float = 0.0
    root: float = 0.0  # of the sum of squared deviations from the mean


@dataclass(frozen=True)
class AlgoState:
    """State that the algorithm carries from step to step; the functions that change it return a new
    one."""

    reward_moments: RewardMoments = RewardMoments()
    kl_coef: float | None = None  # the adaptive KL coefficient; None before the first step


@dataclass(frozen=True, eq=False)
class RowResults(WithArrays):
    """What the last group of each of the data's R rows showed, and rows drawn ahead;
    data.curriculum. 24 bytes a row."""

    _types: ClassVar[dict[str, type]] = {
        "last_step": np.int32,
        "times_seen": np.int32,
        "pass_rate": np.float64,  # 1/10 is the 0.1 of a limit; in float32 it is more
        "reward_mean": np.float64,
        "drawn": np.int32,
    }

    last_step: np.ndarray  # [R] int32, the step that consumed it, from 1; 0: the row had none yet
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
    # Dynamic sampling: groups for the next step. This rank's; in a checkpoint those of all ranks.
    surplus: list[RolloutGroup] = field(default_factory=list)
    # rollout.max_staleness: finished groups that no step has consumed, of all ranks. Only in a
    # checkpoint: while a run goes on its source has them
    ahead: list[RolloutGroup] = field(default_factory=list)
    curriculum: RowResults | None = None  # data.curriculum; None: none, or before its first step
