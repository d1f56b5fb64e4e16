"""A trainer's command line as bash would make it of a script's text. Nothing of the script runs: its
syntax tree is evaluated here, and what only a run could tell is marked.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from posixpath import basename, dirname, join, normpath

import tree_sitter_bash
from tree_sitter import Language, Node, Parser

from megagrpo.system.environment import for_a_bare_shell
from megagrpo.system.errors import translated
from megagrpo.tools.convert.shell_words import (
    QUOTED,
    Answer,
    Nodes,
    State,
    Value,
    is_unknown,
    plain,
    source,
    split,
    tested,
    text_of,
    words_of,
)

_TEXT = r"""'[^']*'|"(?:\\.|[^"\\])*\""""
# what is quoted; a comment; an escaped character; a variable
_PIECES = re.compile(rf"({_TEXT}|\\\n)|(?<!\S)\#[^\n]*|\\(.)|\$(\d|\w+)", re.DOTALL)
_EXPANSION = r"\$\(+[^()\n]*\)+|\$\{[^{}\n]*\}"
_ASSIGNMENT = rf"\w+=(?:{_TEXT}|{_EXPANSION}|\\[^\n]|[^\s'\"()\\;&|])*+"
_SEVERAL = re.compile(rf"(?m)(?<!\S)({_ASSIGNMENT}[ \t]+{_ASSIGNMENT})[ \t]*$")
_ASSIGNED = re.compile(r"[A-Za-z_]\w*(?= *(?:\+\+|--|[-+*/]?=(?!=)))")
_LISTS = (
    "variable_assignments declaration_command compound_statement do_group case_item "
    "else_clause ERROR"
)


def trainer_command(path: Path, trainer: str, example: str) -> tuple[list[str], list[str]]:
    """Returns the words of a script's first command with one that fits the pattern `trainer`, from
    that word on, and notes.

    The caller's variables are used. What expands to nothing is noted: variables that are not set,
    programs that would have written it. Raises ValueError, with an `example`, if nothing starts a
    trainer.
    """
    file = str(path.absolute())
    own: dict[str, Value] = {"HOME": "~", "PWD": str(Path.cwd()), "0": file, "BASH_SOURCE": file}
    state = State(for_a_bare_shell() | own | {"@": [], "*": []}, trainer, _substituted)
    errors = (RecursionError, LookupError, ValueError)
    with translated(f"{path} is not understood; give the trainer's command alone", *errors):
        _read(state, path)
    if not state.commands:
        names = [
            what.partition(" ")[0] for mark, what in state.marks.items() if not is_unknown(mark)
        ]
        unset = [name for name in names if name[1:].isidentifier()]
        without = f", without {', '.join(dict.fromkeys(unset))}" if unset else ""
        ends = f"; it ends by `{state.leaving[0]}`{without}" if state.leaving else ""
        raise ValueError(f"{path}: has no command `{example}`{ends}")
    # `pkill -f train.py`, `mkdir logs/main_ppo` and the like name a trainer without options
    started = [words for words in state.commands if any(map(_is_option, words))] or state.commands
    found = started[0]
    option = "its command"
    for word in found:
        text = plain(word)
        if _is_option(text):
            option = text.partition("=")[0]
        state.note_marks(word, option)
    if len(started) > 1:
        state.note(f"{len(started)} commands start a trainer; this is the first")
    return [plain(word) for word in found if plain(word) or word == QUOTED], list(state.notes)


def _is_option(word: str) -> bool:
    return word.strip(QUOTED).startswith("--") or "=" in word


@cache
def _parser() -> Parser:
    return Parser(Language(tree_sitter_bash.language()))


def _read(state: State, path: Path) -> None:
    _evaluate(state, plain(path.read_text(encoding="utf-8", errors="replace")))


def _evaluate(state: State, text: str) -> Answer:
    """Evaluates a script. The grammar may take `a/$NAME/b`, "a"\\b, x-`y` and `$(((1))` apart, and a
    line of assignments for those of a command below it, so these are written otherwise."""
    text = _SEVERAL.sub(r"\1;", re.sub(r"`([^`\n]*)`", r"$(\1)", text))
    text = _PIECES.sub(_rewritten, text.replace("$(((", "$(( ("))
    program = _parser().parse(text.encode()).root_node
    if program.has_error:
        file = state.variables["BASH_SOURCE"]
        state.note(f"{file} is no bash that is understood; it may be read wrongly")
    return _each(state, program.named_children)


def _rewritten(match: re.Match[str]) -> str:
    same, escaped, name = match.groups()
    if escaped:
        return f'"{escaped}"' if escaped == "'" else f"'{escaped}'"
    return f"${{{name}}}" if name else same or ""


# ---- commands ----------------------------------------------------------------------------------


def _each(state: State, nodes: Nodes) -> Answer:
    """Evaluates commands; returns the last one's answer."""
    answer: Answer = True
    for node in nodes:
        if node.is_named and not state.leaving:
            answer = _run(state, node)
    return answer


def _run(state: State, node: Node) -> Answer:
    """Evaluates a command, or a list of them."""
    state.spend(150)
    inside = node.named_children
    match node.type:
        case "command":
            return _command(state, node)
        case "variable_assignment":
            return _assign(state, node)
        case "test_command":
            return tested(state, node)
        case "list":  # a && b, a || b
            first, operator, *_, second = node.children
            written = len(state.output or ())
            answer = _run(state, first)
            if answer is None and state.output:  # only the program's exit status counts here
                del state.output[written:]
            if operator.type == "||":
                return _decided(state, first, answer, [], [second])
            return _decided(state, first, answer, [second], []) and answer
        case "negated_command":
            answer = _each(state, inside)
            return None if answer is None else not answer
        case "if_statement" | "elif_clause":
            return _condition(state, node)
        case "case_statement":
            return _case(state, node)
        case "while_statement" | "for_statement" | "c_style_for_statement":
            _unknown(state, node, re.findall(r"^for[ (]+(\w+)", source(node)))
            if node.type == "while_statement":  # or until
                _each(state, inside[:-1])
            return _decided(state, node, None, inside[-1:], [])
        case "redirected_statement":
            return _each(state, node.children_by_field_name("body"))
        case "pipeline":
            for stage in inside:
                _run(state.subshell(), stage)
        case "subshell":
            _each(state.subshell(), inside)
        case "function_definition":
            state.functions[source(inside[0])] = inside[-1]
        case "unset_command":
            for name in map(plain, words_of(state, inside)):
                state.variables.pop(name, None)
        case "compound_statement" if node.children[0].type == "((":
            _unknown(state, node, _ASSIGNED.findall(source(node)))
        case _ if node.type in _LISTS:
            return _each(state, inside)
    return None


def _condition(state: State, node: Node) -> Answer:
    """Evaluates an if or elif with the clauses after it."""
    then = [child.type for child in node.children].index("then")
    after = [each for each in node.named_children if each.type.endswith("_clause")]
    body = [each for each in node.children[then:] if each not in after]
    if node.type == "elif_clause" and node.next_named_sibling:
        after = [node.next_named_sibling]
    answer = _each(state, node.children[:then])
    return _decided(state, node.named_children[0], answer, body, after[:1])


def _case(state: State, node: Node) -> Answer:
    """Evaluates a case; what only a run could tell fits no pattern but `*`."""
    asked, *items = node.named_children
    value = text_of(state, asked)
    taken: Nodes | None = None
    others: list[Node] = []
    for item in items:
        patterns = item.children_by_field_name("value")
        body = [each for each in item.named_children if each not in patterns]
        if taken is None and any(
            fnmatchcase(plain(value), text_of(state, each)) for each in patterns
        ):
            taken = body
        else:
            others += body
    return _decided(state, asked, None if is_unknown(value) else False, others, taken or [])


def _unknown(state: State, node: Node, names: Sequence[str]) -> None:
    """Marks variables of which only a run could tell what they are."""
    state.variables.update(dict.fromkeys(names, state.mark(node)))


def _decided(state: State, asked: Node, answer: Answer, yes: Nodes, no: Nodes) -> Answer:
    """Evaluates one of two branches. If only a run could tell which, no is assumed, and noted if it
    may count; then yes is only tried, and no ends nothing."""
    if answer is not None:
        return _each(state, yes if answer else no)
    if state.output is not None or any("=" in source(each) for each in (*yes, *no)):
        while asked.type == "list":
            asked = asked.children[0]
        state.note(f"taken as false, because nothing runs: {state.where(asked, source(asked))}")
    tried = replace(state.subshell(), notes={}, output=None)
    taken = _each(state, no)
    if state.leaving:  # what goes on was not left, so the other branch was taken
        taken = True
        state.leaving.clear()
    _each(tried, yes)
    return taken


def _command(state: State, node: Node) -> Answer:
    """Evaluates a command: bash's own, a function, or a program."""
    named = [each for each in node.children if not re.search("assign|redirect", each.type)]
    words = [word for word in words_of(state, named) if plain(word) != "--"]
    name, *args = [plain(word) for word in words] or [":"]
    if name in (*state.functions, "source", "."):
        _each(state, [each for each in node.children if each.type == "variable_assignment"])
    if name in state.functions:
        _call(state, node, words, state.functions[name])
        return None
    match name:
        case "exit" | "return":
            state.leaving.append(name)
        case "cd":
            state.variables["PWD"] = _path(state, words[-1].strip(QUOTED) if args else "~")
        case "source" | ".":
            _source(state, "".join(words[1:2]).strip(QUOTED))
        case "shift" | "set" if not re.match("[-+](?!-)", "".join(args)):  # not set -- --lr 1
            _unknown(state, node, "@*123456789")
        case "eval" | "let" | "read" | "mapfile" | "readarray" | "getopts" | "printf" | "unset":
            names = [*_ASSIGNED.findall(" ".join(args)), *filter(str.isidentifier, args)]
            _unknown(state, node, names)
            return _program(state, node, [" ".join(words[1:])] if name == "eval" else [])
        case ":" | "true" | "set" | "shopt" | "trap" | "wait":
            pass
        case _:
            text = _written(state, name, words)
            if text is None:
                return _program(state, node, words)
            state.say(text)
    return True


def _call(state: State, node: Node, words: list[str], function: Node) -> None:
    """Evaluates a function; of variables that it changes only a run could tell the values."""
    called = state.subshell()
    positional = {str(at): word.strip(QUOTED) for at, word in enumerate(words) if at}
    called.variables |= {"@": words[1:], "*": words[1:], **positional}
    _each(called, [function])
    changed = [
        key
        for key, value in called.variables.items()
        if key.isidentifier() and value != state.variables.get(key)
    ]
    _unknown(state, node, changed)


def _written(state: State, name: str, words: list[str]) -> str | None:
    """Returns what a simple command writes; None for another program."""
    match name, words[1:]:
        case "echo", texts:
            return " ".join(text for text in texts if text not in ("-n", "-e")) + "\n"
        case "pwd", _:
            return str(state.variables["PWD"])
        case "dirname", [path] if not path.startswith("-"):
            return dirname(path.strip(QUOTED).rstrip("/")) or "."
        case "basename", [path, *ending] if not path.startswith("-"):
            name = basename(path.strip(QUOTED).rstrip("/"))
            return name.removesuffix(plain("".join(ending)))
        case "seq", [first, step, end] if (first + step + end).isdecimal() and len(end) < 5:
            return "\n".join(map(str, range(int(first), int(end) + 1, int(step) or 1)))
    return None


def _program(state: State, node: Node, words: list[str]) -> Answer:
    """Notes a command if it starts a trainer; one may be in a text, as of `bash -c`."""
    for at, word in enumerate(words):
        inside = split(plain(word))
        if len(inside) > 1 and any(re.fullmatch(state.trainer, each) for each in inside):
            place = state.place or f"line {node.start_point[0] + 1}"
            state.note_marks(word, "its command")
            return _evaluate(replace(state.subshell(), place=place), plain(word))
        if re.fullmatch(state.trainer, plain(word)):
            state.commands.append(words[at:])
            # as of `ray job submit --runtime-env-json`
            if names := re.findall(r'"([A-Z]\w*)" *:', plain(" ".join(words[:at]))):
                state.note(f"variables of its processes are not translated: {', '.join(names)}")
            break
    state.say(state.mark(node))
    return None


def _source(state: State, name: str) -> None:
    """Evaluates a file of the script's folder, or of scripts/models in a folder around it, as
    frameworks have it."""
    folder = Path(str(state.variables["0"])).parent
    wanted = Path(_path(state, name))
    models = [above / "scripts" / "models" for above in folder.parents]
    for within, file in [(folder, wanted), *((each, each / wanted.name) for each in models)]:
        real = file.resolve()
        if real.is_relative_to(within.resolve()) and real.is_file():
            _read(replace(state, place=file.name, leaving=[]), real)
            return
    state.note(f"{plain(name)} could not be read; what it sets is missing")


def _assign(state: State, node: Node) -> Answer:
    """Evaluates NAME=value, NAME+=value, NAME=(values)."""
    name, _, index = source(node.children[0]).partition("[")
    given = node.children_by_field_name("value")
    before = state.variables.get(name, "") if index or node.children[1].type == "+=" else ""
    text = "".join(text_of(state, each) for each in given)
    items = before if isinstance(before, list) else [before] * bool(before)
    if given and given[0].type == "array":
        state.variables[name] = [*items, *words_of(state, given[0].named_children)]
    elif re.fullmatch(r"\d{1,3}\]", index):
        state.variables[name] = [*items[: int(index[:-1])], text, *items[int(index[:-1]) + 1 :]]
    elif isinstance(before, str) and not index:
        state.variables[name] = before + text
    else:
        _unknown(state, node, [name])
    return True


def _path(state: State, path: str) -> str:
    """Returns a path from the present folder."""
    if is_unknown(path) or path.startswith("~"):
        return path
    return normpath(join(str(state.variables["PWD"]), plain(path)))


def _substituted(state: State, node: Node) -> str:
    """Returns what `$(...)` becomes."""
    inner = replace(state.subshell(), output=[])
    _each(inner, node.named_children)
    text = "".join(inner.output or ()).rstrip("\n")
    return state.mark(node) if is_unknown(text) or not text else text
