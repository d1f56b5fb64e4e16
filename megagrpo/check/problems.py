"""Finds every problem of an experiment that is known before a start. Loads no torch."""

from contextlib import suppress

from megagrpo.check.rules import (
    engine_layout,
    inputs,
    model,
    placement,
    served_models,
    trainer_layout,
)
from megagrpo.check.rules.subject import Nodes, Subject, broken, model_description, tokenizer_folder
from megagrpo.checkpoint.folder import checkpoint_folder, latest, step_of
from megagrpo.config.fields import refuse
from megagrpo.config.schema import ActorConfig, ExperimentConfig
from megagrpo.data.vocabulary import token_ids
from megagrpo.models.architecture import Architecture
from megagrpo.models.config_json import HfConfig
from megagrpo.models.folder import Model
from megagrpo.models.table import architecture_of
from megagrpo.monitor.step_log import read_metrics

OF_MODEL = (model.before_start, trainer_layout.before_start, engine_layout.before_start)
BEFORE_START = (inputs.before_start, placement.before_start, *OF_MODEL, served_models.before_start)


def preflight(config: ExperimentConfig, nodes: Nodes | None = None) -> list[str]:
    """Returns every problem: missing files, broken lines, unknown functions, ranks that have no
    place on the nodes, a model that the layout cannot cut."""
    description = model_description(config)
    # none without tokenizer.json: load_tokenizer checks after loading
    ids = {} if description is None else token_ids(tokenizer_folder(config))
    largest = max(ids.values(), default=None)
    subject = Subject.of(config, description, largest, nodes or Nodes())
    return [text for rules in BEFORE_START for text in broken(rules(subject))]


def check_against_model(config: ExperimentConfig, hf: HfConfig) -> list[str]:
    """Returns every clash between the experiment and the model's own config.json, each with its
    numbers."""
    subject = Subject.of(config, hf)
    return [text for rules in OF_MODEL for text in broken(rules(subject))]


def refuse_for_engines(config: ExperimentConfig) -> None:
    """Raises ValueError if engines cannot load or cut the model or served ones; the trainers' layout
    is not judged."""
    description = model_description(config)
    if description is None:
        raise ValueError(f"model.path: {config.model.path} holds no config.json")
    subject = Subject.of(config, description)
    parts = (model, engine_layout, served_models)
    rules = [rule for part in parts for rule in part.before_start(subject)]
    refuse("engines do not fit the model", broken(rules))


def layout_problems(arch: Architecture, actor: ActorConfig) -> list[str]:
    """Returns why the trainers' layout cannot cut the model."""
    return broken(trainer_layout.layout_rules(arch, actor))


def refuse_layout(arch: Architecture, actor: ActorConfig) -> None:
    """Raises ValueError if the trainers' layout cannot cut the model; before an actor is made."""
    refuse("the model does not fit the layout", layout_problems(arch, actor))


def model_to_train(config: ExperimentConfig) -> Model:
    """Reads the experiment's model, which the layout can cut. Raises ValueError."""
    read = Model.of(config)
    refuse_layout(read.arch, config.actor)
    return read


def finished(config: ExperimentConfig) -> str:
    """Returns why nothing is left to do, or ""."""
    steps = config.train.steps(0)
    last = latest(config.run_folder.checkpoints)
    if config.train.num_epochs or last is None or config.checkpoint.resume == "never":
        return ""
    done = step_of(last)
    export = checkpoint_folder(last.parent, done, "hf")
    if done < steps or (done == steps and config.checkpoint.hf_every and not export.is_dir()):
        return ""
    if done == steps and config.eval is not None:
        with suppress(ValueError, IndexError):  # of a record that is not there, or damaged
            # the last evaluation failed, or a stop request ended it
            if "eval/accuracy" not in read_metrics(config.run_folder)[-1]:
                return ""
    return (
        f"{done} of {steps} steps are done, in {config.run_folder.path}; raise train.num_steps, or "
        "name another output_dir"
    )


def describe_model(config: ExperimentConfig) -> dict[str, object]:
    """Returns the model's config.json, which the layouts can cut. Raises ValueError with every
    problem."""
    description = model_description(config)
    if description is None:
        raise ValueError(
            f"model.path: {config.model.path} holds no config.json; no other file of the model is needed"
        )
    refuse("the experiment does not fit its model", check_against_model(config, description))
    return description


def described_architecture(config: ExperimentConfig) -> Architecture:
    """Returns the architecture of the experiment's model. Raises ValueError as describe_model."""
    return architecture_of(describe_model(config), config.actor.has_draft)
