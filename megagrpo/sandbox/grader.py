"""Grader `code`: runs the response's Python program in sandboxes against the test cases of the
answer."""

import ast
import builtins
import json
import os
import re
import select
import sys
import time
from collections.abc import Iterator

from megagrpo.config.reward import CodeOptions, Scalar
from megagrpo.sandbox.calls import SAME
from megagrpo.sandbox.sandbox import Limits, Sandbox, isolates, run_program
from megagrpo.sandbox.test_cases import TestCases, read_tests

_FENCE = "```"
_PYTHON = ("python", "python3", "py")


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
    problems = run(program_of(text), tests, settings, isolates(settings.isolation))
    for number, problem in enumerate(problems, start=1):
        num_passed += not problem
        if problem and not failure:
            failure = f"test {number} of {len(tests)}: {problem}"
        if problem and settings.score == "all":
            break
    if settings.score == "all":
        return float(num_passed == len(tests)), failure
    return num_passed / len(tests), failure


def program_of(text: str) -> str:
    """Returns the last block marked as Python, else the last block, else the whole text."""
    return (marked_programs(text) or [body for _, body in _blocks(text)] or [text])[-1]


def marked_programs(text: str) -> list[str]:
    """Returns all blocks marked as Python."""
    return [body for language, body in _blocks(text) if language.lower() in _PYTHON]


def _blocks(text: str) -> Iterator[tuple[str, str]]:
    """Yields (language, content) of each fenced block; the last one may be unclosed.

    Reads each character a fixed number of times: a response may consist of fences.
    """
    start = text.find(_FENCE)
    while start >= 0:
        start += len(_FENCE)
        closed = text.find(_FENCE, start)
        end = closed if closed >= 0 else len(text)
        line_end = text.find("\n", start, end)
        if line_end >= 0:  # else it is code within a line
            word = text[start:line_end].strip()
            language = "".join(re.findall(r"^\w*", word))
            yield language, text[line_end + 1 : end]
        start = text.find(_FENCE, end + len(_FENCE))


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
        limits = _limits(settings, min(settings.test_s, left_s))
        ended = run_program(source, stdin.encode(errors="replace"), limits, isolate)
        right = _same_text(ended.stdout.decode(errors="replace"), expected, settings.tolerance)
        yield ended.problem or ("" if right else "wrong output")


def _limits(settings: CodeOptions, wall_s: float) -> Limits:
    return Limits(wall_s=wall_s, **settings.model_dump(include=set(Limits.__annotations__)))


def _same_text(got: str, expected: str, tolerance: float) -> bool:
    """Returns whether two outputs are equal, up to trailing white space and trailing empty
    lines."""
    lines, expected_lines = (
        [line.rstrip() for line in text.rstrip().splitlines()] for text in (got, expected)
    )
    if lines == expected_lines or not tolerance:
        return lines == expected_lines
    words, expected_words = got.split(), expected.split()
    pairs = zip(words, expected_words, strict=False)
    return len(words) == len(expected_words) and all(_same_word(a, b, tolerance) for a, b in pairs)


def _same_word(got: str, expected: str, tolerance: float) -> bool:
    try:
        return abs(float(got) - float(expected)) <= tolerance * max(1.0, abs(float(expected)))
    except ValueError:
        return got == expected


def _run_calls(
    source: str, tests: TestCases, settings: CodeOptions, isolate: bool
) -> Iterator[str]:
    """Yields "" for each test that passes, else the reason. Program and tests run in two
    sandboxes."""
    limits = _limits(settings, settings.total_s)
    asked, answered, judged = os.pipe(), os.pipe(), os.pipe()
    pipes = {"input": answered[0], "output": asked[1], "verdicts": judged[1]}
    with (
        open(judged[0], "rb") as verdicts,
        Sandbox(
            "serve", source, limits, isolate, pipes={"input": asked[0], "output": answered[1]}
        ) as program,
        Sandbox("test", json.dumps(_instructions(tests)), limits, isolate, pipes=pipes),
    ):
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
                    over = "the tests ended" if ready else "time limit"
            line, newline, heard = heard.partition(b"\n")
            verdict = json.loads(line) if newline else over
            if verdict == "the program ended":
                ended = program.stop()
                verdict = ended["reason"] or f"the program ended with exit code {ended['code']}"
            yield verdict or ""


def _instructions(tests: TestCases) -> dict[str, list[str]]:
    """Returns the input of calls.run_tests: statements, names to request from the program, modules
    to import."""
    loaded: set[str] = set()
    called: set[str] = set()
    bound: set[str] = set()
    handed: set[tuple[str, str]] = set()  # (function, argument) of statements like check(f)
    for statement in tests.statements:
        for node in ast.walk(ast.parse(statement)):
            match node:
                case ast.Expr(value=ast.Call(func=ast.Name(id=by), args=[ast.Name(id=name)])):
                    handed.add((by, name))
                case ast.Call(func=ast.Name(id=name)):
                    called.add(name)
                case ast.Name(id=name, ctx=ast.Load()):
                    loaded.add(name)
                case ast.Name(id=name) | ast.arg(arg=name):
                    bound.add(name)
                case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                    bound.add(name)
                case ast.alias(name=name, asname=other):
                    bound.add(other or name.partition(".")[0])
    known = set(vars(builtins)) | sys.stdlib_module_names | {SAME}
    names = loaded - bound - known
    names |= {name for by, name in handed if by in bound} - bound
    if tests.function is not None:
        names.add(tests.function)
    elif not names:  # the function has the name of a module or a builtin, which is not meant
        modules = called & sys.stdlib_module_names
        names = (modules or called) - bound - {SAME}
    # Any other builtin is Python's own: a program's `len` must not judge it.
    return {
        "names": sorted(names),
        "modules": sorted((loaded & sys.stdlib_module_names) - bound - names),
        "tests": list(tests.statements),
    }
