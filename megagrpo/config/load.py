"""Reads a YAML file and `--set` overrides into an ExperimentConfig, and reports every problem at
once.

Four steps: read each source into plain data with the location of every key; merge them (preset,
file, overrides); validate with the schema; ask who else judges the experiment.
Problems are reported in the words of the file.
"""

import copy
import difflib
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias, cast

import yaml
from pydantic import ValidationError

from megagrpo.config.fields import RULES_LATER, KeyPath, annotations_at, broken_rules, sections
from megagrpo.config.objective.own import own_digest
from megagrpo.config.schema import ExperimentConfig
from megagrpo.config.wording import by_path, dotted, in_words, nearest, show, shown, value_at
from megagrpo.system.run_folder import write_whole

PRESETS = Path(__file__).with_name("presets")


Plain: TypeAlias = "dict[str, Plain] | list[Plain] | str | int | float | bool | None"
Fetch: TypeAlias = Callable[[ExperimentConfig], tuple[ExperimentConfig, list[tuple[KeyPath, str]]]]
# of keys that have no default, while the rest is judged
_STAND_INS: dict[str, Plain] = {"name": "-", "output_dir": "-", "model": {"path": "-"}, "data": {}}


class ConfigError(ValueError):
    """The experiment cannot be run as written; the text lists every problem with its location and
    its remedy."""


@dataclass
class _Source:
    """Plain data of one source, the location of each key path, and problems of the text itself."""

    name: str
    data: Plain = None
    locations: dict[KeyPath, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    preset_problems: list[str] = field(default_factory=list)  # the nearest preset stands in

    def location(self, path: KeyPath) -> str:
        """Returns the location of the value at `path`, or of the nearest section around it."""
        around = (path[:length] for length in range(len(path), 0, -1))
        return next((self.locations[part] for part in around if part in self.locations), self.name)


class _Loader(yaml.SafeLoader):
    """Reads YAML 1.2 scalars: 1e-6 is a float, only true and false are booleans, nothing is octal
    or a date."""

    yaml_implicit_resolvers: dict[str, list] = {}  # noqa: RUF012  # PyYAML's own declaration of the attribute


class Dumper(yaml.SafeDumper):
    """Quotes a text that a reader of YAML 1.2 or 1.1 would take for another scalar: 1e5, 08, no."""


for _tag, _pattern, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("int", r"[-+]?[0-9][0-9_]*", "-+0123456789"),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+.0123456789",
    ),
):
    for _side in (_Loader, Dumper):
        _side.add_implicit_resolver(
            f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$"), list(_first)
        )
_Loader.add_constructor(
    "tag:yaml.org,2002:int", lambda loader, node: int(node.value.replace("_", ""))
)
# U+0085 is a line break to PyYAML, which it writes as it is and reads as a space, unless quoted
Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, '"' if "\x85" in text else None
    ),
)


def plain_yaml(text: str, name: str) -> Plain:
    """Returns YAML 1.2 as plain data. Raises ConfigError naming `name` and the line."""
    source = _parse(text, name)
    _refuse(source, source.problems)
    return source.data


def load_config(
    path: str | Path,
    overrides: Sequence[str] = (),
    judge: Callable[[ExperimentConfig], Iterable[tuple[KeyPath, str]]] = lambda config: (),
    later: Callable[[ExperimentConfig], Iterable[str]] = lambda config: (),
    fetch: Fetch = lambda config: (config, []),
) -> ExperimentConfig:
    """Reads an experiment file; `overrides` are "a.b=c" with c in YAML. `judge` returns (key path
    of a value, problem), () for a problem that names its keys: check/rules/table.py. `later` returns
    what other checks find; it is asked if the file has problems, about the rest of it. `fetch`
    replaces names of what is elsewhere: data/hub.py.

    Raises ConfigError naming every unknown key, wrong value and impossible combination, with file,
    line and remedy.
    """
    source = _merged(path, overrides)
    config, problems, refused = _validated(source)
    if config is None:
        _refuse(source, problems)
    assert config is not None
    config, elsewhere = fetch(config)
    problems += [f"{source.location(keys)}: {dotted(keys)}: {text}" for keys, text in elsewhere]
    found = [
        f"{_places(source, text, keys)}: {dotted(keys)}{': ' if keys else ''}{text}"
        for keys, text in broken_rules(config)
        if not _inside(keys, refused)
    ]
    for keys, text in judge(config):
        value = f"{shown(keys, value_at(source.data, keys))}: " if keys else ""
        where = source.location(keys) if keys else _places(source, text, keys)
        found.append(f"{where}: {value}{text}")
    if problems or found:
        found += located(path, overrides, later(config))
    # what names a refused value may be a consequence of it
    _refuse(source, [*problems, *(text for text in found if not _names_any(text, refused))])
    return config


def located(path: str | Path, overrides: Sequence[str], problems: Iterable[str]) -> list[str]:
    """Returns problems, each behind the lines and overrides that wrote the keys which it names."""
    source = _merged(path, overrides)
    found = [(_places(source, text, ()), text) for text in problems]
    return [text if where == source.name else f"{where}: {text}" for where, text in found]


def _merged(path: str | Path, overrides: Sequence[str]) -> _Source:
    """Returns what preset, file and overrides say together. Raises ConfigError."""
    source = _read_file(Path(path))
    _refuse(source, source.problems)
    # A preset and the choice of a variant come before what is set inside them, in any order on the
    # command line.
    for text in overrides:
        if _sets(text, "preset"):
            _override(source, text)
    _lay_over_preset(source)
    for text in sorted(overrides, key=lambda text: not _sets(text, "name")):
        if not _sets(text, "preset"):
            _override(source, text)
    _refuse(source, source.problems)
    return source


def _validated(source: _Source) -> tuple[ExperimentConfig | None, list[str], set[KeyPath]]:
    """Returns the experiment without what its types refuse, the problems, and the paths of the
    refused; None if a required value is left out. No rule is judged."""
    data = copy.deepcopy(source.data)
    problems = list(source.preset_problems)
    refused: set[KeyPath] = set()
    while True:
        try:
            config = ExperimentConfig.model_validate(data, context=RULES_LATER)
        except ValidationError as exc:
            errors = by_path(exc, data)
        else:
            return config, problems, refused
        # what is missing now because it was refused is no problem of its own
        fresh = {path: found for path, found in errors.items() if not _inside(path, refused)}
        problems += [
            f"{source.location(path)}: {text}" for path, text in in_words(fresh, source.data)
        ]
        again = {path[:-1] for path in errors.keys() - fresh.keys()}
        for path in (*fresh, *again):
            if not path or (not _left_out(data, path) and path in refused):
                return None, problems, refused
            refused.add(path)


def _inside(path: KeyPath, refused: set[KeyPath]) -> bool:
    return any(path[:length] in refused for length in range(1, len(path) + 1))


def _left_out(data: Plain, path: KeyPath) -> bool:
    """Takes the value at `path` out of the data, or puts a stand-in there. Returns whether that
    changed anything."""
    *around, key = next((path[:i] for i, key in enumerate(path) if isinstance(key, int)), path)
    if [*around, key] == ["model", "path"]:
        return _left_out(data, ("model",))
    section = value_at(data, tuple(around))
    if not isinstance(section, dict):
        return False
    there = section.pop(str(key), None)
    if not around and key in _STAND_INS:
        section[str(key)] = copy.copy(_STAND_INS[str(key)])
        return there != _STAND_INS[str(key)]
    return there is not None


def _names_any(text: str, paths: Iterable[KeyPath]) -> bool:
    """Returns whether a message names one of the keys, so that it may be a consequence of the
    value there."""
    keys = {str(path[-1]) for path in paths if len(path) > 1}
    return not keys.isdisjoint(re.findall(r"[\w-]+", text))


def _places(source: _Source, text: str, path: KeyPath) -> str:
    """Returns the locations of the keys that a message about the section at `path` names."""
    words = re.findall(r"[a-z]\w*(?:\.\w+)*", text)
    keys = [(*path, *word.split(".")) for word in words if path or "." in word]
    found = [source.locations[key] for key in keys if key in source.locations]
    return ", ".join(dict.fromkeys(found)) or source.location(path)


def dump_config(config: ExperimentConfig, path: str | Path) -> None:
    """Writes the resolved experiment as YAML that load_config reads back to an equal config; whole
    file or nothing."""
    functions = config.algorithm.own_functions
    if (curriculum := config.data.curriculum) is not None and ":" in curriculum.name:
        functions["data.curriculum.name"] = curriculum.name
    record = "".join(f"# {own_digest(key, name)}\n" for key, name in functions.items())
    values = config.model_dump(mode="json")
    text = yaml.dump(values, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=120)
    write_whole(Path(path), record + text)


def _refuse(source: _Source, problems: list[str]) -> None:
    if problems:
        different = list(dict.fromkeys(problems))
        count = "1 problem" if len(different) == 1 else f"{len(different)} problems"
        raise ConfigError("\n  ".join([f"{source.name}: {count}", *different])) from None


def _read_file(path: Path) -> _Source:
    if not path.exists():
        near = difflib.get_close_matches(
            path.name, [p.name for p in path.parent.glob("*.yaml")], n=1
        )
        hint = f"; did you mean {path.parent / near[0]}?" if near else ""
        return _Source(str(path), problems=[f"{path}: no such file{hint}"])
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        return _Source(str(path), problems=[f"{path}: cannot be read as text: {exc}"])
    source = _parse(text, str(path))
    if not isinstance(source.data, dict) and not source.problems:
        is_what = (
            "the file is empty"
            if source.data is None
            else f"should be sections like 'model:', is {source.data!r}"
        )
        source.problems.append(f"{path}: {is_what}")
    return source


def _parse(text: str, name: str) -> _Source:
    source = _Source(name)
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        source.data = None if node is None else _build(loader, node, (), source)
    except yaml.MarkedYAMLError as exc:
        mark = exc.problem_mark or exc.context_mark
        source.problems.append(
            f"{name}:{mark.line + 1 if mark else '?'}: not valid YAML: {exc.problem or exc.context}"
        )
    except (yaml.YAMLError, RecursionError) as exc:  # the latter: an anchor inside itself
        source.problems.append(f"{name}: not valid YAML: {' '.join(str(exc).split())}")
    return source


def _build(loader: _Loader, node: yaml.Node, path: KeyPath, source: _Source) -> Plain:
    source.locations[path] = f"{source.name}:{node.start_mark.line + 1}"
    if isinstance(node, yaml.SequenceNode):
        return [_build(loader, child, (*path, i), source) for i, child in enumerate(node.value)]
    if isinstance(node, yaml.ScalarNode):
        # of values that are not what their tag says, such as `!!int x`
        with suppress(ValueError, LookupError, AttributeError):
            return loader.construct_object(node, deep=True)  # else `!!map x` would be empty
        tag = node.tag.rpartition(":")[2]
        source.problems.append(
            f"{source.locations[path]}: not valid YAML: {node.value!r:.60} is no {tag}"
        )
        return None
    out: dict[str, Plain] = {}
    for key_node, child in node.value:
        key = key_node.value if isinstance(key_node, yaml.ScalarNode) else "<not a name>"
        here = (*path, key)
        location = f"{source.name}:{key_node.start_mark.line + 1}"
        if key in out:
            first = source.locations[here]
            source.problems.append(
                f"{location}: {dotted(here)} is written twice (first at {first}); remove one"
            )
        out[key] = _build(loader, child, here, source)
        source.locations[here] = location
    return out


def _lay_over_preset(source: _Source) -> None:
    """Puts the values of the source's preset, if it names one, under its own."""
    own = cast(dict[str, Plain], source.data)
    if "preset" not in own:
        return
    name = own.pop("preset")
    known = sorted(path.stem for path in PRESETS.glob("*.yaml"))
    if name not in known:
        location = source.location(("preset",))
        problem = f"{location}: preset {name!r} is unknown{nearest(str(name), known)}"
        near = difflib.get_close_matches(str(name), known, n=1)
        if not near:
            source.problems.append(problem)
            return
        source.preset_problems.append(problem)
        name = near[0]
    preset = _read_file(PRESETS / f"{name}.yaml")
    _refuse(source, preset.problems)
    source.data = _merge(preset.data, own, ())
    source.locations = preset.locations | source.locations


def _merge(below: Plain, above: Plain, path: KeyPath) -> Plain:
    """Lays `above` over `below`, key by key; another variant of a section replaces it."""
    if not (isinstance(below, dict) and isinstance(above, dict)):
        return above
    if "name" in above and _is_other(path, below.get("name"), above["name"]):
        return above
    merged = {
        key: _merge(below[key], value, (*path, key)) for key, value in above.items() if key in below
    }
    return below | above | merged


def _is_other(path: KeyPath, old: Plain, new: Plain) -> bool:
    """Returns whether a section gets the name of another variant; others have names beside keys."""
    return old != new and len(sections(annotations_at(ExperimentConfig, path))) > 1


def _sets(override: str, key: str) -> bool:
    return override.partition("=")[0].strip().split(".")[-1] == key


def _override(source: _Source, text: str) -> None:
    """Sets one key.

    Another variant of a section loses what was written for the old one, as in _merge.
    """
    key_path, equals, value = text.partition("=")
    keys = tuple(key_path.strip().split("."))
    location = f"--set {text}"
    if not equals or not all(keys):
        source.problems.append(f"{location}: should look like --set train.num_steps=20")
        return
    parsed = _parse(value, location)
    source.problems += parsed.problems
    section = cast(dict[str, Plain], source.data)
    for depth, key in enumerate(keys[:-1], start=1):
        if section.get(key) is None:
            section[key] = {}
            source.locations[keys[:depth]] = location
        inner = section[key]
        if not isinstance(inner, dict):
            source.problems.append(
                f"{location}: {dotted(keys[:depth])} is {show(inner)}, not a section"
            )
            return
        section = inner
    forgotten: KeyPath = keys
    if keys[-1] == "name" and _is_other(keys[:-1], section.get("name"), parsed.data):
        section.clear()
        forgotten = keys[:-1]
    section[keys[-1]] = parsed.data
    source.locations = {
        k: v for k, v in source.locations.items() if k[: len(forgotten)] != forgotten
    }
    source.locations |= (
        {forgotten: location} | {(*keys, *k): location for k in parsed.locations} | {keys: location}
    )
