"""Reads what a user of another framework brings into one flat mapping: key -> value."""

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from megagrpo.config.load import ConfigError, Plain, plain_yaml
from megagrpo.tools.convert.foreign import FRAMEWORKS, leaves_of, where_to_look, whose
from megagrpo.tools.convert.shell import trainer_command

_REFERENCE = re.compile(r"\$\{(?:oc\.select:)?([\w.]+)(?:,\s*([^{}]*))?\}")
# key=value, +key=value, group@package=file; ~key takes a key away
_OVERRIDE = re.compile(r"\+{0,2}([A-Za-z_][\w.@/]*)=(.*)|(~\S+)", re.DOTALL)
_CONFIG_NAME = re.compile(r"(?:--config-name|-cn)(?:=(.*))?")


# framework -> the pattern of its trainer, and an example of its command
_SLIME = (r"\S*train(_async)?\.py", "python train.py --option value ...")
_COMMANDS = {
    "verl": (r"\S*main_(ppo|dapo|\S*trainer)\S*", "python -m verl.trainer.main_ppo key=value ..."),
    "slime": _SLIME,
    "miles": _SLIME,
}


@dataclass(frozen=True)
class Source:
    """The options that a user's file sets, by their dotted keys, and what is to be said of it."""

    given: dict[str, Plain]
    notes: list[str] = field(default_factory=list)


def read_source(framework: str, path: Path) -> Source:
    """Returns the options that a file sets. Raises ValueError if it cannot be read, or starts no
    trainer."""
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    text = path.read_text(encoding="utf-8", errors="replace")
    another = whose(text) if framework in _COMMANDS else FRAMEWORKS[framework]
    if another:
        raise ValueError(f"{path}: {where_to_look(another)}")
    if path.suffix in (".yaml", ".yml") and framework == "verl":
        return Source(_read_yaml(path))
    words, notes = trainer_command(path, *_COMMANDS[framework])
    return Source(overrides(words) if framework == "verl" else options(words), notes)


def _read_yaml(path: Path) -> dict[str, Plain]:
    given = plain_yaml(path.read_text(encoding="utf-8"), str(path))
    if not isinstance(given, dict):
        raise ValueError(f"{path}: should be sections or keys, is {given!r:.60}")
    leaves = ((key, cast(Plain, value)) for key, value in leaves_of(given))
    return _interpolated({key: value for key, value in leaves if not key.endswith("_target_")})


def overrides(words: Sequence[str]) -> dict[str, Plain]:
    """Returns the values of Hydra's overrides."""
    found = [match for word in words if (match := _OVERRIDE.fullmatch(word))]
    read = [(match[1], plain_yaml(match[2], match[1])) for match in found if match[1]]
    read += [(match[3], "taken away") for match in found if match[3]]
    given = {leaf: cast(Plain, one) for key, value in read for leaf, one in leaves_of(value, key)}
    for word, after in zip(words, [*words[1:], ""], strict=True):
        if match := _CONFIG_NAME.fullmatch(word):
            given["--config-name"] = after if match[1] is None else match[1]
    return _interpolated(given)


def options(words: Sequence[str]) -> dict[str, Plain]:
    """Returns the values of argparse's options after a program's name, the first word: --key value,
    --key=value, true without a value, a list of several. The program's name is a key, too."""
    given: dict[str, Plain] = {words[0].rpartition("/")[2]: True}
    values: list[Plain] = []
    for word in words[1:]:
        if not re.match(r"--[A-Za-z]", word):
            values.append(_value(word))
            continue
        key, has_value, value = word.partition("=")
        values = [_value(value)] if has_value else []
        given[key] = values
    return {key: _single(value) for key, value in given.items()}


def _single(value: Plain) -> Plain:
    if not isinstance(value, list) or len(value) > 1:
        return value
    return value[0] if value else True


def _value(text: str) -> Plain:
    with suppress(ConfigError):  # such as %h or @x, which are text in a command
        return plain_yaml(text, text)
    return text


def _interpolated(values: dict[str, Plain]) -> dict[str, Plain]:
    """Returns the values with `${key}` and `${oc.select:key,default}` replaced by that key's value,
    as Hydra does; others stay as they are."""

    def found(match: re.Match[str], depth: int) -> Plain:
        if match[1] in values:
            return resolved(values[match[1]], depth + 1)
        return match[0] if match[2] is None else plain_yaml(match[2], match[0])

    def resolved(value: Plain, depth: int = 0) -> Plain:
        if not isinstance(value, str) or "${" not in value or depth > 5:
            return value
        whole = _REFERENCE.fullmatch(value)
        if whole is not None:
            return found(whole, depth)
        return _REFERENCE.sub(lambda match: str(found(match, depth)), value)

    return {key: resolved(value) for key, value in values.items()}
