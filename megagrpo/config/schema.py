"""The experiment: every section of the YAML, one frozen pydantic model each.

A default and a description live on their field, nowhere else; docs/reference/configuration.md is generated from them
(`python -m megagrpo.config.describe`). Reading files, overrides and error messages are in config/load.py.
"""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from megagrpo.config.actor import ActorConfig, OptimizerConfig, ParallelConfig
from megagrpo.config.algorithm import AlgorithmConfig
from megagrpo.config.data import DataConfig, EvalConfig, ModelConfig
from megagrpo.config.reward import GraderConfig, RewardConfig
from megagrpo.config.rollout import RolloutConfig, SamplingConfig, ToolConfig, WeightsConfig
from megagrpo.config.section import NonNegativeInt, PositiveFloat, PositiveInt, Section

__all__ = [
    "ActorConfig",
    "AlgorithmConfig",
    "CheckpointConfig",
    "DataConfig",
    "EvalConfig",
    "ExperimentConfig",
    "GraderConfig",
    "LogConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "RewardConfig",
    "RolloutConfig",
    "SamplingConfig",
    "SftConfig",
    "ToolConfig",
    "TrainConfig",
    "WandbConfig",
    "WeightsConfig",
]


DEFAULT_STEPS = 100


class TrainConfig(Section):
    """How many steps there are, and how large one is."""

    num_steps: PositiveInt | None = Field(
        default=None,
        description=f"Steps of the run: sample, update, publish; default: {DEFAULT_STEPS}, or what `num_epochs` makes.",
    )
    num_epochs: PositiveInt | None = Field(
        default=None,
        description="Passes over the prompts, instead of `num_steps`: as many steps as take them that often, the last "
        "one whole.",
    )
    num_prompts_per_step: PositiveInt = Field(default=64, description="Prompts (groups) of a step.")
    group_size: PositiveInt = Field(default=8, description="Responses to each prompt.")
    num_updates_per_step: PositiveInt = Field(
        default=1,
        description="Optimizer updates of each pass over a step's samples; its groups are split between them.",
    )
    num_epochs_per_step: PositiveInt = Field(
        default=1,
        description="Passes over a step's samples; each later one splits the groups between its updates anew, at "
        "random.",
    )
    non_finite: Literal["halt", "skip"] = Field(
        default="halt",
        description="What follows an update whose loss or gradient is not finite; its batch is dumped either way.",
    )
    max_bad_fraction: Annotated[float, Field(ge=0, le=1)] = Field(
        default=0.5, description="Fraction of reward errors and timeouts in a step above which the run stops."
    )

    @property
    def updates_of_step(self) -> int:
        """Optimizer updates of a step, in all its passes."""
        return self.num_epochs_per_step * self.num_updates_per_step

    def steps(self, num_prompts: int) -> int:
        """Returns the number of steps of a run over a file of `num_prompts` prompts."""
        if self.num_epochs is not None:
            return -(-self.num_epochs * num_prompts // self.num_prompts_per_step)
        return self.num_steps or DEFAULT_STEPS

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if self.num_epochs is not None and self.num_steps is not None:
            raise ValueError(
                f"num_steps {self.num_steps} and num_epochs {self.num_epochs} both say how long the run is; set one to"
                " null"
            )
        return self


class CheckpointConfig(Section):
    """When the run is saved, and what it starts from."""

    every: NonNegativeInt = Field(default=0, description="Steps between checkpoints; 0: only at the end.")
    reshardable: Literal["last", "always", "never"] = Field(
        default="last",
        description="Which saves another layout can load too: the last one of a start (after its last step, or when it "
        "is asked to stop), all, or none. The others are faster and smaller in memory: every rank writes its own part.",
    )
    keep: PositiveInt = Field(default=2, description="Newest checkpoints kept.")
    keep_gb: PositiveFloat | None = Field(
        default=None,
        description="GB (1e9 bytes) that the kept checkpoints may have together: older ones go, never the newest; "
        "default: no limit.",
    )
    asynchronous: bool | Literal["auto"] = Field(
        default="auto",
        description="Copy to host memory, write while training goes on, finish after a later step; auto: from two "
        "trainer nodes on.",
    )
    disk_gb_s: PositiveFloat = Field(
        default=10.0,
        description="GB/s of the file system, all nodes together: what `megagrpo check` computes the seconds from.",
    )
    resume: Literal["auto", "never"] = Field(
        default="auto", description="Continue from the run folder's last checkpoint, or refuse a folder that has one."
    )
    load: str | None = Field(
        default=None, description="Another run's checkpoint folder, whose weights and optimizer this run starts from."
    )


class WandbConfig(Section):
    """The run on Weights & Biases; the API key is wandb's own affair (`wandb login`, or WANDB_API_KEY)."""

    project: str = Field(description="Project that the run belongs to.")
    entity: str | None = Field(default=None, description="User or team; default: that of the API key.")
    group: str | None = Field(default=None, description="Group of runs, such as the seeds of one experiment.")
    name: str | None = Field(default=None, description="Name of the run; default: the experiment's.")
    mode: Literal["online", "offline", "disabled"] = Field(
        default="online", description="offline: kept in the run folder for `wandb sync`; disabled: nothing."
    )
    tags: list[str] = Field(default=[], description="Tags of the run.")


class LogConfig(Section):
    """What is written beside metrics.jsonl."""

    tensorboard: bool = Field(default=True, description="Write TensorBoard files.")
    wandb: WandbConfig | None = Field(
        default=None, description="Send the same metrics to Weights & Biases (extra `wandb`); default: none."
    )
    console: bool = Field(default=True, description="Print a line for every step.")
    dump_steps: list[PositiveInt] = Field(default=[], description="Steps whose batch is kept for `megagrpo replay`.")
    rollouts: bool = Field(default=True, description="Write every prompt, response and reward as JSON lines.")
    timeline: bool = Field(
        default=True, description="Record when every rank entered which phase, and the requests to every engine."
    )
    tokens: NonNegativeInt = Field(
        default=4,
        description="Groups of a step whose tokens are recorded with the difference between trainer's and engine's "
        "log-probability; 0: none.",
    )


class SftConfig(Section):
    """Supervised warm-up with the same actor: it learns `answer` after `prompt`, and writes `model.path`."""

    data: DataConfig = Field(description="Prompts and the answers to learn; same keys as `data`.")
    model: str = Field(description="Hugging Face folder to start from.")
    num_steps: PositiveInt = Field(default=100, description="Most optimizer updates.")
    stop_at_loss: PositiveFloat | None = Field(
        default=None, description="End as soon as the running mean of the loss is below this; default: never."
    )
    batch_size: PositiveInt = Field(default=64, description="Rows of one update.")
    optimizer: OptimizerConfig = Field(default=OptimizerConfig(lr=1e-3), description="Same keys as `actor.optimizer`.")


class ExperimentConfig(Section):
    """One experiment: one YAML file. `preset: NAME` at its top level lays a published algorithm under it."""

    name: str = Field(description="Name of the experiment.")
    output_dir: str = Field(description="Run folder; on a cluster, on a file system that all nodes see.")
    seed: NonNegativeInt = Field(default=0, description="Seed of every random choice.")
    model: ModelConfig = Field(description="The model to train.")
    data: DataConfig = Field(description="Prompts to train on.")
    sampling: SamplingConfig = Field(default=SamplingConfig(), description="How responses are sampled.")
    reward: RewardConfig = Field(default=RewardConfig(), description="How responses are graded.")
    algorithm: AlgorithmConfig = Field(default=AlgorithmConfig(), description="What is optimised.")
    train: TrainConfig = Field(default=TrainConfig(), description="Number and size of the steps.")
    eval: EvalConfig | None = Field(default=None, description="Held-out evaluation; default: none.")
    actor: ActorConfig = Field(default=ActorConfig(), description="The learner: ranks, layout, optimizer.")
    rollout: RolloutConfig = Field(default=RolloutConfig(), description="The service that samples.")
    weights: WeightsConfig = Field(default=WeightsConfig(), description="From the learner to the engines.")
    checkpoint: CheckpointConfig = Field(default=CheckpointConfig(), description="Saving and resuming.")
    log: LogConfig = Field(default=LogConfig(), description="What is recorded.")
    sft: SftConfig | None = Field(default=None, description="Supervised warm-up; default: none.")

    @model_validator(mode="after")
    def _sampling_and_training(self) -> Self:
        rollout, mismatch = self.rollout, self.algorithm.mismatch
        if rollout.colocate and self.weights.traits.uses_groups:
            raise ValueError(
                f"rollout.colocate with weights.transport {self.weights.transport}: NCCL takes no two ranks on one GPU;"
                " set weights.transport: ipc, or disk"
            )
        ahead = next((f"{k} {n}" for k in ("max_staleness", "extra_groups") if (n := getattr(rollout, k))), "")
        if rollout.colocate and ahead:
            raise ValueError(
                f"rollout.{ahead} with rollout.colocate: engines sleep while the actor trains, and can sample nothing "
                "ahead; set one of them"
            )
        if rollout.max_staleness == 1 and self.algorithm.dynamic_sampling is not None:
            raise ValueError(
                "rollout.max_staleness 1 with algorithm.dynamic_sampling: groups that a step leaves over are trained "
                "on one step later, so that nothing could be sampled ahead within the bound; take 2 or more, or 0"
            )
        if ahead and mismatch.weight is None and mismatch.reject is None:
            raise ValueError(
                f"rollout.{ahead} trains on tokens of older weights, which needs a correction: set "
                "algorithm.mismatch.weight, such as {name: tis}, or algorithm.mismatch.reject"
            )
        return self

    @model_validator(mode="after")
    def _extra_groups(self) -> Self:
        extra, wanted = self.rollout.extra_groups, self.train.num_prompts_per_step
        if not extra:
            return self
        if extra > wanted:
            raise ValueError(
                f"rollout.extra_groups {extra} is more than train.num_prompts_per_step {wanted}: groups would be left "
                "behind more often than they are taken"
            )
        if self.weights.in_flight == "drain":
            raise ValueError(
                f"rollout.extra_groups {extra} with weights.in_flight drain: every publish would wait for the groups "
                "that the step did not wait for; take retract"
            )
        if self.algorithm.dynamic_sampling is not None:
            raise ValueError(
                f"rollout.extra_groups {extra} with algorithm.dynamic_sampling, which samples more groups than a step "
                "takes by itself; set one of them"
            )
        if self.algorithm.needs_greedy_response:
            raise ValueError(
                f"rollout.extra_groups {extra} with advantage {self.algorithm.advantage.name}: its greedy requests "
                "would change what the groups draw that are still being sampled; set one of them"
            )
        return self

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        train = self.train
        if train.num_prompts_per_step % train.num_updates_per_step:
            raise ValueError(
                f"train.num_prompts_per_step {train.num_prompts_per_step} is not a multiple of "
                f"train.num_updates_per_step {train.num_updates_per_step}"
            )
        if self.weights.timeout_s >= self.actor.deadline_s:
            raise ValueError(
                f"weights.timeout_s {self.weights.timeout_s:g} must be below actor.deadline_s {self.actor.deadline_s:g}"
                ": while rank 0 updates engines, the other ranks wait for it in a collective"
            )
        kl, parallel = self.algorithm.kl, self.actor.parallel
        full = kl.estimator == "full" and self.algorithm.uses_reference
        if full and parallel.cp > 1 and train.updates_of_step > 1 and not self.actor.packing:
            raise ValueError(
                f"algorithm.kl.estimator full, actor.parallel.cp {parallel.cp} and {train.updates_of_step} updates"
                " a step need actor.packing: true; padded, the reference's positions would lie on other ranks than the"
                " actor's"
            )
        if train.num_epochs is not None and self.algorithm.dynamic_sampling is not None:
            raise ValueError(
                "train.num_epochs with algorithm.dynamic_sampling: a step then takes as many prompts as it must, so "
                "that passes over them do not say how many steps there are; give train.num_steps"
            )
        if self.reward.group_grader is not None and self.algorithm.needs_greedy_response:
            raise ValueError(
                f"reward.group_grader with advantage {self.algorithm.advantage.name}: its greedy baseline is graded "
                "alone, and cannot be compared with rewards that depend on the group"
            )
        self.algorithm.check_group_size(train.group_size)
        self.algorithm.check_responses(train.num_prompts_per_step * train.group_size)
        self.algorithm.check_response_tokens(self.sampling.max_response_tokens)
        return self

    @model_validator(mode="after")
    def _replayed_experts(self) -> Self:
        if self.actor.routing_replay == "old" and self.train.updates_of_step == 1:
            raise ValueError(
                "actor.routing_replay old changes nothing with one update a step: the weights before it are those that "
                "choose the experts; remove it, raise train.num_updates_per_step or num_epochs_per_step, or set it to "
                "rollout"
            )
        chunk = self.rollout.sglang.get("chunked_prefill_size")
        if self.actor.routing_replay == "rollout" and isinstance(chunk, int) and chunk <= 0:
            raise ValueError(
                f"actor.routing_replay rollout with rollout.sglang.chunked_prefill_size {chunk}: SGLang keeps the "
                "experts of one chunk, and a longer prompt in one piece would end the engine; remove the latter"
            )
        halves = self.rollout.sglang.get("enable_two_batch_overlap") or any(
            word.startswith("--enable-two") for word in self.rollout.extra_args
        )
        if self.actor.routing_replay == "rollout" and halves:
            raise ValueError(
                "actor.routing_replay rollout with SGLang's enable_two_batch_overlap, which keeps the experts of a "
                "batch's second half where those of the first are; remove one of them"
            )
        return self
