"""Walks the schema: the sections, variants and choices that a field's annotation allows."""

from collections.abc import Iterable
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

KeyPath = tuple[str | int, ...]  # of a value in an experiment: ("sampling", "stop", 0)


def members(annotation: Any) -> list[Any]:
    """Returns the members of a possibly annotated, possibly optional union."""
    if get_origin(annotation) is Annotated:
        return members(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return [member for arg in get_args(annotation) for member in members(arg)]
    return [annotation]


def sections(annotations: Iterable[Any]) -> list[type[BaseModel]]:
    """Returns those of the annotations that are sections; several are the variants of one."""
    return [member for member in annotations if isinstance(member, type) and issubclass(member, BaseModel)]


def elements(annotation: Any) -> list[Any]:
    """Returns the types of a list's elements; none if the annotation is no list."""
    return members(get_args(annotation)[0]) if get_origin(annotation) is list else []


def annotations_at(root: type[BaseModel], path: KeyPath) -> list[Any]:
    """Returns the types of the value at `path`; none if the schema has no such key."""
    found: list[Any] = [root]
    for key in path:
        if isinstance(key, int):
            found = [item for member in found for item in elements(member)]
            continue
        fields = [section.model_fields[key] for section in sections(found) if key in section.model_fields]
        found = [member for field in fields for member in members(field.annotation)]
    return found


def keys_of(models: Iterable[type[BaseModel]]) -> list[str]:
    """Returns the keys of a section, over all of its variants."""
    return list(dict.fromkeys(name for model in models for name in model.model_fields))


def choices(annotations: Iterable[Any]) -> list[str]:
    """Returns the values of the annotations that are Literals, as text."""
    return [str(value) for member in annotations if get_origin(member) is Literal for value in get_args(member)]


def variant_names(models: Iterable[type[BaseModel]]) -> list[str]:
    """Returns the `name` of each variant of a section."""
    return [name for model in models for name in choices([model.model_fields["name"].annotation])]


def all_paths(model: type[BaseModel], prefix: str = "") -> list[str]:
    """Returns the dotted path of every key below `model`."""
    out = []
    for name, info in model.model_fields.items():
        out.append(prefix + name)
        for inner in sections(members(info.annotation)):
            out += all_paths(inner, f"{prefix}{name}.")
    return list(dict.fromkeys(out))
