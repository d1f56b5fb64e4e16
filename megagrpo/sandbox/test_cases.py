"""Test cases of grader `code`: reads the forms of public data sets into one form."""

import ast
import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass

from megagrpo.sandbox.calls import RIGHT
from megagrpo.system.errors import explained

_FUNCTIONAL = ("functional", "function_call")  # LiveCodeBench's word, PrimeIntellect's
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_CHECKS = (ast.Assert, ast.Raise, ast.Call)
_NESTED = ("input_output", "test_cases", "tests", "asserts")  # keys that hold all tests


@dataclass(frozen=True)
class TestCases:
    """The tests of one problem: either for a program's standard output, or for the functions that
    it defines."""

    scripts: tuple[tuple[str, str], ...] = ()  # (standard input, expected standard output)
    statements: tuple[str, ...] = ()  # each raises unless the program's functions are right
    function: str | None = None  # that all statements call, if the data names it

    def __len__(self) -> int:
        return len(self.scripts) or len(self.statements)


def read_tests(answer: str, tolerance: float = 0.0) -> TestCases:
    """Reads the answer, which is JSON in one of these forms, or a text of Python assertions.

    {"inputs": [...], "outputs": [...]}, with "fn_name" for calls (APPS, TACO; verl's form); a list
    of assertions (MBPP); a list of {"input", "output"} with "testtype" or "type", whose function is
    named by "fn_name" or "metadata": {"func_name": ...} (LiveCodeBench, DeepCoder); a list of pairs
    (input, output); any of these under "input_output", "test_cases", "tests" or "asserts", as JSON
    or as its text. Raises ValueError with the reason.
    """
    with ExitStack() as end:  # integers of any length, as for the tested programs
        end.callback(sys.set_int_max_str_digits, sys.get_int_max_str_digits())
        sys.set_int_max_str_digits(0)
        return _tests(_parsed(answer), tolerance)


def _parsed(answer: str) -> object:
    """Returns the JSON of a text; assertions, which are not JSON, become a list of one text."""
    with suppress(json.JSONDecodeError):
        return json.loads(answer)
    if "assert" in answer:
        return [answer]
    raise ValueError(f"the answer {answer[:60]!r} is not JSON with test cases, nor assertions")


def _tests(data: object, tolerance: float) -> TestCases:
    if isinstance(data, str):
        data = _parsed(data)
    if isinstance(data, Mapping):
        data = _given(data)
        if {"inputs", "outputs"} <= data.keys():
            name = data.get("fn_name")
            return _from_columns(_list(data, "inputs"), _list(data, "outputs"), name, tolerance)
        for key in _NESTED:
            if key in data:
                return _tests(data[key], tolerance)
        if {"input", "output"} <= data.keys():
            data = [data]
    if not isinstance(data, list) or not data:
        raise ValueError(
            f"the answer {data!r:.60} should be a list with at least one test, or have "
            '"inputs" and "outputs", or one of ' + ", ".join(f'"{key}"' for key in _NESTED)
        )
    if all(isinstance(test, str) for test in data):
        return TestCases(statements=tuple(_checked(test) for test in data))
    if all(isinstance(test, Mapping) for test in data):
        return _from_objects([*map(_given, data)], tolerance)
    if all(isinstance(test, list) and len(test) == 2 for test in data):
        inputs, outputs = map(list, zip(*data, strict=True))
        return _from_columns(inputs, outputs, None, tolerance)
    raise ValueError(
        "each test is a text of assertions, an object with input and output, or such a pair; "
        f"the answer has {data!r:.80}"
    )


def _given(data: Mapping[str, object]) -> Mapping[str, object]:
    """Returns an object without the nulls of keys that others have; an expected result may be
    null."""
    return {key: value for key, value in data.items() if value is not None or key == "output"}


def _from_objects(tests: Sequence[Mapping[str, object]], tolerance: float) -> TestCases:
    names: set[str | None] = set()
    for test in tests:
        if not {"input", "output"} <= test.keys():
            raise ValueError(f'a test has no "input" and "output": {dict(test)!r:.80}')
        names.add(_function(test))
    if len(names) > 1:
        raise ValueError(
            f"the tests call several functions, or mix calls and standard input: {names}"
        )
    inputs, outputs = ([test[key] for test in tests] for key in ("input", "output"))
    return _from_columns(inputs, outputs, names.pop(), tolerance)


def _function(test: Mapping[str, object]) -> str | None:
    """Returns the function that a test calls, None if it uses standard input."""
    metadata = test.get("metadata")
    if isinstance(metadata, str):
        metadata = json.loads(metadata or "{}")
    within = metadata if isinstance(metadata, Mapping) else {}
    name = test.get("fn_name") or within.get("func_name") or within.get("fn_name")
    if test.get("testtype", test.get("type")) not in _FUNCTIONAL:
        return str(name) if name and "testtype" not in test and "type" not in test else None
    if not name:
        raise ValueError(f'a functional test names no function in "metadata": {dict(test)!r:.80}')
    return str(name)


def _from_columns(inputs: list, outputs: list, name: object, tolerance: float) -> TestCases:
    if len(inputs) != len(outputs):
        raise ValueError(f"the answer has {len(inputs)} inputs and {len(outputs)} outputs")
    pairs = list(zip(inputs, outputs, strict=True))
    if not name:
        return TestCases(scripts=tuple((_lines(input), _lines(output)) for input, output in pairs))
    if not isinstance(name, str) or not name.isidentifier():
        raise ValueError(f'"fn_name" should be the name of a function, is {name!r:.60}')
    calls = tuple(_call(name, arguments, result, tolerance) for arguments, result in pairs)
    return TestCases(statements=calls, function=name)


def _list(data: Mapping[str, object], key: str) -> list[object]:
    value = data[key]
    if not isinstance(value, list) or not value:
        raise ValueError(
            f'"{key}" of the answer should be a list with at least one entry, is {value!r:.60}'
        )
    return value


def _lines(value: object) -> str:
    if isinstance(value, list):
        return "\n".join(map(str, value))
    if not isinstance(value, str):
        raise ValueError(
            f"standard input and output are texts or lists of lines, not {value!r:.60}"
        )
    return value


def _call(name: str, arguments: object, expected: object, tolerance: float) -> str:
    """Returns the statement for one call; a text is JSON with one argument per line, as in
    LiveCodeBench."""
    alternatives = [expected]
    if isinstance(arguments, str) and isinstance(expected, str):
        with explained(f"a call's input {arguments!r:.60} or output is not JSON"):
            lines = arguments.strip("\n")  # none: a call without arguments
            arguments = [json.loads(line) for line in lines.split("\n") if lines]
            alternatives = [json.loads(expected)]
    elif isinstance(expected, list) and len(expected) == 1:
        alternatives += expected  # APPS puts a result into a list
    if not isinstance(arguments, list):
        raise ValueError(
            f'with "fn_name", each of the inputs is a list of arguments, not {arguments!r:.60}'
        )
    # Python takes a hundred times as long to read lists as to read a text
    return f"assert {RIGHT}({name}, {json.dumps([arguments, alternatives])!r}, {tolerance!r})"


def _checked(statement: str) -> str:
    """Returns assertions as they are. Raises ValueError if Python cannot read them, or if they
    could not fail, or not pass."""
    test = f"the answer's test {statement!r:.80}"
    with explained(f"{test} is not Python"):
        tree = ast.parse(statement)
    # with a `try` it may do without
    for node in tree.body if "try:" in statement else ast.walk(tree):
        match node:
            case ast.Import(names=aliases):
                modules = [alias.name for alias in aliases]
            case ast.ImportFrom(module=module):
                modules = [module or "."]
            case _:
                continue
        for name in modules:
            if name.partition(".")[0] not in sys.stdlib_module_names:
                raise ValueError(f"{test} imports {name}; only Python's own modules are there")
    defined = {node.name for node in ast.walk(tree) if isinstance(node, _DEFINITIONS)}
    executed: list[ast.AST] = [tree]
    for each in executed:  # grows
        executed += (n for n in ast.iter_child_nodes(each) if not isinstance(n, _DEFINITIONS))
    # another call, such as unittest.main's, does not reach what is defined here
    called = not defined or any(getattr(n, "id", "") in defined for n in executed)
    if not any(isinstance(n, _CHECKS[: 2 + called]) for n in executed):
        raise ValueError(f"{test} asserts nothing, or only in functions that it does not call")
    return statement
