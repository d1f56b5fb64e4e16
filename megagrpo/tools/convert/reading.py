"""Reads what a user of another framework brings into one flat mapping: key -> value."""

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from megagrpo.config.load import ConfigError, Plain, plain_yaml
from megagrpo.tools.convert.foreign import FRAMEWORKS, defaults, leaves_of, where_to_look, whose
from megagrpo.tools.convert.shell import trainer_command

_REFERENCE = re.compile(r"\$\{(?:oc\.select:)?([\w.]+)(?:,\s*([^{}]*))?\}")
# key=value, +key=value, group@package=file
_OVERRIDE = re.compile(r"\+{0,2}([A-Za-z_][\w.@/-]*)=(.*)", re.DOTALL)
# a key of Hydra's {key:value}, which YAML reads only with a space after the colon
_KEY = re.compile(r"([{,]\s*[\w.$/-]+):(?=\S)")
_SHORT = {"-cn": "--config-name", "-cp": "--config-path", "-cd": "--config-dir"}
# options whose words stay texts, also if they look like numbers
_TEXTS = re.compile(r"--(.*-)?(data|key|path|dir|checkpoint|load|save|group|project|stop)")
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
    return Source(overrides(words[1:]) if framework == "verl" else options(words), notes)


def _read_yaml(path: Path) -> dict[str, Plain]:
    given = plain_yaml(path.read_text(encoding="utf-8"), str(path))
    if not isinstance(given, dict):
        raise ValueError(f"{path}: should be sections or keys, is {given!r:.60}")
    leaves = leaves_of(given)
    return _interpolated({key: value for key, value in leaves if not key.endswith("_target_")})


def overrides(words: Sequence[str]) -> dict[str, Plain]:
    """Returns the values of Hydra's overrides and of its options; ~key, which takes a key away, and
    another word are keys, too."""
    given: dict[str, Plain] = {}
    rest = iter(words)
    for word in rest:
        option, has_value, value = word.partition("=")
        option = _SHORT.get(option, option)
        if option in _SHORT.values():
            given[option] = value if has_value else next(rest, "")
        elif match := _OVERRIDE.fullmatch(word):
            text = match[2]
            if text.startswith("{"):
                text = _KEY.sub(r"\1: ", text)
            given |= leaves_of(plain_yaml(text, match[1]), match[1])
        else:
            given[word] = "taken away" if word.startswith("~") else "no override"
    return _interpolated(given)


def options(words: Sequence[str]) -> dict[str, Plain]:
    """Returns the values of argparse's options after a program's name, the first word: --key value,
    --key=value, true without a value, a list of several. The program's name is a key, too."""
    key = words[0].rpartition("/")[2]
    given: dict[str, list[Plain]] = {key: []}
    for word in words[1:]:
        has_value = "="
        value = word
        if re.match(r"--[A-Za-z]", word):
            key, has_value, value = word.partition("=")
            given[key] = []
        if has_value:
            given[key].append(_value(key, value))
    return {key: values[0] if len(values) == 1 else values or True for key, values in given.items()}


def _value(key: str, text: str) -> Plain:
    """Returns a number, a bool or the object of a JSON text; else the text, as argparse has it."""
    with suppress(ConfigError):  # such as %h or @x
        value = plain_yaml(text, text)
        if not _TEXTS.fullmatch(key) and isinstance(value, int | float | dict):
            return value
    return text


def _interpolated(values: dict[str, Plain]) -> dict[str, Plain]:
    """Returns the values with `${key}` and `${oc.select:key,default}` replaced by that key's value,
    or verl's default, as Hydra does; others stay as they are."""
    known = defaults("verl") | values

    def resolved(value: Plain, depth: int = 0) -> Plain:
        def found(match: re.Match[str]) -> Plain:
            if match[1] in known:
                return resolved(known[match[1]], depth + 1)
            return match[0] if match[2] is None else plain_yaml(match[2], match[0])

        if not isinstance(value, str) or depth > 5:
            return value
        whole = _REFERENCE.fullmatch(value)
        return found(whole) if whole else _REFERENCE.sub(lambda match: str(found(match)), value)

    return {key: resolved(value) for key, value in values.items()}
