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
from dataclasses import dataclass

from megagrpo.config.reward import CodeOptions, Scalar
from megagrpo.sandbox.sandbox import Limits, Sandbox, isolates, run_program
from megagrpo.system.explained import explained

_FENCE = re.compile(r"```[ \t]*(\w*)[^\n]*\n(.*?)(?:```|\Z)", re.DOTALL)
_PYTHON = ("python", "python3", "py")


@dataclass(frozen=True)
class TestCases:
    """The tests of one problem: of a program's standard output, or of the functions that it
    defines."""

    scripts: tuple[tuple[str, str], ...] = ()  # (standard input, expected standard output)
    statements: tuple[
        str, ...
    ] = ()  # each calls the program's functions and raises unless the result is right

    def __len__(self) -> int:
        return len(self.scripts) or len(self.statements)


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
    return (marked_programs(text) or [body for _, body in _FENCE.findall(text)] or [text])[-1]


def marked_programs(text: str) -> list[str]:
    """Returns all blocks marked as Python."""
    return [body for language, body in _FENCE.findall(text) if language.lower() in _PYTHON]


def read_tests(answer: str, tolerance: float = 0.0) -> TestCases:
    """Reads the answer: JSON {"inputs": [...], "outputs": [...]}, with "fn_name" for calls, or
    {"asserts": [...]}.

    Raises ValueError with the reason.
    """
    with explained(f"the answer {answer[:60]!r} is not JSON with test cases"):
        data = json.loads(answer)
    if isinstance(data, list):
        data = {"asserts": data}
    if not isinstance(data, dict) or not (
        {"inputs", "outputs"} <= data.keys() or "asserts" in data
    ):
        raise ValueError(
            f'the answer {answer[:60]!r} has neither "inputs" and "outputs" nor "asserts"'
        )
    if "asserts" in data:
        return TestCases(statements=tuple(_checked(text) for text in _list(data, "asserts")))
    inputs, outputs = _list(data, "inputs"), _list(data, "outputs")
    if len(inputs) != len(outputs):
        raise ValueError(f"the answer has {len(inputs)} inputs and {len(outputs)} outputs")
    if name := data.get("fn_name"):
        pairs = zip(inputs, outputs, strict=True)
        return TestCases(
            statements=tuple(_checked(_call(name, *pair, tolerance)) for pair in pairs)
        )
    return TestCases(
        scripts=tuple((_lines(i), _lines(o)) for i, o in zip(inputs, outputs, strict=True))
    )


def _list(data: dict[str, list[object]], key: str) -> list[object]:
    if not isinstance(data[key], list) or not data[key]:
        raise ValueError(
            f'"{key}" of the answer should be a list with at least one entry, is {data[key]!r:.60}'
        )
    return data[key]


def _lines(value: object) -> str:
    if isinstance(value, list):
        return "\n".join(map(str, value))
    if not isinstance(value, str):
        raise ValueError(
            f"standard input and output are texts or lists of lines, not {value!r:.60}"
        )
    return value


def _call(name: object, arguments: object, expected: object, tolerance: float) -> str:
    """Returns the statement for one call; a text is JSON, one argument a line, as in
    LiveCodeBench."""
    if isinstance(arguments, str) and isinstance(expected, str):
        arguments = [json.loads(line) for line in arguments.splitlines()]
        expected = json.loads(expected)
    if not isinstance(arguments, list):
        raise ValueError(
            f'with "fn_name", each of the inputs is a list of arguments, not {arguments!r:.60}'
        )
    return f"assert same({name}(*{arguments!r}), {expected!r}, {tolerance!r})"


def _checked(statement: object) -> str:
    with explained(f"the answer's test {statement!r:.80} is not Python"):
        ast.parse(str(statement))
    return str(statement)


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
    lines, wanted = (
        [line.rstrip() for line in text.rstrip().splitlines()] for text in (got, expected)
    )
    if lines == wanted or not tolerance:
        return lines == wanted
    words, wanted_words = got.split(), expected.split()
    pairs = zip(words, wanted_words, strict=False)
    return len(words) == len(wanted_words) and all(_same_word(a, b, tolerance) for a, b in pairs)


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
    of_tests = {"input": answered[0], "output": asked[1], "verdicts": judged[1]}
    with (
        open(judged[0], "rb") as verdicts,
        Sandbox(
            "serve", source, limits, isolate, pipes={"input": asked[0], "output": answered[1]}
        ) as program,
        Sandbox("test", json.dumps(_instructions(tests)), limits, isolate, pipes=of_tests),
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
    bound: set[str] = set()
    for statement in tests.statements:
        for node in ast.walk(ast.parse(statement)):
            match node:
                case ast.Name(id=name, ctx=ast.Load()):
                    loaded.add(name)
                case ast.Name(id=name) | ast.arg(arg=name):
                    bound.add(name)
                case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                    bound.add(name)
                case ast.alias(name=name, asname=other):
                    bound.add(other or name.partition(".")[0])
    free = (
        loaded - bound - set(vars(builtins)) - {"same"}
    )  # a program's own `len` must not judge it
    modules = free & sys.stdlib_module_names
    return {
        "names": sorted(free - modules),
        "modules": sorted(modules),
        "tests": list(tests.statements),
    }
