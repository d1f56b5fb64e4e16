"""Finds every problem of an experiment that is known before a start. Loads no torch."""

import json
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megagrpo.checkpoint.folder import latest, layout_problem
from megagrpo.config.layout import divisors, layout_problems
from megagrpo.config.schema import DataConfig, ExperimentConfig, RewardConfig
from megagrpo.data.prompts import read_rows
from megagrpo.families.architecture import Architecture
from megagrpo.families.quantization import load_format_problems
from megagrpo.families.table import architecture_of, model_problems, read_description
from megagrpo.rewards.graders.code import read_tests
from megagrpo.rewards.graders.table import check_grader, load_group_grader
from megagrpo.rollout.tools import load_tool
from megagrpo.system.run_folder import RunFolder


def preflight(config: ExperimentConfig) -> list[str]:
    """Returns every problem: missing files, broken lines, unknown functions, a model that the layout cannot cut."""
    problems = [
        *_missing_files(config),
        *_missing_packages(config),
        *_broken_lines(config),
        *_function_problems(config),
        *_source_problems(config),
    ]
    hf = model_description(config)
    if hf is not None:
        problems += check_against_model(
            config, hf, _largest_token_id(Path(config.model.tokenizer or config.model.path))
        )
    return problems


def model_description(config: ExperimentConfig) -> dict[str, Any] | None:
    """Returns the model's config.json, or that of the model from which the warm-up will make it; None without both.

    Raises ValueError for a config.json that is not JSON.
    """
    for folder in (config.model.path, config.sft.model if config.sft is not None else config.model.path):
        path = Path(folder) / "config.json"
        if path.is_file():
            return read_description(path)
    return None


def check_against_model(config: ExperimentConfig, hf: dict[str, Any], largest_token_id: int | None = None) -> list[str]:
    """Returns every clash between the experiment and the model's own config.json, each with its numbers."""
    problems = model_problems(hf)
    if problems:
        return [f"model.path: {problem}" for problem in problems]
    arch = architecture_of(hf)
    problems = [
        *layout_problems(arch, config.actor),
        *_engine_problems(config, arch),
        *load_format_problems(hf, config.rollout.load_format),
        *_length_problems(config, arch),
    ]
    if largest_token_id is not None and largest_token_id >= arch.vocab_size:
        problems.append(
            f"model.tokenizer has token id {largest_token_id}, "
            f"but the model only {arch.vocab_size} embeddings (vocab_size)"
        )
    return problems


def longest_samples(config: ExperimentConfig) -> dict[str, int]:
    """Returns the most tokens that one sample of each data section may have."""
    response = config.sampling.max_response_tokens

    def total(data: DataConfig, max_response: int) -> int:
        return data.max_prompt_tokens + max_response

    out = {"data": total(config.data, response)}
    if config.eval is not None:
        out["eval.data"] = total(config.eval.data, config.eval.max_response_tokens or response)
    return out


def _engine_problems(config: ExperimentConfig, arch: Architecture) -> list[str]:
    tp, ep, experts = config.rollout.tp, config.rollout.ep, arch.num_experts
    heads, kv_heads = arch.num_heads, arch.num_kv_heads
    problems = []
    if heads % tp:
        problems.append(
            f"rollout.tp = {tp} does not divide the model's num_attention_heads = {heads}; "
            f"it may be {divisors(heads, tp)}"
        )
    if arch.mla is None and kv_heads % tp and tp % kv_heads:
        problems.append(
            f"rollout.tp = {tp} is neither a divisor nor a multiple of the model's num_key_value_heads = {kv_heads}"
        )
    if experts and experts % ep:
        problems.append(
            f"rollout.ep = {ep} does not divide the model's num_experts = {experts}; it may be {divisors(experts, ep)}"
        )
    if ep > 1 and not experts:
        problems.append(f"rollout.ep = {ep}, but a {arch.family} model has no experts; ep must be 1")
    return problems


def _length_problems(config: ExperimentConfig, arch: Architecture) -> list[str]:
    problems = []
    cache = config.rollout.max_total_tokens
    for section, length in longest_samples(config).items():
        if length > arch.max_positions:
            problems.append(f"{section}: up to {length} tokens, but the model has {arch.max_positions} positions")
        if cache is not None and length > cache:
            problems.append(
                f"{section}: up to {length} tokens, but an engine's cache holds {cache} (rollout.max_total_tokens)"
            )
    return problems


def _missing_files(config: ExperimentConfig) -> list[str]:
    wanted = [("model.path", config.model.path), *(("data.path", path) for path in config.data.paths)]
    if config.model.tokenizer is not None:
        wanted.append(("model.tokenizer", config.model.tokenizer))
    if config.eval is not None:
        wanted += [("eval.data.path", path) for path in config.eval.data.paths]
    if config.sft is not None:
        wanted.append(("sft.model", config.sft.model))
        wanted += [("sft.data.path", path) for path in config.sft.data.paths]
    if config.checkpoint.load is not None and not any(RunFolder(Path(config.output_dir)).checkpoints.glob("step_*")):
        wanted.append(("checkpoint.load", config.checkpoint.load))
    problems = [
        f"{key}: {path} does not exist" for key, path in wanted if not Path(path).exists() and not is_made(config, path)
    ]
    if Path(config.model.path).is_dir() and not (Path(config.model.path) / "config.json").is_file():
        problems.append(f"model.path: {config.model.path} holds no config.json, so it is no Hugging Face model folder")
    return problems


def _missing_packages(config: ExperimentConfig) -> list[str]:
    """Returns which optional packages the experiment needs and this environment lacks."""
    problems = []
    wandb, spec = config.log.wandb, find_spec("wandb")
    # without an origin it is a folder of that name where Python was started
    if wandb is not None and wandb.mode != "disabled" and (spec is None or spec.origin is None):
        problems.append("log.wandb: the package wandb is not installed; `pip install wandb`, or remove log.wandb")
    return problems


def _source_problems(config: ExperimentConfig) -> list[str]:
    """Returns why the checkpoint that the run would start from cannot be loaded in its layout."""
    load = config.checkpoint.load
    source = latest(RunFolder(Path(config.output_dir)).checkpoints) or (Path(load) if load else None)
    if source is None:
        return []
    try:
        problem = layout_problem(source, config.actor.layout)
    except (OSError, ValueError):  # a damaged checkpoint, which is refused with its reason when it is loaded
        return []
    return [f"actor: {problem}"] if problem else []


def _broken_lines(config: ExperimentConfig) -> list[str]:
    problems = []
    for data in data_sections(config):
        if all(Path(path).exists() for path in data.paths):
            found = _complaint(_read_lines, data, config.reward)
            problems += [text if any(p in text for p in data.paths) else f"{data.name}: {text}" for text in found]
    return problems


def _read_lines(data: DataConfig, reward: RewardConfig) -> None:
    rows = read_rows(data)
    known = {name: entry for entry in reward.entries for name in (entry.short_name, entry.grader)}
    for grader in sorted({str(row.values[data.grader_key]) for row in rows} if data.grader_key else ()):
        if grader not in known:
            check_grader(grader, {})
    for row in rows:
        named = known.get(str(row.values[data.grader_key])) if data.grader_key else None
        graders = [str(row.values[data.grader_key])] if data.grader_key else [entry.grader for entry in reward.entries]
        if "code" in graders or (named is not None and named.grader == "code"):
            try:
                read_tests(str(row.values[data.answer_key]))
            except ValueError as exc:
                raise ValueError(f"{row.location}: {exc}") from exc


def data_sections(config: ExperimentConfig) -> Iterator[DataConfig]:
    """Yields the sections that name a file of prompts."""
    yield config.data
    if config.eval is not None:
        yield config.eval.data
    if config.sft is not None:
        yield config.sft.data


def _function_problems(config: ExperimentConfig) -> list[str]:
    reward = config.reward
    problems = [problem for entry in reward.entries for problem in _complaint(check_grader, entry.grader, entry.args)]
    if reward.group_grader is not None:
        problems += _complaint(load_group_grader, reward.group_grader, reward.group_args)
    if config.sampling.tool is not None:
        problems += _complaint(load_tool, config.sampling.tool.function)
    return problems


def _complaint(load: Callable[..., object], *arguments: object) -> list[str]:
    """Returns the text of the ValueError with which a loader refuses its arguments."""
    try:
        load(*arguments)
    except ValueError as exc:
        return [str(exc)]
    return []


def is_made(config: ExperimentConfig, path: str) -> bool:
    """Returns whether this experiment's own `megagrpo sft` writes `path`."""
    return config.sft is not None and Path(path) == Path(config.model.path)


def _largest_token_id(folder: Path) -> int | None:
    """Returns the largest id in tokenizer.json; None without that file: load_tokenizer checks after loading."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    vocab = tokenizer["model"].get("vocab", {})
    ids = list(vocab.values()) if isinstance(vocab, dict) else [len(vocab) - 1]
    return max([*ids, *(token["id"] for token in tokenizer.get("added_tokens", []))])
