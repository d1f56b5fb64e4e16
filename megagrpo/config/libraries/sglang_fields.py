"""The fields of SGLang's ServerArgs as its installed source declares them; SGLang itself is not imported.

The record is assembled from the classes in sglang/srt/arg_groups/fields, whose annotations also give each field's
option on the command line. Written against sglang 0.5.21.
"""

import ast
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megagrpo.config.libraries.source import LibraryField, accepted_values, accepts

_FIELDS, _CHOICES = "srt/arg_groups/fields", "srt/arg_groups/choices.py"
# Named there without an option, and given one in ServerArgs.add_cli_args.
_OPTION_ELSEWHERE = ("sampling_backend", "reasoning_parser", "tool_call_parser", "kv_canary_real_data")
_WRITTEN = ("int", "List", "Dict")  # of fields that are one word of JSON; others are classes, given as maps


@dataclass(frozen=True)
class ServerField:
    """Holds one field of ServerArgs."""

    name: str
    group: str  # the class that declares it
    kind: str  # its annotation, without Optional: "int", "List[str]"
    default: str  # as in the source
    choices: tuple[Any, ...]  # (): any
    options: tuple[str, ...]  # on the command line, the first one ours; (): none
    has_negation: bool  # "--no-..." is an option too
    as_json: bool  # its value is one word of JSON
    place: str  # "file:line"

    @property
    def default_value(self) -> Any:
        """The default where it is written out; otherwise its source."""
        return LibraryField(self.name, self.kind, self.default, self.place, {}).default_value

    def problem(self, value: Any) -> str:
        """Returns why `value` is none for this field, and what would be; "" for a right one."""
        if not self.options:
            return "has no option on SGLang's command line"
        if self.choices:
            right, wanted = value in self.choices, f"one of {', '.join(map(str, self.choices))}"
        else:
            kind = "dict" if self.as_json and not self.kind.startswith(_WRITTEN) else self.kind
            declared = LibraryField(self.name, kind, "", self.place, {})
            right, wanted = accepts(declared, value), accepted_values(declared)
        return "" if right else f"should be {wanted}, as SGLang declares it ({self.place})"

    def words(self, value: Any) -> list[str]:
        """Returns the words of the command line that set a right value."""
        option = self.options[0]
        if self.kind == "bool":
            if self.has_negation and value is False:
                return [f"--no-{option.removeprefix('--')}"]
            return [option] if value else []
        if self.as_json:
            return [option, json.dumps(value)]
        return [option, *map(str, value if isinstance(value, list) else [value])]


@cache
def server_fields() -> dict[str, ServerField]:
    """Returns name -> field of the installed SGLang; {} where there is none."""
    spec = find_spec("sglang")
    if spec is None or spec.origin is None:  # without an origin it is a folder of that name where Python was started
        return {}
    root = Path(spec.origin).parent
    known = _constants(root / _CHOICES)
    return {
        field.name: field for path in sorted((root / _FIELDS).glob("*.py")) for field in _declared(path, root, known)
    }


def _constants(path: Path) -> dict[str, Any]:
    """Returns the lists of choices that are written out in a file."""
    found = {}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found[node.targets[0].id] = _literal(node.value, {})
    return found


def _literal(node: ast.expr, known: dict[str, Any]) -> Any:
    """Returns the value of a written-out expression or of a known name; None for any other."""
    if isinstance(node, ast.Name):
        return known.get(node.id)
    try:
        return ast.literal_eval(node)
    except ValueError:
        return None


def _declared(path: Path, root: Path, known: dict[str, Any]) -> Iterator[ServerField]:
    """Yields the fields that the classes of one file declare: `name: A[kind, help or Arg(...)] = default`."""
    for declaring in [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)]:
        for node in declaring.body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                place = f"{path.relative_to(root.parent)}:{node.lineno}"
                yield _field(node.target.id, declaring.name, node, place, known)


def _field(name: str, group: str, node: ast.AnnAssign, place: str, known: dict[str, Any]) -> ServerField:
    annotation, details = node.annotation, {}
    has_option = name in _OPTION_ELSEWHERE
    if isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value) == "A":
        assert isinstance(annotation.slice, ast.Tuple), f"{place}: A[...] without a description"
        annotation, *rest = annotation.slice.elts
        details = {word.arg: word.value for call in rest if isinstance(call, ast.Call) for word in call.keywords}
        has_option |= "no_cli" not in details
    kind = ast.unparse(annotation)
    kind = kind.removeprefix("Optional[").removesuffix("]") if kind.startswith("Optional[") else kind
    choices = _literal(details["choices"], known) if "choices" in details else None
    if kind.startswith("Literal["):
        choices = ast.literal_eval(kind.removeprefix("Literal") or "[]")
    own = _literal(details["cli_name"], known) if "cli_name" in details else "--" + name.replace("_", "-")
    aliases = _literal(details["aliases"], known) if "aliases" in details else []
    parser = ast.unparse(details["type_parser"]) if "type_parser" in details else ""
    return ServerField(
        name=name,
        group=group,
        kind=kind,
        default="" if node.value is None else ast.unparse(node.value),
        choices=tuple(choices or ()),
        options=(own, *aliases) if has_option else (),
        has_negation="BooleanOptionalAction" in (ast.unparse(details["action"]) if "action" in details else ""),
        as_json="json" in parser or "config" in parser,
        place=place,
    )
