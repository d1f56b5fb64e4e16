"""A trainer's command line as bash would make it of a script's text. Nothing of the script runs: its
syntax tree is evaluated here, and what only a program could tell is marked."""

import re
from collections.abc import Callable
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from posixpath import join, normpath

from tree_sitter import Node

from megagrpo.system.environment import for_a_bare_shell
from megagrpo.system.errors import translated
from megagrpo.tools.convert.shell_words import (
    QUOTED,
    Answer,
    Nodes,
    State,
    Value,
    calculated,
    expand,
    fits,
    is_known,
    marks_in,
    parsed,
    plain,
    plain_words,
    quoted,
    quoted_text,
    raw,
    source,
    tested,
    words,
    written,
)

_MOST_COMMANDS = 20_000
_LISTS = "variable_assignments declaration_command compound_statement do_group else_clause ERROR"


def trainer_command(path: Path, trainers: str, example: str) -> tuple[list[str], list[str]]:
    """Returns the words of a script's first command with one that fits `trainers`, patterns of bash's
    `case`, from that word on, and notes.

    The caller's variables are used. What expands to nothing is noted: variables that are not set,
    programs that would have written it. Raises ValueError, with an `example`, if nothing starts a
    trainer.
    """
    file = str(path.absolute())
    own: dict[str, Value] = {"HOME": "~", "PWD": str(Path.cwd()), "0": file, "BASH_SOURCE": file}
    state = State({**for_a_bare_shell(), **own}, _substituted, trainers.split("|"))
    errors = (RecursionError, LookupError, ValueError)
    with translated(f"{path} is not understood; give the trainer's command alone", *errors):
        _each(state, _read(state, plain(path.read_text(encoding="utf-8", errors="replace"))))
    if not state.commands:
        names = ", ".join(text for text in state.marks if re.fullmatch(r"\$[A-Za-z_]\w*", text))
        without = f", without {names}" if names else ""
        ends = f"; it ends by `{state.leaving[0]}`{without}" if state.leaving else ""
        raise ValueError(f"{path}: has no command `{example}`{ends}")
    found = state.commands[0]
    notes: dict[str, dict[str, None]] = {}
    option = "its command"
    for word in found:
        text = plain(word)
        if text.startswith("--") or "=" in text:
            option = text.partition("=")[0]
        for sign in marks_in(word):
            note = f"expanded to nothing: {state.meaning(sign)}, in "
            notes.setdefault(note, {})[option] = None
    said = [*state.notes, *(note + ", ".join(options) for note, options in notes.items())]
    if len(state.commands) > 1:
        said.append(f"{len(state.commands)} commands start a trainer; this is the first")
    return plain_words(found), said


def _is_trainer(state: State, word: str) -> bool:
    return any(fnmatchcase(plain(word), trainer) for trainer in state.trainers)


def _read(state: State, text: str) -> Nodes:
    program = parsed(text)
    if program.has_error:
        state.notes[
            f"{state.variables['BASH_SOURCE']} is no bash that is understood; it may be read wrongly"
        ] = None
    return program.named_children


def _subshell(state: State, output: list[str] | None = None) -> State:
    return replace(state, variables=dict(state.variables), output=output)


def _until(state: State, nodes: Nodes, *ends: str) -> Answer:
    """Evaluates commands up to one of these ends; without them, up to any."""
    answer = _each(state, nodes)
    if not ends or state.leaving[:1] == [*ends]:
        state.leaving.clear()
    return answer


def _each(state: State, nodes: Nodes) -> Answer:
    """Evaluates commands; returns the last one's answer."""
    answer: Answer = True
    for node in nodes:
        if node.is_named and node.type != "comment" and not state.leaving:
            answer = _run(state, node)
    return answer


def _run(state: State, node: Node) -> Answer:
    """Evaluates a command, or a list of them."""
    if next(state.steps) > _MOST_COMMANDS:
        raise ValueError("too many commands")
    if handler := _HANDLERS.get(node.type):
        return handler(state, node)
    match node.type:
        case "negated_command":
            answer = _each(state, node.named_children)
            return None if answer is None else not answer
        case "redirected_statement":
            return _each(state, node.children_by_field_name("body"))
        case "pipeline":
            for stage in node.named_children:
                _until(_subshell(state), [stage])
            return _unknown(state, node)
        case "subshell":
            return _until(_subshell(state, state.output), node.named_children)
        case "function_definition":
            state.functions[source(node.children_by_field_name("name")[0])] = node
        case "declaration_command" if source(node.children[0]) == "local":
            for name in (source(each).partition("=")[0] for each in node.named_children):
                state.hidden.setdefault(name, state.variables.get(name))
        case "unset_command":
            for name in words(state, node.named_children):
                state.variables.pop(name, None)
        case "compound_statement" if node.children[0].type == "((":
            number = calculated(state, node)
            if is_known(number):
                return plain(number) != "0"
            for name in re.findall(r"\b(\w+) *(?:\+\+|--|[-+*/]?=(?!=))", source(node)):
                state.put(name, number)
            return None
    return _each(state, node.named_children) if node.type in _LISTS else True


def _unknown(state: State, _: Node) -> Answer:
    """Returns the answer of a program, which writes what only a run could tell."""
    if state.output is not None:
        state.output.append(state.asked)
    return None


def _decided(state: State, asked: Node, answer: Answer, yes: Nodes, no: Nodes) -> Answer:
    """Evaluates one of two branches. If only a run could tell which, no is assumed, and noted if it
    may count; then yes is only tried, and no ends nothing."""
    if answer is not None:
        return _each(state, yes if answer else no)
    if state.output is not None or any("=" in source(each) for each in (*yes, *no)):
        while asked.type == "list":
            asked = asked.children[0]
        what = state.meaning(state.unknown(asked))
        state.notes[f"taken as false, because nothing runs: {what}"] = None
    tried = replace(_subshell(state), notes={})
    taken = _each(state, no)
    if state.leaving:  # what goes on was not left, so the other branch was taken
        taken = True
        state.leaving.clear()
    _until(tried, yes)
    return taken


def _both(state: State, node: Node) -> Answer:
    """Evaluates `a && b` or `a || b`."""
    first, operator, *_, second = node.children
    written = len(state.output or ())
    answer = _run(state, first)
    if answer is None and state.output:
        # only the program's exit status counts here, not its output
        del state.output[written:]
    if operator.type == "||":
        return _decided(state, first, answer, [], [second])
    return _decided(state, first, answer, [second], []) and answer


def _condition(state: State, node: Node) -> Answer:
    """Evaluates an if or elif with the clauses after it."""
    then = [child.type for child in node.children].index("then")
    body = [child for child in node.children[then:] if not child.type.endswith("_clause")]
    above = node if node.type == "if_statement" else node.parent
    after = [each for each in above.children if each.start_byte > node.start_byte] if above else []
    clauses = [each for each in after if each.type.endswith("_clause")]
    answer = _each(replace(state, output=None), node.children[:then])
    return _decided(state, node.named_children[0], answer, body, clauses[:1])


def _case(state: State, node: Node) -> Answer:
    """Evaluates a case; what only a run could tell fits no pattern but `*`."""
    value = expand(state, node.named_children[0], True)
    taken: list[Node] = []
    others: list[Node] = []
    for item in (each for each in node.children if each.type == "case_item"):
        end = [child.type for child in item.children].index(")")
        body = item.children[end + 1 :]
        if not taken and fits(state, value, item.children[item.children[0].type == "(" : end]):
            taken = body
        else:
            others += body
    answer = False if is_known(value) else None
    return _decided(state, node.named_children[0], answer, others, taken)


def _loop(state: State, node: Node) -> Answer:
    """Tries the body of a loop, whose turns only a run could tell, as what they leave in its
    variable."""
    first = node.named_children[0]
    name = re.match(r"\w+", source(first))
    if name is not None and node.type != "while_statement":
        state.variables[name[0]] = state.unknown(first)
    return _decided(state, node, None, node.children_by_field_name("body"), [])


def _command(state: State, node: Node) -> Answer:
    """Evaluates a command: bash's own, a function, or a program."""
    named = [each for each in node.children if not re.search("assign|redirect", each.type)]
    parts = words(state, named)
    name, *args = plain_words(parts) or [":"]
    if name in (*state.functions, "source", "."):
        _each(state, [each for each in node.children if each.type == "variable_assignment"])
    if name in state.functions:
        return _call(state, state.functions[name], parts[1:])
    match name:
        case "exit" | "return":
            state.leaving.append(name)
            return None if marks_in("".join(parts)) else args[:1] in ([], ["0"])
        case "cd":
            state.put("PWD", _path(state, raw(parts[-1]) if args else "~"))
        case "source" | ".":
            _source(state, raw("".join(parts[1:2])))
        case "shift" | "set" if name == "shift" or "--" in parts:
            state.arguments = [state.unknown(node)] * 9
        case "printf" if args[:1] == ["-v"]:
            state.variables[args[1]] = state.unknown(node)
        case "read" | "mapfile" | "readarray" | "getopts" | "eval" | "let":
            for name in re.findall(r"(?<!\S)[a-zA-Z_]\w*(?![^-+*/=\s])", " ".join(args)):
                state.variables[name] = state.unknown(node)
            return _program(state, node, parts)
        case ":" | "true" | "set" | "shopt" | "trap" | "wait":
            pass
        case _ if not written(state, name, parts[1:]):
            return _program(state, node, parts)
    return True


def _call(state: State, function: Node, arguments: list[str]) -> Answer:
    """Evaluates a function; its `local` variables get their values back."""
    called = replace(state, arguments=arguments, hidden={})
    answer = _until(called, function.children_by_field_name("body"), "return")
    for name, value in called.hidden.items():
        state.variables.pop(name, None)
        state.variables |= {} if value is None else {name: value}
    return answer


def _program(state: State, node: Node, parts: list[str]) -> Answer:
    """Notes a command if it starts a trainer; one may be in a text, as of `bash -c`."""
    for at, part in enumerate(parts):
        found = re.findall(r"[^ \t\n]+", raw(part))
        if len(found) > 1 and any(_is_trainer(state, word) for word in found):
            place = state.place or f"line {node.start_point[0] + 1}"
            other = replace(_subshell(state), place=place)
            return _each(other, _read(other, raw(part)))
        if _is_trainer(state, part):
            state.commands.append(parts[at:])
            # as of `ray job submit --runtime-env-json`
            if names := re.findall(r'"([A-Z]\w*)" *:', raw(" ".join(parts[:at]))):
                state.notes[
                    f"variables of its processes are not translated: {', '.join(names)}"
                ] = None
            break
    return _unknown(state, node)


def _source(state: State, name: str) -> None:
    """Evaluates a file of the script's folder, or of scripts/models in a folder around it, as
    frameworks have it."""
    folder = Path(str(state.variables["0"])).parent
    wanted = Path(_path(state, name))
    models = [above / "scripts" / "models" for above in folder.parents]
    for within, file in [(folder, wanted), *((each, each / wanted.name) for each in models)]:
        real = file.resolve()
        if real.is_relative_to(within.resolve()) and real.is_file():
            inside = replace(state, place=file.name)
            text = real.read_text(encoding="utf-8", errors="replace")
            _until(inside, _read(inside, plain(text)), "return")
            return
    state.notes[f"{plain(name)} could not be read; what it sets is missing"] = None


def _substituted(state: State, node: Node) -> str:
    """Returns what `$(...)` becomes."""
    output: list[str] = []
    asked = state.unknown(node)
    _until(replace(_subshell(state, output), asked=asked), node.named_children)
    return "".join(output).rstrip("\n")


def _assign(state: State, node: Node) -> bool:
    """Evaluates NAME=value, NAME+=value, NAME=(values), NAME[n]=value."""
    name, _, index = source(node.children[0]).partition("[")
    given = node.children_by_field_name("value")
    before = state.variables.get(name, "") if index or node.children[1].type == "+=" else ""
    items = before if isinstance(before, list) else [QUOTED + quoted(before)] * bool(before)
    if given and given[0].type == "array":
        state.put(name, [*items, *words(state, given[0].named_children)])
        return True
    text = quoted_text(state, given)
    if index:
        number = int(index[:-1]) if re.fullmatch(r"\d{1,3}]", index) else len(items)
        state.put(name, [*items[:number], QUOTED + quoted(text), *items[number + 1 :]])
    elif isinstance(before, list):
        first = QUOTED + quoted(raw("".join(before[:1])) + text)
        state.put(name, [first, *before[1:]])
    else:
        state.put(name, before + text)
    return True


def _path(state: State, path: str) -> str:
    """Returns a path from the present folder."""
    if not is_known(path) or path.startswith("~"):
        return path
    return normpath(join(str(state.variables["PWD"]), plain(path)))


_HANDLERS: dict[str, Callable[[State, Node], Answer]] = {
    "command": _command,
    "list": _both,
    "if_statement": _condition,
    "elif_clause": _condition,
    "case_statement": _case,
    "for_statement": _loop,
    "c_style_for_statement": _loop,
    "while_statement": _loop,
    "test_command": tested,
    "variable_assignment": _assign,
    "file_redirect": _unknown,  # $(<file)
}
