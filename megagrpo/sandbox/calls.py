"""Calls between a tested program and its tests, in two sandboxes connected by two pipes; see
child.py.

The program's process defines functions and answers calls; the tests' process makes the calls and
judges the results. A message is a line of JSON: plain data, and numbers that stand for all other
objects. The program sees arguments, never an assertion: whatever it does to its own interpreter, it
can only return a right or a wrong result.
"""

import builtins
import importlib
import json
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

# What LiveCodeBench's runner writes before a program, in its order: after it `bisect` is a module and
# `pow` Python's. Without statistics, which takes as long to import as all others.
_MODULES = (
    "string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random",
    "itertools", "functools", "operator", "io", "sys", "json",
)  # fmt: skip
_PRELUDE = (
    *(f"from {name} import *" for name in (*_MODULES, "typing", "builtins")),
    *(f"import {name}" for name in _MODULES),
    "sys.setrecursionlimit(50000)",
)
# and what LeetCode's starters expect
_STARTERS = (
    """class ListNode:
    def __init__(self, val=0, next=None):
        self.val = val
        self.next = next
""",
    """class TreeNode:
    def __init__(self, val=0, left=None, right=None):
        self.val = val
        self.left = left
        self.right = right
""",
)
# What a test may expect a program to raise. StopIteration would end a `map` of the test as if every
# call were right.
_EXPECTED = (
    ArithmeticError, AssertionError, AttributeError, IndexError, KeyError, LookupError, NameError,
    NotImplementedError, OverflowError, RecursionError, TypeError, ValueError, ZeroDivisionError,
)  # fmt: skip
_BY_NAME = {kind.__name__: kind for kind in _EXPECTED}
_KINDS = {kind.__name__: kind for kind in (list, tuple, set, frozenset)}
RIGHT = "_is_right"  # the name in tests of the function that calls and compares
_LONGEST_LINE = 2**24  # characters
Value = Any  # an object of a program, or the JSON that stands for it


def run_script(source: str) -> None:
    """Runs a program as `python program.py` would."""
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    _provide(vars(module))
    exec(compile(source, "program.py", "exec"), vars(module))


def _provide(space: dict[str, Value]) -> None:
    """Defines the names that programs use without an import. `site` would define exit and quit."""
    space["__file__"] = "program.py"
    vars(builtins).update(exit=sys.exit, quit=sys.exit)
    for line in (*_PRELUDE, *_STARTERS):
        with suppress(ImportError):  # a program that needs it fails by itself
            exec(line, space)


def answer_requests(source: str, options: types.SimpleNamespace) -> None:
    """Runs the program, then answers requests [operation, target, name, args, kwargs] with ["ok",
    value], or [names of an exception's type and of those above it, text]."""
    module = types.ModuleType("program")
    objects: list[Value] = []
    predefined: dict[str, Value] = {}  # names that are defined before the program runs
    sys.modules["program"] = module
    with (
        open(options.input, encoding="utf-8") as requests,
        open(options.output, "w", encoding="utf-8") as out,
    ):

        def answer(attempt: Callable[[], Value]) -> bool:
            line, raised = tried(lambda: json.dumps(["ok", _encode(attempt(), objects)]))
            if raised is not None:
                names = [kind.__name__ for kind in type(raised).__mro__]
                line = json.dumps([names, str(raised)[:300]])
            out.write(f"{line}\n")
            out.flush()
            return raised is None

        def define() -> None:
            _provide(vars(module))
            predefined.update(vars(module))
            with suppress(SystemExit):  # the definitions before it count
                exec(compile(source, "program.py", "exec"), vars(module))

        if answer(define):
            for line in requests:
                answer(partial(_operate, json.loads(line), vars(module), predefined, objects))


def tried(attempt: Callable[[], Value]) -> tuple[Value, BaseException | None]:
    """Returns the value, or None and the exception: SystemExit too is the result of a call."""
    try:
        return attempt(), None
    except BaseException as exc:
        return None, exc


def _operate(
    request: list[Value],
    space: Mapping[str, Value],
    predefined: Mapping[str, Value],
    objects: list[Value],
) -> Value:
    operation, target, name, args, kwargs = request
    args = _decode(args, objects.__getitem__)
    kwargs = _decode(kwargs, objects.__getitem__)
    match operation:
        case "global":
            if name in space and not (name in predefined and space[name] is predefined[name]):
                return space[name]
            if hasattr(space.get("Solution"), name):
                return getattr(space["Solution"](), name)
            raise NameError(f"the program defines no {name}")
        case "attribute":
            return getattr(objects[target], name)
        case "call":
            return objects[target](*args, **kwargs)
        case "apply":
            value = objects[target](*args)
            # it may have worked in place, as LeetCode asks of some functions
            in_place = value is None and args and isinstance(args[0], list)
            return [value, *(args[:1] if in_place else ())]
        case "list":
            return list(objects[target])
    raise ValueError(f"unknown operation {operation}")


def _encode(value: Value, objects: list[Value] | None) -> Value:
    """Returns plain data as JSON; other values become their index in `objects`."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case complex():
            return {"complex": [value.real, value.imag]}
        case bytes() | bytearray():
            return {"bytes": bytes(value).hex()}
        case list() | tuple() | set() | frozenset():
            kind = next(name for name in _KINDS if isinstance(value, _KINDS[name]))
            return {kind: [_encode(item, objects) for item in value]}
        case dict():
            return {"dict": [[_encode(k, objects), _encode(v, objects)] for k, v in value.items()]}
        case _Remote():
            return {"object": value._number}
    if objects is None:
        raise TypeError(
            f"a {type(value).__name__} cannot be sent to the program; only plain data can"
        )
    objects.append(value)
    return {"object": len(objects) - 1}


def _decode(value: Value, stand_in: Callable[[int], Value]) -> Value:
    """Inverts _encode. stand_in: index -> the local stand-in of that object."""
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    match kind:
        case "object":
            return stand_in(content)
        case "complex":
            return complex(*content)
        case "bytes":
            return bytes.fromhex(content)
        case "dict":
            return {_decode(k, stand_in): _decode(v, stand_in) for k, v in content}
    items = (_decode(item, stand_in) for item in content)
    return _KINDS[kind](items)


class _Remote:
    """Stands for an object of the program. It equals nothing: a comparison would let the program
    judge itself."""

    def __init__(self, ask: Callable[..., Value], number: int):
        vars(self).update(_ask=ask, _number=number)

    def __call__(self, *args: Value, **kwargs: Value) -> Value:
        return self._ask("call", self._number, None, args, kwargs)

    def __getattr__(self, name: str) -> Value:
        return self._ask("attribute", self._number, name)

    def __setattr__(self, name: str, value: Value) -> None:
        self.__getattr__("__setattr__")(name, value)

    def __str__(self) -> str:
        return self.__getattr__("__str__")()

    def __iter__(self) -> Iterator[Value]:
        return iter(self._ask("list", self._number, None))


def run_tests(tests: dict[str, Value], options: types.SimpleNamespace) -> None:
    """Runs each test and writes a line for it: null if it passed, else the reason.

    tests: {"names": requested from the program, "modules": to import, "tests": statements}.
    """
    with (
        open(options.input, encoding="utf-8") as replies,
        open(options.output, "w", encoding="utf-8") as requests,
        open(options.verdicts, "w", encoding="utf-8") as verdicts,
    ):

        def receive() -> Value:
            line = replies.readline(_LONGEST_LINE)
            if not line.endswith("\n"):
                raise EOFError("the program ended" if len(line) < _LONGEST_LINE else "output limit")
            kind, value = json.loads(line)
            if kind != "ok":
                raise _exception(kind, value)
            return value

        def ask(
            operation: str,
            target: int | None,
            name: str | None,
            args: Value = (),
            kwargs: Value = (),
        ) -> Value:
            message = [
                operation,
                target,
                name,
                _encode(list(args), None),
                _encode(dict(kwargs), None),
            ]
            requests.write(json.dumps(message) + "\n")
            requests.flush()
            return _decode(receive(), lambda number: _Remote(ask, number))

        space: dict[str, Value] = {"__name__": "__main__", RIGHT: _is_right}
        space |= {name: importlib.import_module(name) for name in tests["modules"]}
        problem = _problem(receive)
        for name in tests["names"] if problem is None else ():
            space[name] = partial(_undefined, name)  # the tests that call it fail
            with suppress(RuntimeError, *_EXPECTED):
                space[name] = ask("global", None, name)
        for test in tests["tests"]:
            failed = problem or _problem(partial(exec, compile(test, "test", "exec"), space))
            verdicts.write(json.dumps(failed) + "\n")
            verdicts.flush()


def _exception(names: list[str], text: str) -> Exception:
    """Returns what a program raised. names: of its type and of those above it."""
    for name in names:
        if name in _BY_NAME:
            return _BY_NAME[name](text)
    return RuntimeError(f"{names[0]}: {text}")


def _undefined(name: str, *_: Value, **__: Value) -> Value:
    raise NameError(f"the program defines no {name}")


def _is_right(function: Value, case: str, tolerance: float) -> bool:
    """Returns whether a function's result, or what it makes of its first argument, is one of the
    alternatives. case: JSON of [arguments, alternatives]."""
    args, alternatives = json.loads(case)
    if not isinstance(function, _Remote):
        function()  # says that the program does not define it
    value, *changed = function._ask("apply", function._number, None, args)
    # no more: a program could send many guesses
    results = [value, *changed[:1]] if value is None else [value]
    return any(
        _same(result, expected, tolerance) for result in results for expected in alternatives
    )


def _same(value: Value, expected: Value, tolerance: float) -> bool:
    """Returns whether a result equals the expected JSON, which has lists for sequences and sets;
    numbers may differ by the tolerance, relative to an expected float."""
    match expected:
        case list():
            if isinstance(value, _Remote):  # such as a range
                value = list(value)
            if isinstance(value, set | frozenset):
                return len(value) == len(expected) and value == set(map(_frozen, expected))
            if not isinstance(value, list | tuple) or len(value) != len(expected):
                return False
            return all(_same(v, e, tolerance) for v, e in zip(value, expected, strict=True))
        case dict():  # JSON has texts as keys
            if not isinstance(value, dict) or len(value) != len(expected):
                return False
            texts = {key if isinstance(key, str) else json.dumps(key): value[key] for key in value}
            return texts.keys() == expected.keys() and all(
                _same(texts[key], expected[key], tolerance) for key in expected
            )
        case float() | int() if isinstance(value, float | int) and value != expected:
            scale = max(1.0, abs(expected)) if isinstance(expected, float) else 1.0
            return abs(value - expected) <= tolerance * scale < float("inf")
    return bool(value == expected)


def _frozen(value: Value) -> Value:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def _problem(attempt: Callable[[], object]) -> str | None:
    """Returns why a test did not pass, None if it did."""
    _, raised = tried(attempt)
    match raised:
        case None:
            return None
        case AssertionError():
            return f"a wrong result{f': {raised}' if str(raised) else ''}"[:300]
        case RuntimeError() | EOFError():
            return str(raised)[:300] or "an error"  # "" would be no problem
    return f"{type(raised).__name__}: {raised}"[:300]
