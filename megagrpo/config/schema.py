"""The experiment: every section of the YAML, one frozen pydantic model each.

A default and a description live on their field, nowhere else; docs/reference/configuration.md is
generated from them (`python -m megagrpo.tools.describe`). Reading files, overrides and error
messages are in config/load.py.
"""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from megagrpo.config.actor import ActorConfig, OptimizerConfig, ParallelConfig
from megagrpo.config.algorithm import AlgorithmConfig
from megagrpo.config.data import DataConfig, EvalConfig, ModelConfig
from megagrpo.config.fields import (
    LocalPath,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Problems,
    Section,
)
from megagrpo.config.reward import GraderConfig, RewardConfig
from megagrpo.config.rollout import RolloutConfig, SamplingConfig, ToolConfig, WeightsConfig
from megagrpo.system.run_folder import RunFolder

__all__ = [
    "ActorConfig",
    "AlarmsConfig",
    "AlgorithmConfig",
    "CheckpointConfig",
    "ClusterConfig",
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
        description=f"Steps of the run: sample, update, publish; default: {DEFAULT_STEPS}, or what "
        "`num_epochs` makes.",
    )
    num_epochs: PositiveInt | None = None
    """Passes over the prompts, instead of `num_steps`: as many steps as take them that often, the
    last one whole."""
    num_prompts_per_step: PositiveInt = Field(default=64, description="Prompts (groups) of a step.")
    group_size: PositiveInt = Field(default=8, description="Responses to each prompt.")
    num_updates_per_step: PositiveInt = 1
    """Optimizer updates of each pass over a step's samples; its groups are split between them."""
    num_epochs_per_step: PositiveInt = 1
    """Passes over a step's samples; each later one splits the groups between its updates again, at
    random."""
    non_finite: Literal["halt", "skip"] = "halt"
    """Reaction to an update whose loss or gradient is not finite; its batch is dumped either
    way."""
    max_bad_fraction: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Fraction of reward errors and timeouts in a step above which the run stops."""

    @property
    def updates_of_step(self) -> int:
        """Optimizer updates of a step, in all its passes."""
        return self.num_epochs_per_step * self.num_updates_per_step

    def steps(self, num_prompts: int) -> int:
        """Returns the number of steps of a run over a file of `num_prompts` prompts."""
        if self.num_epochs is not None:
            return -(-self.num_epochs * num_prompts // self.num_prompts_per_step)
        return self.num_steps or DEFAULT_STEPS

    def problems(self) -> Problems:
        prompts, updates = (
            f"num_prompts_per_step {self.num_prompts_per_step}",
            self.num_updates_per_step,
        )
        both = f"num_steps {self.num_steps} and num_epochs {self.num_epochs}"
        return {
            f"{both} both say how long the run is; set one to null": self.num_epochs
            and self.num_steps,
            f"{prompts} is not a multiple of num_updates_per_step {updates}": self.num_prompts_per_step
            % updates,
        }

    def excludes(self, experiment: "ExperimentConfig") -> Problems:
        mixed = any(source.ratio is not None for source in experiment.data.sources)
        return {
            "train.num_epochs with ratios in data.sources: small sources are passed more often "
            "than large ones; give "
            "train.num_steps": self.num_epochs and mixed
        }


class CheckpointConfig(Section):
    """When the run is saved, and what it starts from."""

    every: NonNegativeInt = Field(
        default=0, description="Steps between checkpoints; 0: only at the end."
    )
    reshardable: Literal["last", "always", "never"] = "last"
    """Saves that another layout can load too: the last one of a start (after its last step, or when
    it is asked to stop), all, or none. The others are faster and smaller in memory: every rank
    writes its own part."""
    keep: PositiveInt = Field(default=2, description="Newest checkpoints kept.")
    keep_gb: PositiveFloat | None = None
    """GB (1e9 bytes) that the kept checkpoints may have together: older ones go, never the newest;
    default: no limit."""
    asynchronous: bool | Literal["auto"] = "auto"
    """Copy to host memory, write while training goes on, finish after a later step; auto: from two
    trainer nodes on."""
    disk_gb_s: PositiveFloat = 10.0
    """GB/s of the file system, all nodes together: what `megagrpo check` computes the seconds
    from."""
    resume: Literal["auto", "never"] = "auto"
    """Continue from the run folder's last checkpoint, or refuse a folder that has one."""
    load: LocalPath | None = None
    """Another run's checkpoint folder, whose weights and optimizer this run starts from."""


class WandbConfig(Section):
    """The run on Weights & Biases; the API key is wandb's own affair (`wandb login`, or
    WANDB_API_KEY)."""

    project: str = Field(description="Project that the run belongs to.")
    entity: str | None = Field(
        default=None, description="User or team; default: that of the API key."
    )
    group: str | None = Field(
        default=None, description="Group of runs, such as the seeds of one experiment."
    )
    name: str | None = Field(
        default=None, description="Name of the run; default: the experiment's."
    )
    mode: Literal["online", "offline", "disabled"] = "online"
    """offline: kept in the run folder for `wandb sync`; disabled: nothing."""
    tags: list[str] = Field(default=[], description="Tags of the run.")


class AlarmsConfig(Section):
    """Bounds beyond which a run prints a warning with a remedy, each once in a start; null: no such
    warning."""

    steps: PositiveInt = Field(
        default=3, description="Consecutive steps beyond a bound before the warning."
    )
    degenerate_fraction: PositiveFloat | None = 1.0
    """`group/degenerate_fraction` from which on nothing is learned, if advantages are 0 too."""
    advantage_std: PositiveFloat | None = 0.01
    """Smallest `advantage/std`; grpo's is near 1, and at most that of the rewards without a
    division by theirs."""
    kl_reference: PositiveFloat | None = 0.1
    """Largest `policy/kl_reference`, in nats a token: `target_kl` of verl's adaptive KL (verl
    docs/examples/config)."""
    clip_fraction: PositiveFloat | None = 0.3
    """Largest `policy/clip_fraction_low` + `_high`: a rule of thumb; GSPO clips 0.15 (arXiv
    2507.18071)."""
    truncated_rise: NonNegativeFloat | None = 0.1
    """Largest rise of `response/truncated_fraction` since the first step of a start; no published
    value."""
    entropy_left: PositiveFloat | None = 0.1
    """Smallest `policy/entropy` as a fraction of the first step's; a drop by 73 % is usual (arXiv
    2505.22617)."""
    mismatch_growth: PositiveFloat | None = 3.0
    """Largest `mismatch/logprob_abs_mean` (of lag 0) as a multiple of the first step's, where it is
    above 0.001: verl's FAQ calls 0.005 normal and 0.01 a fault, of probabilities."""


class LogConfig(Section):
    """Files and services that get metrics besides metrics.jsonl."""

    tensorboard: bool = Field(default=True, description="Write TensorBoard files.")
    wandb: WandbConfig | None = None
    """Send the same metrics to Weights & Biases (extra `wandb`); default: none."""
    console: bool = Field(default=True, description="Print a line for every step.")
    alarms: AlarmsConfig | None = Field(
        default=AlarmsConfig(), description="Warnings of a run's health; null: none."
    )
    dump_steps: list[PositiveInt] = Field(
        default=[], description="Steps whose batch is kept for `megagrpo replay`."
    )
    rollouts: bool = Field(
        default=True, description="Write every prompt, response and reward as JSON lines."
    )
    timeline: bool = True
    """Record when every rank entered which phase, and the requests to every engine."""
    tokens: NonNegativeInt = 4
    """Groups of a step whose tokens are recorded with the difference between trainer's and engine's
    log-probability; 0: none."""


class ClusterConfig(Section):
    """The nodes that the experiment is for, as `check`, `plan` and `submit` place its ranks and
    count their memory."""

    gpus_per_node: PositiveInt = Field(default=8, description="GPUs of every node.")
    gpu: Literal["H100", "H200", "H20", "B200"] = "H100"
    """Kind of the GPUs, into whose memory the experiment must fit; for another kind, the one with
    no more memory."""


class SftConfig(Section):
    """Supervised warm-up with the same actor: it learns `answer` after `prompt`, and writes
    `model.path`."""

    data: DataConfig = Field(description="Prompts and the answers to learn; same keys as `data`.")
    model: LocalPath = Field(description="Hugging Face folder to start from.")
    num_steps: PositiveInt = Field(default=100, description="Most optimizer updates.")
    stop_at_loss: PositiveFloat | None = None
    """End as soon as the running mean of the loss is below this; default: never."""
    batch_size: PositiveInt = Field(default=64, description="Rows of one update.")
    optimizer: OptimizerConfig = Field(
        default=OptimizerConfig(lr=1e-3), description="Same keys as `actor.optimizer`."
    )


class ExperimentConfig(Section):
    """One experiment: one YAML file. `preset: NAME` at its top level lays a published algorithm
    under it."""

    name: str = Field(description="Name of the experiment.")
    output_dir: LocalPath = Field(
        description="Run folder; on a cluster, on a file system that all nodes see."
    )
    seed: NonNegativeInt = Field(default=0, description="Seed of every random choice.")
    model: ModelConfig = Field(description="The model to train.")
    data: DataConfig = Field(description="Prompts to train on.")
    sampling: SamplingConfig = Field(
        default=SamplingConfig(), description="How responses are sampled."
    )
    reward: RewardConfig = Field(default=RewardConfig(), description="How responses are graded.")
    algorithm: AlgorithmConfig = Field(default=AlgorithmConfig(), description="What is optimised.")
    train: TrainConfig = Field(default=TrainConfig(), description="Number and size of the steps.")
    eval: EvalConfig | None = Field(default=None, description="Held-out evaluation; default: none.")
    actor: ActorConfig = Field(
        default=ActorConfig(), description="The learner: ranks, layout, optimizer."
    )
    rollout: RolloutConfig = Field(default=RolloutConfig(), description="The service that samples.")
    weights: WeightsConfig = Field(
        default=WeightsConfig(), description="From the learner to the engines."
    )
    cluster: ClusterConfig = Field(
        default=ClusterConfig(), description="The nodes that it is planned for."
    )
    checkpoint: CheckpointConfig = Field(
        default=CheckpointConfig(), description="Saving and resuming."
    )
    log: LogConfig = Field(default=LogConfig(), description="What is recorded.")
    sft: SftConfig | None = Field(default=None, description="Supervised warm-up; default: none.")

    @property
    def run_folder(self) -> RunFolder:
        """The files of the run."""
        return RunFolder(Path(self.output_dir))

    def problems(self) -> Problems:
        sections = (
            self.sampling,
            self.rollout,
            self.train,
            self.weights,
            self.algorithm,
            self.reward,
            self.actor,
        )
        return {
            text: holds for section in sections for text, holds in section.excludes(self).items()
        }
