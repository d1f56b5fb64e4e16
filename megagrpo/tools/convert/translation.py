"""An experiment in the making: our keys with the foreign ones that they come from, and what became
of each of these."""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache, partial
from typing import Literal, TypeGuard, cast

from megagrpo.config.load import Plain
from megagrpo.config.schema import ExperimentConfig
from megagrpo.tools.convert import foreign
from megagrpo.tools.convert.foreign import Entry, Row, alike, find, spelled
from megagrpo.tools.view.texts import printable

_SECRET = re.compile(r"(?i)(?:^|[._-])(?:\w*key|\w*token|\w*secret|\w*password)$")
_COLUMN = re.compile(  # whose keys are names of columns
    r"(?i)(?:prompt|input|label|answer|source|reward|image|video|metadata|tool|data|fn|teacher)[_-]key$"
)
_SECRET_INSIDE = re.compile(  # as in a JSON text of variables: {"WANDB_API_KEY": "..."}
    r"(?i)((?:api_?key|access_?key|token|secret|password)\w*[\\\"']*\s*[:=]\s*[\\\"']*)[^\s\\\"',}]+"
)
Status = Literal["translated", "as here", "not translated", "unknown"]


@dataclass(frozen=True)
class KeyOutcome:
    """The translation of one of their keys."""

    key: str
    value: Plain
    status: Status
    text: str  # our keys, or the reason

    @property
    def shown(self) -> str:
        """The key with its value as YAML, but for secrets: a key's own, and those inside a text."""
        value = _SECRET_INSIDE.sub(r"\1...", _flow(self.value))
        if self.status != "translated" and _is_secret(self.key) and self.value is not None:
            value = '"..."'
        return f"{self.key} = {value}"


class Translation:
    """Takes values for our keys. given: their keys with values; null is as not given. notes: what
    is to be said of them as a whole. Their names may be short, as in the tables."""

    def __init__(self, framework: str, given: Mapping[str, Plain], notes: Sequence[str] = ()):
        self.framework = framework
        self.shown = foreign.FRAMEWORKS[framework]
        self.notes = list(notes)
        self.given = dict(given)
        self._set = {key: value for key, value in given.items() if value is not None}
        self._all = foreign.defaults(framework) | self._set
        self._read: set[str] = set()  # by the present rule
        self.values: dict[str, Plain] = {}  # by our dotted key
        self.because: dict[str, list[str]] = {}  # our key -> their keys
        self._lacks: dict[str, str] = {}  # their key -> why it is not translated
        self.remarks: list[str] = []  # on what they do without a key of theirs
        self.problems: list[str] = []  # of the experiment as a whole

    def get(self, *keys: str) -> Plain:
        """Returns the value of the first of these that has one, given or by default, and is not set
        to null; else the first one's default, or None."""
        names = foreign.full_names(self.framework, keys)
        for key in names:
            self._read.add(key)
            if key in self._all and self.given.get(key, ...) is not None:
                return self._all[key]
        return self._all.get(names[0]) if names else None

    def text(self, *keys: str) -> str:
        """Returns `get` as text; "" for None."""
        value = self.get(*keys)
        return "" if value is None else str(value)

    def number(self, *keys: str, default: int = 1) -> int:
        """Returns `get` as a whole number, from 1 if `default` is; `default` for None, and for
        another value, which is not translated."""
        value = self.real(*keys, default=default)
        if value == int(value) and (value > 0 or default < 1):
            return int(value)
        self._lack_first(keys, "should be a whole number above 0")
        return default

    def real(self, *keys: str, default: float = 0.0) -> float:
        """Returns `get` as a number; `default` for None, and for another value, which is not
        translated."""
        value = self.get(*keys)
        if value is None:
            return default
        if _is_number(value):
            return value
        self._lack_first(keys, "should be a number")
        return default

    def _lack_first(self, keys: Sequence[str], reason: str) -> None:
        names = foreign.full_names(self.framework, keys)
        self.lack(next((key for key in names if key in self._set), names[0]), reason)

    def put(self, ours: str, value: Plain, *keys: str) -> None:
        """Sets our key because of `keys`, and of the table's that the rule has read; left out if
        none of these is given and the value is our default."""
        read = (key for key in self.named(ours) if key in self._read)
        because = dict.fromkeys(self.because.get(ours, []))
        because |= dict.fromkeys(
            key for key in (*read, *foreign.full_names(self.framework, keys)) if key in self._set
        )
        # their defaults depend on the variant's name
        depends_on_variant = ours.startswith(("algorithm.loss.", "algorithm.advantage."))
        if not because and (value is None or (value == _default(ours) and not depends_on_variant)):
            return
        self.values[ours] = value
        self.because[ours] = list(because)

    def named(self, ours: str) -> tuple[str, ...]:
        """Returns the keys that the table has for ours."""
        return foreign.names_of(self.framework, ours)

    def translated(self, ours: str, default: int = 1) -> int:
        """Returns a number that is translated already; `default` without one."""
        value = self.values.get(ours)
        return value if isinstance(value, int) and value > 0 else default

    def lack(self, key: str, reason: str) -> None:
        """Records why what `key` says, or stands for by default, is not translated; the first reason
        counts."""
        self._lacks.setdefault(foreign.full_name(self.framework, key), reason)

    def refuse(self, ours: str, reason: str) -> None:
        """Takes back our key, or the name of our section, which the experiment refuses; of what was
        not translated it is a problem."""
        known = [key for key in (ours, f"{ours}.name") if key in self.because]
        for key in known:  # another rule may have refused it, too
            self.values.pop(key, None)
            for theirs in self.because[key] or [key]:
                self._lacks.setdefault(theirs, reason)
        self.problems += [] if known else [reason]

    def apply(self, functions: Mapping[str, Callable[["Translation"], None]]) -> None:
        """Translates every key that depends on no other, defaults included, then by the rows of
        rules.yaml. functions: what it names."""
        for key, value in self._all.items():
            entry = find(self.framework, key)
            if entry is None or entry.rule:
                continue
            if entry.is_section and _is_secret(key):
                self._lacks[key] = "a secret; what needs it should read a variable"
            elif entry.to:
                self.put(entry.to, spelled(value, entry.values), key)
            elif entry.lacks and _unknown(value, entry.same):
                self._lacks[key] = entry.lacks
        for row in foreign.rows(self.framework):
            self._read.clear()
            if isinstance(row, str):
                functions[row](self)
            else:
                self._follow(row)

    def _follow(self, row: Row) -> None:
        """Does what a row says if its conditions hold."""
        if not self._holds(row):
            return
        source, words, reason = row["from"], row["values"], row.get("lacks")
        value = self.get(*source)
        if "text" in row and value is not None:
            value = str(value)
        told = {"value": value, "values": ", ".join(str(theirs) for theirs, _ in words)}
        unknown = _unknown(value, [None, "", *(theirs for theirs, _ in words)])
        if unknown and "only" in row:
            reason = row["only"]
            told["value"] = ", ".join(map(str, unknown))
        if "remark" in row:
            self.remarks.append(row["remark"].format(**told))
        elif reason:
            self._lack_first(source, reason.format(**told))
        elif "is" in row:
            self.put(row["to"], row["is"], *row["by"])
        elif "to" in row and (value is not None or "else" in row):
            if value is None:
                value = row["else"]
                value = value.format(**self.values) if isinstance(value, str) else value
            else:
                value = spelled(value, words)
            value = _listed(value) if "listed" in row else value
            read = (key for key in source if key in self._read)
            self.put(row["to"], value, *read, *row["by"])

    def _holds(self, row: Row) -> bool:
        theirs = [
            (self.real(*names) if str(wanted).startswith("> ") else self.get(*names), wanted)
            for names, wanted in row["when"].items()
        ]
        ours = [(self.values.get(name), wanted) for name, wanted in row.get("got", {}).items()]
        return all(_is_wanted(value, wanted) for value, wanted in (*theirs, *ours))

    def outcomes(self) -> list[KeyOutcome]:
        """Returns what became of every given key, and of defaults that are not translated."""
        lacking = [key for key in self._lacks if key not in self.given]
        return [self._outcome(key) for key in (*self.given, *lacking)]

    def _outcome(self, key: str) -> KeyOutcome:
        entry = find(self.framework, key)
        value = self._all.get(key)
        outcome = partial(KeyOutcome, key, value)
        ours = [our_key for our_key, theirs in self.because.items() if key in theirs]
        if key in self._lacks:
            return outcome("not translated", self._lacks[key])
        if ours and "${" in str(value):
            return outcome("not translated", "no value here is ${...}: write what it becomes")
        if ours:
            return outcome("translated", ", ".join(ours))
        if entry is None and value in (None, {}, []):
            return outcome("as here", "it says nothing")
        if entry is None:
            return outcome("unknown", "no such key in docs/reference/names.md")
        if key in self._set and _is_left_out(entry, value):
            reason = f"{entry.to}, but not from this combination: write it by hand"
            return outcome("not translated", reason)
        needs = f"{entry.to}, which needs {entry.needs}" if entry.needs else entry.to
        return outcome("as here", entry.free or needs or "what is done anyway")

    def nested(self) -> dict[str, Plain]:
        """Returns the experiment as nested sections, in the order of the schema."""
        out: dict[str, Plain] = {}
        order = list(ExperimentConfig.model_fields)
        for ours, value in sorted(
            self.values.items(), key=lambda pair: (order.index(pair[0].partition(".")[0]), pair[0])
        ):
            *sections, last = ours.split(".")
            section = out
            for name in sections:
                section = cast(dict[str, Plain], section.setdefault(name, {}))
            section[last] = value
        return out

    def yaml(self, title: str) -> str:
        """Returns the experiment as YAML with a comment on every key, and below it those that set
        nothing."""
        lines = [*map(_comment, [title, *self.notes, *self.remarks]), *self._yaml(self.nested())]
        for status in ("as here", "not translated", "unknown"):
            found = [each for each in self.outcomes() if each.status == status]
            lines += ["", f"# {self.shown}'s keys {status}:"] if found else []
            lines += [_comment(f"  {each.shown}: {each.text}") for each in found]
        return "\n".join([*lines, ""])

    def _yaml(self, section: dict[str, Plain], path: str = "") -> list[str]:
        lines = []
        for key, value in section.items():
            ours = f"{path}{key}"
            begin = f"{'  ' * path.count('.')}{key}:"
            if isinstance(value, dict) and ours not in self.values:
                lines += [begin, *self._yaml(value, f"{ours}.")]
            else:
                comment = ", ".join(self.because[ours]) or "its default"
                lines.append(f"{begin} {_flow(value)}  # {self.shown}: {comment}")
        return lines


def _is_secret(key: str) -> bool:
    """Returns whether a key's name says that its value is a secret."""
    return bool(_SECRET.search(key)) and not _COLUMN.search(key)


def _comment(text: str) -> str:
    """Returns a comment in YAML, which a line break of a value in it would end."""
    return f"# {printable(text)}"


def _listed(value: Plain) -> list[Plain]:
    return value if isinstance(value, list) else [value]


def _unknown(value: Plain, known: Sequence[object]) -> list[Plain]:
    """Returns a value, or those of a list, that are not among the known ones."""
    return [one for one in _listed(value) if not any(alike(one, other) for other in known)]


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_wanted(value: object, wanted: object) -> bool:
    """Returns whether a value meets a condition of rules.yaml."""
    match wanted:
        case list():
            return any(_is_wanted(value, one) for one in wanted)
        case dict():
            return not _is_wanted(value, wanted["not"])
        case "any":
            return value is not None
        case "truthy" | "falsy":
            return bool(value) is (wanted == "truthy")
        case str() if wanted.startswith("> "):
            return _is_number(value) and value > int(wanted[2:])
        case str() if "*" in wanted:
            return fnmatchcase(str(value), wanted)
    return alike(value, wanted)


def _is_left_out(entry: Entry, value: Plain) -> bool:
    """Returns whether no rule took a value that counts, and that is not what we have anyway."""
    if not entry.to or not entry.rule or entry.needs:
        return False
    left_out = (*entry.same, False, _default(entry.to))  # a switch that is off says nothing
    return not any(alike(spelled(value, entry.values), one) for one in left_out)


def _flow(value: Plain) -> str:
    return str(value) if isinstance(value, float) else json.dumps(value, ensure_ascii=False)


@cache
def _defaults_of_ours() -> ExperimentConfig:
    return ExperimentConfig.model_validate(
        {"name": "-", "output_dir": "-", "model": {"path": "-"}, "data": {"path": "-"}}
    )


def _default(ours: str) -> object:
    """Returns the default of our key; a value that no key has if it has none."""
    value: object = _defaults_of_ours()
    for name in ours.split("."):
        value = getattr(value, name, ...)
    return value
