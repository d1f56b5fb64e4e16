"""Loads functions named in an experiment: a built-in by its short name, a user's own as
`package.module:function`.

A module may also be a file, `folder/file.py:function`.
"""

import difflib
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from megagrpo.system.errors import explained, translated


def load_function(name: str, built_in: Mapping[str, str], key: str) -> Callable[..., Any]:
    """Imports and returns the function `name`.

    built_in: short name -> "package.module:function". key: the configuration key that holds the
    name, for messages. Raises ValueError for an unknown short name, a module that cannot be
    imported, and a function that the module lacks.
    """
    module_name, colon, function_name = built_in.get(name, name).rpartition(":")
    if not colon:
        hint = did_you_mean(name, built_in) or f"; known: {', '.join(built_in)}"
        raise ValueError(
            f"{key} {name!r} is unknown{hint} (your own is written "
            "package.module:function, or file.py:function)"
        )
    hints = {
        ModuleNotFoundError: "; is its folder on PYTHONPATH?",
        FileNotFoundError: "; paths begin in the folder where megagrpo starts",
    }
    if Path(f"{module_name}.py").is_file():
        hints[ModuleNotFoundError] = f"; write {module_name}.py:{function_name}"
    with (
        explained(
            f"{key} {name!r}: importing {module_name} failed",
            lambda exc: hints.get(type(exc), ""),
        ),
        translated("it calls sys.exit", SystemExit, raised=ImportError),
    ):
        if module_name.endswith(".py"):
            module = _from_file(Path(module_name).resolve())
        else:
            module = importlib.import_module(module_name)
        function = getattr(module, function_name, None)  # also what a module imports when asked
    if not callable(function):
        functions = [word for word, value in vars(module).items() if callable(value)]
        hint = did_you_mean(function_name, functions)
        if function is not None:
            hint = f"; it is of type {type(function).__name__}{hint}"
        raise ValueError(f"{key} {name!r}: {module_name} has no function {function_name}{hint}")
    return function


def check_arguments(
    misfit: str,
    name: str,
    function: Callable[..., object],
    inputs: Sequence[str],
    args: Mapping[str, object],
    named: Sequence[str] = (),
) -> None:
    """Raises ValueError if a function cannot be called with its inputs and the user's `args`.

    misfit: the start of the message, before the function's name: "reward.args do not fit grader".
    inputs, named: the names of its positional inputs, and of its keyword inputs.
    """
    signature = inspect.signature(function)
    try:
        signature.bind(*inputs, **dict.fromkeys(named), **args)
    except TypeError as exc:
        options = [word for word in signature.parameters if word not in (*inputs, *named)]
        hints = [did_you_mean(arg, options) for arg in args if arg not in options]
        called = f"{name}({', '.join([*inputs, *options])})"
        hint = next(filter(None, hints), f"; it is called as {called}")
        raise ValueError(f"{misfit} {name!r}: {exc}{hint}") from exc


@cache
def _from_file(path: Path) -> ModuleType:
    """Loads a file once per process, and registers the module for dataclasses and pickle, under a
    name that no library has: a user may call the file sympy.py."""
    name = re.sub(r"\W", "_", str(path))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, "the name ends in .py"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    with ExitStack() as on_failure:
        on_failure.callback(sys.modules.pop, name)
        spec.loader.exec_module(module)
        on_failure.pop_all()
    return module


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Returns "; did you mean 'x'?" for the known word nearest to `word`, or "" if none is near."""
    for nearest in difflib.get_close_matches(word, list(known), n=1):
        return f"; did you mean {nearest!r}?"
    return ""
