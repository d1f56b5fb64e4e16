"""From a YAML file and `--set` overrides to an ExperimentConfig, with every problem reported at once.

Three steps: read each source into plain data that remembers where every key stands, merge (preset, then the file, then
overrides), validate with the schema and say each complaint in the words of the file.
"""

import difflib
import re
from dataclasses import dataclass, field
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from megagrpo.config.schema import ExperimentConfig
from megagrpo.run_folder import write_whole

KeyPath = tuple[str | int, ...]


class ConfigError(ValueError):
    """The experiment cannot be run as written; the text lists every problem with its place and remedy."""


PRESETS = Path(__file__).with_name("presets")


@dataclass
class _Source:
    """Plain data plus where each key path was written, for messages."""

    data: Any
    places: dict[KeyPath, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


class _Loader(yaml.SafeLoader):
    """YAML 1.2 scalars: 1e-6 is a float, only true/false are booleans, no octal, base-60 or date surprises."""

    yaml_implicit_resolvers = {}


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


def load_config(path: str | Path, overrides: list[str] = ()) -> ExperimentConfig:
    """Read an experiment file; `overrides` are "a.b=c" with c in YAML.

    Raises ConfigError naming every unknown key, wrong value and impossible combination, with file, line and remedy.
    """
    source = _read_file(Path(path))
    if source.data is None and not source.problems:
        source.problems.append(f"{path}: the file is empty")
    if source.problems:
        raise _error(path, source.problems)
    # a preset and the choice of a variant come before what is set inside them, wherever they stand on the command line
    for text in (text for text in overrides if _is_set(text, "preset")):
        _override(source, text)
    source = _with_preset(source, path)
    for text in sorted(
        (text for text in overrides if not _is_set(text, "preset")), key=lambda text: not _is_set(text, "name")
    ):
        _override(source, text)
    if source.problems:
        raise _error(path, source.problems)
    try:
        return ExperimentConfig.model_validate(source.data)
    except ValidationError as exc:
        raise _error(path, _explain_errors(exc, source, str(path))) from None


def dump_config(config: ExperimentConfig, path: str | Path) -> None:
    """Writes the resolved experiment as YAML that load_config reads back to an equal config; whole file or nothing."""
    write_whole(
        Path(path), yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=120)
    )


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
    """`above` wins key by key; a section whose `name` changes is another variant and replaces the old one whole."""
    if not (isinstance(below, dict) and isinstance(above, dict)):
        return above
    if path and "name" in above and above["name"] != below.get("name"):
        return above
    out = dict(below)
    for key, value in above.items():
        out[key] = _merge(below[key], value, (*path, key)) if key in below else value
    return out


def _is_set(override: str, key: str) -> bool:
    return override.partition("=")[0].strip().split(".")[-1] == key


def _override(source: _Source, text: str) -> None:
    """Set one key; a section that gets another `name` is another variant, and loses what was written for the old one, as in _merge."""
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


# ---- saying what is wrong ------------------------------------------------------------------------------------------


def _explain_errors(exc: ValidationError, source: _Source, name: str) -> list[str]:
    """One line per offending key; a union of scalar types complains once per member, which is said once."""
    by_path: dict[KeyPath, list[tuple[dict, KeyPath]]] = {}
    for error in exc.errors(include_url=False):
        path = _data_path(error["loc"], error["type"], source.data)
        by_path.setdefault(path, []).append((error, path))
    lines = []
    for path, errors in by_path.items():
        place = next((source.places[path[:n]] for n in range(len(path), 0, -1) if path[:n] in source.places), name)
        value = _value_at(source.data, path)
        for said in dict.fromkeys(_say(error, path, value, len(errors)) for error, _ in errors):
            lines.append(f"{place}: {said}")
            if len(errors) > 1 and errors[0][0]["type"].endswith("_type"):
                break
    return lines


def _data_path(loc: KeyPath, kind: str, data: Any) -> KeyPath:
    """pydantic's location without the union tags that it puts between keys."""
    path: list = []
    for i, key in enumerate(loc):
        last = i == len(loc) - 1
        if (isinstance(data, dict) and key in data) or (
            isinstance(data, list) and isinstance(key, int) and key < len(data)
        ):
            data = data[key]
            path.append(key)
        elif last and kind == "missing":
            path.append(key)
    return tuple(path)


def _value_at(data: Any, path: KeyPath) -> Any:
    for key in path:
        if isinstance(data, dict) and key not in data:
            return None
        data = data[key]
    return data


def _say(error: dict, path: KeyPath, value: Any, num_errors: int) -> str:
    kind, dotted, context = error["type"], _dotted(path), error.get("ctx", {})
    match kind:
        case "extra_forbidden":
            return f"{dotted} = {_show(value)}: unknown key{_remedy_unknown(path)}"
        case "missing":
            return f"{dotted} is missing; it has no default, write it"
        case "value_error":
            return f"{dotted + ': ' if dotted else ''}{context['error']}"
        case "union_tag_not_found":
            names = ", ".join(_variant_names(path))
            return f"{dotted} = {_show(value)}: needs a 'name', one of {names}"
        case "union_tag_invalid":
            tag = str(context["tag"])
            return f"{dotted}.name = {_show(tag)}: unknown{_nearest(tag, _variant_names(path))}"
        case "literal_error":
            return f"{dotted} = {_show(value)}: not a choice{_nearest(str(value), _choices(path), context['expected'])}"
        case "model_type" | "model_attributes_type":
            return f"{dotted} = {_show(value)}: should be a section with keys {', '.join(_fields(_section_at(path)))}"
    if num_errors > 1 and kind.endswith("_type"):
        return f"{dotted} = {_show(value)}: should be a text, a number, true or false"
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
    section = _section_at(path[:-1])
    siblings = _fields(section) if section else []
    near = difflib.get_close_matches(str(path[-1]), siblings, n=1, cutoff=0.6)
    elsewhere = [p for p in _all_paths(ExperimentConfig) if p.split(".")[-1] == path[-1]]
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


# ---- walking the schema --------------------------------------------------------------------------------------------


def _annotations(annotation: Any) -> list[Any]:
    """The members of a possibly annotated, possibly optional union."""
    if get_origin(annotation) is Annotated:
        return _annotations(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return [member for arg in get_args(annotation) for member in _annotations(arg)]
    return [annotation]


def _annotation_at(path: KeyPath) -> list[Any]:
    members: list[Any] = [ExperimentConfig]
    for key in path:
        fields = [m.model_fields[key] for m in _models(members) if key in m.model_fields]
        members = [member for f in fields for member in _annotations(f.annotation)]
    return members


def _models(members: list[Any]) -> list[type[BaseModel]]:
    return [m for m in members if isinstance(m, type) and issubclass(m, BaseModel)]


def _section_at(path: KeyPath) -> list[type[BaseModel]]:
    return _models(_annotation_at(path))


def _fields(models: list[type[BaseModel]]) -> list[str]:
    return list(dict.fromkeys(name for model in models for name in model.model_fields))


def _choices(path: KeyPath) -> list[str]:
    return [str(value) for m in _annotation_at(path) if get_origin(m) is Literal for value in get_args(m)]


def _variant_names(path: KeyPath) -> list[str]:
    return [str(value) for model in _section_at(path) for value in get_args(model.model_fields["name"].annotation)]


def _all_paths(model: type[BaseModel], prefix: str = "") -> list[str]:
    out = []
    for name, info in model.model_fields.items():
        out.append(prefix + name)
        for inner in _models(_annotations(info.annotation)):
            out += _all_paths(inner, f"{prefix}{name}.")
    return list(dict.fromkeys(out))
