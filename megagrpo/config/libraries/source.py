"""Reads what a library can be told from the source of its dataclass, and checks an experiment's settings against it.

Nothing is imported: Megatron's and SGLang's classes would load torch, which takes longer than all of `megagrpo check`.
"""

import ast
import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

DTYPES = ("float32", "float16", "bfloat16", "fp8")  # how a torch.dtype is written in an experiment
_SCALARS: dict[str, type | tuple[type, ...]] = {"bool": bool, "int": int, "float": (int, float), "str": str}
_LISTS = ("list", "List", "tuple", "Tuple", "Sequence")
_MAPS = ("dict", "Dict", "Mapping")


@dataclass(frozen=True)
class LibraryField:
    """Holds one field of a library's dataclass as its source has it."""

    name: str
    annotation: str
    default: str  # of the field, as written; "" where there is none
    where: str  # module and line, such as megatron/core/model_parallel_config.py:37
    choices: Mapping[str, tuple[str, ...]]  # enumerations that the annotation names -> their members

    @property
    def default_value(self) -> Any:
        """The default where it is a number, a text, a list of them or None; otherwise its source."""
        try:
            return ast.literal_eval(self.default)
        except (ValueError, SyntaxError):
            return _plain_name(self.default)


@dataclass(frozen=True)
class Refusal:
    """Says why a field of a library is not set in an experiment, and which key of ours says the same, if one does."""

    reason: str
    instead: str = ""


@dataclass(frozen=True)
class Library:
    """Names a dataclass by its package, its files, base classes' first, and its name."""

    package: str
    files: tuple[str, ...]
    name: str


class LibraryMissing(ValueError):
    """Says that a library's source is not on this machine, so that nothing can be checked against it."""


@cache
def library_fields(library: Library) -> dict[str, LibraryField]:
    """Returns the fields of the installed class, inherited ones first. Raises LibraryMissing."""
    folder = _package_folder(library.package)
    trees = {file: ast.parse((folder / file).read_text(encoding="utf-8"), file) for file in library.files}
    choices = {
        node.name: _members(node)
        for tree in trees.values()
        for node in tree.body
        if isinstance(node, ast.ClassDef) and any("Enum" in ast.unparse(base) for base in node.bases)
    }
    classes = {
        node.name: (f"{library.package}/{file}", node)
        for file, tree in trees.items()
        for node in tree.body
        if isinstance(node, ast.ClassDef)
    }
    if library.name not in classes:
        raise LibraryMissing(f"{library.package} has no class {library.name} in {', '.join(library.files)}")
    return _fields_of(library.name, classes, choices)


def setting_problems(
    fields: Mapping[str, LibraryField], refused: Mapping[str, Refusal], given: Mapping[str, Any], what: str
) -> dict[str, str]:
    """Returns what is wrong with each key of `given`; `what` names the class, such as Megatron's TransformerConfig."""
    problems = {key: _problem(key, value, fields, refused, what) for key, value in given.items()}
    return {key: problem for key, problem in problems.items() if problem}


def accepts(field: LibraryField, value: Any) -> bool:
    """Tells whether a value of an experiment file is one that the field takes."""
    return (value is None and field.default == "None") or _accepts(_annotation(field), value, field.choices)


def accepted_values(field: LibraryField) -> str:
    """Returns what the field takes, in words."""
    return _describe(_annotation(field), field.choices)


def _problem(
    key: str, value: Any, fields: Mapping[str, LibraryField], refused: Mapping[str, Refusal], what: str
) -> str:
    if key in refused:
        refusal = refused[key]
        return f"{refusal.reason}{f'; set {refusal.instead}' if refusal.instead else ''}"
    if key not in fields:
        near = difflib.get_close_matches(key, [name for name in fields if name not in refused], n=1, cutoff=0.6)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        return f"{what} has no such field{hint}"
    if not accepted_values(fields[key]):
        return f"{fields[key].annotation} cannot be written in a file ({fields[key].where})"
    if not accepts(fields[key], value):
        return f"should be {accepted_values(fields[key])} ({fields[key].where})"
    return ""


def _package_folder(package: str) -> Path:
    found = find_spec(package)
    if found is None or not found.submodule_search_locations:
        raise LibraryMissing(f"the package {package} is not installed here")
    return Path(next(iter(found.submodule_search_locations)))


def _members(enumeration: ast.ClassDef) -> tuple[str, ...]:
    return tuple(
        target.id
        for node in enumeration.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    )


def _fields_of(
    name: str, classes: Mapping[str, tuple[str, ast.ClassDef]], choices: Mapping[str, tuple[str, ...]]
) -> dict[str, LibraryField]:
    path, node = classes[name]
    fields: dict[str, LibraryField] = {}
    for base in node.bases:
        if ast.unparse(base) in classes:
            fields |= _fields_of(ast.unparse(base), classes, choices)
    for statement in node.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            annotation = ast.unparse(statement.annotation)
            if not annotation.startswith("ClassVar"):
                default = _default(statement.value)
                where = f"{path}:{statement.lineno}"
                fields[statement.target.id] = LibraryField(statement.target.id, annotation, default, where, choices)
    return fields


def _default(value: ast.expr | None) -> str:
    """Returns the default's source, of `field(...)` that of its argument."""
    if isinstance(value, ast.Call) and ast.unparse(value.func) in ("field", "dataclasses.field"):
        arguments = {word.arg: word.value for word in value.keywords}
        if "default_factory" in arguments:
            return {"list": "[]", "dict": "{}"}.get(ast.unparse(arguments["default_factory"]), "")
        return ast.unparse(arguments["default"]) if "default" in arguments else ""
    if value is None:
        return ""
    try:  # 1024 * 1024
        return repr(ast.literal_eval(value))
    except ValueError:
        return _product(value)


def _product(value: ast.expr) -> str:
    """Returns the result of a product or power of numbers; other source as it is."""
    if isinstance(value, ast.BinOp) and isinstance(value.left, ast.Constant) and isinstance(value.right, ast.Constant):
        left, right = value.left.value, value.right.value
        if isinstance(left, int) and isinstance(right, int):
            if isinstance(value.op, ast.Mult):
                return repr(left * right)
            if isinstance(value.op, ast.Pow):
                return repr(left**right)
    return ast.unparse(value)


def _plain_name(source: str) -> str:
    """Returns the last part of a dotted name: float32 of torch.float32."""
    return source.rpartition(".")[2]


def _annotation(field: LibraryField) -> ast.expr:
    return ast.parse(field.annotation, mode="eval").body


def _name(node: ast.expr) -> str:
    return ast.unparse(node).rpartition(".")[2] if isinstance(node, ast.Attribute) else ast.unparse(node)


def _parts(node: ast.expr) -> list[ast.expr]:
    """Returns the arguments of X[...]; the members of A | B."""
    if isinstance(node, ast.BinOp):
        return [*_parts(node.left), *_parts(node.right)] if isinstance(node.op, ast.BitOr) else [node]
    if isinstance(node, ast.Subscript):
        return list(node.slice.elts) if isinstance(node.slice, ast.Tuple) else [node.slice]
    return [node]


def _members_of_union(node: ast.expr) -> list[ast.expr] | None:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return _parts(node)
    if isinstance(node, ast.Subscript) and _name(node.value) == "Union":
        return _parts(node)
    if isinstance(node, ast.Subscript) and _name(node.value) == "Optional":
        return [*_parts(node), ast.Constant(None)]
    return None


def _accepts(node: ast.expr, value: Any, choices: Mapping[str, tuple[str, ...]]) -> bool:
    union = _members_of_union(node)
    if union is not None:
        return any(_accepts(member, value, choices) for member in union)
    if isinstance(node, ast.Constant):
        if isinstance(node.value, str):  # a forward reference
            return _accepts(ast.parse(node.value, mode="eval").body, value, choices)
        return node.value is value
    if isinstance(node, ast.Subscript):
        return _accepts_generic(_name(node.value), _parts(node), value, choices)
    name = _name(node)
    if name in choices:
        return value in choices[name]
    if name in _SCALARS:
        return isinstance(value, _SCALARS[name]) and (name == "bool" or not isinstance(value, bool))
    if name == "dtype":
        return value in DTYPES
    return name == "Any" or (name in _LISTS and isinstance(value, list)) or (name in _MAPS and isinstance(value, dict))


def _accepts_generic(name: str, parts: list[ast.expr], value: Any, choices: Mapping[str, tuple[str, ...]]) -> bool:
    if name == "Literal":
        allowed = [ast.literal_eval(part) for part in parts]
        return any(value == one and type(value) is type(one) for one in allowed)
    if name in ("tuple", "Tuple") and not isinstance(parts[-1], ast.Constant):
        same_length = isinstance(value, list) and len(value) == len(parts)
        return same_length and all(_accepts(part, item, choices) for part, item in zip(parts, value, strict=True))
    if name in _LISTS:
        return isinstance(value, list) and all(_accepts(parts[0], item, choices) for item in value)
    if name in _MAPS:
        return isinstance(value, dict) and all(
            _accepts(parts[0], key, choices) and _accepts(parts[1], item, choices) for key, item in value.items()
        )
    if name == "Annotated":
        return _accepts(parts[0], value, choices)
    return False


def _describe(node: ast.expr, choices: Mapping[str, tuple[str, ...]]) -> str:
    """Returns the annotation in words; "" where nothing that a file can hold would be right."""
    union = _members_of_union(node)
    if union is not None:
        known = [text for text in (_describe(member, choices) for member in union) if text]
        return " or ".join(known) if known != ["null"] else ""
    if isinstance(node, ast.Constant):
        if isinstance(node.value, str):
            return _describe(ast.parse(node.value, mode="eval").body, choices)
        return "null" if node.value is None else str(node.value)
    name = _name(node.value) if isinstance(node, ast.Subscript) else _name(node)
    parts = _parts(node) if isinstance(node, ast.Subscript) else []
    if name == "Literal":
        return _one_of(ast.literal_eval(part) for part in parts)
    if name == "Annotated":
        return _describe(parts[0], choices)
    if name in _LISTS:
        return f"a list of ({_describe(parts[0], choices)})" if parts else "a list"
    if name in choices:
        return _one_of(choices[name])
    words = {"bool": "true or false", "int": "a whole number", "float": "a number", "str": "a text", "Any": "any value"}
    if name == "dtype":
        return _one_of(DTYPES)
    return "a map" if name in _MAPS else words.get(name, "")


def _one_of(values: Iterable[Any]) -> str:
    return "one of " + ", ".join("null" if value is None else str(value) for value in values)
