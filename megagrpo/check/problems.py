"""Finds every problem of an experiment that is known before a start. Loads no torch."""

from collections.abc import Callable, Iterable
from contextlib import suppress

from megagrpo.check.rules.subject import Nodes, Subject, broken, model_description
from megagrpo.check.rules.table import OF_MODEL, OF_START
from megagrpo.check.rules.trainer_layout import trainer_layout_rules
from megagrpo.checkpoint.folder import latest, step_of
from megagrpo.config.fields import Rule
from megagrpo.config.schema import ExperimentConfig
from megagrpo.models.architecture import Architecture, HfConfig
from megagrpo.models.folder import Model
from megagrpo.models.table import architecture_of
from megagrpo.monitor.record import read_metrics


def preflight(config: ExperimentConfig, nodes: Nodes | None = None) -> list[str]:
    """Returns every problem: missing files, broken lines, unknown functions, ranks that have no
    place on the nodes, a model that the layout cannot cut."""
    subject = Subject.read(config, nodes)
    return _judged(subject, (*OF_START, *OF_MODEL))


def check_against_model(
    config: ExperimentConfig, hf: HfConfig, largest_token_id: int | None = None
) -> list[str]:
    """Returns every clash between the experiment and the model's own config.json, each with its
    numbers."""
    return _judged(Subject.described(config, hf, largest_token_id), OF_MODEL)


def _judged(subject: Subject, table: Iterable[Callable[[Subject], Iterable[Rule]]]) -> list[str]:
    return [text for rules in table for text in broken(rules(subject))]


def layout_problems(arch: Architecture, config: ExperimentConfig) -> list[str]:
    """Returns why the trainers' layout cannot cut the model."""
    return broken(trainer_layout_rules(Subject(config, arch=arch)))


def model_to_train(config: ExperimentConfig) -> Model:
    """Reads the experiment's model folder. Raises ValueError if it cannot be read, or not be cut
    over the trainers' ranks."""
    model = Model.of(config)
    if problems := layout_problems(model.arch, config):
        raise ValueError("the model does not fit the layout:\n  " + "\n  ".join(problems))
    return model


def finished(config: ExperimentConfig) -> str:
    """Returns why nothing is left to do, or ""."""
    steps = config.train.num_steps
    last = latest(config.run_folder.checkpoints)
    if steps is None or last is None or config.checkpoint.resume == "never":
        return ""
    done = step_of(last)
    if done < steps:
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
            f"model.path: {config.model.path} holds no config.json; no other "
            "file of the model is needed"
        )
    problems = check_against_model(config, description)
    if problems:
        raise ValueError("the experiment does not fit its model:\n  " + "\n  ".join(problems))
    return description


def described_architecture(config: ExperimentConfig) -> Architecture:
    """Returns the architecture of the experiment's model. Raises ValueError as describe_model."""
    return architecture_of(describe_model(config), config.actor.has_draft)
