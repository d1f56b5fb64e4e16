"""Rules about the inputs of a run: files, packages, checkpoints, rows and the user's functions."""

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from megagrpo.check.rules.subject import Subject, broken
from megagrpo.checkpoint.changes import input_problem, prompt_order
from megagrpo.checkpoint.folder import OTHER_DATA, latest, layout_problem, place_problem
from megagrpo.config.fields import Rule, complaints
from megagrpo.config.schema import DataConfig, ExperimentConfig
from megagrpo.config.trackers import TRACKERS
from megagrpo.config.wording import dotted
from megagrpo.data.curriculum import load_curriculum
from megagrpo.data.hub import is_hub_name
from megagrpo.data.rows import Row, read_rows, unknown_teachers
from megagrpo.models.folder import ADAPTERS, MERGE, Model
from megagrpo.models.table import model_problems
from megagrpo.rewards.graders.functions import (
    check_answer,
    check_grader,
    load_group_grader,
    required_columns,
)
from megagrpo.rollout.agents.environments import load_environment
from megagrpo.rollout.agents.program_worker import load_program
from megagrpo.system import environment
from megagrpo.system.user_function import check_arguments

Call = tuple[Callable[..., object], *tuple[object, ...]]  # a function and its arguments
_NAMED = 10  # rows


def before_start(subject: Subject) -> Iterator[Rule]:
    """Yields what is missing or cannot be read."""
    for rules in (absent_files, _model_folders, installed, _rows, _functions, _checkpoints):
        yield from rules(subject.experiment)


def absent_files(config: ExperimentConfig) -> Iterator[Rule]:
    """Yields the rules that files are there; names on the Hub were judged as the experiment was
    read."""
    for key, path in read_files(config):
        yield Rule(
            not (Path(path).exists() or is_made(config, path)),
            f"{key}: {path} does not exist",
            f"write OWNER/NAME as on the Hub, or `hf download OWNER/NAME --local-dir {path}`"
            * ("model" in key),
        )


def read_files(config: ExperimentConfig) -> Iterator[tuple[str, str]]:
    """Yields key and path of what a run reads, without names on the Hub."""
    wanted = [("model.path", config.model.path), ("model.tokenizer", config.model.tokenizer)]
    if config.sft is not None:
        wanted.append(("sft.model", config.sft.model))
    wanted += [
        (f"{key}.path", path) for key, data in config.data_sections.items() for path in data.paths
    ]
    wanted += [
        (f"{dotted(config.keys_of(name))}.path", model.path)
        for name, model in config.served_models.items()
    ]
    if config.checkpoint.load is not None and not any(config.run_folder.checkpoints.glob("step_*")):
        yield "checkpoint.load", config.checkpoint.load  # no name on the Hub
    for key, path in wanted:
        if path and not is_hub_name(path):
            yield key, path


def _model_folders(config: ExperimentConfig) -> Iterator[Rule]:
    """Yields why the folders that training starts from hold no model, or weights of another. One
    without weights is a description, as `check` and `plan` need it."""
    wanted = {"model.path": config.model.path}
    if config.sft is not None:
        wanted["sft.model"] = config.sft.model
    for key, name in wanted.items():
        folder = Path(name)
        described = (folder / "config.json").is_file()
        yield Rule(
            folder.exists() and not described,
            f"{key}: {name} holds no config.json, so it is no Hugging Face model folder",
            MERGE * (folder / ADAPTERS).is_file(),
        )
        if described:
            model = Model.read(name, draft=config.actor.has_draft)
            if not model_problems(model.description, model.draft):
                yield from (
                    Rule(True, f"{key}: {text}") for text in complaints(model.refuse_weights)
                )


def installed(config: ExperimentConfig) -> Iterator[Rule]:
    """Yields the rules that this machine has the programs and packages that the experiment names."""
    agent = config.sampling.agent
    for program in agent.command[:1] if agent is not None else ():
        yield Rule(
            shutil.which(program) is None,
            f"sampling.agent.command: {program} is no program that this machine has",
        )
    names = [one.name for one in config.log.trackers if one.name in TRACKERS]
    packages = {f"log.trackers {name}": name for name in names}
    if config.log.wandb is not None:
        packages["log.wandb"] = "wandb"
    for key, name in packages.items():
        spec = find_spec(name)
        yield Rule(
            # without an origin it is a folder of that name in the working directory
            spec is None or spec.origin is None,
            f"{key}: the package {name} is not installed",
            f"`pip install {name}`, or remove {key}",
        )


def _checkpoints(config: ExperimentConfig) -> Iterator[Rule]:
    """Yields the rules about the checkpoint that the run would start from, which must suit its
    layout, and about the place of its own."""
    root = config.run_folder.checkpoints
    load = config.checkpoint.load
    if problem := place_problem(root, config.checkpoint.dir):
        yield Rule(True, problem)
    newest = latest(root)
    yield Rule(
        newest is not None
        and config.checkpoint.resume == "never"
        and not environment.get_int("SLURM_RESTART_COUNT", 0),
        f"checkpoint.resume is never, but {newest} is there",
        "name another output_dir",
    )
    source = newest or (Path(load) if load else None)
    yield Rule(
        newest is None and source and source.exists() and not (source / "state.json").is_file(),
        f"checkpoint.load: {load} is no finished checkpoint: it has no state.json",
        "name a folder step_NUMBER of a run's checkpoints",
    )
    with suppress(OSError, ValueError):  # of a damaged checkpoint, whose load gives the reason
        if source is not None and (problem := layout_problem(source, config.actor.layout)):
            yield Rule(True, f"actor: {problem}")
        if newest is not None and config.checkpoint.resume != OTHER_DATA:
            problem = input_problem(newest, prompt_order(config))
            yield Rule(problem, problem)


def _rows(config: ExperimentConfig) -> Iterator[Rule]:
    """Yields what is wrong with rows, by their locations."""
    for key, data in config.data_sections.items():
        if all(Path(path).exists() for path in data.paths):
            problems: list[str] = []
            for text in complaints(_read_lines, key, data, config, problems):
                where = "" if any(path in text for path in data.paths) else f"{data.name}: "
                yield Rule(True, where + text)
            yield from (Rule(True, text) for text in named_first(problems))


def named_first(problems: Sequence[str]) -> Iterator[str]:
    """Yields the first problems of rows, and a line that counts the others."""
    yield from problems[:_NAMED]
    if len(problems) > _NAMED:
        yield f"and {len(problems) - _NAMED:,} more rows like these"


def _read_lines(
    section: str, data: DataConfig, config: ExperimentConfig, problems: list[str]
) -> None:
    """Adds the problems of rows. Raises ValueError for those of the whole."""
    entries = config.reward.entries
    rows = read_rows(data, problems)
    problems += _teachers_of_rows(config, rows)
    if section == "data":
        problems += _unused_streams(config, rows)
    if section == "sft":  # which no grader reads
        return
    keys = data.answer_key, *(source.answer_key or "" for source in data.sources)
    answers = {key.rpartition(".")[2] for key in keys}
    known = dict[str, tuple[str, set[str]]]()
    for entry in entries:
        needed = set[str]()
        with suppress(ValueError):  # another rule names a grader that cannot be loaded
            needed = required_columns(entry.grader, entry.args)
        known |= dict.fromkeys((entry.grader, entry.short_name), (entry.grader, needed))
    every = [known[entry.short_name] for entry in entries]
    for unknown in sorted({row.grader for row in rows if row.grader is not None} - known.keys()):
        check_grader(unknown, {})
        alone = config.reward.model_copy(update={"grader": unknown, "args": {}, "graders": []})
        problems += [f"reward.{text}" for text in broken(alone.problems())]
        known[unknown] = unknown, required_columns(unknown, {})
    for row in rows:
        for grader, columns in every if row.grader is None else [known[row.grader]]:
            problems += [
                f"{row.location}: {problem}"
                for problem in complaints(check_answer, grader, row.answer)
            ]
            if missing := ", ".join(sorted(columns.difference(answers, row.extra))):
                problems += [
                    f"{row.location}: grader {grader} needs a value for {missing}: set "
                    f"data.extra_key to [{missing}], columns of the row"
                ]


def _teachers_of_rows(config: ExperimentConfig, rows: Sequence[Row]) -> Iterator[str]:
    """Yields which rows name teachers that do not exist, or several that no loss mixes."""
    own_sets = config.scoring[1] == "teacher_topk"
    for row in rows:
        names = [name for name, _ in row.teachers]
        yield from unknown_teachers(row, config.teachers)
        if own_sets and len(names) > 1:
            yield (
                f"{row.location}: teachers {', '.join(names)} with distillation.loss teacher_topk: "
                "each has most probable tokens of its own; name one, or take student_topk"
            )


def _unused_streams(config: ExperimentConfig, rows: Sequence[Row]) -> Iterator[str]:
    """Yields sources of streams that no row has, and rows with weights of components without
    tokens."""
    components = config.algorithm.components
    sources = sorted({row.source for row in rows})
    for stream in config.algorithm.streams:
        for source in stream.sources:
            if source not in sources:
                found = ", ".join(filter(None, sources)) or "none"
                yield f"algorithm.streams: no row is of source {source!r}; there are: {found}"
    for row in rows:
        if unused := ", ".join(sorted(row.weights.keys() - set(components))):
            yield (
                f"{row.location}: weights of {unused}, which no stream gives a token; the components "
                f"are {', '.join(components)}"
            )


def _functions(config: ExperimentConfig) -> Iterator[Rule]:
    """Yields why functions of the user's cannot be loaded."""
    reward = config.reward
    sampling = config.sampling
    curriculum = config.data.curriculum
    loads: list[Call] = [(load,) for load in config.algorithm.own_loaders]
    loads += [(tracker.load,) for tracker in config.log.trackers]
    if curriculum is not None:
        loads.append((load_curriculum, curriculum))
    loads += [(check_grader, entry.grader, entry.args) for entry in reward.entries]
    if reward.group_grader is not None:
        loads.append((load_group_grader, reward.group_grader, reward.group_args))
    if (played := sampling.environment) is not None:
        loads.append(
            (_check_player, load_environment, played.function, played.args, ("row", "seed"), ())
        )
    if (agent := sampling.agent) is not None and agent.function is not None:
        inputs = ("base_url", "key", "row")
        loads.append((_check_player, load_program, agent.function, agent.args, (), inputs))
    for call in loads:
        yield from (Rule(True, text) for text in complaints(*call))


def _check_player(
    load: Callable[[str], Callable[..., object]],
    name: str,
    args: Mapping[str, object],
    inputs: Sequence[str],
    named: Sequence[str],
) -> None:
    """Raises ValueError if what plays rollouts does not take the user's arguments."""
    check_arguments("sampling: args do not fit", name, load(name), inputs, args, named)


def is_made(config: ExperimentConfig, path: str) -> bool:
    """Returns whether this experiment's own `megagrpo sft` writes `path`."""
    return config.sft is not None and Path(path) == Path(config.model.path)
