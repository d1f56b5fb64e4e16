"""Words, tests and numbers of a shell script from its syntax tree, with the values of its variables.

A text may have signs, of Unicode's private area: white space within quotes, `QUOTED` for a word that
is kept if it is empty, and marks for what is not known, each an index into `State.marks`.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import translate
from functools import cache
from itertools import count, dropwhile
from operator import add, eq, floordiv, ge, gt, le, lt, mod, mul, ne, sub
from posixpath import basename, dirname
from textwrap import shorten

import tree_sitter_bash
from tree_sitter import Language, Node, Parser

Value = str | list[str]  # the words of an array have their signs
Answer = bool | None  # None: only a run could tell
Nodes = Sequence[Node]
# kinds of marks: a variable that is not set, a program's output
EMPTY = 0xE000
UNKNOWN = 0xE800
QUOTED = "\uf8ff"
_SPACES = str.maketrans(" \t\n", "\uf8fc\uf8fd\uf8fe")
_RAW = str.maketrans({"\uf8fc": " ", "\uf8fd": "\t", "\uf8fe": "\n", QUOTED: None})
_MARK = re.compile("[\ue000-\uefff]")
_QUOTED = r"""'[^']*'|"(?:\\.|[^"\\])*\""""
# what is quoted, or a comment; an escaped character; a variable
_PIECES = re.compile(rf"({_QUOTED}|(?<!\S)\#[^\n]*|\\\n)|\\(.)|\$(\d|\w+)", re.DOTALL)
_EXPANSION = r"\$\(+[^()\n]*\)+|\$\{[^{}\n]*\}"
_ASSIGNMENT = rf"\w+=(?:{_QUOTED}|{_EXPANSION}|\\[^\n]|[^\s'\"()\\;&|])*+"
_SEVERAL = re.compile(rf"(?m)(?<!\S)({_ASSIGNMENT}[ \t]+{_ASSIGNMENT})[ \t]*$")
LONGEST = 100_000  # text of a variable, of a command
_COMPARED = {"-eq": eq, "-ne": ne, "-lt": lt, "-le": le, "-gt": gt, "-ge": ge}


_COMPUTED = {
    "+": add,
    "-": sub,
    "*": mul,
    "/": floordiv,
    "%": mod,
    "<": lt,
    "<=": le,
    ">": gt,
    ">=": ge,
    "==": eq,
    "!=": ne,
}


@dataclass
class State:
    """A shell. A subshell has other variables."""

    variables: dict[str, Value]
    substitute: Callable[["State", Node], str]  # what `$(...)` becomes
    trainers: Sequence[str]
    commands: list[list[str]] = field(default_factory=list)  # of trainers: words with their signs
    notes: dict[str, None] = field(default_factory=dict)
    leaving: list[str] = field(default_factory=list)  # by exit, return, break or continue
    steps: Iterator[int] = field(default_factory=count)
    marks: dict[str, str] = field(default_factory=dict)  # what they stand for -> that with its line
    functions: dict[str, Node] = field(default_factory=dict)
    arguments: list[str] = field(default_factory=list)  # words with their signs
    hidden: dict[str, Value | None] = field(default_factory=dict)  # by `local`: the caller's
    output: list[str] | None = None
    asked: str = ""  # the mark that stands for the output of programs
    place: str = ""  # of a text that is evaluated; else a node's line

    def mark(self, kind: int, text: str, node: Node) -> str:
        """Returns a mark."""
        text = shorten(plain(text), 100, placeholder=" ...")
        place = self.place or f"line {node.start_point[0] + 1}"
        self.marks.setdefault(text, f"{text} ({place})")
        if len(self.marks) > 0x800:
            raise ValueError("too much that only a run could tell")
        return chr(kind + list(self.marks).index(text))

    def put(self, name: str, value: Value) -> None:
        """Sets a variable. Raises ValueError if it gets too long."""
        if sum(map(len, value)) > LONGEST:
            raise ValueError(f"${name} gets too long")
        self.variables[name] = value

    def unknown(self, node: Node) -> str:
        """Returns a mark for what only a run could tell."""
        return self.mark(UNKNOWN, source(node), node)

    def meaning(self, mark: str) -> str:
        """Returns what a mark stands for, with its line."""
        return list(self.marks.values())[ord(mark) & 0x7FF]


@cache
def _parser() -> Parser:
    return Parser(Language(tree_sitter_bash.language()))


def parsed(text: str) -> Node:
    """Returns the syntax tree of a script. The grammar may take `a/$NAME/b`, "a"\\b and x-`y` apart,
    and a line of assignments for those of a command below it, so these are written otherwise."""
    text = _SEVERAL.sub(r"\1;", re.sub(r"`([^`\n]*)`", r"$(\1)", text))
    return _parser().parse(_PIECES.sub(_rewritten, text).encode()).root_node


def _rewritten(match: re.Match[str]) -> str:
    same, escaped, name = match.groups()
    if escaped:
        return f'"{escaped}"' if escaped == "'" else f"'{escaped}'"
    return same or f"${{{name}}}"


def source(node: Node) -> str:
    """Returns a node's text in the script."""
    return (node.text or b"").decode().strip()


def raw(text: str) -> str:
    """Returns a text without signs of quotes; marks stay."""
    return text.translate(_RAW)


def plain(text: str) -> str:
    """Returns a text without signs and marks."""
    return _MARK.sub("", raw(text))


def quoted(text: str) -> str:
    """Returns a text whose white space ends no word."""
    return text.translate(_SPACES)


def words(state: State, nodes: Nodes) -> list[str]:
    """Returns the words that words become, with their signs."""
    text = " ".join(expand(state, node) for node in nodes)
    if len(text) > LONGEST:
        raise ValueError("a command gets too long")
    return [word for word in re.split(r"[ \t\n]+", text) if word]


def plain_words(parts: Sequence[str]) -> list[str]:
    """Returns words without signs and marks, but for those that were only a mark."""
    return [plain(part) for part in parts if QUOTED in part or plain(part)]


def marks_in(text: str) -> str:
    """Returns the marks of a text."""
    return "".join(_MARK.findall(text))


def is_known(text: str) -> bool:
    """Returns whether a text has nothing that only a run could tell."""
    return not re.search("[\ue800-\uefff]", text)


def quoted_text(state: State, nodes: Nodes) -> str:
    """Returns what words become between quotes, with marks only."""
    return raw("".join(expand(state, node, True) for node in nodes))


def expand(state: State, node: Node, inside: bool = False) -> str:
    """Returns what a word becomes, with signs. inside: of quotes."""
    text = source(node)
    match node.type:
        case "comment":
            return ""
        case "raw_string":
            return QUOTED + quoted(text[1:-1])
        case "concatenation" | "command_name":
            return "".join(expand(state, child, inside) for child in node.children)
        case "string":
            whole = (node.text or b"").removesuffix(b'"')
            body = ""
            at = whole.index(b'"') + 1
            for child in node.children:
                if child.children:  # an expansion, whose text here has the white space before it
                    end = child.end_byte - node.start_byte
                    body += _literal(whole[at : end - len(source(child).encode())])
                    body += expand(state, child, True)
                    at = end
            body += _literal(whole[at:])
            return body if "@" in text and not plain(body) else QUOTED + body
        case "simple_expansion" | "expansion":
            value = _parameter(state, node)
            if isinstance(value, list) and inside and not re.search(r"\*\]?\}?$", text):
                return " ".join(value)
            found = value if isinstance(value, str) else " ".join(map(raw, value))
        case "command_substitution" if text.startswith("$(("):  # in ${NAME:-$((1 + 2))}
            found = calculated(state, parsed(f": {text}").named_children[0].children[1])
        case "command_substitution":
            found = state.substitute(state, node)
        case "arithmetic_expansion":
            found = calculated(state, node)
        case "ansi_c_string" | "process_substitution" | "brace_expression":
            found = state.unknown(node)
        case _:  # a space at its beginning is part of a word in ${NAME:-one word}
            text = (node.text or b"").decode()
            return text.replace("\\\n", "")
    return quoted(found) if inside else found


def _literal(text: bytes) -> str:
    """Returns text between double quotes."""
    return quoted(re.sub(r'\\([$`"\\\n])', lambda m: m[1].strip("\n"), text.decode()))


def _parameter(state: State, node: Node) -> Value:
    """Returns what `$NAME` or `${NAME...}` becomes."""
    parts = [child for child in node.children if child.type not in ("$", "${", "}")]
    name = source(parts[0])
    operator = parts[1].type if len(parts) > 1 else ""
    value = _value(state, name, node)
    whole = "".join(value or "")
    if operator in (",", ",,") and is_known(whole):
        return whole.lower() if operator == ",," else whole[:1].lower() + whole[1:]
    if operator.strip(":") == "?" and plain(whole):
        return whole
    if operator.strip(":") == "?":
        asked = plain(quoted_text(state, parts[2:]))
        state.notes[f"the script asks for {name} (line {node.start_point[0] + 1}): {asked}"] = None
    if operator.strip(":") not in ("", "-", "=", "+") or (operator and not parts[0].is_named):
        return state.mark(UNKNOWN, source(node) + marks_in(whole), node)
    empty = value is None or (":" in operator and not plain(whole) and is_known(whole))
    if "+" in operator:
        empty = not empty
        value = ""
    if value is not None and not empty:
        return value
    if not operator:
        return [] if name.endswith("[@]") else state.mark(EMPTY, f"${name}", node)
    word = "".join(expand(state, part) for part in parts[2:]) + marks_in(whole)
    if "=" in operator:
        state.put(name, raw(word))
    if not plain(word):
        state.mark(EMPTY, f"${name}", node)
    return word


def _value(state: State, name: str, node: Node) -> Value | None:
    """Returns a variable's value, or an array's element; None if it is not set."""
    if name in ("@", "*"):
        return state.arguments
    if name.isdecimal() and name != "0":
        return raw("".join(state.arguments[int(name) - 1 : int(name)])) or None
    name, _, index = name.partition("[")
    value = state.variables.get(name)
    if index not in ("", "0]", "@]", "*]"):
        return state.unknown(node)
    first = isinstance(value, list) and index in ("", "0]")
    return raw("".join(value[:1])) if value and first else value


def _glob(state: State, nodes: Nodes) -> str:
    """Returns a pattern in which what is quoted stands for itself."""
    found = ""
    for node in nodes:
        if node.type in ("regex", "extglob_pattern", "word"):
            found += source(node)
        elif node.type == "concatenation":
            found += _glob(state, node.children)
        else:
            text = plain(quoted_text(state, [node]))
            found += re.sub(r"([*?[])", r"[\1]", text) if "string" in node.type else text
    return found


def written(state: State, name: str, parts: Sequence[str]) -> bool:
    """Writes what a simple command writes; returns False for another program."""
    match name, plain_words(parts):
        case "echo", [*texts]:
            text = " ".join(dropwhile(("-n", "-e").__contains__, texts))
        case "pwd", _:
            text = str(state.variables["PWD"])
        case "dirname", [*_, path]:
            text = dirname(path.rstrip("/")) or "."
        case "basename", ["-s" | "--", *ending, path] | [path, *ending]:
            text = basename(path.rstrip("/")).removesuffix("".join(ending))
        case "seq", [first, step, last] if (first + step + last).isdecimal() and len(last) < 5:
            text = "\n".join(map(str, range(int(first), int(last) + 1, int(step) or 1)))
        case _:
            return False
    if state.output is not None:
        state.output.append(text + marks_in("".join(parts)) + "\n")
        if sum(map(len, state.output)) > LONGEST:
            raise ValueError("what $(...) writes gets too long")
    return True


def fits(state: State, text: str, nodes: Nodes) -> bool:
    """Returns whether a text is what one of several patterns, between `|`, stands for."""
    globs = _glob(state, nodes).split("|")
    return any(re.match(translate(glob), plain(text)) for glob in globs)


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
    texts = [quoted_text(state, [each]) for each in named]
    if not is_known("".join(texts)) or any("_expression" in each.type for each in named):
        return None
    first = plain(texts[0])
    second = plain("".join(texts[1:]))
    if operator in ("-n", "-z"):
        return bool(first) is (operator == "-n")
    if operator in ("=", "==", "!="):
        return fits(state, first, named[1:]) is (operator != "!=")
    if operator in _COMPARED and first.isdecimal() and second.isdecimal():
        return bool(_COMPARED[operator](int(first), int(second)))
    return None


def calculated(state: State, node: Node) -> str:
    """Returns what `$((...))` becomes, with the marks of what it reads."""
    read: list[str] = []
    with suppress(ValueError, ArithmeticError):
        return str(int(_number(state, node, read))) + marks_in("".join(read))
    text = "".join(read)
    return state.unknown(node) if is_known(text) else marks_in(text)


def _number(state: State, node: Node, read: list[str]) -> int:
    """Returns the value of an arithmetic expression. read: gets the texts that it reads. Raises
    ValueError if only a run could tell."""
    children = node.named_children
    operator = next((part.type for part in node.children if not part.is_named), "")
    if node.type in ("arithmetic_expansion", "parenthesized_expression", "compound_statement"):
        return [_number(state, child, read) for child in children][-1]
    if node.type == "binary_expression" and operator in _COMPUTED:
        left, right = (_number(state, child, read) for child in children)
        result = _COMPUTED[operator](left, right)
        # bash has 64 bits, and rounds quotients of negative numbers otherwise
        if not 0 <= result < 1 << 63:
            raise ValueError
        return result
    text = source(node) if "expan" not in node.type else quoted_text(state, [node])
    if text.isidentifier():
        text = "".join(state.variables.get(text) or state.mark(EMPTY, f"${text}", node))
    read.append(text)
    digits = plain(text).strip() or "0"
    if not is_known(text) or not re.fullmatch(r"0|[1-9]\d{,17}", digits):
        raise ValueError
    return int(digits)
