"""Finds every problem of an experiment that is known before a start. Loads no torch."""

import math
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from megagrpo.check.engine_layout import engine_layout_problems
from megagrpo.checkpoint.folder import latest, layout_problem, place_problem, step_of
from megagrpo.config.fields import complaints
from megagrpo.config.layout import layout_problems
from megagrpo.config.placement import Nodes, placement_problems
from megagrpo.config.schema import DataConfig, ExperimentConfig
from megagrpo.data.curriculum import load_curriculum
from megagrpo.data.hub import is_hub_name
from megagrpo.data.rows import Row, read_rows, unknown_teachers
from megagrpo.data.vocabulary import different_tokens, token_ids
from megagrpo.models.architecture import Architecture
from megagrpo.models.fields import expected_kernels
from megagrpo.models.table import (
    architecture_of,
    load_format_problems,
    model_problems,
    read_description,
)
from megagrpo.monitor.record import read_metrics
from megagrpo.rewards.graders.table import check_answer, check_grader, load_group_grader
from megagrpo.rollout.agents.environments import load_environment
from megagrpo.rollout.agents.program_worker import load_program

_NAMED = 10  # rows
_SPARED = 7  # positions that SGLang 0.5.21 leaves free in a request that it only reads
# on the Hugging Face Hub, by what the names of their models begin with
_OWNERS = {
    "Qwen": "Qwen",
    "GLM": "zai-org",
    "DeepSeek": "deepseek-ai",
    "Kimi": "moonshotai",
    "Moonlight": "moonshotai",
    "Llama": "meta-llama",
    "Mixtral": "mistralai",
}


def preflight(config: ExperimentConfig, nodes: Nodes | None = None) -> list[str]:
    """Returns every problem: missing files, broken lines, unknown functions, ranks that have no
    place on the nodes, a model that the layout cannot cut.
    """
    checks = (
        _missing_files,
        _missing_packages,
        _broken_lines,
        _function_problems,
        _source_problems,
    )
    problems = [problem for check in checks for problem in check(config)]
    problems += placement_problems(config, nodes)
    hf = model_description(config)
    if hf is not None:
        folder = Path(config.model.tokenizer or model_folder(config) or config.model.path)
        # None without tokenizer.json: load_tokenizer checks after loading
        largest = max(token_ids(folder).values(), default=None)
        problems += check_against_model(config, hf, largest)
        problems += _teacher_problems(config, folder, longest_samples(config)["data"], largest)
    return problems


def model_folder(config: ExperimentConfig) -> str | None:
    """Returns the model's folder, or that of the model from which the warm-up will make it; None
    without config.json in either."""
    folders = [config.model.path, *([config.sft.model] if config.sft is not None else [])]
    return next((folder for folder in folders if (Path(folder) / "config.json").is_file()), None)


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


def model_description(config: ExperimentConfig) -> dict[str, object] | None:
    """Returns the config.json of model_folder; None without it.

    Raises ValueError for a config.json that is not JSON.
    """
    folder = model_folder(config)
    return None if folder is None else read_description(Path(folder) / "config.json")


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


def check_against_model(
    config: ExperimentConfig, hf: dict[str, object], largest_token_id: int | None = None
) -> list[str]:
    """Returns every clash between the experiment and the model's own config.json, each with its
    numbers."""
    problems = [f"model.path: {problem}" for problem in model_problems(hf, config.actor.has_draft)]
    if problems:
        return problems
    arch = architecture_of(hf, config.actor.has_draft)
    problems += layout_problems(arch, config.actor)
    problems += _engine_problems(config, arch)
    problems += load_format_problems(hf, config.rollout.load_format)
    problems += _length_problems(config, arch)
    problems += _sparse_problems(config, arch)
    if (largest_id := max(config.sampling.stop_token_ids, default=0)) >= arch.vocab_size:
        problems.append(
            f"sampling.stop_token_ids: {largest_id} is no token of the model, which has "
            f"{arch.vocab_size} (vocab_size)"
        )
    if largest_token_id is not None and largest_token_id >= arch.vocab_size:
        size = f"{arch.vocab_size} embeddings (vocab_size)"
        problems.append(
            f"model.tokenizer has token id {largest_token_id}, but the model only {size}"
        )
    return problems


def longest_samples(config: ExperimentConfig) -> dict[str, int]:
    """Returns the most tokens that one sample of each data section may have."""
    response = config.sampling.max_response_tokens
    out = {"data": config.data.max_prompt_tokens + response}
    if config.eval is not None:
        of_eval = config.eval.max_response_tokens or response
        out["eval.data"] = config.data.max_prompt_tokens + of_eval
    return out


def _engine_problems(config: ExperimentConfig, arch: Architecture) -> Iterator[str]:
    yield from engine_layout_problems(config.rollout, arch)
    ep = config.rollout.ep
    experts = config.rollout.dtype == "float32" and not config.rollout.deterministic
    if ep > 1 and experts and config.actor.device == "cuda":
        yield (
            f"rollout.ep = {ep} with rollout.dtype float32 on GPUs: torch's experts, the only ones "
            "in float32, do not skip those of other ranks; set ep 1 or bfloat16"
        )


def _length_problems(config: ExperimentConfig, arch: Architecture) -> Iterator[str]:
    what = {"max_total_tokens": "cache holds", "context_length": "context is"}
    limits = {key: config.rollout.sglang.get(key) for key in what}
    for section, length in longest_samples(config).items():
        if length > arch.max_positions:
            yield (
                f"{section}: up to {length} tokens, but the model has "
                f"{arch.max_positions} positions"
            )
        for key, limit in limits.items():
            if isinstance(limit, int) and length > limit:
                yield (
                    f"{section}: up to {length} tokens, but an engine's {what[key]} "
                    f"{limit} (rollout.sglang.{key})"
                )


def _sparse_problems(config: ExperimentConfig, arch: Architecture) -> Iterator[str]:
    """Yields why sparse attention cannot be computed there: of samples longer than index_topk some
    keys are left out."""
    if arch.indexer is None:
        return
    kernels = expected_kernels(config.actor)
    if kernels.cuda and config.rollout.dtype == "float32":
        yield "rollout.dtype float32: SGLang's sparse attention on GPUs is of bfloat16; set that"
    longest = max(longest_samples(config).values())
    if longest <= arch.indexer.topk:
        return
    sparse = f"samples of up to {longest} tokens are sparse (the model's index_topk is {arch.indexer.topk})"
    if not kernels.cuda:
        yield (
            f"data: {sparse}, which engines on a CPU cannot compute: let max_prompt_tokens and "
            f"max_response_tokens be at most {arch.indexer.topk} together, or run on GPUs "
            "(actor.dtype: bfloat16)"
        )
    elif not kernels.transformer_engine:
        yield (
            f"actor.transformer_engine: {sparse}, and torch's layers would hold masks as large as "
            "the square of that; remove it, or set it to true"
        )
    elif config.actor.megatron.get("dsa_kernel_backend") == "none":
        yield (
            f"actor.megatron.dsa_kernel_backend none: {sparse}, and Megatron would hold float32 "
            "scores of every query and key; remove it, or set cudnn"
        )


def _teacher_problems(
    config: ExperimentConfig, tokenizer: Path, longest: int, largest_token_id: int | None
) -> Iterator[str]:
    """Yields what is wrong with the files of teachers and with the cut of their engines.

    tokenizer: folder of the trained model's. longest: tokens that a teacher scores.
    """
    for name, teacher in config.teachers.items():
        if teacher.path is None or is_hub_name(teacher.path):
            continue  # names on the Hub were judged as the experiment was read
        folder = Path(teacher.path)
        key = f"teachers.{name}.path: {folder}"
        if not (folder / "config.json").is_file():
            yield f"{key} holds no config.json, so it is no Hugging Face model folder"
            continue
        hf = read_description(folder / "config.json")
        if not model_problems(hf):  # else one of SGLang's models that no trainer has
            arch = architecture_of(hf)
            cuts = engine_layout_problems(config.of_teacher(name).rollout, arch)
            yield from (text.replace("rollout.", f"teachers.{name}.", 1) for text in cuts)
            given = config.rollout.sglang.get("context_length")
            if given is not None and given > arch.max_positions:
                yield (
                    f"rollout.sglang.context_length {given} is more than the {arch.max_positions} "
                    f"positions of {key}: SGLang would not start it; lower it"
                )
            if longest > (limit := min(arch.max_positions, given or math.inf) - _SPARED):
                yield (
                    f"{key} scores up to {limit} tokens ({_SPARED} below its positions), and "
                    f"samples have up to {longest}"
                )
        vocabulary = hf.get("vocab_size") or (hf.get("text_config") or {}).get("vocab_size")
        if vocabulary is not None and (largest_token_id or 0) >= vocabulary:
            yield (
                f"{key} has {vocabulary} embeddings (vocab_size), but {tokenizer} "
                f"token id {largest_token_id}"
            )
        if tokenizer.is_dir() and (problem := different_tokens(folder, tokenizer)):
            yield f"{key} {problem}; distillation needs the same ids for the same tokens"


def _missing_files(config: ExperimentConfig) -> Iterator[str]:
    wanted = [("model.path", config.model.path)]
    if config.model.tokenizer is not None:
        wanted.append(("model.tokenizer", config.model.tokenizer))
    if config.sft is not None:
        wanted.append(("sft.model", config.sft.model))
    for key, data in config.data_sections.items():
        wanted += [(f"{key}.path", path) for path in data.paths]
    if config.checkpoint.load is not None and not any(config.run_folder.checkpoints.glob("step_*")):
        wanted.append(("checkpoint.load", config.checkpoint.load))
    for key, path in wanted:
        if Path(path).exists() or is_made(config, path) or is_hub_name(path):
            continue  # names on the Hub were judged as the experiment was read
        yield f"{key}: {path} does not exist{hub_hint(path) if 'model' in key else ''}"
    model = config.model.path
    if Path(model).is_dir() and not (Path(model) / "config.json").is_file():
        yield f"model.path: {model} holds no config.json, so it is no Hugging Face model folder"


def hub_hint(path: str) -> str:
    """Returns how to get a model whose folder is called like one on the Hugging Face Hub."""
    name = path.rpartition("/")[2]
    owner = next((owner for start, owner in _OWNERS.items() if name.startswith(start)), "")
    if not owner:
        return ""
    hub_name = f"{owner}/{name}"
    return f"; write {hub_name}, or fetch it: `hf download {hub_name} --local-dir {path}`"


def _missing_packages(config: ExperimentConfig) -> Iterator[str]:
    """Yields which optional packages the experiment needs and this environment lacks."""
    wandb = config.log.wandb
    spec = find_spec("wandb")
    # without an origin it is a folder of that name in the working directory
    if wandb is not None and (spec is None or spec.origin is None):
        yield (
            "log.wandb: the package wandb is not installed; `pip install "
            "wandb`, or remove log.wandb"
        )


def _source_problems(config: ExperimentConfig) -> Iterator[str]:
    """Yields why the checkpoint that the run would start from cannot be loaded in its layout, or
    its own not be written to their place."""
    load = config.checkpoint.load
    if problem := place_problem(config.run_folder.checkpoints, config.checkpoint.dir):
        yield problem
    source = latest(config.run_folder.checkpoints) or (Path(load) if load else None)
    with suppress(OSError, ValueError):  # of a damaged checkpoint, whose load gives the reason
        if source is not None and (problem := layout_problem(source, config.actor.layout)):
            yield f"actor: {problem}"


def _broken_lines(config: ExperimentConfig) -> Iterator[str]:
    for data in config.data_sections.values():
        if all(Path(path).exists() for path in data.paths):
            problems: list[str] = []
            for text in complaints(_read_lines, data, config, problems):
                yield text if any(path in text for path in data.paths) else f"{data.name}: {text}"
            yield from named_first(problems)


def named_first(problems: Sequence[str]) -> Iterator[str]:
    """Yields the first problems of rows, and a line that counts the others."""
    yield from problems[:_NAMED]
    if len(problems) > _NAMED:
        yield f"and {len(problems) - _NAMED:,} more rows like these"


def _read_lines(data: DataConfig, config: ExperimentConfig, problems: list[str]) -> None:
    """Adds the problems of rows. Raises ValueError for those of the whole."""
    reward = config.reward
    rows = read_rows(data, problems)
    problems += _teachers_of_rows(config, rows)
    problems += _unused_streams(config, rows)
    names = [row.grader for row in rows]
    known = {
        name: entry.grader for entry in reward.entries for name in (entry.short_name, entry.grader)
    }
    for unknown in sorted({name for name in names if name is not None} - known.keys()):
        check_grader(unknown, {})
    for name, row in zip(names, rows, strict=True):
        graders = (
            [entry.grader for entry in reward.entries] if name is None else [known.get(name, name)]
        )
        for grader in graders:
            said = complaints(check_answer, grader, row.answer)
            problems += [f"{row.location}: {problem}" for problem in said]


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


def _function_problems(config: ExperimentConfig) -> Iterator[str]:
    reward = config.reward
    for load in config.algorithm.own_loaders:
        yield from complaints(load)
    if config.data.curriculum is not None:
        yield from complaints(load_curriculum, config.data.curriculum)
    for entry in reward.entries:
        yield from complaints(check_grader, entry.grader, entry.args)
    if reward.group_grader is not None:
        yield from complaints(load_group_grader, reward.group_grader, reward.group_args)
    if config.sampling.environment is not None:
        yield from complaints(load_environment, config.sampling.environment.function)
    if (agent := config.sampling.agent) is not None and agent.function is not None:
        yield from complaints(load_program, agent.function)
    if agent is not None and agent.command and shutil.which(agent.command[0]) is None:
        yield f"sampling.agent.command: {agent.command[0]} is no program that this machine has"


def is_made(config: ExperimentConfig, path: str) -> bool:
    """Returns whether this experiment's own `megagrpo sft` writes `path`."""
    return config.sft is not None and Path(path) == Path(config.model.path)
