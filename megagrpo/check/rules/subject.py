"""What rules judge: an experiment with the model and the nodes that it is for. Loads no torch."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from megagrpo.config.fields import Rule
from megagrpo.config.schema import ExperimentConfig
from megagrpo.models.architecture import Architecture
from megagrpo.models.config_json import HfConfig
from megagrpo.models.table import architecture_of, model_problems, read_description

SPARED = 7  # positions that SGLang 0.5.21 leaves free behind the tokens that a request reads


@dataclass(frozen=True)
class Nodes:
    """The nodes that there are. None: GPUs as `cluster.gpus_per_node` says, and as few nodes as
    will do."""

    gpus: int | None = None  # of every node
    trainers: int | None = None
    # nodes beside those, for engines; 0: engines run on the trainers' nodes
    rollout: int | None = None


@dataclass(frozen=True)
class Subject:
    """An experiment, with its nodes and as much of its model as is known."""

    experiment: ExperimentConfig
    nodes: Nodes = Nodes()
    description: HfConfig | None = None  # the model's config.json, if it is there
    arch: Architecture | None = None  # of a description that a family reads
    largest_token_id: int | None = None  # of the tokenizer

    @classmethod
    def of(
        cls,
        experiment: ExperimentConfig,
        description: HfConfig | None,
        largest_token_id: int | None = None,
        nodes: Nodes = Nodes(),  # frozen
    ) -> "Subject":
        """Returns an experiment with the model that a config.json describes."""
        draft = experiment.actor.has_draft
        arch = None
        if description is not None and not model_problems(description, draft):
            arch = architecture_of(description, draft)
        return cls(experiment, nodes, description, arch, largest_token_id)


def broken(rules: Iterable[Rule]) -> list[str]:
    """Returns the messages of the rules that are broken."""
    return [rule.text for rule in rules if rule.when]


def model_folder(config: ExperimentConfig) -> str | None:
    """Returns the model's folder, or that of the model from which the warm-up will make it; None
    without config.json in either."""
    folders = [config.model.path, *([config.sft.model] if config.sft is not None else [])]
    return next((folder for folder in folders if (Path(folder) / "config.json").is_file()), None)


def model_description(config: ExperimentConfig) -> dict[str, object] | None:
    """Returns the config.json of model_folder; None without it.

    Raises ValueError for a config.json that is not JSON.
    """
    folder = model_folder(config)
    return None if folder is None else read_description(Path(folder) / "config.json")


def tokenizer_folder(config: ExperimentConfig) -> Path:
    """Returns the folder with the tokenizer of the trained model."""
    return Path(config.model.tokenizer or model_folder(config) or config.model.path)


def longest_samples(config: ExperimentConfig) -> dict[str, int]:
    """Returns the most tokens that one sample of each data section may have."""
    response = config.sampling.max_response_tokens
    out = {"data": config.data.max_prompt_tokens + response}
    if config.eval is not None:
        eval_response = config.eval.max_response_tokens or response
        out["eval.data"] = config.data.max_prompt_tokens + eval_response
    return out
