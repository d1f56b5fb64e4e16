"""Reads a YAML file and `--set` overrides into an ExperimentConfig, and reports every problem at once.

Four steps: read each source into plain data with the location of every key; merge them (preset, file, overrides);
validate with the schema; check the settings of libraries against their sources. Problems are reported in the words of
the file.
"""

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from megagrpo.config.fields import KeyPath, all_paths, annotations_at, choices, keys_of, sections, variant_names
from megagrpo.config.libraries.megatron import megatron_setting_problems
from megagrpo.config.libraries.sglang import engine_setting_problems
from megagrpo.config.schema import ExperimentConfig
from megagrpo.system.run_folder import write_whole

PRESETS = Path(__file__).with_name("presets")


class ConfigError(ValueError):
    """The experiment cannot be run as written; the text lists every problem with its place and its remedy."""


@dataclass
class _Source:
    """Plain data of one source, the location of each key path, and problems of the text itself."""

    data: Any
    places: dict[KeyPath, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


class _Loader(yaml.SafeLoader):
    """Reads YAML 1.2 scalars: 1e-6 is a float, only true and false are booleans, nothing is octal or a date."""

    yaml_implicit_resolvers: dict[str, list] = {}  # noqa: RUF012  # PyYAML's own declaration of the attribute


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
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$"), list(_first))
_Loader.add_constructor("tag:yaml.org,2002:int", lambda loader, node: int(node.value.replace("_", "")))


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> ExperimentConfig:
    """Reads an experiment file; `overrides` are "a.b=c" with c in YAML.

    Raises ConfigError naming every unknown key, wrong value and impossible combination, with file, line and remedy.
    """
    source = _read_file(Path(path))
    if source.data is None and not source.problems:
        source.problems.append(f"{path}: the file is empty")
    if source.problems:
        raise _error(path, source.problems)
    # A preset and the choice of a variant come before what is set inside them, wherever they stand on the command line.
    presets = [text for text in overrides if _sets(text, "preset")]
    others = [text for text in overrides if not _sets(text, "preset")]
    for text in presets:
        _override(source, text)
    source = _with_preset(source, path)
    for text in sorted(others, key=lambda text: not _sets(text, "name")):
        _override(source, text)
    if source.problems:
        raise _error(path, source.problems)
    try:
        config = ExperimentConfig.model_validate(source.data)
    except ValidationError as exc:
        raise _error(path, _explain_errors(exc, source, str(path))) from None
    found = [*megatron_setting_problems(config.actor), *engine_setting_problems(config.rollout)]
    problems = [_at(keys, problem, source, str(path)) for keys, problem in found]
    if problems:
        raise _error(path, problems)
    return config


def dump_config(config: ExperimentConfig, path: str | Path) -> None:
    """Writes the resolved experiment as YAML that load_config reads back to an equal config; whole file or nothing."""
    text = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=120)
    write_whole(Path(path), text)


def _error(path: str | Path, problems: list[str]) -> ConfigError:
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    return ConfigError("\n  ".join([f"{path}: {count}", *problems]))


def _read_file(path: Path) -> _Source:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.yaml")], n=1)
        hint = f"; did you mean {path.parent / near[0]}?" if near else ""
        return _Source(None, problems=[f"{path}: no such file{hint}"])
    except (OSError, UnicodeDecodeError) as exc:
        return _Source(None, problems=[f"{path}: cannot be read as text: {exc}"])
    source = _parse(text, str(path))
    if source.data is not None and not isinstance(source.data, dict):
        source.problems.append(f"{path}: should be sections like 'model:', is {_show(source.data)}")
    return source


def _parse(text: str, name: str) -> _Source:
    source = _Source(None)
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        source.data = None if node is None else _build(loader, node, (), source, name)
    except yaml.MarkedYAMLError as exc:
        mark = exc.problem_mark or exc.context_mark
        source.problems.append(f"{name}:{mark.line + 1 if mark else '?'}: not valid YAML: {exc.problem or exc.context}")
    except yaml.YAMLError as exc:
        source.problems.append(f"{name}: not valid YAML: {' '.join(str(exc).split())}")
    return source


def _build(loader: _Loader, node: yaml.Node, path: KeyPath, source: _Source, name: str) -> Any:
    source.places[path] = f"{name}:{node.start_mark.line + 1}"
    if isinstance(node, yaml.SequenceNode):
        return [_build(loader, child, (*path, i), source, name) for i, child in enumerate(node.value)]
    if isinstance(node, yaml.ScalarNode):
        return loader.construct_object(node)
    out: dict = {}
    for key_node, child in node.value:
        key = key_node.value if isinstance(key_node, yaml.ScalarNode) else "<not a name>"
        here = (*path, key)
        if key in out:
            where = f"{name}:{key_node.start_mark.line + 1}"
            source.problems.append(
                f"{where}: {_dotted(here)} is written twice (first at {source.places[here]}); remove one"
            )
        out[key] = _build(loader, child, here, source, name)
        source.places[here] = f"{name}:{key_node.start_mark.line + 1}"
    return out


def _with_preset(source: _Source, path: str | Path) -> _Source:
    if "preset" not in source.data:
        return source
    name = source.data.pop("preset")
    known = sorted(p.stem for p in PRESETS.glob("*.yaml"))
    if not isinstance(name, str) or name not in known:
        source.problems.append(f"{source.places[('preset',)]}: preset {name!r} is unknown{_nearest(str(name), known)}")
        return source
    preset = _read_file(PRESETS / f"{name}.yaml")
    if preset.problems or preset.data is None:
        raise _error(path, preset.problems or [f"{PRESETS / name}.yaml: the preset is empty"])
    return _Source(_merge(preset.data, source.data, ()), {**preset.places, **source.places})


def _merge(below: Any, above: Any, path: KeyPath) -> Any:
    """Lays `above` over `below`, key by key; a section with another `name` is another variant and replaces it."""
    if not (isinstance(below, dict) and isinstance(above, dict)):
        return above
    if path and "name" in above and above["name"] != below.get("name"):
        return above
    out = dict(below)
    for key, value in above.items():
        out[key] = _merge(below[key], value, (*path, key)) if key in below else value
    return out


def _sets(override: str, key: str) -> bool:
    return override.partition("=")[0].strip().split(".")[-1] == key


def _override(source: _Source, text: str) -> None:
    """Sets one key.

    A section that gets another `name` is another variant and loses what was written for the old one, as in _merge.
    """
    dotted, equals, value = text.partition("=")
    keys = tuple(dotted.strip().split("."))
    place = f"--set {text}"
    if not equals or not all(keys):
        source.problems.append(f"{place}: should look like --set train.num_steps=20")
        return
    parsed = _parse(value, place)
    source.problems += parsed.problems
    section = source.data
    for i, key in enumerate(keys[:-1]):
        inner = section.get(key)
        if inner is None:
            inner = section[key] = {}
            source.places[keys[: i + 1]] = place
        if not isinstance(inner, dict):
            source.problems.append(f"{place}: {_dotted(keys[: i + 1])} is {_show(inner)}, not a section")
            return
        section = inner
    if keys[-1] == "name" and len(keys) > 1 and section.get("name") != parsed.data:
        section.clear()
        source.places = {k: v for k, v in source.places.items() if k[: len(keys) - 1] != keys[:-1]} | {keys[:-1]: place}
    section[keys[-1]] = parsed.data
    source.places = {k: v for k, v in source.places.items() if k[: len(keys)] != keys}
    source.places.update({(*keys, *k): place for k in parsed.places})
    source.places[keys] = place


# ---- what is wrong, in words ---------------------------------------------------------------------------------------


def _at(path: KeyPath, problem: str, source: _Source, name: str) -> str:
    """Returns one problem with its place and its value."""
    return f"{_place(path, source, name)}: {_dotted(path)} = {_show(_value_at(source.data, path))}: {problem}"


def _place(path: KeyPath, source: _Source, name: str) -> str:
    return next((source.places[path[:n]] for n in range(len(path), 0, -1) if path[:n] in source.places), name)


def _explain_errors(exc: ValidationError, source: _Source, name: str) -> list[str]:
    """Returns one line for each problem. pydantic reports a union of scalar types once a member; one line is enough."""
    by_path: dict[KeyPath, list[ErrorDetails]] = {}
    for error in exc.errors(include_url=False):
        by_path.setdefault(_data_path(error["loc"], error["type"], source.data), []).append(error)
    lines = []
    for path, errors in by_path.items():
        place = _place(path, source, name)
        value = _value_at(source.data, path)
        if len(errors) > 1 and errors[0]["type"].endswith("_type"):
            problems = [f"{_dotted(path)} = {_show(value)}: should be a text, a number, true or false"]
        else:
            problems = list(dict.fromkeys(_describe(error, path, value) for error in errors))
        lines += [f"{place}: {problem}" for problem in problems]
    return lines


def _data_path(loc: tuple[Any, ...], kind: str, data: Any) -> KeyPath:
    """Returns pydantic's location without the union tags that it puts between keys."""
    path: list[str | int] = []
    for i, key in enumerate(loc):
        in_dict = isinstance(data, dict) and key in data
        in_list = isinstance(data, list) and isinstance(key, int) and key < len(data)
        if in_dict or in_list:
            data = data[key]
            path.append(key)
        elif i == len(loc) - 1 and kind == "missing":
            path.append(key)
    return tuple(path)


def _value_at(data: Any, path: KeyPath) -> Any:
    for key in path:
        if isinstance(data, dict) and key not in data:
            return None
        data = data[key]
    return data


def _describe(error: ErrorDetails, path: KeyPath, value: Any) -> str:
    kind, dotted, context = error["type"], _dotted(path), error.get("ctx", {})
    allowed = annotations_at(ExperimentConfig, path)
    match kind:
        case "extra_forbidden":
            return f"{dotted} = {_show(value)}: unknown key{_remedy_unknown(path)}"
        case "missing":
            return f"{dotted} is missing; it has no default, write it"
        case "value_error":
            return f"{dotted + ': ' if dotted else ''}{context['error']}"
        case "union_tag_not_found":
            return f"{dotted} = {_show(value)}: needs a 'name', one of {', '.join(variant_names(sections(allowed)))}"
        case "union_tag_invalid":
            tag = str(context["tag"])
            return f"{dotted}.name = {_show(tag)}: unknown{_nearest(tag, variant_names(sections(allowed)))}"
        case "literal_error":
            near = _nearest(str(value), choices(allowed), context["expected"])
            return f"{dotted} = {_show(value)}: not a choice{near}"
        case "model_type" | "model_attributes_type":
            keys = ", ".join(keys_of(sections(allowed)))
            return f"{dotted} = {_show(value)}: should be a section with keys {keys}"
    return f"{dotted} = {_show(value)}: {_plain(error['msg'])}{_type_remedy(kind, value)}"


def _plain(message: str) -> str:
    return re.sub(r"^Input should be", "should be", message)


def _type_remedy(kind: str, value: Any) -> str:
    if kind in ("int_type", "float_type", "bool_type") and isinstance(value, str):
        return "; write it without quotes" if re.fullmatch(r"[-+\d.eE_]+|true|false", value) else ""
    if kind == "string_type" and value is not None and not isinstance(value, (dict, list)):
        return f"; write it in quotes: '{value}'"
    if kind == "int_type" and isinstance(value, float) and value.is_integer():
        return f"; write {int(value)}"
    if kind == "list_type":
        return f"; write [{value}]"
    return ""


def _remedy_unknown(path: KeyPath) -> str:
    siblings = keys_of(sections(annotations_at(ExperimentConfig, path[:-1])))
    near = difflib.get_close_matches(str(path[-1]), siblings, n=1, cutoff=0.6)
    elsewhere = [p for p in all_paths(ExperimentConfig) if p.split(".")[-1] == path[-1]]
    if elsewhere and not near:
        return f"; did you mean {' or '.join(elsewhere[:3])}?"
    return _nearest(str(path[-1]), siblings)


def _nearest(word: str, choices: list[str], fallback: str = "") -> str:
    near = difflib.get_close_matches(word, choices, n=1, cutoff=0.6)
    if near:
        return f"; did you mean {near[0]!r}?"
    known = ", ".join(choices) or fallback
    return f"; known: {known}" if known else ""


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _dotted(path: KeyPath) -> str:
    return ".".join(str(key) for key in path)
