"""The options of other frameworks by their names there: foreign_names.yaml and slime_names.yaml,
and hints for keys that came from there.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

Scalar = str | int | float | bool | None
Words = tuple[tuple[object, Scalar], ...]  # their values with ours
FRAMEWORKS = {"verl": "verl", "roll": "ROLL", "trl": "TRL", "slime": "slime", "miles": "miles"}
_FOLDER = Path(__file__).parent
_TABLES = ("foreign_names.yaml", "slime_names.yaml")
_SHORT = re.compile(r"^(actor|rollout|model|ref)\.")  # of verl's names


@dataclass(frozen=True)
class Entry:
    """Options that mean one thing; see the head of foreign_names.yaml."""

    keys: dict[str, tuple[str, ...]]  # framework -> its names
    to: str = ""
    rule: str = ""
    needs: str = ""
    values: Words = ()  # theirs, ours
    free: str = ""
    lacks: str = ""
    same: tuple[Scalar, ...] = ()
    note: str = ""


@dataclass(frozen=True)
class Row:
    """What some options mean together; see the head of rules.yaml."""

    to: str = ""
    source: tuple[str, ...] = ()
    constant: Any = None
    by: tuple[str, ...] = ()
    when: Mapping[str, Any] = field(default_factory=dict)
    got: Mapping[str, Any] = field(default_factory=dict)
    values: Words = ()
    only: str = ""
    otherwise: Scalar = None
    listed: bool = False
    lacks: str = ""
    remark: str = ""


@cache
def rows(framework: str) -> tuple[Row | str, ...]:
    """Returns the rows of rules.yaml, and the names of functions among them."""
    known = _read("rules.yaml")["slime" if framework == "miles" else framework]
    return tuple(row if isinstance(row, str) else _row(framework, **row) for row in known)


def _row(framework: str, **given: Any) -> Row:
    when = {
        "|".join(_whole(framework, name) for name in names.split("|")): wanted
        for names, wanted in given.pop("when", {}).items()
    }
    named = {name: _names(framework, given.pop(key, [])) for key, name in _NAMED.items()}
    renamed = {name: given.pop(key, None) for key, name in _RENAMED.items()}
    values = tuple(given.pop("values", {}).items())
    return Row(**given, **named, **renamed, when=when, values=values)


_NAMED = {"from": "source", "by": "by"}
_RENAMED = {"is": "constant", "else": "otherwise"}


def _names(framework: str, names: str | list[str]) -> tuple[str, ...]:
    return tuple(_whole(framework, name) for name in ([names] if isinstance(names, str) else names))


def alike(one: object, other: object) -> bool:
    """Returns whether two values are the same; true is not 1."""
    return isinstance(one, bool) is isinstance(other, bool) and one == other


def spelled(value: Any, words: Words) -> Any:
    """Returns a value in our words, if there are some for it."""
    return next((ours for theirs, ours in words if alike(value, theirs)), value)


@cache
def entries() -> tuple[Entry, ...]:
    """Returns the tables, in their order."""
    return tuple(_entry(each) for name in _TABLES for each in _read(name))


def _read(name: str) -> Any:
    return yaml.safe_load((_FOLDER / name).read_text(encoding="utf-8"))


def _entry(given: dict) -> Entry:
    keys = {name: _names(name, given.pop(name, [])) for name in FRAMEWORKS}
    keys["miles"] = (*keys["slime"], *keys["miles"])
    same, values = tuple(given.pop("same", ())), tuple(given.pop("values", {}).items())
    return Entry(keys=keys, same=same, values=values, **given)


@cache
def defaults(framework: str) -> dict[str, Scalar]:
    """Returns the defaults of foreign_defaults.yaml."""
    found = _read("foreign_defaults.yaml")
    of_framework = found["slime"] | found["miles"] if framework == "miles" else found[framework]
    return {_whole(framework, key): value for key, value in of_framework.items()}


def _whole(framework: str, name: str) -> str:
    if framework in ("slime", "miles"):
        return name if name.endswith(".py") else f"--{name}"
    return _SHORT.sub(r"actor_rollout_ref.\1.", name) if framework == "verl" else name


@cache
def _patterns(framework: str) -> list[tuple[int, re.Pattern[str], Entry]]:
    found = [(name, entry) for entry in entries() for name in entry.keys[framework]]
    return [
        (len(n.replace("*", "")), re.compile(re.escape(n).replace(r"\*", ".+")), entry)
        for n, entry in found
    ]


@cache
def find(framework: str, key: str) -> Entry | None:
    """Returns the entry of the most specific name that `key` has; None if it is not in the
    table."""
    matching = [
        (length, entry) for length, pattern, entry in _patterns(framework) if pattern.fullmatch(key)
    ]
    return max(matching, key=lambda pair: pair[0])[1] if matching else None


def key_hint(key: str, value: object) -> str:
    """Returns what an unknown key of an experiment is called here, if it is one of another
    framework's; else ""."""
    leaves = [name for name, _ in leaves_of(value, key)]
    for framework, shown in FRAMEWORKS.items():
        hints = [
            f"{shown}'s {leaf} is {what}" for leaf in leaves if (what := _is_here(framework, leaf))
        ]
        if hints:
            more = ", ..." if len(hints) > 4 else ""
            how = f" (`megagrpo convert {framework} FILE` translates all)"
            return f"; {', '.join(hints[:4])}{more}{'' if shown in _OTHERS else how}"
    last = key.rpartition(".")[2]
    for framework, shown in FRAMEWORKS.items():
        for entry in entries():
            for name in entry.keys[framework]:
                named = name.rpartition(".")[2] == last and "*" not in name
                if named and entry.to not in ("", key):
                    return f"; {shown}'s {name} is {entry.to} here" + (
                        f": {entry.note}" if entry.note else ""
                    )
    return ""


def _is_here(framework: str, key: str) -> str:
    if (entry := find(framework, key) or find(framework, f"--{key.replace('_', '-')}")) is None:
        return ""
    return f"{entry.to} here" if entry.to else f"not here: {entry.lacks or entry.free}"


def value_hint(key: str, value: object) -> str:
    """Returns how a value of another framework is spelled here, if `key` of an experiment has it;
    else ""."""
    words = (spelled(value, entry.values) for entry in entries() if entry.to == key)
    ours = next((word for word in words if not alike(word, value)), None)
    return "" if ours is None else f"; {value!r} is {ours!r} here"


def leaves_of(value: object, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yields the dotted key of every value inside nested sections, below `prefix`."""
    if not isinstance(value, dict) or not value:
        yield prefix, value
        return
    for key, inner in value.items():
        yield from leaves_of(inner, f"{prefix}.{key}" if prefix else str(key))


# name -> what its files look like, and our keys for the first of theirs
_OTHERS = {
    "NeMo-RL": (
        r"(?m)\A(?=[\s\S]*^grpo:[ \t]*$)(?=[\s\S]*^policy:[ \t]*$)|run_grpo\w{,99}\.py|nemo_rl",
        "policy.model_name is model.path, grpo.num_prompts_per_step is train.num_prompts_per_step, "
        "grpo.num_generations_per_prompt is train.group_size, loss_fn.ratio_clip_min and _max are "
        "algorithm.loss.clip_ratio_low and _high, loss_fn.reference_policy_kl_penalty is "
        "algorithm.kl.loss_coef, policy.megatron_cfg's sizes are actor.parallel, "
        "grpo.adv_estimator's gdpo is algorithm.advantage: {name: gdpo, whiten_over: responses} "
        "with its reward_weights in reward.graders",
    ),
    "OpenRLHF": (
        r"openrlhf\.cli|openrlhf\.trainer",
        "--actor.model_name_or_path (before 2026 --pretrain) is model.path, --data.prompt_dataset "
        "(--prompt_data) is data.path, --rollout.batch_size is train.num_prompts_per_step, "
        "--rollout.n_samples_per_prompt is train.group_size, --actor.eps_clip_low_high are "
        "algorithm.loss.clip_ratio_low and _high, --algo.kl.init_coef with --algo.kl.use_loss is "
        "algorithm.kl.loss_coef",
    ),
    "prime-rl": (
        r"(?m)^\[(?:orchestrator|inference|trainer)[\].]|prime_rl|uv run rl @",
        "model.name is model.path, group_size (once rollouts_per_example) is train.group_size, "
        "orchestrator.batch_size counts samples: divided by the group it is "
        "train.num_prompts_per_step, max_off_policy_steps is rollout.max_staleness, "
        "buffer.online_difficulty_filtering is algorithm.dynamic_sampling, buffer.easy_threshold "
        "and hard_threshold are data.curriculum's easy_at_least and hard_at_most, its "
        "environments run as sampling.agent: {function: verifiers}",
    ),
    "TRL": (
        r"(?m)^[ \t]*(?:from|import)\s+trl\b|GRPO(?:Config|Trainer)\(|\btrl\s+grpo\b"
        r"|^(?:reward_funcs|per_device_train_batch_size):",
        "GRPOTrainer's model (--model_name_or_path) is model.path, train_dataset (--dataset_name) is "
        "data.path, reward_funcs are reward.graders, where its functions work as they are, "
        "num_generations is train.group_size, per_device_train_batch_size times processes times "
        "gradient_accumulation_steps, divided by the group, is train.num_prompts_per_step, "
        "max_completion_length is sampling.max_response_tokens, beta is algorithm.kl.loss_coef, "
        "epsilon and epsilon_high are algorithm.loss.clip_ratio_low and _high, loss_type is "
        "algorithm.aggregation; the others are in the TRL column of docs/reference/names.md",
    ),
    "ms-swift": (
        r"swift\s+rlhf|megatron\s+rlhf|rlhf_type",
        "--model is model.path, --dataset is data.path, --num_generations is train.group_size, "
        "--reward_funcs is reward.graders, --beta is algorithm.kl.loss_coef; its GRPO options are "
        "TRL's names: the TRL column of docs/reference/names.md",
    ),
}


def whose(text: str) -> str:
    """Returns the framework, of those that are not translated, whose file a text is; else ""."""
    return next((name for name, (sight, _) in _OTHERS.items() if re.search(sight, text)), "")


def where_to_look(name: str) -> str:
    """Returns the answer to a file of a framework that is not translated."""
    translated = ", ".join(shown for shown in FRAMEWORKS.values() if shown not in _OTHERS)
    return (
        f"this is {name}'s, which is not translated ({translated} are). Begin with `megagrpo init` "
        f"or docs/train.md: {_OTHERS[name][1]}. docs/reference/configuration.md has all keys"
    )
