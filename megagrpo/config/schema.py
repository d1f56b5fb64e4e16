"""The experiment schema: one frozen pydantic model per YAML section. A default lives on its field, nowhere else.

Loading, overrides and error messages are in config_load.py; the algorithm section is in config_algorithm.py.
"""

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, model_validator

from megagrpo.config.algorithm import AlgorithmConfig
from megagrpo.config.section import Section
from megagrpo.families.table import FAMILIES

Dtype = Literal["float32", "bfloat16"]
if TYPE_CHECKING:
    FamilyName = str  # a type checker takes no computed Literal
else:
    FamilyName = Literal[tuple(FAMILIES)]
PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]


class ModelConfig(Section):
    path: str  # HF folder: config.json, tokenizer files, safetensors
    tokenizer: str | None = None  # another HF folder; default: path


class DataConfig(Section):
    path: str  # .jsonl or .parquet
    prompt_key: str = "prompt"
    answer_key: str = "answer"
    grader_key: str | None = None  # column that names a grader per line
    chat_template: bool = False
    chat_template_args: dict[str, str | int | float | bool] = {}  # e.g. enable_thinking: false for Qwen3
    system_prompt: str | None = None  # with chat_template
    prompt_template: str = "{prompt}"  # applied to the prompt text before the chat template
    add_bos: bool = False  # without chat_template
    max_prompt_tokens: PositiveInt = 1024
    shuffle: bool = True
    limit: PositiveInt | None = None  # first lines only

    @model_validator(mode="after")
    def _one_source_of_special_tokens(self):
        if self.add_bos and self.chat_template:
            raise ValueError("add_bos with chat_template: the template writes its own special tokens; remove add_bos")
        for key in ("system_prompt", "chat_template_args"):
            if getattr(self, key) and not self.chat_template:
                raise ValueError(f"{key} has no effect without chat_template: true")
        return self


class ToolConfig(Section):
    """The model calls a tool inside its response: what the tool says is put in, masked, and the response goes on."""

    function: str  # calculator | "package.module:function", called with the response so far; None ends the response
    call_end: str  # the one token at which the model stops and the tool is asked
    max_turns: Annotated[int, Field(ge=2)] = 4  # of the model; max_response_tokens counts the tool's tokens too


class SamplingConfig(Section):
    temperature: PositiveFloat = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: int = -1
    max_response_tokens: PositiveInt = 512
    stop_token_ids: list[int] = []  # beside the model's own end of sequence
    stop: list[str] = []
    tool: ToolConfig | None = None
    allow_truncated_distribution: bool = False  # top_p < 1 or top_k > 0: log-probs are not renormalised

    @model_validator(mode="after")
    def _full_distribution(self):
        if (self.top_p < 1 or self.top_k > 0) and not self.allow_truncated_distribution:
            raise ValueError(
                "top_p < 1 or top_k > 0 samples from another distribution than the log-probs describe; "
                "set allow_truncated_distribution: true to accept that"
            )
        return self


class EvalConfig(Section):
    data: DataConfig
    every: PositiveInt = 10  # steps; also before the first and after the last
    num_samples: PositiveInt = 1  # > 1 reports pass@k as well
    temperature: Annotated[float, Field(ge=0)] = 0.0
    max_response_tokens: PositiveInt | None = None  # default: sampling.max_response_tokens


class ParallelConfig(Section):
    """Data parallel size is what is left: world / (tp pp cp). Sequence parallel is on whenever tp > 1."""

    tp: PositiveInt = 1
    pp: PositiveInt = 1
    vpp: PositiveInt = 1  # virtual pipeline stages per rank
    cp: PositiveInt = 1
    ep: PositiveInt = 1
    etp: PositiveInt = 1
    first_stage_layers: PositiveInt | None = None  # of the pipeline; default: what is not given is cut evenly
    last_stage_layers: PositiveInt | None = None

    @model_validator(mode="after")
    def _sizes(self):
        if self.vpp > 1 and self.pp == 1:
            raise ValueError(f"vpp {self.vpp} needs pp > 1: virtual stages share the ranks of a pipeline")
        for name, layers in (
            ("first_stage_layers", self.first_stage_layers),
            ("last_stage_layers", self.last_stage_layers),
        ):
            if layers is not None and self.pp == 1:
                raise ValueError(f"{name} {layers} needs pp > 1: without a pipeline one stage has all layers")
        return self

    def stage_layers(self, num_layers: int) -> list[int]:
        """Layers of each pipeline stage. ValueError saying why `num_layers` cannot be cut like this."""
        given = [n for n in (self.first_stage_layers, self.last_stage_layers) if n is not None]
        middle, left = self.pp - len(given), num_layers - sum(given)
        if (left > 0) != (middle > 0) or left < 0 or (middle and left % middle):
            rest = f" less first_stage_layers and last_stage_layers, {sum(given)} together," if given else ""
            raise ValueError(f"num_hidden_layers = {num_layers}{rest} cannot be cut into {middle} equal stages")
        stages = [self.first_stage_layers] if self.first_stage_layers else []
        stages += [left // middle] * middle if middle else []
        stages += [self.last_stage_layers] if self.last_stage_layers else []
        uneven = [n for n in stages if n % self.vpp]
        if uneven:
            raise ValueError(f"a stage of {uneven[0]} layers does not divide into vpp = {self.vpp} virtual stages")
        return stages


class OptimizerConfig(Section):
    lr: PositiveFloat = 1e-6
    min_lr: Annotated[float, Field(ge=0)] = 0.0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: NonNegativeInt = 0  # optimiser updates
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_eps: PositiveFloat = 1e-8
    clip_grad: Annotated[float, Field(ge=0)] = 1.0  # 0: no clipping
    distributed: bool = True  # shard the optimiser over data-parallel ranks

    @model_validator(mode="after")
    def _decay(self):
        if self.min_lr and self.schedule == "constant":
            raise ValueError(f"min_lr {self.min_lr:g} has no effect with schedule constant; choose linear or cosine")
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr {self.min_lr:g} is above lr {self.lr:g}")
        return self


class ActorConfig(Section):
    world_size: PositiveInt = 1  # trainer ranks
    dtype: Dtype = "float32"
    parallel: ParallelConfig = ParallelConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    micro_batch_tokens: PositiveInt = 4096  # padded tokens in one forward pass
    packing: bool = True  # several sequences in one row, no padding between them
    recompute: Literal["none", "selective", "full"] = "none"
    transformer_engine: bool = False  # its layers, attention and grouped experts in the place of torch's; needs CUDA
    logprob_chunk_tokens: PositiveInt = 1024  # [chunk, vocab / tp] is the largest logits block ever held
    threads: PositiveInt = 1  # intra-op threads a rank on a CPU
    deadline_s: PositiveFloat = 1800.0  # every collective
    max_restarts: NonNegativeInt = 3  # of all ranks together, over the run, when one was lost

    @property
    def dp(self) -> int:
        return self.world_size // (self.parallel.tp * self.parallel.pp * self.parallel.cp)

    @model_validator(mode="after")
    def _world_divides(self):
        p = self.parallel
        for what, size in (("tp x pp x cp", p.tp * p.pp * p.cp), ("etp x ep x pp", p.etp * p.ep * p.pp)):
            if self.world_size % size:
                up = -(-self.world_size // size) * size
                raise ValueError(f"world_size {self.world_size} is not a multiple of {what} = {size}; {up} would be")
        return self


class RolloutConfig(Section):
    num_engines: PositiveInt = 1
    tp: PositiveInt = 1  # ranks of one engine
    ep: PositiveInt = 1
    nodes_per_engine: PositiveInt = 1
    dtype: Dtype = "float32"
    deterministic: bool = False  # batch-invariant kernels, one seed per sample: a run can be repeated bit by bit
    max_running_requests: PositiveInt = 128  # of one engine
    max_total_tokens: PositiveInt | None = None  # KV cache of one engine; default: SGLang's choice (20,000 on a CPU)
    mem_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.85
    extra_args: list[str] = []  # appended to the engine's command line
    host: str = (
        "127.0.0.1"  # what the services bind to: an address, or an interface that every machine has, such as eth0
    )
    request_timeout_s: PositiveFloat = 600.0
    step_timeout_s: PositiveFloat = (
        3600.0  # all groups of a step; of each batch under dynamic sampling, of an evaluation
    )
    retries: PositiveInt = 8
    start_timeout_s: PositiveFloat = 300.0
    health_timeout_s: PositiveFloat = (
        60.0  # an engine silent for longer is started again; the longest forward pass is shorter
    )
    max_restarts: NonNegativeInt = 5  # of one engine, over the run
    min_healthy_engines: PositiveInt = 1
    max_staleness: Literal[0] = 0  # asynchrony is not built yet

    @model_validator(mode="after")
    def _sizes(self):
        if self.tp % self.nodes_per_engine:
            raise ValueError(f"tp {self.tp} does not divide over nodes_per_engine {self.nodes_per_engine}")
        if self.tp % self.ep:
            raise ValueError(f"tp {self.tp} is not a multiple of ep {self.ep}")
        if self.min_healthy_engines > self.num_engines:
            raise ValueError(
                f"min_healthy_engines {self.min_healthy_engines} is more than num_engines {self.num_engines}"
            )
        return self


class WeightsConfig(Section):
    transport: Literal["disk", "broadcast"] = "broadcast"
    bucket_mb: PositiveFloat = 512.0
    timeout_s: PositiveFloat = 600.0  # one publish, restarted engines included


class RewardConfig(Section):
    grader: str = "gsm8k"  # exact | gsm8k | math | format | "package.module:function"
    args: dict[str, str | int | float | bool] = {}
    workers: PositiveInt = 2
    timeout_s: PositiveFloat = 10.0  # one response
    shuffle: bool = False  # control experiment: permute the rewards over the step's samples


class TrainConfig(Section):
    num_steps: PositiveInt = 100
    num_prompts_per_step: PositiveInt = 64
    group_size: PositiveInt = 8
    num_updates_per_step: PositiveInt = 1  # optimiser updates; the step's groups are split between them
    non_finite: Literal["halt", "skip"] = (
        "halt"  # an update whose loss or gradient is NaN or infinite; its batch is dumped
    )
    max_bad_fraction: Annotated[float, Field(ge=0, le=1)] = (
        0.5  # of reward errors and timeouts in a step; above it the run stops
    )


class CheckpointConfig(Section):
    every: NonNegativeInt = 0  # steps; 0: only at the end
    keep: PositiveInt = 2
    asynchronous: bool = False  # copy to host memory, write while training goes on, finish after a later step
    resume: Literal["auto", "never"] = "auto"
    load: str | None = None  # another run's checkpoint folder: its weights and optimiser are what this run starts from


class LogConfig(Section):
    tensorboard: bool = True
    console: bool = True
    dump_steps: list[PositiveInt] = []  # whose batch is kept for `megagrpo replay`
    rollouts: bool = True  # every prompt, response and reward as JSON lines


class SftConfig(Section):
    """Supervised warm-up with the same actor: learns `answer` after `prompt`."""

    data: DataConfig
    model: str  # HF folder to start from
    num_steps: PositiveInt = 100
    stop_at_loss: PositiveFloat | None = None  # end as soon as the running mean of the loss is below
    batch_size: PositiveInt = 64
    optimizer: OptimizerConfig = OptimizerConfig(lr=1e-3)


class TinyModelConfig(Section):
    """A randomly initialised model for laptops, made by `megagrpo prepare` with a character tokenizer."""

    path: str
    family: FamilyName = "qwen3_moe"
    alphabet: str = "0123456789+-*/=.()<># "
    hidden_size: PositiveInt = 128
    num_layers: PositiveInt = 4
    num_heads: PositiveInt = 4
    num_kv_heads: PositiveInt = 2
    head_dim: PositiveInt = 32
    ffn_size: PositiveInt = 256
    num_experts: PositiveInt = 8
    experts_per_token: PositiveInt = 2
    expert_ffn_size: PositiveInt = 128
    tie_embeddings: bool = False


class DatasetConfig(Section):
    """Data files made by `megagrpo prepare`."""

    kind: Literal["arithmetic", "gsm8k_calc"]
    folder: str  # receives sft.jsonl, train.jsonl, eval.jsonl
    source: str | None = None  # gsm8k_calc: folder with GSM8K's train.jsonl and test.jsonl
    num_sft: PositiveInt = 4000  # of the supervised warm-up
    num_train: PositiveInt = 4000
    num_eval: PositiveInt = 256
    max_operand: PositiveInt = 99  # arithmetic
    calculator: bool = False  # arithmetic: warm-up answers that call the tool, "<37+48>85=85"
    max_expression: PositiveInt = 16  # gsm8k_calc: characters; longer ones are left out
    max_answer: PositiveInt = 6  # gsm8k_calc: characters
    operators: Annotated[str, Field(pattern=r"^[-+*/]+$")] = "+-*/"  # gsm8k_calc: expressions with others are left out

    @model_validator(mode="after")
    def _calculator(self):
        if self.calculator and self.kind != "arithmetic":
            raise ValueError(f"calculator belongs to kind arithmetic; kind is {self.kind}")
        return self


class PrepareConfig(Section):
    model: TinyModelConfig | None = None
    dataset: DatasetConfig | None = None


class ExperimentConfig(Section):
    name: str
    output_dir: str
    seed: NonNegativeInt = 0
    model: ModelConfig
    data: DataConfig
    sampling: SamplingConfig = SamplingConfig()
    reward: RewardConfig = RewardConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    train: TrainConfig = TrainConfig()
    eval: EvalConfig | None = None
    actor: ActorConfig = ActorConfig()
    rollout: RolloutConfig = RolloutConfig()
    weights: WeightsConfig = WeightsConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()
    sft: SftConfig | None = None
    prepare: PrepareConfig | None = None

    @model_validator(mode="after")
    def _consistent(self):
        train = self.train
        if train.num_prompts_per_step % train.num_updates_per_step:
            raise ValueError(
                f"train.num_prompts_per_step {train.num_prompts_per_step} is not a multiple of "
                f"train.num_updates_per_step {train.num_updates_per_step}"
            )
        if self.weights.timeout_s >= self.actor.deadline_s:
            raise ValueError(
                f"weights.timeout_s {self.weights.timeout_s:g} must be below actor.deadline_s {self.actor.deadline_s:g}: "
                "while rank 0 updates engines, the other ranks wait for it in a collective"
            )
        kl, parallel = self.algorithm.kl, self.actor.parallel
        full = kl.estimator == "full" and self.algorithm.uses_reference
        if full and parallel.cp > 1 and train.num_updates_per_step > 1 and not self.actor.packing:
            raise ValueError(
                f"algorithm.kl.estimator full, actor.parallel.cp {parallel.cp} and {train.num_updates_per_step} updates a step need "
                "actor.packing: true; padded, the reference's positions would lie on other ranks than the actor's"
            )
        self.algorithm.check_group_size(train.group_size)
        self.algorithm.check_responses(train.num_prompts_per_step * train.group_size)
        self.algorithm.check_response_tokens(self.sampling.max_response_tokens)
        return self
