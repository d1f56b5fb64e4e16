"""The sections of the sampling side: `sampling`, `rollout`, `weights`."""

import re
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, field_validator, model_validator

from megagrpo.config.fields import (
    Dtype,
    LibrarySettings,
    NonNegativeInt,
    Number,
    PositiveFloat,
    PositiveInt,
    Processes,
    Rule,
    Seconds,
    Section,
    TopK,
)

if TYPE_CHECKING:
    from megagrpo.config.schema import ExperimentConfig

_BESIDE_TRAINERS = 0.6  # of a GPU's memory
_KERNELS_COMPILED_S = 3600.0  # FP8's, on GPUs at the first start on a node


class EnvironmentConfig(Section):
    """An environment that answers the model's turns and may give the reward; see
    [agents](../agents.md)."""

    function: str
    """"package.module:function", called as function(row, seed, **args) for every rollout; the
    rollouts of a group get the same row and seed."""
    args: dict[str, str | int | float | bool] = Field(default={})
    """Its keyword arguments."""
    history: Literal["all", "last"] = "all"
    """What a turn sees: everything before it, so that a rollout is one sample, or the environment's
    last message alone, so that every turn is a sample of its own."""
    max_turns: PositiveInt = 8
    """Turns of the model; the rewards so far count then."""
    rewards: bool = True
    """Whether its steps give the reward; false: the graders of `reward` score the text of the whole
    rollout."""
    credit: Literal["rollout", "turn"] = "rollout"
    """Where the reward goes: to the whole rollout, or each step's to the turn before it, for
    estimators with returns (`reinforce`, `reinforce_plus_plus`)."""
    workers: Processes = 2
    """Processes of each rank that samples; each has many environments and answers one call at a
    time."""
    timeout_s: Seconds = 30.0
    """Seconds for one call; then the process is ended, and the rollout's outcome is a timeout,
    never a reward."""
    episode_timeout_s: Seconds | None = None
    """Seconds for all calls of a rollout together, after which its rewards so far count; not the
    time for which it waits for engines or for a process. Default: no limit but
    `rollout.step_timeout_s`."""

    def problems(self) -> list[Rule]:
        whole = self.episode_timeout_s
        return [
            Rule(
                whole is not None and whole <= self.timeout_s,
                f"episode_timeout_s {whole} must be above timeout_s {self.timeout_s:g}, the "
                "limit of one call",
                "raise it, or lower timeout_s",
            ),
            Rule(
                not self.rewards and self.history == "last",
                "rewards false needs history all: graders score one text of a rollout",
                "set history: all",
            ),
            Rule(
                not self.rewards and self.credit == "turn",
                "credit turn needs rewards true: graders score whole rollouts",
                "set credit: rollout",
            ),
        ]


class AgentConfig(Section):
    """A program that talks to the model over a chat endpoint and returns the reward; see
    [agents](../agents.md)."""

    function: str | None = None
    """"package.module:function", async or not, called as function(base_url, key, row, **args) for
    every rollout, or verifiers, an environment of that library."""
    args: dict[str, str | int | float | bool] = Field(default={})
    """Its keyword arguments."""
    command: list[str] = Field(default=[])
    """Instead of a function: a command that finds MEGAGRPO_BASE_URL and MEGAGRPO_KEY (and OpenAI's
    and Anthropic's names for them) in its environment and the row on its standard input, and prints
    the reward as its last line."""
    fork: Literal["sample", "refuse"] = "sample"
    """What becomes of messages that do not extend the last turn, such as a second request after the
    same messages, or a history that was edited or summarised: they begin a sample of their own, or
    the request is refused."""
    history: Literal["all", "last"] = "all"
    """A turn continues the tokens of those before it, so that a rollout that does not fork is one
    sample; or every turn is a sample of its own, for which all messages are rendered: for chat
    templates that cannot be continued."""
    max_turns: PositiveInt = 32
    """Turns of the model."""
    credit: Literal["rollout", "turn"] = "rollout"
    """Where the reward goes: to the whole rollout, or `turn_rewards` to their turns, for estimators
    with returns (`reinforce`, `reinforce_plus_plus`)."""
    truncated_reward: Number | None = None
    """The reward if a limit of tokens or turns made the program fail; default: an error, which has
    no reward."""
    tool_parser: str = ""
    """SGLang's name of the parser of the model's tool calls, such as qwen25; default: its text is
    the message."""
    reasoning_parser: str = ""
    """SGLang's name of the parser of reasoning, such as qwen3."""
    workers: Processes = 2
    """Processes of each rank that samples; each runs many programs at once."""
    timeout_s: Seconds = 600.0
    """Seconds of a program, without those for which engines sample its turns; then it is ended, and
    the rollout's outcome is a timeout, never a reward."""

    def problems(self) -> list[Rule]:
        return [
            Rule(
                bool(self.command) == (self.function is not None),
                "neither function nor command is set, or both are",
                "set one of them",
            ),
            Rule(
                bool(self.args and self.command),
                "args are a function's; a command has its words",
                "write them into command",
            ),
        ]


class SamplingConfig(Section):
    """How responses are sampled."""

    temperature: Annotated[float, Field(ge=0.01, le=100)] = 1.0
    """Sampling temperature; log-probabilities are of the same distribution."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus of probability sampled from; 1: all."""
    top_k: TopK = -1
    """Most probable tokens sampled from; -1 or 0: all."""
    max_response_tokens: PositiveInt = 512
    """Longest response in tokens."""
    stop_token_ids: list[NonNegativeInt] = Field(default=[])
    """Token ids that end a response, beside the model's own end of sequence."""
    stop: list[Annotated[str, Field(min_length=1)]] = Field(default=[])
    """Texts that end a response."""
    skip_special_tokens: bool = False
    """Leave special tokens out of the text that graders, environments and tool parsers see; default:
    only those for padding and the begin and end of texts, and the one that ended the response."""
    environment: EnvironmentConfig | None = None
    """What answers the model; default: nothing."""
    agent: AgentConfig | None = None
    """The program that talks to the model; default: none."""
    allow_truncated_distribution: bool = False
    """Accept top_p < 1 or top_k > 0, for which log-probabilities are not renormalised."""

    def problems(self) -> list[Rule]:
        truncated = self.top_p < 1 or self.top_k > 0
        return [
            Rule(
                truncated and (not self.allow_truncated_distribution),
                "top_p < 1 or top_k > 0 samples from another distribution than the "
                "log-probs describe",
                "set allow_truncated_distribution: true to accept that",
            ),
            Rule(
                self.agent is not None and self.environment is not None,
                "agent with environment: the program has its own",
                "set one of them",
            ),
        ]

    @property
    def rewarding(self) -> str:
        """Returns the key of what gives the reward in place of graders, or ""."""
        if self.agent is not None:
            return "sampling.agent"
        gives = self.environment is not None and self.environment.rewards
        return "sampling.environment" if gives else ""

    @property
    def several_turns(self) -> bool:
        """Returns whether rollouts may have several turns, each a request."""
        return self.environment is not None or self.agent is not None

    def excludes(self, experiment: "ExperimentConfig") -> list[Rule]:
        sees = experiment.data.images_key is not None
        reward = experiment.reward
        advantage = experiment.algorithm.advantage.name
        given = (
            reward.grader,
            reward.graders,
            reward.group_grader,
        )  # a dumped experiment has the default grader, too
        graded = given != (type(reward).model_fields["grader"].default, [], None)
        given_by = self.rewarding or "sampling.agent"
        whole_s = 0.0 if self.environment is None else self.environment.episode_timeout_s or 0.0
        return [
            Rule(
                self.rewarding and graded,
                f"reward has graders, but the reward is given by {given_by}",
                "remove the graders",
            ),
            Rule(
                self.rewarding and experiment.algorithm.needs_greedy_response,
                f"{given_by} with advantage {advantage}: it needs a greedy response "
                "to each prompt, and a greedy rollout would have other turns",
                "take another estimator",
            ),
            Rule(
                whole_s >= experiment.rollout.step_timeout_s,
                "sampling.environment.episode_timeout_s must be below "
                "rollout.step_timeout_s, that of all rollouts of a step",
                "lower it, or raise rollout.step_timeout_s",
            ),
            Rule(
                sees and self.several_turns,
                "sampling.environment and agent with data.images_key: they continue "
                "prompts of text only",
                "remove one of both",
            ),
        ]


class RolloutConfig(Section):
    """The SGLang service: its engines, their size, and what is waited for how long."""

    num_engines: PositiveInt = 1
    """Engines at the start."""
    max_staleness: NonNegativeInt = 0
    """How many versions of the weights a token may be older than those that it trains. So many
    batches ahead are sampled while earlier ones are trained on, and are trained on in their order:
    nothing is thrown away. 0: sampling and training take turns."""
    engine_choice: Literal["request", "group"] = "request"
    """Which requests an engine gets together: each goes to the engine with the fewest (request), or
    those of a group go to one engine (group), which reads their prompt once if
    `sglang: {schedule_policy: lpm}`. Later turns always follow the first."""
    prefix_cache: Literal["flush", "by_version"] = "flush"
    """What a publish does to the engines' prefix caches: it empties them, so that open rollouts are
    read again; or each rollout has the cache of the weights with which it began, whose tokens after
    a publish rest on keys and values of older weights."""
    tp: PositiveInt = 1
    """Tensor-parallel ranks of one engine."""
    ep: PositiveInt = 1
    """Expert-parallel ranks of one engine; divides `tp`."""
    nodes_per_engine: PositiveInt = 1
    """Nodes that one engine spans; divides `tp`."""
    dtype: Dtype = "float32"
    """Type of the engines' weights and activations; default: `actor.dtype`."""
    quantization: Literal["fp8"] | None = None
    """Format of the engines' linear layers and experts, if not `dtype`: E4M3 in blocks of 128 x 128
    with a float32 scale each. Trainers quantise what they publish; embeddings, output layer, norms
    and routers stay in `dtype`. See [FP8 engines](../fp8.md)."""
    draft_tokens: PositiveInt | None = None
    """Tokens that a draft (`actor.draft`) proposes for a forward of the model; samples stay the
    model's. Default: 0."""
    load_format: Literal["dummy", "model"] = "dummy"
    """Engines start with random weights, which the first publish fills and proves (dummy), or read
    `model.path`."""
    deterministic: bool = False
    """Batch-invariant kernels, one seed a sample, deterministic algorithms in trainers: a run can
    be repeated bit by bit, unless caches overflow. On a GPU torch warns of an operator that has no
    such algorithm."""
    max_running_requests: PositiveInt = 128
    """Requests that one engine works on at once."""
    mem_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.85
    """Fraction of GPU memory for weights and KV cache; default under `colocate`: 0.6, for the
    actor's weights stay there while engines sample."""
    colocate: bool = False
    """Engines on the trainers' GPUs, on one node or many, rank for rank: they release their memory
    while the actor trains, and its optimizer's state and gradients go to the host while they
    sample; wants `weights.transport: ipc`."""
    sglang: LibrarySettings = Field(default={})
    """Fields of SGLang's ServerArgs, by their names there, such as `chunked_prefill_size: 8192`."""
    host: str = "127.0.0.1"
    """Address of services, or an interface of all machines: eth0."""
    request_timeout_s: Seconds = 600.0
    """Seconds for one request."""
    step_timeout_s: Seconds = 3600.0
    """Seconds for all groups of a step, of each batch under dynamic sampling, or of an
    evaluation."""
    start_timeout_s: Seconds = 300.0
    """Seconds for an engine, or for Ray, to start; default with `quantization`, whose kernels are
    compiled at the first start on a node: 3600."""
    health_timeout_s: Seconds | None = None
    """Seconds of silence after which an engine is started again; longer than the longest forward
    pass. Default: 300 on GPUs, where the first pass of a length compiles kernels; 60 on a CPU."""
    max_restarts: NonNegativeInt = 5
    """Restarts of one engine over the run."""
    min_healthy_engines: PositiveInt = 1
    """Engines that must hold the new weights for a publish to return without waiting for the
    others."""

    def patience_s(self, cuda: bool) -> float:
        """Returns health_timeout_s, in seconds, of engines on GPUs or on a CPU."""
        return self.health_timeout_s or (300.0 if cuda else 60.0)

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_others(cls, given: object) -> object:
        if isinstance(given, dict) and given.get("colocate") is True:
            given = {"mem_fraction": _BESIDE_TRAINERS} | given
        if isinstance(given, dict) and given.get("quantization") is not None:
            given = {"start_timeout_s": _KERNELS_COMPILED_S} | given
        return given

    def problems(self) -> list[Rule]:
        nodes, healthy = self.nodes_per_engine, self.min_healthy_engines
        return [
            Rule(
                self.tp % nodes,
                f"tp {self.tp} does not divide over nodes_per_engine {nodes}",
                "take a multiple of it",
            ),
            Rule(
                self.tp % self.ep,
                f"tp {self.tp} is not a multiple of ep {self.ep}",
                "take a multiple of it",
            ),
            Rule(
                self.quantization and self.load_format == "model",
                "quantization fp8 with load_format model: the trainers quantise, and the "
                "model's files hold none of that",
                "take dummy",
            ),
            Rule(
                healthy > self.num_engines,
                f"min_healthy_engines {healthy} is more than num_engines {self.num_engines}",
                "lower it",
            ),
        ]

    def excludes(self, experiment: "ExperimentConfig") -> list[Rule]:
        algorithm, weights = experiment.algorithm, experiment.weights
        ahead = self.max_staleness
        corrected = algorithm.mismatch.weight or algorithm.mismatch.reject
        what = (
            f"rollout.max_staleness {ahead} trains on tokens of older weights"
            if ahead
            else "a cache in fp8_e4m3 rounds"
        )
        return [
            Rule(
                self.quantization
                and self.dtype == "float32"
                and (experiment.actor.device != "cpu"),
                "rollout.quantization fp8 with rollout.dtype float32: FP8 layers on GPUs "
                "compute in bfloat16",
                "set rollout.dtype: bfloat16, or actor.device: cpu",
            ),
            Rule(
                self.draft_tokens and (not experiment.actor.has_draft),
                "rollout.draft_tokens without actor.draft: engines would have no draft",
                "add actor.draft: {}, or remove rollout.draft_tokens",
            ),
            Rule(
                self.colocate and weights.uses_groups,
                f"rollout.colocate with weights.transport {weights.transport}: NCCL takes "
                "no two ranks on one GPU",
                "set weights.transport: ipc, or disk",
            ),
            Rule(
                self.colocate and ahead,
                f"rollout.max_staleness {ahead} with rollout.colocate: engines sleep while "
                "the actor trains, and can sample nothing ahead",
                "set one of them",
            ),
            Rule(
                self.max_staleness == 1 and algorithm.dynamic_sampling,
                "rollout.max_staleness 1 with algorithm.dynamic_sampling: groups that a "
                "step leaves over are trained on one step later, so that nothing could be "
                "sampled ahead within the bound",
                "take 2 or more, or 0",
            ),
            Rule(
                not corrected and (ahead or self.sglang.get("kv_cache_dtype") == "fp8_e4m3"),
                f"{what}, which needs a correction",
                "set algorithm.mismatch.weight, such as {name: tis}, or algorithm.mismatch.reject",
            ),
            Rule(
                self.prefix_cache == "by_version" and (not ahead),
                "rollout.prefix_cache by_version without max_staleness: no rollout "
                "outlives a publish, and what is kept would be of no use",
                "take flush",
            ),
            Rule(
                self.prefix_cache == "by_version" and self.deterministic,
                "rollout.prefix_cache by_version with rollout.deterministic: bits would "
                "depend on what caches still hold",
                "take flush",
            ),
        ]


def engine_number(engine: str) -> int:
    """Returns the number in an engine's id, as in engine-3; 0 for other text."""
    found = re.search(r"\d+$", engine)
    return int(found.group()) if found else 0


class WeightsConfig(Section):
    """How the actor's weights reach the engines after every step."""

    transport: Literal["disk", "broadcast", "reshard", "ipc"] = "reshard"
    """Each engine rank its own slices from the trainers that hold them; or whole tensors by rank 0
    to all; or a checkpoint on a disk that engines and trainers share; or slices through memory of a
    machine that they share, as `rollout.colocate` needs (`ipc`)."""
    in_flight: Literal["drain", "retract"] = "retract"
    """Treatment of responses in flight at a publish (rollout.max_staleness): they keep their tokens
    and go on with the new weights, which read them again (retract), or are waited for (drain): then
    a deterministic run repeats bit by bit."""

    delta: bool = False
    """Send only the elements that have changed since the last publish, wherever these are fewer
    bytes; every rank keeps what it has sent in host memory. After a step of GRPO in bfloat16 most
    elements are the same."""
    bucket_mb: PositiveFloat = 512.0
    """MiB of weights that a rank holds beside its parameters during a transfer."""
    timeout_s: Seconds = 600.0
    """Seconds for one publish, restarted engines included; below `actor.deadline_s`."""

    @property
    def connect_timeout_s(self) -> float:
        """Seconds for an engine's ranks and trainers to form a process group, at most a quarter of
        the time left of a publish."""
        return min(60.0, self.timeout_s / 10)

    @property
    def uses_groups(self) -> bool:
        """Returns whether trainer and engine ranks form process groups: NCCL refuses two of them on
        one GPU."""
        return self.transport in ("broadcast", "reshard")

    @property
    def needs_colocation(self) -> bool:
        """Returns whether every engine rank must be on the machine and GPU of a trainer rank."""
        return self.transport == "ipc"

    def suited(self, colocate: bool) -> "WeightsConfig":
        """Returns this section, with a transport that suits engines on the trainers' GPUs or on
        others."""
        usable = not self.uses_groups if colocate else not self.needs_colocation
        other = {"transport": "ipc" if colocate else "reshard", "delta": False}
        return self if usable else self.model_copy(update=other)

    @field_validator("in_flight", mode="before")
    @classmethod
    def _not_in_place(cls, given: object) -> object:
        if given == "in_place":
            raise ValueError(
                "in_place is refused: responses would go on over keys and values of older weights, "
                "which no weights "
                "describe, these stay in the prefix cache for every later prompt that begins "
                "alike, and the token on "
                "its way is called newer than it is; retract keeps all tokens too"
            )
        return given

    def problems(self) -> list[Rule]:
        return [
            Rule(
                self.delta and self.transport != "reshard",
                f"delta goes with transport: reshard, not {self.transport}",
                "remove delta, or set transport: reshard",
            ),
        ]

    def excludes(self, experiment: "ExperimentConfig") -> list[Rule]:
        deadline_s = experiment.actor.deadline_s
        return [
            Rule(
                self.timeout_s >= deadline_s,
                f"weights.timeout_s {self.timeout_s:g} must be below actor.deadline_s "
                f"{deadline_s:g}: while rank 0 updates engines, the other ranks wait for it "
                "in a collective",
                "lower it, or raise the deadline",
            ),
        ]
