"""Generates the reference of every configuration key from the schema, and the page of all rules.

python -m megagrpo.tools.describe > docs/reference/configuration.md
python -m megagrpo.tools.describe --rules > docs/reference/rules.md
"""

import sys
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from megagrpo.config.actor import RouterLossConfig
from megagrpo.config.fields import Rule, Section, choices, elements, members, sections
from megagrpo.config.libraries import REFUSED
from megagrpo.config.objective.correction import Band, Rejection, TruncatedImportance
from megagrpo.config.reward import OPTIONS
from megagrpo.config.rollout import AgentConfig, EnvironmentConfig
from megagrpo.config.schema import DataConfig, ExperimentConfig, ModelConfig

_HEAD = """\
# Configuration

Every key of an experiment, with its type, default and meaning. This page is generated from the schema
(`python -m megagrpo.tools.describe > docs/reference/configuration.md`), and a test compares the two.

An experiment is one YAML file. Unknown keys, wrong types and impossible combinations are refused at start, all of them
at once, each with its line, the nearest valid name and the remedy. On the command line, `--set section.key=value`
wins over the file, and the file wins over its `preset: NAME` (see [algorithms](../algorithms.md)).
`megagrpo check CONFIG` explains what an experiment amounts to and starts nothing. Numbers follow YAML 1.2: `1e-6` is a
number, `no` is a text.

A *required* key has no default; *none* is written `null`.
"""
_RULES_HEAD = """\
# Rules

Which settings do not go together, why, and what to write instead. `megagrpo check CONFIG` and every other command
name all that an experiment breaks. This page is generated from the sections' `problems` and `excludes`
(`python -m megagrpo.tools.describe --rules > docs/reference/rules.md`), and a test compares the two. Where a message
names the experiment's values, these are the defaults. What SGLang's and Megatron's own settings may not be is on the
page of [all keys](configuration.md).
"""
_REFUSED_HEAD = """\
All other fields of Megatron's and SGLang's classes may be set by their own names; `*` stands for any characters.
`megagrpo check` and `train` ask the library itself whether a name exists and its value has the right type; where it is
not installed, as on a login node, they say in a line that they do not judge it.
"""
_SIGNS = (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<"))  # of the classes in annotated_types
_SCALARS: dict[object, str] = {int: "integer", float: "number", str: "text", bool: "true or false"}

# of sections that are none by default
_OPTIONAL: dict[str, Section] = {
    "sampling.environment": EnvironmentConfig(function="m:f"),
    "sampling.agent": AgentConfig(function="m:f"),
    "actor.router_losses": RouterLossConfig(balance=1e-4),
    "algorithm.mismatch.weight, name: tis": TruncatedImportance(name="tis"),
    "algorithm.mismatch.weight, name: icepop or mis_mask": Band(name="icepop"),
    "algorithm.mismatch.reject": Rejection(high=2.0),
}


def reference() -> str:
    """Returns docs/reference/configuration.md."""
    lines = [_HEAD]
    _add_section(lines, "", ExperimentConfig, seen=set())
    for grader, options in OPTIONS.items():
        lines += [
            f"## `reward.args` of grader `{grader}`",
            "",
            *_doc(options),
            *_table("reward.args", options),
        ]
    head = ("## Settings of libraries that are refused", "", _REFUSED_HEAD)
    lines += [*head, "| map | reason | fields |", "|---|---|---|"]
    for path, refused in REFUSED.items():
        lines += _refused_rows(".".join(path), refused)
    return "\n".join([*lines, ""])


def _refused_rows(path: str, refused: Mapping[str, str]) -> list[str]:
    """Returns one row for each reason, with the names and patterns that it is given for."""
    fields: dict[str, list[str]] = {}
    for name, why in refused.items():
        fields.setdefault(why.removeprefix("refused: "), []).append(f"`{name}`")
    return [f"| `{path}` | {reason} | {', '.join(names)} |" for reason, names in fields.items()]


def _add_section(
    lines: list[str], path: str, section: type[Section], seen: set[type[Section]]
) -> None:
    """Appends the table of `section` at `path`, then those of the sections inside it that are not
    `seen`."""
    if section in seen:
        return
    seen.add(section)
    lines += [
        f"## {f'`{path}`' if path else 'Top level'}",
        "",
        *_doc(section),
        *_table(path, section),
    ]
    for name, field in section.model_fields.items():
        inner, below = sections(members(field.annotation)), f"{path}.{name}".lstrip(".")
        of_list = sections(
            item for member in members(field.annotation) for item in elements(member)
        )
        if of_list:
            _add_section(lines, f"{below}.0", of_list[0], seen)
        elif len(inner) == 1:
            _add_section(lines, below, inner[0], seen)
        elif inner:
            lines += [f"## `{below}`", "", "One of these variants; its `name` chooses.", ""]
            for variant in inner:
                names = " and ".join(
                    f"`name: {name}`" for name in choices([variant.model_fields["name"].annotation])
                )
                lines += [f"### `{below}`, {names}", "", *_doc(variant), *_table(below, variant)]


def _doc(section: type[Section]) -> list[str]:
    return [" ".join(section.__doc__.split()), ""] if section.__doc__ else []


def _table(path: str, section: type[Section]) -> list[str]:
    rows = []
    for name, field in section.model_fields.items():
        chooses_variant = path and name == "name" and get_origin(field.annotation) is Literal
        if not chooses_variant:  # its heading says the name already
            meaning = " ".join((field.description or "").split()).replace(
                "|", "\\|"
            )  # a bar ends a cell
            rows.append(f"| `{name}` | {_type(field)} | {_default(field)} | {meaning} |")
    return ["| key | type | default | meaning |", "|---|---|---|---|", *rows, ""] if rows else []


def _default(field: FieldInfo) -> str:
    if field.default is PydanticUndefined:
        return "required"
    if isinstance(field.default, Section):
        changed = field.default.model_dump(exclude_defaults=True)
        if len(sections(members(field.annotation))) > 1:
            changed = {"name": field.default.model_dump()["name"], **changed}
        return _value(changed) if changed else ""
    return _value(field.default)


def _value(value: object) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, dict):
        return f"`{{{', '.join(f'{key}: {item}' for key, item in value.items())}}}`"
    if isinstance(value, float):
        return f"`{value:g}`"
    return f'`"{value}"`' if isinstance(value, str) else f"`{value}`"


def _type(field: FieldInfo) -> str:
    parts = [_member(member) for member in members(field.annotation) if member is not type(None)]
    constraints = [*field.metadata, *_inner_metadata(field.annotation)]
    bounds = [
        f"{sign} {getattr(item, name)}"
        for item in constraints
        for name, sign in _SIGNS
        if hasattr(item, name)
    ]
    return f"{' or '.join(dict.fromkeys(parts))} {' and '.join(bounds)}".strip()


def _member(member: object) -> str:
    if get_origin(member) is Literal:
        return ", ".join(f"`{value}`" for value in get_args(member))
    if get_origin(member) is list:
        return f"list of {_member(members(get_args(member)[0])[0])}s"
    if get_origin(member) is dict:
        return "map" if get_args(member)[1] is Any else "map of scalars"
    return _SCALARS.get(member, "section")


def _inner_metadata(annotation: object) -> list[object]:
    """Returns the constraints inside an optional or a list type, which pydantic does not lift to
    the field."""
    annotated = [argument for argument in get_args(annotation) if get_origin(argument) is Annotated]
    fields = [
        item
        for argument in annotated
        for item in argument.__metadata__
        if isinstance(item, FieldInfo)
    ]
    return [constraint for field in fields for constraint in field.metadata]


def rules() -> str:
    """Returns docs/reference/rules.md."""
    example = _example()
    lines = [_RULES_HEAD]
    for path, table in _tables(example):
        lines += [f"## `{path}`", ""]
        lines += ["| settings and reason | remedy |", "|---|---|"]
        lines += [f"| {_cell(rule.because)} | {_cell(rule.remedy)} |" for rule in table]
        lines.append("")
    return "\n".join(lines)


def _example() -> ExperimentConfig:
    """Returns the experiment of all defaults."""
    data = DataConfig(path="prompts.jsonl")
    return ExperimentConfig(name="e", output_dir="runs/e", model=ModelConfig(path="m"), data=data)


def _tables(experiment: ExperimentConfig) -> Iterator[tuple[str, list[Rule]]]:
    """Yields the path of each section that has rules, with those of its own fields and then those
    with other sections."""
    examples = dict(_walk("", experiment))
    examples |= _OPTIONAL
    for path, section in examples.items():
        own = [] if section is experiment else section.problems()
        if found := [*own, *section.excludes(experiment)]:
            yield path, found


def _walk(path: str, section: Section) -> Iterator[tuple[str, Section]]:
    yield path, section
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, Section):
            yield from _walk(f"{path}.{name}".lstrip("."), value)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    print(rules() if "--rules" in sys.argv else reference(), end="")
