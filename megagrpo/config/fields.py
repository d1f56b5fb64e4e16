"""The base classes of configuration sections, shared types of fields, and walks over the schema."""

import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Any, ClassVar, Literal, Self, Union, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    model_validator,
)

from megagrpo.system.errors import collected


def _expanded(path: object) -> object:
    if isinstance(path, str):
        path = os.path.expandvars(os.path.expanduser(path))
        if re.search(r"\$(\w|\{\w+\})", path):
            raise ValueError(f"{path!r} names a variable that is not set")
        # else each look at the file would end in a traceback
        encoded = os.fsencode(path)
        if len(encoded) > 4000 or max(map(len, encoded.split(b"/"))) > 255:
            raise ValueError("no file has so long a name: 255 bytes, or 4,000 with its folders")
    return path


def _not_empty(text: str) -> str:
    if not text.strip():
        raise ValueError("it is empty")
    return text


Text = Annotated[str, AfterValidator(_not_empty)]
LocalPath = Annotated[Text, BeforeValidator(_expanded)]  # ~ and $VARIABLES are expanded
Dtype = Literal["float32", "bfloat16"]
MOST = 2**31 - 1  # of counts and sizes: libraries keep them in int32
LARGEST = 1e9  # of other numbers, either way: float32 holds products of them
PositiveInt = Annotated[int, Field(ge=1, le=MOST)]
NonNegativeInt = Annotated[int, Field(ge=0, le=MOST)]
Number = Annotated[float, Field(ge=-LARGEST, le=LARGEST)]
PositiveFloat = Annotated[float, Field(gt=0, le=LARGEST)]
NonNegativeFloat = Annotated[float, Field(ge=0, le=LARGEST)]
Fraction = Annotated[float, Field(ge=0, le=1)]
PositiveFraction = Annotated[float, Field(gt=0, le=1)]
Processes = Annotated[int, Field(ge=1, le=1024)]  # or threads, on one machine
LONGEST_S = 2e6  # system calls wait less than 2^31 ms
Seconds = Annotated[float, Field(gt=0, le=LONGEST_S)]
# -1, or 0 as other libraries write it: all tokens
TopK = Annotated[int, Field(ge=-1, le=MOST), AfterValidator(lambda number: number or -1)]
Aggregation = Literal[
    "token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
]
# fields of a library by its own names; config/libraries checks their values
LibrarySettings = dict[str, Any]
RULES_LATER = {"rules": "later"}  # a context of validation in which broken_rules judges instead
KeyPath = tuple[str | int, ...]  # of a value in an experiment: ("sampling", "stop", 0)


@dataclass(frozen=True)
class Rule:
    """Settings that do not go together, the reason, and what to write instead."""

    when: object  # true: the rule is broken
    because: str
    remedy: str = ""
    key: KeyPath = ()  # of the one value that is refused; (): the text names its keys

    @property
    def text(self) -> str:
        """The message for users, without `key`."""
        return f"{self.because}; {self.remedy}" if self.remedy else self.because


class Section(BaseModel):
    """Holds one section of an experiment: strict types, no unknown keys, frozen, finite numbers.

    A description that is too long for its field's line stands below it, as the field's docstring.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        validate_default=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        hide_input_in_errors=True,  # which may hold a password
    )

    def problems(self) -> list[Rule]:
        """Rules between fields of this section, broken or not; all others are in check/rules."""
        return []

    @model_validator(mode="after")
    def _goes_together(self, info: ValidationInfo) -> Self:
        for rule in self.problems() if info.context is not RULES_LATER else []:
            if rule.when:
                raise ValueError(rule.text)
        return self


class Variant(Section):
    """Holds the fields of one choice, which `name` selects in YAML; class variables describe it to
    the program."""

    formula: ClassVar[str]  # in the papers' notation, for AlgorithmConfig.formula
    # those the paper's objective needs; None: any
    aggregations: ClassVar[tuple[Aggregation, ...] | None] = None
    # given for another aggregation, with its name, the variant's and those that are the paper's
    aggregation_advice: ClassVar[str] = (
        "{name} is the paper's objective with aggregation {papers} only; here it is {aggregation}"
    )

    name: str

    @property
    def shown_name(self) -> str:
        """The choice, as `check` names it."""
        return self.name

    @property
    def shown_formula(self) -> str:
        """Its formula, as `check` prints it."""
        return self.formula


def broken_rules(section: Section, path: KeyPath = ()) -> Iterator[tuple[KeyPath, str]]:
    """Yields (path of a section, text) of each broken rule inside `section`."""
    found: list[str] = []
    with collected(found):  # a rule may ask a grader's own options, which refuse by themselves
        found += [rule.text for rule in section.problems() if rule.when]
    yield from ((path, text) for text in found)
    for key, value in section:
        inside: dict[KeyPath, object] = {(): value}
        if isinstance(value, list | dict):
            items = value.items() if isinstance(value, dict) else enumerate(value)
            inside = {(name,): item for name, item in items}
        for name, item in inside.items():
            if isinstance(item, Section):
                yield from broken_rules(item, (*path, key, *name))


def named(names: Iterable[str]) -> str:
    """Returns the names as a message lists them; "..." if there are none, as on the page of all
    rules."""
    return ", ".join(names) or "..."


def repeated(names: Iterable[str]) -> list[str]:
    """Returns the names that are there several times."""
    return sorted(name for name, number in Counter(names).items() if number > 1)


def refuse(title: str, problems: Iterable[str]) -> None:
    """Raises ValueError with the problems, a line each, unless there are none."""
    if lines := list(problems):
        raise ValueError("\n  ".join([f"{title}:", *lines]))


def complaints(function: Callable[..., object], *arguments: object) -> list[str]:
    """Returns the text of the ValueError with which the function refuses its arguments; [] if it
    accepts them."""
    found: list[str] = []
    with collected(found):
        function(*arguments)
    return found


def members(annotation: object) -> list[object]:
    """Returns the members of a possibly annotated, possibly optional union."""
    if get_origin(annotation) is Annotated:
        return members(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return [member for arg in get_args(annotation) for member in members(arg)]
    return [annotation]


def sections(annotations: Iterable[object]) -> list[type[Section]]:
    """Returns those of the annotations that are sections; several are the variants of one."""
    return [
        member for member in annotations if isinstance(member, type) and issubclass(member, Section)
    ]


def elements(annotation: object) -> list[object]:
    """Returns the types of a list's elements, or of the sections that are a map's values; none if
    the annotation is neither."""
    if get_origin(annotation) is dict:
        return list(sections(members(get_args(annotation)[1])))
    return members(get_args(annotation)[0]) if get_origin(annotation) is list else []


def annotations_at(root: type[Section], path: KeyPath) -> list[object]:
    """Returns the types of the value at `path`; none if the schema has no such key."""
    found: list[object] = [root]
    for key in path:
        kind = list if isinstance(key, int) else dict
        inside = [
            item for member in found if get_origin(member) is kind for item in elements(member)
        ]
        if inside or isinstance(key, int):
            found = inside
        else:
            fields = [
                section.model_fields[key]
                for section in sections(found)
                if key in section.model_fields
            ]
            found = [member for field in fields for member in members(field.annotation)]
    return found


def choices(annotations: Iterable[object]) -> list[str]:
    """Returns the values of the annotations that are Literals, as text."""
    return [
        str(value)
        for member in annotations
        if get_origin(member) is Literal
        for value in get_args(member)
    ]


def all_paths(model: type[Section], prefix: str = "") -> list[str]:
    """Returns the dotted path of every key below `model`."""
    out = []
    for name, info in model.model_fields.items():
        out.append(prefix + name)
        for inner in sections(members(info.annotation)):
            out += all_paths(inner, f"{prefix}{name}.")
    return list(dict.fromkeys(out))
