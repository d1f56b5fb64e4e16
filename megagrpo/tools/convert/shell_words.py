"""Words and tests of a shell script from its syntax tree, with the values of its variables.

A mark, one sign of a private area of Unicode, is in place of a text: of a variable that is not set,
or of something unknown.
"""

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from operator import eq, ge, gt, le, lt, ne
from textwrap import shorten

from tree_sitter import Node

Value = str | list[str]
Answer = bool | None  # None: only a run could tell
Nodes = Sequence[Node]
_UNSET, _UNKNOWN = 0xF0000, 0x100000  # the first mark of each kind
_MARK = re.compile("[\U000f0000-\U0010ffff]")
QUOTED = "\ue004"  # begins a word that is kept if it is empty
_OPERAND = r"[\s(]*(?:0|[1-9]\d{,17})[\s)]*"
_CALCULATION = re.compile(rf"{_OPERAND}(?:[-+*/%]{_OPERAND}){{,20}}")
_COMPARED = {"-eq": eq, "-ne": ne, "-lt": lt, "-le": le, "-gt": gt, "-ge": ge}
_MOST_WORK = 3_000_000  # characters of values; a command is some


@dataclass
class State:
    """A shell."""

    variables: dict[str, Value]
    trainer: str  # pattern of its word
    substitute: Callable[["State", Node], str]  # what `$(...)` becomes
    place: str = ""  # of a text that is evaluated; else a node's line
    commands: list[list[str]] = field(default_factory=list)  # of trainers: words with their marks
    notes: dict[str, None] = field(default_factory=dict)
    marks: dict[str, str] = field(default_factory=dict)  # what they stand for
    functions: dict[str, Node] = field(default_factory=dict)
    leaving: list[str] = field(default_factory=list)  # by exit or return
    output: list[str] | None = None  # of commands, if it counts
    work: list[int] = field(default_factory=lambda: [0])

    def where(self, node: Node, text: str) -> str:
        """Returns a text with its place."""
        text = shorten(plain(text), 100, placeholder=" ...")
        return f"{text} ({self.place or f'line {node.start_point[0] + 1}'})"

    def mark(self, node: Node, name: str = "") -> str:
        """Returns a mark for what only a run could tell, or for a variable that is not set."""
        sign = chr((_UNSET if name else _UNKNOWN) + len(self.marks))
        self.marks[sign] = self.where(node, f"${name}" if name else source(node))
        return sign

    def note(self, text: str) -> None:
        """Notes a text, once."""
        self.notes[text] = None

    def note_marks(self, text: str, option: str) -> None:
        """Notes what the marks of an option's text stand for."""
        for mark in _MARK.findall(text):
            self.note(f"expanded to nothing: {self.marks[mark]}, in {option}")

    def say(self, text: str) -> None:
        """Writes the output of a command."""
        if self.output is not None:
            self.output.append(text)

    def spend(self, work: int) -> None:
        """Raises ValueError if a script is too much work."""
        self.work[0] += work
        if self.work[0] > _MOST_WORK:
            raise ValueError("too many commands, or too long ones")

    def subshell(self) -> "State":
        """Returns a shell whose variables, and whose end, are its own."""
        return replace(self, variables=dict(self.variables), leaving=[])


def source(node: Node) -> str:
    """Returns a node's text in the script."""
    return (node.text or b"").decode().strip()


def plain(text: str) -> str:
    """Returns a text without marks."""
    return _MARK.sub("", text).replace(QUOTED, "")


def is_unknown(text: str) -> bool:
    """Returns whether only a run could tell what a text is."""
    return max(text, default="") >= chr(_UNKNOWN)


def split(text: str) -> list[str]:
    return re.findall(r"[^ \t\n]+", text)


def words_of(state: State, nodes: Nodes) -> list[str]:
    """Returns the words that words become."""
    return [word for node in nodes for word in _fields(state, node)]


def _fields(state: State, node: Node) -> list[str]:
    match node.type:
        case "concatenation" | "command_name":
            found = [""]
            for child in node.children:
                first, *others = _fields(state, child) or [""]
                found[-1] += first
                found += others
            return found if any(found) else []
        case "simple_expansion" | "expansion":
            before = state.variables.get(source(node.children[1]))
            value = _parameter(state, node)
            whole = value if isinstance(value, str) else " ".join(value)
            # a quoted default is one word, but not the value that it stands in for
            quoted = re.search(r"_?string$", node.children[-2].type)
            if quoted and (value != before or "+" in node.children[2].type):
                return [whole]
            return split(whole)
        case "command_substitution" | "arithmetic_expansion":
            return split(text_of(state, node))
        case "string" if re.fullmatch(r'"\$\{(\w+\[@\]|@)\}"|"\$@"', source(node)):
            value = _parameter(state, node.named_children[0])
            return value if isinstance(value, list) else [value]
        case "string" | "raw_string":
            return [QUOTED + text_of(state, node)]
    return [text_of(state, node)]


def text_of(state: State, node: Node) -> str:
    """Returns what a word becomes between quotes, or as a value."""
    text = source(node)
    match node.type:
        case "raw_string":
            return text[1:-1]
        case "concatenation":
            return "".join(text_of(state, child) for child in node.children)
        case "string":
            whole = (node.text or b"").removesuffix(b'"')
            body = ""
            at = whole.index(b'"') + 1
            for child in node.children:
                if child.children:  # an expansion, whose text here has the white space before it
                    end = child.end_byte - node.start_byte
                    body += _literal(whole[at : end - len(source(child).encode())])
                    body += text_of(state, child)
                    at = end
            return body + _literal(whole[at:])
        case "simple_expansion" | "expansion":
            value = _parameter(state, node)
            return value if isinstance(value, str) else " ".join(value).replace(QUOTED, "")
        case "command_substitution" | "arithmetic_expansion" if text.startswith("$(("):
            return _calculated(state, node, text[3:-2])
        case "command_substitution":
            return state.substitute(state, node)
        case "ansi_c_string" | "process_substitution" | "brace_expression":
            return state.mark(node)
    # a space at its beginning is part of a word in ${NAME:-one word}
    return (node.text or b"").decode().replace("\\\n", "")


def _literal(text: bytes) -> str:
    """Returns text between double quotes."""
    return re.sub(r'\\([$`"\\\n])', lambda m: m[1].strip("\n"), text.decode())


def _parameter(state: State, node: Node) -> Value:
    """Returns what `$NAME` or `${NAME...}` becomes."""
    parts = [child for child in node.children if child.type not in ("$", "${", "}")]
    name, _, index = source(parts[0]).partition("[")
    operator = parts[1].type if len(parts) > 1 else ""
    value = state.variables.get(name)
    if isinstance(value, list) and index in ("", "0]") and name not in "@*":
        value = "".join(value[:1]).replace(QUOTED, "")
    whole = "".join(value or "")
    state.spend(len(whole))
    if operator in (",", ",,") and not is_unknown(whole):
        return whole.lower() if operator == ",," else whole[:1].lower() + whole[1:]
    kind = operator.strip(":")
    bare = operator and not parts[0].is_named  # as ${#NAME}
    cut = operator == ":"  # ${NAME:1}
    if kind not in ("", "-", "=", "+", "?") or cut or bare or index not in ("", "0]", "@]", "*]"):
        return state.mark(node) + "".join(_MARK.findall(whole))
    empty = value is None or (":" in operator and not plain(whole) and not is_unknown(whole))
    if kind == "+":
        empty = not empty
        value = ""
    if value is not None and not empty:
        return value
    if kind in ("", "?"):
        return [] if index == "@]" else state.mark(node, name)
    word = "".join(text_of(state, part) for part in parts[2:])
    if kind == "=":
        state.variables[name] = word
    if not plain(word):
        state.mark(node, name)  # it may be why the script ends
    return word


def _calculated(state: State, node: Node, text: str) -> str:
    """Returns what `$((text))` becomes, with the marks of what it reads."""
    read = []

    def number(match: re.Match[str]) -> str:
        value = state.variables.get(match[1])
        read.append(state.mark(node, match[1]) if value is None else "".join(value))
        digits = plain(read[-1]) or "0"
        return digits if digits.isdecimal() else "?"

    text = re.sub(r"\$?\{?([A-Za-z_]\w*)\}?", number, text)
    marks = "".join(_MARK.findall("".join(read)))
    if is_unknown(marks):
        return marks
    # no sign: bash rounds quotients of negative numbers otherwise
    if _CALCULATION.fullmatch(text) and not ("-" in text and re.search("[/%]", text)):
        with suppress(SyntaxError, ArithmeticError):
            result = eval(text.replace("/", "//").strip())
            if 0 <= result < 1 << 63:  # bash has 64 bits
                return str(result) + marks
    return state.mark(node)


def tested(state: State, node: Node) -> Answer:
    """Returns the answer of a test, or of a part of it; None if only a run could tell."""
    sign = node.child_by_field_name("operator")
    named = [each for each in node.named_children if each != sign]
    operator = source(sign) if sign else ""
    if not node.type.endswith(("_command", "_expression")):
        named = [node]
        operator = "-n"
    if operator in ("", "!", "&&", "||"):
        sides = [tested(state, each) for each in named]
        stop = operator == "||"
        if operator == "!":
            return None if None in sides else not sides[0]
        if stop in sides:
            return stop
        return None if None in sides else not stop
    first, *others = [text_of(state, each) for each in named]
    second = plain("".join(others))
    if is_unknown(first + "".join(others)) or any("_expression" in each.type for each in named):
        return None
    first = plain(first)
    if operator in ("-n", "-z"):
        return bool(first) is (operator == "-n")
    if operator in ("=", "==", "!=") and not re.search(r"[*?[]", second):
        return (first == second) is (operator != "!=")
    if operator in _COMPARED and first.isdecimal() and second.isdecimal():
        return bool(_COMPARED[operator](int(first), int(second)))
    return None
