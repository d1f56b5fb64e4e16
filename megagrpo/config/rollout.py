"""The sections of the sampling side: `sampling`, `rollout`, `weights`."""

from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import Field, field_validator, model_validator

from megagrpo.config.section import Dtype, NonNegativeInt, PositiveFloat, PositiveInt, Section

_COLOCATED_MEM_FRACTION = 0.6


class ToolConfig(Section):
    """A tool called in the middle of a response: its output is put in, masked from the loss, and sampling goes on."""

    function: str = Field(
        description='`calculator`, or "package.module:function", called with the text so far; None ends the response.'
    )
    call_end: str = Field(description="The one token at which the model stops and the tool is asked.")
    max_turns: Annotated[int, Field(ge=2)] = Field(
        default=4, description="Turns of the model; `max_response_tokens` counts the tool's tokens too."
    )


class SamplingConfig(Section):
    """How responses are sampled."""

    temperature: PositiveFloat = Field(
        default=1.0, description="Sampling temperature; log-probabilities are of the same distribution."
    )
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(
        default=1.0, description="Nucleus of probability sampled from; 1: all."
    )
    top_k: int = Field(default=-1, description="Most probable tokens sampled from; -1: all.")
    max_response_tokens: PositiveInt = Field(default=512, description="Longest response in tokens.")
    stop_token_ids: list[int] = Field(
        default=[], description="Token ids that end a response, beside the model's own end of sequence."
    )
    stop: list[str] = Field(default=[], description="Texts that end a response.")
    tool: ToolConfig | None = Field(default=None, description="A tool called inside responses; default: none.")
    allow_truncated_distribution: bool = Field(
        default=False, description="Accept top_p < 1 or top_k > 0, for which log-probabilities are not renormalised."
    )

    @model_validator(mode="after")
    def _full_distribution(self) -> Self:
        if (self.top_p < 1 or self.top_k > 0) and not self.allow_truncated_distribution:
            raise ValueError(
                "top_p < 1 or top_k > 0 samples from another distribution than the log-probs describe; "
                "set allow_truncated_distribution: true to accept that"
            )
        return self


class RolloutConfig(Section):
    """The SGLang service: its engines, their size, and what is waited for how long."""

    num_engines: PositiveInt = Field(default=1, description="Engines at the start.")
    max_staleness: NonNegativeInt = Field(
        default=0,
        description="How many versions of the weights a token may be older than those that it trains. So many batches "
        "ahead are sampled while earlier ones are trained on, and are trained on in their order: nothing is thrown "
        "away. 0: sampling and training take turns.",
    )
    extra_groups: NonNegativeInt = Field(
        default=0,
        description="For max_staleness 0: groups sampled beyond those of a step, which takes the ones that are "
        "finished first. The others go on while the actor trains, with all their tokens, and come first in the next "
        "step.",
    )
    max_deferrals: PositiveInt = Field(
        default=1,
        description="Steps for which a group may be left behind by `extra_groups`; then it is waited for. So many "
        "versions a token may be older than the weights that it trains.",
    )
    order: Literal["arrival", "long_prompts_first", "shortest_expected_first"] = Field(
        default="arrival",
        description="Which requests of a batch leave first: in the order of the data, by the length of their prompts, "
        "or by the mean response to the same prompt in earlier epochs (else to all prompts).",
    )
    streaming: bool = Field(
        default=False,
        description="Responses come in pieces: one that is cut by its engine's end goes on from the tokens that came, "
        "instead of from its beginning. Costs a message for every 32 tokens of every response.",
    )
    tp: PositiveInt = Field(default=1, description="Tensor-parallel ranks of one engine.")
    ep: PositiveInt = Field(default=1, description="Expert-parallel ranks of one engine; divides `tp`.")
    nodes_per_engine: PositiveInt = Field(default=1, description="Nodes that one engine spans; divides `tp`.")
    dtype: Dtype = Field(default="float32", description="Type of the engines' weights and activations.")
    load_format: Literal["dummy", "model"] = Field(
        default="dummy",
        description="How engines start: with random weights, which the first publish fills and proves before anybody "
        "samples (`dummy`), or with those in `model.path`, which is read from disk once an engine and start (`model`).",
    )
    deterministic: bool = Field(
        default=False, description="Batch-invariant kernels and one seed a sample: a run can be repeated bit by bit."
    )
    max_running_requests: PositiveInt = Field(default=128, description="Requests that one engine works on at once.")
    max_total_tokens: PositiveInt | None = Field(
        default=None, description="Tokens in one engine's KV cache; default: SGLang's choice (20,000 on a CPU)."
    )
    mem_fraction: Annotated[float, Field(gt=0, lt=1)] = Field(
        default=0.85,
        description="Fraction of GPU memory for weights and KV cache; default under `colocate`: 0.6, for the actor's "
        "weights stay there while engines sample.",
    )
    colocate: bool = Field(
        default=False,
        description="Engines on the GPUs of the trainers of one machine, rank for rank: they release their memory "
        "while the actor trains, and its optimizer's state and gradients go to the host while they sample; wants "
        "`weights.transport: ipc`.",
    )
    sglang: dict[str, Any] = Field(
        default={},
        description="Fields of SGLang's ServerArgs, by their names there, such as `chunked_prefill_size: 8192`.",
    )
    extra_args: list[str] = Field(
        default=[], description="Words appended to the engine's command line, for what is no field of ServerArgs."
    )
    host: str = Field(
        default="127.0.0.1",
        description="What the services bind to: an address, or an interface that every machine has, such as eth0.",
    )
    request_timeout_s: PositiveFloat = Field(default=600.0, description="Seconds for one request.")
    step_timeout_s: PositiveFloat = Field(
        default=3600.0,
        description="Seconds for all groups of a step, of each batch under dynamic sampling, or of an evaluation.",
    )
    retries: PositiveInt = Field(default=8, description="Times that one request is tried again.")
    start_timeout_s: PositiveFloat = Field(default=300.0, description="Seconds for an engine, or for Ray, to start.")
    health_timeout_s: PositiveFloat | None = Field(
        default=None,
        description="Seconds of silence after which an engine is started again; longer than the longest forward pass. "
        "Default: 300 on GPUs, where the first pass of a length compiles kernels; 60 on a CPU.",
    )
    max_restarts: NonNegativeInt = Field(default=5, description="Restarts of one engine over the run.")
    min_healthy_engines: PositiveInt = Field(
        default=1,
        description="Engines that must hold the new weights for a publish to return without waiting for the others.",
    )

    @property
    def max_lag(self) -> int:
        """Returns how many versions a token may be older than the weights that it trains."""
        return self.max_staleness or (self.max_deferrals if self.extra_groups else 0)

    def patience_s(self, cuda: bool) -> float:
        """Returns health_timeout_s, in seconds, of engines on GPUs or on a CPU."""
        return self.health_timeout_s or (300.0 if cuda else 60.0)

    @model_validator(mode="before")
    @classmethod
    def _memory_beside_trainers(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("colocate") is True:
            return {"mem_fraction": _COLOCATED_MEM_FRACTION} | given
        return given

    @model_validator(mode="after")
    def _colocated(self) -> Self:
        if self.colocate and self.nodes_per_engine > 1:
            raise ValueError(f"colocate is for one machine, nodes_per_engine {self.nodes_per_engine} for several")
        return self

    @model_validator(mode="after")
    def _ahead_or_extra(self) -> Self:
        if self.extra_groups and self.max_staleness:
            raise ValueError(
                f"extra_groups {self.extra_groups} with max_staleness {self.max_staleness}: engines that sample ahead "
                "are never empty, and their groups are trained on in order; set one of them"
            )
        return self

    @model_validator(mode="after")
    def _sizes(self) -> Self:
        if self.tp % self.nodes_per_engine:
            raise ValueError(f"tp {self.tp} does not divide over nodes_per_engine {self.nodes_per_engine}")
        if self.tp % self.ep:
            raise ValueError(f"tp {self.tp} is not a multiple of ep {self.ep}")
        if self.min_healthy_engines > self.num_engines:
            raise ValueError(
                f"min_healthy_engines {self.min_healthy_engines} is more than num_engines {self.num_engines}"
            )
        return self


class TransportTraits(NamedTuple):
    """What the rest of the program must know of a weight transport."""

    uses_groups: bool  # process groups of trainer and engine ranks: NCCL refuses two of them on one GPU
    needs_colocation: bool  # every engine rank is on the machine and GPU of a trainer rank


_TRANSPORTS = {
    "disk": TransportTraits(uses_groups=False, needs_colocation=False),
    "broadcast": TransportTraits(uses_groups=True, needs_colocation=False),
    "reshard": TransportTraits(uses_groups=True, needs_colocation=False),
    "ipc": TransportTraits(uses_groups=False, needs_colocation=True),
}


class WeightsConfig(Section):
    """How the actor's weights reach the engines after every step."""

    transport: Literal["disk", "broadcast", "reshard", "ipc"] = Field(
        default="reshard",
        description="Each engine rank its own slices from the trainers that hold them; or whole tensors by rank 0 "
        "to all; or a checkpoint on a disk that engines and trainers share; or slices through memory of a machine that "
        "they share, as `rollout.colocate` needs (`ipc`).",
    )
    in_flight: Literal["drain", "retract"] = Field(
        default="retract",
        description="What becomes of responses that are being sampled at a publish (rollout.max_staleness): they keep "
        "their tokens and go on with the new weights, which read them again (retract), or are waited for (drain): "
        "then a deterministic run repeats bit by bit.",
    )

    @property
    def traits(self) -> TransportTraits:
        """What others must know of the transport."""
        return _TRANSPORTS[self.transport]

    @field_validator("in_flight", mode="before")
    @classmethod
    def _not_in_place(cls, given: Any) -> Any:
        if given == "in_place":
            raise ValueError(
                "in_place is refused: responses would go on over keys and values of older weights, which no weights "
                "describe, these stay in the prefix cache for every later prompt that begins alike, and the token on "
                "its way is called newer than it is; retract keeps all tokens too"
            )
        return given

    bucket_mb: PositiveFloat = Field(
        default=512.0, description="MiB of weights that a rank holds beside its parameters during a transfer."
    )
    timeout_s: PositiveFloat = Field(
        default=600.0, description="Seconds for one publish, restarted engines included; below `actor.deadline_s`."
    )
