"""The sections of the sampling side: `sampling`, `rollout`, `weights`."""

import re
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, model_validator

from megagrpo.config.fields import (
    Dtype,
    LibrarySettings,
    NonNegativeInt,
    Number,
    PositiveFloat,
    PositiveFraction,
    PositiveInt,
    Processes,
    Rule,
    Seconds,
    Section,
    Text,
    TopK,
)

if TYPE_CHECKING:
    ToolParser = str
    ReasoningParser = str
else:  # of SGLang 0.5.21's registries, whose import takes seconds; hunyuan needs a tokenizer
    names = """
        apertus2509 cohere_command4 deepseekv3 deepseekv31 deepseekv32 deepseekv4 deepseekv41 dots
        glm glm45 glm47 gpt-oss k2_horizon kimi_k2 kimi_k3 lfm2 ling3 llama3 mimo minicpm5 mistral
        muse poolside_v1 pythonic qwen qwen25 qwen3_coder spark25 step3 step3p5 minimax-m2
        minimax-m3 nanbeige trinity interns1 hermes gigachat3 gigachat35 gemma4 inkling
        iquest_q1"""
    ToolParser = Literal[("", *names.split())]
    names = """
        apertus2509 deepseek-r1 deepseek-v3 deepseek-v4 deepseek-v41 dots glm45 ling3
        gpt-oss k2_horizon kimi kimi_k2 kimi_k3 mimo muse poolside_v1 qwen3 qwen3-thinking minimax
        minimax-append-think minimax-m3 nanbeige step3 step3p5 mistral nemotron_3
        granite_thinking_parser interns1 gemma4 inkling iquest_q1 cohere_command4 gigachat35"""
    ReasoningParser = Literal[("", *names.split())]

_BESIDE_TRAINERS = 0.6  # of a GPU's memory
# of built-in environments: an argument, its default, and the seconds of a call for each of it
_OWN_LIMITS = {
    "python": ("run_s", 5.0, 1),
    "mcp": ("timeout_s", 14.0, 2),
    "openenv": ("timeout_s", 20.0, 1),
    "sql": ("max_steps", 1_000_000, 5e-6),
}
_KERNELS_COMPILED_S = 3600.0  # FP8's, on GPUs at the first start on a node


class EnvironmentConfig(Section):
    """An environment that answers the model's turns and can give the reward. See
    [agents](../agents.md)."""

    function: str
    """`calculator`, `sql`, `python`, `gymnasium`, `mcp`, `openenv` ([environments that
    ship](../environments.md)), or yours, "package.module:function". It is called for every rollout
    as function(row, seed, **args). All rollouts in a group get the same row and seed."""
    args: dict[str, str | int | float | bool] = Field(default={})
    """Keyword arguments for the function."""
    history: Literal["all", "last"] = "all"
    """What the model sees in a turn. all: everything before it (one sample per rollout). last: the
    row, with the environment's last message in place of its own (one sample per turn)."""
    max_turns: PositiveInt = 8
    """Most turns of the model. Rewards up to then count."""
    rewards: bool = True
    """Take the reward from the environment's steps. false: the graders in `reward` score the
    rollout's text."""
    credit: Literal["rollout", "turn"] = "rollout"
    """Give the reward to the rollout, or each step's reward to the turn before it, for estimators
    with returns (`reinforce`, `reinforce_plus_plus`)."""
    workers: Processes = 2
    """Processes per sampling rank. Each holds many environments and answers one call at a time."""
    timeout_s: Seconds = 30.0
    """Time limit per call. Beyond it the process is ended and the outcome is a timeout, never a
    reward. Default at most half of `rollout.step_timeout_s`."""
    episode_timeout_s: Seconds | None = None
    """Time limit for all calls in a rollout, without waits for engines or processes. Rewards up to
    then count. Default: only `rollout.step_timeout_s`."""

    def problems(self) -> list[Rule]:
        whole = self.episode_timeout_s
        name, default, times = _OWN_LIMITS.get(self.function, ("run_s", 5.0, 0))
        own_s = self.args.get(name, default)
        return [
            Rule(
                not isinstance(own_s, str) and times * own_s >= self.timeout_s,
                f"args.{name} {own_s} must be some seconds below timeout_s {self.timeout_s:g}, mcp's "
                "below half of it, sql's 200,000 for a second; else what is slow ends its process, with "
                "the episodes of others",
                "lower it, or raise timeout_s",
            ),
            Rule(
                whole is not None and whole <= self.timeout_s,
                f"episode_timeout_s {whole} must be above timeout_s {self.timeout_s:g}, the limit of one call",
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
    """A program that talks to the model over a chat endpoint and returns the reward. See
    [agents](../agents.md)."""

    function: str | None = None
    """"package.module:function", async or not, which is called for every rollout as
    function(base_url, key, row, **args), or `verifiers` or `harbor`, [programs that
    ship](../environments.md)."""
    args: dict[str, str | int | float | bool] = Field(default={})
    """Keyword arguments for the function."""
    command: list[str] = Field(default=[])
    """Command instead of a function. Its environment has MEGAGRPO_BASE_URL and MEGAGRPO_KEY (also
    under the names that OpenAI's and Anthropic's clients read), its standard input the row. The
    last line that it prints is the reward."""
    fork: Literal["sample", "refuse"] = "sample"
    """Whether messages that do not extend the last turn (a second request after the same ones, an
    edited or summarized history) start a new sample or are refused."""
    history: Literal["all", "last"] = "all"
    """all: a turn continues the tokens before it. last: every turn is a new sample with all
    messages rendered, for chat templates that cannot continue."""
    max_turns: PositiveInt = 32
    """Most turns of the model."""
    credit: Literal["rollout", "turn"] = "rollout"
    """Give the reward to the rollout, or `turn_rewards` to their turns, for estimators with
    returns."""
    truncated_reward: Number | None = None
    """Reward if the program failed because of a token or turn limit. Default: an error, without a
    reward."""
    tool_parser: ToolParser = ""
    """SGLang's parser for the model's tool calls, such as qwen25. Default: the text is the
    message."""
    reasoning_parser: ReasoningParser = ""
    """SGLang's parser for reasoning, such as qwen3."""
    workers: Processes = 2
    """Processes per sampling rank. Each runs many programs."""
    timeout_s: Seconds = 600.0
    """Time limit per program, without the time that engines take. Beyond it the program is ended
    and the outcome is a timeout, never a reward. Default at most half of
    `rollout.step_timeout_s`."""

    def problems(self) -> list[Rule]:
        return [
            Rule(
                bool(self.command) == (self.function is not None),
                "neither function nor command is set, or both are",
                "set one of them",
            ),
            Rule(
                self.args and self.command,
                "args are a function's; a command has its words",
                "write them into command",
            ),
            Rule(
                self.fork == "refuse" and self.history == "last",
                "with history last no turn extends another, so fork refuse leaves one turn",
                "set fork sample",
            ),
        ]


class SamplingConfig(Section):
    """How responses are sampled."""

    temperature: Annotated[float, Field(ge=0.01, le=100)] = 1.0
    """Sampling temperature. Log-probabilities are those of the same distribution."""
    top_p: PositiveFraction = 1.0
    """Nucleus probability. 1: all tokens."""
    top_k: TopK = -1
    """Number of most probable tokens. -1 or 0: all."""
    max_response_tokens: PositiveInt = 512
    """Longest response."""
    stop_token_ids: list[NonNegativeInt] = Field(default=[])
    """Token ids that end a response, besides the model's end-of-sequence token."""
    stop: list[Annotated[str, Field(min_length=1, max_length=60)]] = Field(
        default=[], max_length=32
    )
    """Texts that end a response, with the token in which the first of them ends."""
    skip_special_tokens: bool = False
    """Hide all special tokens from graders, environments and tool parsers. false: hide only
    padding, begin and end of text, and the token that ended the response."""
    reasoning_end: Annotated[str, Field(min_length=1)] | None = "auto"
    """Text that ends the reasoning. Built-in graders (but `format`), built-in environments and
    `tool_parser` read only what follows its last occurrence, and nothing if the reasoning is not
    closed. auto: `</think>` if the chat template has it. null: none."""
    environment: EnvironmentConfig | None = None
    agent: AgentConfig | None = None
    allow_truncated_distribution: bool = False
    """Accept top_p < 1 or top_k > 0, although log-probabilities are then not renormalized."""

    def problems(self) -> list[Rule]:
        return [
            Rule(
                (self.top_p < 1 or self.top_k > 0) and not self.allow_truncated_distribution,
                "top_p < 1 or top_k > 0 samples from another distribution than that of the log-probabilities",
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


class RolloutConfig(Section):
    """The SGLang service: engines, their size, time limits."""

    num_engines: PositiveInt = 1
    """Number of engines at the start."""
    max_staleness: NonNegativeInt = 0
    """How many versions older than the trained weights a token can be. As many batches are sampled
    ahead and trained on in order, and none is thrown away. 0: sampling and training take turns."""
    engine_choice: Literal["request", "group"] = "request"
    """request: send each request to the engine with the fewest. group: send a group to one engine,
    which reads the prompt once with `sglang: {schedule_policy: lpm}`. Later turns go to the same
    engine."""
    prefix_cache: Literal["flush", "by_version"] = "flush"
    """What happens at a publish. flush: engines empty their caches and read open rollouts again.
    by_version: each rollout keeps the cache from the weights that it began with, so later tokens
    rest on older keys and values."""
    tp: PositiveInt = 1
    """Tensor-parallel ranks per engine."""
    ep: PositiveInt = 1
    """Expert-parallel ranks per engine, a divisor of `tp`."""
    nodes_per_engine: PositiveInt = 1
    """Nodes per engine, a divisor of `tp`."""
    dtype: Dtype = "float32"
    """Type of weights and activations in the engines. Default: `actor.dtype`."""
    quantization: Literal["fp8"] | None = None
    """Store linear layers and experts as E4M3 in blocks of 128 x 128, each with a float32 scale.
    Trainers quantize what they publish. Embeddings, output layer, norms and routers stay in
    `dtype`. See [FP8 engines](../fp8.md)."""
    draft_tokens: PositiveInt | None = None
    """Tokens that the draft (`actor.draft`) proposes per forward pass. The model's distribution
    does not change."""
    load_format: Literal["dummy", "model"] = "dummy"
    """dummy: start with random weights, which the first publish replaces and verifies. model: read
    `model.path`."""
    deterministic: bool = False
    """Use batch-invariant kernels, one seed per sample, and deterministic algorithms in trainers. A
    run then repeats bit by bit unless caches overflow. On a GPU torch warns of operators that have
    no such algorithm."""
    max_running_requests: PositiveInt = 128
    """Concurrent requests per engine."""
    mem_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.85
    """Fraction of GPU memory for weights and KV cache. Default with `colocate`: 0.6, because the
    actor's weights stay."""
    colocate: bool = False
    """Put engines on the trainers' GPUs, rank for rank. Engines release memory while the actor
    trains, and the actor moves optimizer state and gradients to the host while engines sample.
    Needs `weights.transport: ipc`, or `disk`."""
    sglang: LibrarySettings = Field(default={})
    """Fields of SGLang's ServerArgs, such as `chunked_prefill_size: 8192`. `+name` passes on one that
    is [untried](#settings-of-libraries-that-are-refused)."""
    host: Text = "127.0.0.1"
    """Address for services, or an interface that all machines have, such as eth0."""
    request_timeout_s: Seconds = 600.0
    """Time limit per request."""
    step_timeout_s: Seconds = 3600.0
    """Time limit for all groups in a step, for each batch under dynamic sampling, or for an
    evaluation."""
    start_timeout_s: Seconds = 300.0
    """Time limit for an engine, or Ray, to start. Default with `quantization`: 3600, because the
    first start on a node compiles kernels."""
    health_timeout_s: Seconds | None = None
    """Silence after which an engine is restarted. It must exceed the longest forward pass. Default:
    300 on GPUs, which may compile kernels, and 60 on a CPU."""
    max_restarts: NonNegativeInt = 5
    """Most restarts per engine in a run."""
    min_healthy_engines: PositiveInt = 1
    """Engines that must hold the new weights before a publish stops waiting for the others."""

    def patience_s(self, cuda: bool) -> float:
        """Returns health_timeout_s, in seconds, of engines on GPUs or on a CPU."""
        return self.health_timeout_s or (300.0 if cuda else 60.0)

    @property
    def sleep_limit_s(self) -> float:
        """Returns the seconds in which all engines fall asleep: one may be starting, and one may
        not answer."""
        return self.start_timeout_s + self.patience_s(cuda=True)

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
                self.tp % self.ep or self.tp % nodes,
                f"tp {self.tp} is not a multiple of ep {self.ep} and of nodes_per_engine {nodes}",
                "take a multiple of both",
            ),
            Rule(
                self.quantization and self.load_format == "model",
                "quantization fp8 with load_format model: the model's files are not quantized, trainers do it",
                "take dummy",
            ),
            Rule(
                healthy > self.num_engines,
                f"min_healthy_engines {healthy} is more than num_engines {self.num_engines}",
                "lower it",
            ),
        ]


def engine_number(engine: str) -> int:
    """Returns the number in an engine's id, as in engine-3; 0 for other text."""
    found = re.search(r"\d+$", engine)
    return int(found.group()) if found else 0


class WeightsConfig(Section):
    """How weights reach the engines after every step."""

    transport: Literal["disk", "broadcast", "reshard", "ipc"] = "reshard"
    """reshard: each engine rank receives its slices from the trainers that hold them. ipc: the same
    through shared memory, for `rollout.colocate`. broadcast: rank 0 sends full tensors. disk: a
    checkpoint on a shared disk."""
    in_flight: Literal["drain", "retract"] = "retract"
    """retract: responses in flight at a publish keep their tokens, which the new weights read
    again. drain: a publish waits for them, so a deterministic run repeats bit by bit."""

    delta: bool = False
    """Send only the elements that changed since the last publish, if that takes fewer bytes. Every
    rank then keeps what it has sent in host memory."""
    bucket_mb: PositiveFloat = 512.0
    """Weights that a rank holds in addition to its parameters during a transfer."""
    timeout_s: Seconds = 600.0
    """Time limit per publish, restarted engines included. It must be below `actor.deadline_s`."""

    @property
    def bucket_bytes(self) -> int:
        """Returns `bucket_mb` in bytes."""
        return int(self.bucket_mb * 2**20)

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
    def main_sends(self) -> bool:
        """Returns whether the main rank alone sends, in two groups with every engine."""
        return self.transport == "broadcast"

    @property
    def needs_colocation(self) -> bool:
        """Returns whether every engine rank must be on the machine and GPU of a trainer rank."""
        return self.transport == "ipc"

    @property
    def past_loader(self) -> bool:
        """Tells whether slices are written past the engines' loader, and what it computes is verified."""
        return self.transport in ("reshard", "ipc")

    def suited(self, colocate: bool) -> "WeightsConfig":
        """Returns this section, with a transport that suits engines on the trainers' GPUs or on
        others."""
        usable = not self.uses_groups if colocate else not self.needs_colocation
        other = {"transport": "ipc" if colocate else "reshard", "delta": False}
        return self if usable else self.model_copy(update=other)

    def problems(self) -> list[Rule]:
        return [
            Rule(
                self.delta and self.transport != "reshard",
                f"delta goes with transport: reshard, not {self.transport}",
                "remove delta, or set transport: reshard",
            )
        ]
