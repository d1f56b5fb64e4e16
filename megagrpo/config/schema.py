"""The experiment: every section of the YAML, one frozen pydantic model each.

A default and a description live on their field, nowhere else; docs/reference/configuration.md is
generated from them (`python bench/readme.py`). Reading files, overrides and error
messages are in config/load.py.
"""

from pathlib import Path
from typing import Annotated, Literal, get_args

from pydantic import Field, model_validator

from megagrpo.config.actor import ActorConfig, OptimizerConfig, ParallelConfig
from megagrpo.config.algorithm import AlgorithmConfig
from megagrpo.config.data import CurriculumConfig, DataConfig, EvalConfig, ModelConfig
from megagrpo.config.fields import (
    Dtype,
    Fraction,
    KeyPath,
    LocalPath,
    NonNegativeInt,
    PositiveFloat,
    PositiveFraction,
    PositiveInt,
    Rule,
    Section,
    Text,
    repeated,
)
from megagrpo.config.objective.served_models import ServedModel, TeacherConfig
from megagrpo.config.reward import RewardConfig
from megagrpo.config.rollout import (
    AgentConfig,
    EnvironmentConfig,
    RolloutConfig,
    SamplingConfig,
    WeightsConfig,
)
from megagrpo.config.trackers import TrackerConfig, WandbConfig
from megagrpo.system.run_folder import RunFolder

__all__ = [  # of other files
    "ActorConfig",
    "CurriculumConfig",
    "DataConfig",
    "EvalConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "RewardConfig",
    "RolloutConfig",
    "SamplingConfig",
]

DEFAULT_STEPS = 100
_COMPILED_S = 7200.0  # actor.deadline_s: above the start of engines that compile kernels
OF_TRAINING = ("teacher_key", "weight_key", "demonstration_key")  # keys of `data` alone


class TrainConfig(Section):
    """Number and size of the steps."""

    num_steps: NonNegativeInt | None = Field(
        default=None,
        description=f"Steps (sample, update, publish). Default: {DEFAULT_STEPS}, or from `num_epochs`. "
        "0: only one evaluation.",
    )
    num_epochs: PositiveInt | None = None
    """Passes over the prompts, instead of `num_steps`. The last step is full."""
    num_prompts_per_step: PositiveInt = 64
    """Prompts (groups) per step."""
    group_size: PositiveInt = 8
    """Responses per prompt."""
    num_updates_per_step: PositiveInt = 1
    """Optimizer updates per pass, which split the groups between them."""
    num_epochs_per_step: PositiveInt = 1
    """Passes over the samples in a step. Each later pass splits the groups anew, at random."""
    non_finite: Literal["halt", "skip"] = "halt"
    """On a non-finite loss or gradient, stop the run or skip the update. The batch is dumped."""
    max_bad_fraction: Fraction = 0.5
    """The run stops if more than this fraction of a step's rewards are errors and timeouts."""

    @property
    def updates_of_step(self) -> int:
        """Optimizer updates of a step, in all its passes."""
        return self.num_epochs_per_step * self.num_updates_per_step

    def steps(self, num_prompts: int) -> int:
        """Returns the number of steps of a run over a file of `num_prompts` prompts."""
        if self.num_epochs is not None:
            return -(-self.num_epochs * num_prompts // self.num_prompts_per_step)
        return DEFAULT_STEPS if self.num_steps is None else self.num_steps

    def problems(self) -> list[Rule]:
        prompts, updates = self.num_prompts_per_step, self.num_updates_per_step
        return [
            Rule(
                self.num_epochs and self.num_steps is not None,
                f"num_steps {self.num_steps} and num_epochs {self.num_epochs} both say how long the run is",
                "set one to null",
            ),
            Rule(
                prompts % updates,
                f"num_prompts_per_step {prompts} is not a multiple of num_updates_per_step {updates}",
                "take a multiple of it",
            ),
        ]


class CheckpointConfig(Section):
    """When to save the run, and what it starts from."""

    every: NonNegativeInt = 25
    """Steps between checkpoints. 0: only at the end or when the run is stopped."""
    dir: LocalPath | None = None
    """Folder on another disk that all nodes share. `checkpoints` in the run folder becomes a link
    to it."""
    reshardable: Literal["last", "always", "never"] = "last"
    """Checkpoints that another layout can load: the last per start (after its last step, or when
    stopped), all, or none. The others are faster and need less memory."""
    keep: PositiveInt = 2
    """Number of newest checkpoints to keep."""
    hf_every: NonNegativeInt = 0
    """Write every n-th scheduled checkpoint, and the last, also as a [Hugging Face
    folder](../checkpoints.md#exports). 0: none."""
    asynchronous: bool | Literal["auto"] = "auto"
    """Copy to host memory and write during training. auto: from two trainer nodes on."""
    resume: Literal["auto", "never", "other_data"] = "auto"
    """auto: continue from the last checkpoint. never: refuse a folder that has one. other_data:
    continue even if the rows in use have changed or are in another order."""
    load: LocalPath | None = None
    """Checkpoint folder from another run. This run starts from its weights and optimizer. The
    reference for the KL stays `model.path`: to move it, name an export there."""


HealthAlarm = Literal[
    "degenerate_fraction",
    "advantage_std",
    "kl_reference",
    "clip_fraction",
    "truncated_rise",
    "entropy_left",
    "mismatch_growth",
    "rejected_fraction",
]


class LogConfig(Section):
    """What to record besides metrics.jsonl."""

    tensorboard: bool = True
    """Write TensorBoard files."""
    wandb: WandbConfig | None = None
    trackers: list[TrackerConfig] = Field(default=[])
    """Other trackers, for the same metrics."""
    alarms: list[HealthAlarm] = Field(default=list(get_args(HealthAlarm)))
    """[Warnings](../train.md#warnings) that the run prints with a remedy, each once per start."""
    dump_steps: list[PositiveInt] = Field(default=[])
    """Steps whose batch to keep for `megagrpo replay`."""
    tokens: NonNegativeInt = 4
    """Groups per step whose tokens are recorded with the difference between trainer and engine
    log-probabilities."""

    def problems(self) -> list[Rule]:
        twice = repeated(tracker.name for tracker in self.trackers)
        return [Rule(twice, f"trackers names {', '.join(twice)} twice", "name it once")]


class ClusterConfig(Section):
    """The nodes for which `check`, `plan` and `submit` place ranks and count memory."""

    gpus_per_node: PositiveInt = 8
    """GPUs per node."""
    gpu: Literal["H100", "H200", "H20", "B200"] = "H100"
    """GPU model. If yours is not listed, name one with at most as much memory."""


class SftOptimizerConfig(Section):
    """Adam in the warm-up. adam_beta2 is that in `actor.optimizer`, and everything else has its
    default."""

    lr: PositiveFraction = 1e-3
    """Learning rate after the linear warm-up."""
    warmup_steps: NonNegativeInt = 0
    """Updates of linear warm-up."""

    def like(self, actor: OptimizerConfig) -> OptimizerConfig:
        """Returns the section of the actor's optimizer that says the same."""
        return OptimizerConfig(**dict(self), adam_beta2=actor.adam_beta2)


class SftConfig(Section):
    """Supervised warm-up with the same actor. It learns `answer` after `prompt` and writes
    `model.path`."""

    path: LocalPath | list[LocalPath]
    """Files, which are read as in `data`."""
    model: LocalPath
    """Hugging Face folder, or a name on the Hub, to start from."""
    num_steps: PositiveInt = 100
    """Most optimizer updates."""
    stop_at_loss: PositiveFloat | None = None
    """Stop when the running mean of the loss is below this."""
    batch_size: PositiveInt = 64
    """Rows per update."""
    optimizer: SftOptimizerConfig = SftOptimizerConfig()


class ExperimentConfig(Section):
    """One experiment, read from one YAML file."""

    name: Text
    """Name of the experiment."""
    output_dir: LocalPath
    """Run folder. On a cluster, all nodes must see it."""
    seed: Annotated[int, Field(ge=0, le=2**53)] = 0
    """Seed for every random choice."""
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
    teachers: dict[str, TeacherConfig] = Field(default={})
    """Teachers for `algorithm.distillation`, by names that you choose."""
    cluster: ClusterConfig = ClusterConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()
    sft: SftConfig | None = None

    @model_validator(mode="before")
    @classmethod
    def _defaults_by_other_sections(cls, given: object) -> object:
        """Gives `rollout.dtype` the value of `actor.dtype`, `actor.deadline_s` its longer default if
        trainers wait, on shared GPUs, for engines that compile FP8 kernels, and what plays rollouts
        a limit below that of a step; unless they are said."""
        if not isinstance(given, dict):
            return given
        actor, rollout = given.get("actor", {}), given.get("rollout", {})
        if not isinstance(actor, dict) or not isinstance(rollout, dict):
            return given
        if rollout.get("colocate") is True and rollout.get("quantization") is not None:
            actor = {"deadline_s": _COMPILED_S} | actor
        if actor.get("dtype") in get_args(Dtype):
            rollout = {"dtype": actor["dtype"]} | rollout
        step_s, sampling = rollout.get("step_timeout_s"), given.get("sampling")
        if isinstance(sampling, dict) and isinstance(step_s, int | float) and step_s > 0:
            shorter = {
                key: {"timeout_s": min(kind.model_fields["timeout_s"].default, step_s / 2)} | player
                for key, kind in (("agent", AgentConfig), ("environment", EnvironmentConfig))
                if isinstance(player := sampling.get(key), dict)
            }
            given = given | {"sampling": sampling | shorter}
        return given | {"actor": actor, "rollout": rollout}

    @property
    def run_folder(self) -> RunFolder:
        """The files of the run."""
        return RunFolder(Path(self.output_dir))

    @property
    def served_models(self) -> dict[str, ServedModel]:
        """Teachers and judges, by the beginning of their engines' ids."""
        return {
            **{f"teacher-{name}": teacher for name, teacher in self.teachers.items()},
            **{f"judge-{name}": judge for name, judge in self.reward.judges.items()},
        }

    def keys_of(self, model: str) -> KeyPath:
        """Returns the path of the section that describes a served model."""
        kind, _, name = model.partition("-")
        if kind == "teacher":
            return "teachers", name
        names = [grader.short_name for grader in self.reward.graders]
        return ("reward", "graders", names.index(name), "args") if names else ("reward", "args")

    def for_model(self, name: str) -> "ExperimentConfig":
        """Returns the experiment whose engines are those of a served model with a path: with
        weights of its files, no publish, on GPUs of their own."""
        model = self.served_models[name]
        assert model.path is not None, "the engines of a url are started elsewhere"
        rollout: dict[str, object] = {
            "min_healthy_engines": 1,
            "load_format": "model",
            "quantization": None,
            "draft_tokens": None,
        }
        actor = self.actor.model_copy(update={"draft": None, "routing_replay": None})
        return self.model_copy(
            update={
                "model": ModelConfig(path=model.path),
                "rollout": self.rollout.model_copy(update=model.sizes | rollout),
                "actor": actor,
                "teachers": {},
                "reward": RewardConfig(),
            }
        )

    @property
    def engine_sizes(self) -> "dict[str, RolloutConfig | ServedModel]":
        """Numbers and ranks of the engines that the run starts: its own under "", those of served
        models under their names; judges with the same path share those of the first."""
        reward = self.reward
        shared = [f"judge-{name}" for name in reward.judges if reward.first_judge(name) != name]
        theirs = {
            name: model
            for name, model in self.served_models.items()
            if model.path and name not in shared
        }
        return {"": self.rollout, **theirs}

    @property
    def engine_ranks(self) -> int:
        """Number of ranks of all engines that the run starts."""
        return sum(of.num_engines * of.tp for of in self.engine_sizes.values())

    @property
    def num_gpus(self) -> int:
        """Number of GPUs that trainers and engines have, shared ones once."""
        return self.actor.world_size + (0 if self.rollout.colocate else self.engine_ranks)

    @property
    def scoring(self) -> tuple[bool, str, int, frozenset[str]]:
        """Whether every row has a teacher, for which loss, how many tokens teachers score at each
        position beside the sampled one, and the graders whose scores the estimator reads."""
        distillation = self.algorithm.distillation
        graders = frozenset(self.graders_apart)
        if distillation is None:
            return False, "", 0, graders
        every_row = self.data.teacher_key is None
        return every_row, distillation.candidates, distillation.num_candidates, graders

    @property
    def num_servers(self) -> int:
        """Server processes of all engines that the run starts: one on each of their nodes."""
        return sum(size.num_engines * size.nodes_per_engine for size in self.engine_sizes.values())

    @property
    def graders_apart(self) -> dict[str, float]:
        """The weights, by name, of the graders whose scores the estimator reads one by one."""
        reads = self.algorithm.advantage.reads_parts
        return {each.short_name: each.weight for each in self.reward.graders if reads}

    @property
    def eval_data(self) -> DataConfig | None:
        """The prompts of the evaluation, with the keys of `data` that it leaves out."""
        if self.eval is None:
            return None
        none = dict.fromkeys(OF_TRAINING)
        return self.data.reading(self.eval.data, path=self.eval.data.path, limit=None, **none)

    @property
    def sft_data(self) -> DataConfig | None:
        """The rows of the warm-up, read as `data` says; no grader reads them."""
        if self.sft is None:
            return None
        files: dict[str, object] = {"sources": [], "path": self.sft.path, "grader_by_source": {}}
        none = dict.fromkeys(("extra_key", "grader_key", "source_key", "limit", *OF_TRAINING))
        return self.data.model_copy(update=files | none)

    @property
    def data_sections(self) -> dict[str, DataConfig]:
        """The sections that name files of rows, by their keys."""
        found = {"data": self.data, "eval.data": self.eval_data, "sft": self.sft_data}
        return {key: data for key, data in found.items() if data is not None}

    def problems(self) -> list[Rule]:
        # theirs are also the keys that they take from `data`
        said = {rule.text for rule in self.data.problems() if rule.when}
        return [
            Rule(rule.when and rule.text not in said, f"{key}: {rule.because}", rule.remedy)
            for key, data in self.data_sections.items()
            if data is not self.data
            for rule in data.problems()
        ]
