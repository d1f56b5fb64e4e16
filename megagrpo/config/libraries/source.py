"""Reads the fields of a library's configuration classes from its source, and checks values against
their annotations.

No class is imported: importing Megatron or SGLang loads torch, and SGLang on a CPU needs stand-ins.
Annotations and defaults are evaluated with typing's own names, values are checked by pydantic.
"""

import ast
import enum
import json
import typing
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

from pydantic import ConfigDict, GetCoreSchemaHandler, TypeAdapter, ValidationError
from pydantic_core import CoreSchema, core_schema

DTYPES = ("float32", "float16", "bfloat16", "fp8")  # names of torch.dtype in an experiment
_BUILTINS = (bool, int, float, str, list, dict, tuple)


@dataclass(frozen=True)
class Refusal:
    """Why a field of a library is not set in an experiment, and the key of ours to set instead, if
    there is one."""

    reason: str
    instead: str = ""


@dataclass(frozen=True)
class LibraryField:
    """One field of a library's configuration class."""

    name: str
    group: str  # the class that declares it
    declared: str  # its type as written, such as "Optional[int]"
    annotation: object  # the same, evaluated
    default: object  # a plain value; the name of anything else; "" if there is none
    options: Mapping[str, object]  # SGLang's Arg(...)
    location: str  # "megatron/core/model_parallel_config.py:37"

    @property
    def expected(self) -> str:
        """The field's type, as the library writes it; enumerations and dtypes by their values."""
        choices = [name for kind in _parts(self.annotation) for name in _choices(kind)]
        return f"one of {', '.join(choices)}" if choices else self.declared

    def accepts(self, value: object) -> bool:
        """Returns whether an experiment's value has the field's type."""
        if value is None and self.default is None:
            return True
        if (
            isinstance(value, bool) and "bool" not in self.declared
        ):  # for pydantic true is one of Literal[0, 1]
            return False
        with suppress(ValidationError):
            _adapter(self.annotation).validate_json(json.dumps(value), strict=True)
            return True
        return False


class _Name:
    """Stands for a name of the source that is neither typing's nor a plain value; as a type, it has
    no values."""

    def __init__(self, dotted: str) -> None:
        self.dotted = dotted

    def __str__(self) -> str:
        return self.dotted

    def __getattr__(self, name: str) -> "_Name":
        if name.startswith("__"):
            raise AttributeError(name)
        return _Name(f"{self.dotted}.{name}")

    def __getitem__(self, _: object) -> "_Name":
        return self

    def __call__(self, *_: object, **__: object) -> "_Name":
        return self

    def __get_pydantic_core_schema__(
        self, source: object, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.is_instance_schema(_Name)


class _Names(dict[str, object]):
    def __missing__(self, name: str) -> _Name:
        return _Name(name)


@cache
def read_fields(
    package: str, files: Sequence[str], classes: Sequence[str] = ()
) -> dict[str, LibraryField]:
    """Returns name -> field of the classes (default: all) in the files (paths or patterns), {}
    without the package."""
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return {}
    root = Path(next(iter(spec.submodule_search_locations)))
    names = _Names({name: getattr(typing, name) for name in typing.__all__})
    names |= {kind.__name__: kind for kind in _BUILTINS}
    names |= {"A": typing.Annotated, "Arg": dict, "field": _default_of_field, "None": None}
    names["torch"] = SimpleNamespace(
        dtype=typing.Literal[DTYPES], **{name: name for name in DTYPES}
    )
    fields: dict[str, LibraryField] = {}
    for path in [path for pattern in files for path in sorted(root.glob(pattern))]:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                names[node.targets[0].id] = _evaluate(node.value, names)
            elif isinstance(node, ast.ClassDef) and any(
                "Enum" in ast.unparse(base) for base in node.bases
            ):
                assigned = [
                    statement.targets[0]
                    for statement in node.body
                    if isinstance(statement, ast.Assign)
                ]
                members = [target.id for target in assigned if isinstance(target, ast.Name)]
                names[node.name] = enum.Enum(node.name, [(name, name) for name in members])
            elif isinstance(node, ast.ClassDef) and (not classes or node.name in classes):
                file = str(path.relative_to(root.parent))
                found = [_field(node.name, statement, names, file) for statement in node.body]
                fields |= {field.name: field for field in found if field is not None}
    return fields


def refusal_of(name: str, refused: Mapping[str, Refusal]) -> Refusal | None:
    """Returns the refusal whose name or pattern fits, if any."""
    return next(
        (refusal for pattern, refusal in refused.items() if fnmatchcase(name, pattern)), None
    )


def set_elsewhere(ours: Mapping[str, str]) -> dict[str, Refusal]:
    """Returns pattern -> refusal of a table from a key of ours to words."""
    reason = "another key of the file, or the model's config.json, says it"
    return {
        pattern: Refusal(reason, key)
        for key, patterns in ours.items()
        for pattern in patterns.split()
    }


def refusals(reasons: Mapping[str, str]) -> dict[str, Refusal]:
    """Returns pattern -> refusal of a table from reason to words."""
    return {
        pattern: Refusal(reason)
        for reason, patterns in reasons.items()
        for pattern in patterns.split()
    }


def _parts(annotation: object) -> tuple[object, ...]:
    return (
        typing.get_args(annotation)
        if typing.get_origin(annotation) is typing.Union
        else (annotation,)
    )


def _choices(kind: object) -> list[str]:
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return [member.value for member in kind]
    return (
        [str(value) for value in typing.get_args(kind)]
        if typing.get_origin(kind) is typing.Literal
        else []
    )


@cache
def _adapter(annotation: object) -> TypeAdapter[object]:
    return TypeAdapter(
        typing.cast(type, annotation), config=ConfigDict(arbitrary_types_allowed=True)
    )


def _evaluate(node: ast.expr, names: _Names) -> object:
    with suppress(TypeError):  # arithmetic with a name that is unknown here
        return eval(compile(ast.Expression(node), "", "eval"), {"__builtins__": {}}, names)
    return _Name(ast.unparse(node))


def _default_of_field(
    default: object = "", default_factory: Callable[[], object] | None = None, **_: object
) -> object:
    return (
        default_factory()
        if default_factory in _BUILTINS and default_factory is not None
        else default
    )


def _field(group: str, node: ast.stmt, names: _Names, file: str) -> LibraryField | None:
    if not (isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)):
        return None
    written, options = node.annotation, dict[str, object]()
    if isinstance(written, ast.Constant) and isinstance(written.value, str):
        written = ast.parse(written.value, mode="eval").body
    if isinstance(written, ast.Subscript) and ast.unparse(written.value) in ("A", "Annotated"):
        assert isinstance(written.slice, ast.Tuple)
        written, *details = written.slice.elts
        for detail in details:
            found = _evaluate(detail, names)
            options = found if isinstance(found, dict) else options
    declared = ast.unparse(written)
    if declared.startswith("ClassVar"):
        return None
    annotation = _evaluate(written, names)
    default = "" if node.value is None else _evaluate(node.value, names)
    if isinstance(default, enum.Enum):
        default = default.name
    elif isinstance(default, _Name):
        default = default.dotted.rpartition(".")[2]
    return LibraryField(
        node.target.id, group, declared, annotation, default, options, f"{file}:{node.lineno}"
    )
