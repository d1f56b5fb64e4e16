"""What the schema refuses, in the words of the file, with the nearest name and a remedy."""

import re
from collections.abc import Iterator, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from megagrpo.config.fields import KeyPath, all_paths, annotations_at, choices, sections
from megagrpo.config.schema import ExperimentConfig
from megagrpo.system.user_function import did_you_mean

if TYPE_CHECKING:
    from megagrpo.config.load import Plain

_TOOLS = "megagrpo.tools"


def by_path(exc: ValidationError, data: "Plain") -> dict[KeyPath, list[ErrorDetails]]:
    """Returns the errors by the path of their value in the data."""
    found: dict[KeyPath, list[ErrorDetails]] = {}
    for error in exc.errors(include_url=False):
        found.setdefault(_data_path(error["loc"], error["type"], data), []).append(error)
    return found


def in_words(
    found: Mapping[KeyPath, list[ErrorDetails]], data: "Plain"
) -> Iterator[tuple[KeyPath, str]]:
    """Yields (path, text) of each problem. pydantic reports a union once a member: only those that
    the value fits say what is wrong, or all of them together."""
    for path, errors in found.items():
        value = value_at(data, path)
        misfits = [
            error["msg"] for error in errors if error["type"].endswith(("_type", "literal_error"))
        ]
        if len(misfits) < len(errors) or any(other[:-1] == path for other in found):
            errors = [error for error in errors if error["msg"] not in misfits]
        elif len(misfits) > 1:
            kinds = " or ".join(misfits).replace("Input should be ", "")
            yield path, f"{shown(path, value)}: should be {kinds}"
            continue
        for text in dict.fromkeys(_describe(error, path, value) for error in errors):
            yield path, text


def value_at(data: "Plain", path: KeyPath) -> "Plain":
    """Returns the value at `path`; None if it is missing."""
    for key in path:
        if isinstance(data, dict):
            data = data.get(str(key))
        elif isinstance(data, list) and isinstance(key, int):
            data = data[key]
    return data


def _data_path(loc: KeyPath, kind: str, data: "Plain") -> KeyPath:
    """Returns pydantic's location without the union tags that it puts between keys."""
    path: list[str | int] = []
    for i, key in enumerate(loc):
        if isinstance(data, dict) and key in data:
            data = data[str(key)]
        elif isinstance(data, list) and isinstance(key, int) and key < len(data):
            data = data[key]
        elif i < len(loc) - 1 or kind != "missing":
            continue
        path.append(key)
    return tuple(path)


def _describe(error: ErrorDetails, path: KeyPath, value: "Plain") -> str:
    kind = error["type"]
    key = dotted(path)
    context = error.get("ctx", {})
    match kind:
        case "extra_forbidden":
            hint = _foreign_hint("key_hint", key, value) or _remedy_unknown(path, error["loc"])
            return f"{shown(path, value)}: unknown key{hint}"
        case "missing":
            return f"{key} is missing; it has no default, write it"
        case "value_error":
            return f"{key + ': ' if key else ''}{context['error']}"
        case "union_tag_not_found":
            return f"{shown(path, value)}: needs a 'name', one of {', '.join(_variants(path))}"
        case "union_tag_invalid":
            tag = str(context["tag"])
            known = [name for name in _variants(path) if name != "own"]
            hint = _foreign_hint("value_hint", f"{key}.name", tag) or nearest(tag, known)
            if len(known) < len(_variants(path)) and hint.startswith("; known"):
                hint += " (your own is written file.py:function)"
            return f"{key}.name = {show(tag)}: unknown{hint}"
        case "literal_error":
            allowed = choices(annotations_at(ExperimentConfig, path))
            scalar = not isinstance(value, dict | list)
            hint = (scalar and _foreign_hint("value_hint", key, value)) or nearest(
                str(value), allowed, context["expected"]
            )
            return f"{shown(path, value)}: not a choice{hint}"
        case "model_type" | "model_attributes_type":
            return f"{shown(path, value)}: should be a section with keys {', '.join(_keys(path))}"
    message = re.sub(r"^Input should be", "should be", error["msg"])
    return f"{shown(path, value)}: {message}{_type_remedy(kind, path, value)}"


def _foreign_hint(kind: str, key: str, value: object) -> str:
    """Returns what `megagrpo convert` knows of a key or value of another framework; "" if that tool
    is not installed."""
    if find_spec(_TOOLS) is None:
        return ""
    return getattr(import_module(f"{_TOOLS}.convert.foreign"), kind)(key, value)


def _type_remedy(kind: str, path: KeyPath, value: "Plain") -> str:
    if isinstance(value, bool) and path[-2:] in (("reward", "scale"), ("reward", "shift")):
        return "; ROLL's reward_scale: true is algorithm.reward.std here, its reward_shift: true algorithm.reward.mean"
    if kind in ("int_type", "float_type", "bool_type") and isinstance(value, str):
        return "; write it without quotes" if re.fullmatch(r"[-+\d.eE_]+|true|false", value) else ""
    if (
        kind == "string_pattern_mismatch"
        and path[-1] == "name"
        and isinstance(value, str)
        and "/" in value
    ):
        return "; the grader of a source of prompts is said by data.grader_by_source"
    if kind == "string_type" and value is not None and not isinstance(value, dict | list):
        return f"; write it in quotes: '{value}'"
    if kind == "int_type" and isinstance(value, float) and value.is_integer():
        return f"; write {int(value)}"
    return f"; write [{value}]" if kind == "list_type" else ""


def _keys(path: KeyPath, loc: KeyPath = ()) -> list[str]:
    """Returns the keys of the section at `path`: of the variant that pydantic's location names,
    else of all."""
    found = sections(annotations_at(ExperimentConfig, path))
    named = [each for each in found if _names_of(each) & set(loc)]
    return list(dict.fromkeys(name for each in named or found for name in each.model_fields))


def _names_of(section: type[BaseModel]) -> set[object]:
    field = section.model_fields.get("name")
    return set() if field is None else set(get_args(field.annotation))


def _variants(path: KeyPath) -> list[str]:
    return choices(annotations_at(ExperimentConfig, (*path, "name")))


def _remedy_unknown(path: KeyPath, loc: KeyPath) -> str:
    key = str(path[-1])
    siblings = _keys(path[:-1], loc)
    elsewhere = [known for known in all_paths(ExperimentConfig) if known.split(".")[-1] == key]
    if "own" in {*loc} - {*path} and not did_you_mean(key, siblings):
        return f"; an argument of your own function is written args: {{{key}: ...}}"
    if dotted(path) in elsewhere:  # of another variant
        return f"; known: {', '.join(siblings)}"
    if elsewhere and not did_you_mean(key, siblings):
        return f"; did you mean {' or '.join(elsewhere[:3])}?"
    return nearest(key, siblings)


def nearest(word: str, choices: list[str], fallback: str = "") -> str:
    """Returns the nearest of the choices as a hint, or all of them."""
    known = ", ".join(choices) or fallback
    return did_you_mean(word, choices) or (f"; known: {known}" if known else "")


def show(value: "Plain") -> str:
    """Returns a value as Python writes it, its beginning if it is long."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def shown(path: KeyPath, value: "Plain") -> str:
    """Returns a key with its value."""
    return f"{dotted(path)} = {show(value)}"


def dotted(path: KeyPath) -> str:
    """Returns a path as the file's reader writes it."""
    return ".".join(str(key) for key in path)
