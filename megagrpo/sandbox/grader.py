"""Grader `code`: runs the response's Python program in sandboxes against the test cases of the
answer."""

import ast
import builtins
import json
import os
import re
import select
import symtable
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from decimal import Decimal

from megagrpo.config.reward import CodeOptions, Scalar
from megagrpo.sandbox.calls import RIGHT
from megagrpo.sandbox.sandbox import Limits, Sandbox, isolates, run_program
from megagrpo.sandbox.test_cases import TestCases, read_tests

_FENCE = "```"
_PYTHON = ("python", "python3", "py")
# groups: what makes it no integer. 0011 is digits, and Decimal overflows beyond these lengths
_NUMBER = re.compile(
    r"[-+]?(?=\.?\d)(?:0|[1-9]\d{0,999})?(\.\d{0,999})?([eE][-+]?\d{1,4})?", re.ASCII
)


def grade(text: str, answer: str, **options: Scalar | dict[str, Scalar]) -> tuple[float, str]:
    """Returns the score of the program in `text` and the first failure, if any.

    Raises ValueError for an answer without tests, SandboxError if the sandbox fails or this machine
    cannot isolate programs.
    """
    settings = CodeOptions.model_validate(options)
    tests = read_tests(answer, settings.tolerance)
    run = _run_scripts if tests.scripts else _run_calls
    num_passed = 0
    failure = ""
    names = "|".join(_instructions(tests)["names"])
    part = rf"\b(?:def|class) +(?:{names})\b" if names else ""
    problems = run(program_of(text, part), tests, settings, isolates(settings.isolation))
    for number, problem in enumerate(problems, start=1):
        num_passed += not problem
        if problem:
            failure = failure or f"test {number} of {len(tests)}: {problem}"
            if settings.score == "all":
                return 0.0, failure
    return num_passed / len(tests), failure


def program_of(text: str, part: str) -> str:
    """Returns the last block marked as Python, else the last block, else the whole text; of several
    blocks the last with the most of these parts, a regular expression, because an example of use may
    follow."""
    return sorted(
        marked_programs(text) or [body for _, body in _blocks(text)] or [text],
        key=lambda block: len({*re.findall(part, block)}),
    )[-1]


def marked_programs(text: str) -> list[str]:
    """Returns all blocks marked as Python."""
    return [body for language, body in _blocks(text) if language.lower() in _PYTHON]


def _blocks(text: str) -> Iterator[tuple[str, str]]:
    """Yields (language, content) of each fenced block; the last one may be unclosed. Of a block in a
    list the content loses the indentation of its fence, as in Markdown."""
    parts = text.split(_FENCE)
    for before, block in zip(parts[::2], parts[1::2], strict=False):
        head, newline, content = block.partition("\n")
        if newline:  # else it is code within a line
            margin = before.rpartition("\n")[2]
            if margin.isspace() and content.lstrip("\n").startswith(margin):
                content = re.sub(f"(?m)^{margin}", "", content)
            yield re.findall(r"\w*", head.strip())[0], content


def _run_scripts(
    source: str, tests: TestCases, settings: CodeOptions, isolate: bool
) -> Iterator[str]:
    """Yields "" for each test that passes, else the reason."""
    deadline = time.monotonic() + settings.total_s
    for stdin, expected in tests.scripts:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            yield f"time limit of all tests ({settings.total_s:g} s)"
            continue
        limits = program_limits(settings, min(settings.test_s, left_s))
        ended = run_program(source, stdin.encode(errors="replace"), limits, isolate)
        right = _same_text(ended.stdout.decode(errors="replace"), expected, settings.tolerance)
        yield ended.problem or ("" if right else "wrong output")


def program_limits(settings: CodeOptions, wall_s: float) -> Limits:
    """Returns the limits of a program that runs for at most `wall_s` seconds."""
    return Limits(wall_s=wall_s, **settings.model_dump(include=set(Limits.__annotations__)))


def _same_text(got: str, expected: str, tolerance: float) -> bool:
    """Returns whether two outputs have the same words, whatever the white space between them; words
    that are numbers are compared by value, as in LiveCodeBench."""
    words, expected_words = got.split(), expected.split()
    return len(words) == len(expected_words) and all(
        _same_word(*pair, tolerance) for pair in zip(words, expected_words, strict=True)
    )


def _same_word(got: str, expected: str, tolerance: float) -> bool:
    number = _NUMBER.fullmatch(expected)
    if got == expected or not number or not _NUMBER.fullmatch(got):
        return got == expected
    value = Decimal(expected)
    # a count must be exact: a millionth of it is no rounding error
    scale = max(Decimal(1), abs(value) * any(number.groups()))
    return abs(Decimal(got) - value) <= Decimal(tolerance) * scale


def _run_calls(
    source: str, tests: TestCases, settings: CodeOptions, isolate: bool
) -> Iterator[str]:
    """Yields "" for each test that passes, else the reason. Program and tests run in two
    sandboxes."""
    limits = program_limits(settings, settings.total_s)
    with ExitStack() as running, ExitStack() as ends:
        asked, answered, judged = (_pipe(ends) for _ in range(3))
        verdicts = running.enter_context(open(os.dup(judged[0]), "rb"))
        pipes = {"input": asked[0], "output": answered[1]}
        program = running.enter_context(Sandbox("serve", source, limits, isolate, pipes=pipes))
        pipes = {"input": answered[0], "output": asked[1], "verdicts": judged[1]}
        instructions = json.dumps(_instructions(tests))
        judge = running.enter_context(Sandbox("test", instructions, limits, isolate, pipes=pipes))
        ends.close()  # both have theirs, and see the end of the other
        deadline = time.monotonic() + settings.total_s
        heard = b""
        over = ""
        for _ in tests.statements:
            until = min(deadline, time.monotonic() + settings.test_s)
            while b"\n" not in heard and not over:
                ready, _, _ = select.select([verdicts], [], [], max(0.0, until - time.monotonic()))
                data = os.read(verdicts.fileno(), 2**16) if ready else b""
                heard += data
                if not data:  # the remaining tests get no verdict
                    over = "time limit"
                    if ready:  # stop raises if there was no sandbox for them
                        over = judge.stop()["reason"] or "the tests ended"
            line, newline, heard = heard.partition(b"\n")
            verdict = json.loads(line) if newline else over
            if verdict == "the program ended":
                ended = program.stop()
                verdict = ended["reason"] or f"the program ended with exit code {ended['code']}"
            yield verdict or ""


def _pipe(ends: ExitStack) -> tuple[int, int]:
    """Returns a pipe whose ends are closed with the stack."""
    read, write = os.pipe()
    ends.callback(os.close, read)
    ends.callback(os.close, write)
    return read, write


def _instructions(tests: TestCases) -> dict[str, list[str]]:
    """Returns the input of calls.run_tests: statements, names to request from the program, modules
    to import."""
    loaded: set[str] = set()  # global names, also of functions in the statements
    bound: set[str] = set()
    called: set[str] = set()
    handed: set[tuple[str, str]] = set()  # (function, argument) of statements like check(f)
    for statement in tests.statements:
        for node in ast.walk(ast.parse(statement)):
            match node:
                case ast.Expr(value=ast.Call(func=ast.Name(id=by), args=[ast.Name(id=name)])):
                    handed.add((by, name))
                case ast.Call(func=ast.Name(id=name)):
                    called.add(name)
        for symbol in _global_symbols(symtable.symtable(statement, "test", "exec")):
            defines = symbol.is_assigned() or symbol.is_imported()
            (bound if defines else loaded).add(symbol.get_name())
    names = loaded - bound - set(vars(builtins)) - sys.stdlib_module_names - {RIGHT}
    names |= {name for by, name in handed if by in bound} - bound
    if tests.function is not None:
        names.add(tests.function)
    elif not names:  # the function has the name of a module or a builtin, which is not meant
        called &= loaded
        names = (called & sys.stdlib_module_names or called) - bound - {RIGHT}
    # Any other builtin is Python's own: a program's `len` must not judge it.
    return {
        "names": sorted(names),
        "modules": sorted((loaded & sys.stdlib_module_names) - bound - names),
        "tests": list(tests.statements),
    }


def _global_symbols(table: symtable.SymbolTable) -> Iterator[symtable.Symbol]:
    yield from filter(symtable.Symbol.is_global, table.get_symbols())
    for child in table.get_children():
        yield from _global_symbols(child)
