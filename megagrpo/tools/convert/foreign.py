"""The options of other frameworks by their names there, and hints for keys that came from there."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from megagrpo.config.load import Plain

Scalar = str | int | float | bool | None
Words = tuple[tuple[object, Scalar], ...]  # their values with ours
Row = dict[str, Any]  # what some options mean together; see the head of rules.yaml
FRAMEWORKS = {"verl": "verl", "roll": "ROLL", "trl": "TRL", "slime": "slime", "miles": "miles"}
_SHORT = re.compile(r"^(actor|rollout|model|ref)\.")  # of verl's names


@dataclass(frozen=True)
class Entry:
    """Options that mean one thing; see the head of foreign_names.yaml."""

    keys: dict[str, tuple[str, ...]]  # framework -> its names
    to: str = ""
    rule: str | Row = ""
    needs: str = ""
    values: Words = ()  # theirs, ours
    free: str = ""
    lacks: str = ""
    same: tuple[Scalar, ...] = ()
    note: str = ""
    is_section: bool = False  # ours stands for any key in it


@cache
def rows(framework: str) -> tuple[Row | str, ...]:
    """Returns the rows of rules.yaml and, before its last ones, those of names, all with their full
    names; names of functions among them."""
    every = _table("rules.yaml")
    short = [
        {"to": entry.to, "full": entry.keys[framework], **entry.rule}
        for entry in entries()
        if isinstance(entry.rule, dict) and entry.keys[framework]
    ]
    found = (*every["first"], *every[framework], *short, *every["last"])
    return tuple(each if isinstance(each, str) else _row(framework, each) for each in found)


def _row(framework: str, row: Row) -> Row:
    source = row.get("full") or full_names(framework, row.get("from", []))
    if not source and "is" not in row:
        source = names_of(framework, row.get("to", ""))
    when = {
        full_names(framework, names.split("|")): wanted
        for names, wanted in row.get("when", {}).items()
    }
    if "given" in row:
        when[source] = row["given"]
    entry = find(framework, source[0]) if source else None
    words = tuple(row.get("values", {}).items()) or (entry.values if entry else ())
    by = full_names(framework, row.get("by", []))
    return row | {"from": source, "by": by, "when": when, "values": words}


def names_of(framework: str, ours: str) -> tuple[str, ...]:
    """Returns their names for our key."""
    return tuple(key for entry in entries() if entry.to == ours for key in entry.keys[framework])


def full_names(framework: str, names: str | Sequence[str]) -> tuple[str, ...]:
    """Returns their names, which tables shorten."""
    several = [names] if isinstance(names, str) else names
    return tuple(full_name(framework, name) for name in several)


def alike(one: object, other: object) -> bool:
    """Returns whether two values are the same; true is not 1."""
    return isinstance(one, bool) is isinstance(other, bool) and one == other


def spelled(value: Plain, words: Words) -> Plain:
    """Returns a value in our words, if there are some for it."""
    return next((ours for theirs, ours in words if alike(value, theirs)), value)


@cache
def entries() -> tuple[Entry, ...]:
    """Returns the table, in its order."""
    return tuple(map(_entry, _table("foreign_names.yaml")["names"]))


@cache
def _table(name: str) -> dict:
    return yaml.safe_load(Path(__file__).with_name(name).read_text(encoding="utf-8"))


def _entry(given: dict) -> Entry:
    keys = {name: full_names(name, given.pop(name, [])) for name in FRAMEWORKS}
    keys["miles"] = (*keys["slime"], *keys["miles"])
    same = tuple(given.pop("same", ()))
    values = tuple(given.pop("values", {}).items())
    return Entry(keys=keys, same=same, values=values, **given)


@cache
def defaults(framework: str) -> dict[str, Scalar]:
    """Returns the defaults of foreign_defaults.yaml."""
    known = _table("foreign_defaults.yaml")[framework]
    return {full_name(framework, key): value for key, value in known.items()}


def full_name(framework: str, name: str) -> str:
    """Returns a name of theirs in full; one that is full already stays."""
    if framework in ("slime", "miles"):
        return name if name.endswith(".py") or name.startswith("--") else f"--{name}"
    if framework != "verl":
        return name
    return _SHORT.sub(r"actor_rollout_ref.\1.", name).removeprefix("/")


@cache
def _names(framework: str) -> list[tuple[str, Entry]]:
    """Returns all names with their entries, the most specific first."""
    pairs = [(name, entry) for entry in entries() for name in entry.keys[framework]]
    return sorted(pairs, key=lambda pair: -len(pair[0].replace("*", "")))


@cache
def find(framework: str, key: str) -> Entry | None:
    """Returns the entry of the most specific name that `key` has, with the key in it for a `*` of
    ours; None if it is not in the table."""
    for name, entry in _names(framework):
        if name == key or ("*" in name and fnmatchcase(key, name)):
            # all below a section, or an option's name
            below = key.removeprefix(name[:-1]) if name.endswith(".*") else ""
            inside = below or re.sub("^--(sglang-)?", "", key).replace("-", "_")
            return replace(entry, to=entry.to.replace("*", inside), is_section="*" in entry.to)
    return None


def key_hint(key: str, value: Plain) -> str:
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
            return f"; {', '.join(hints[:4])}{more}{'' if shown in _table('others.yaml') else how}"
    same_names = (
        f"; {shown}'s {name} is {entry.to} here" + (f": {entry.note}" if entry.note else "")
        for framework, shown in FRAMEWORKS.items()
        for entry in entries()
        for name in entry.keys[framework]
        if name.rpartition(".")[2] == key.rpartition(".")[2] and entry.to not in ("", key)
    )
    return next(same_names, "")


def _is_here(framework: str, key: str) -> str:
    if (entry := find(framework, key) or find(framework, f"--{key.replace('_', '-')}")) is None:
        return ""
    return f"{entry.to} here" if entry.to else f"not here: {entry.lacks or entry.free}"


def value_hint(key: str, value: Plain) -> str:
    """Returns how a value of another framework is spelled here, if `key` of an experiment has it;
    else ""."""
    words = (spelled(value, entry.values) for entry in entries() if entry.to == key)
    ours = next((word for word in words if not alike(word, value)), None)
    return "" if ours is None else f"; {value!r} is {ours!r} here"


def leaves_of(value: Plain, prefix: str = "") -> Iterator[tuple[str, Plain]]:
    """Yields the dotted key of every value inside nested sections, below `prefix`."""
    if not isinstance(value, dict) or not value:
        yield prefix, value
        return
    for key, inner in value.items():
        yield from leaves_of(inner, f"{prefix}.{key}" if prefix else str(key))


def whose(text: str) -> str:
    """Returns the framework, of those that are not translated, whose file a text is; else ""."""
    others = _table("others.yaml").items()
    return next((name for name, other in others if re.search(other["looks"], text)), "")


def where_to_look(name: str) -> str:
    """Returns the answer to a file of a framework that is not translated."""
    others = _table("others.yaml")
    translated = ", ".join(shown for shown in FRAMEWORKS.values() if shown not in others)
    return (
        f"this is {name}'s, which is not translated ({translated} are). Begin with `megagrpo init` "
        f"or docs/train.md: {others[name]['keys']}. docs/reference/configuration.md has all keys"
    )
