"""Which function a grader's name stands for: `grade(text, answer, **args) -> float`."""

import difflib
import importlib
import inspect
from collections.abc import Callable

Grader = Callable[..., float]

BUILT_IN = {  # by name and not imported here: only `math` should pay for sympy
    "exact": "megagrpo.rewards.format:exact",
    "format": "megagrpo.rewards.format:grade",
    "gsm8k": "megagrpo.rewards.gsm8k:grade",
    "math": "megagrpo.rewards.math:grade",
}


def load_grader(name: str, args: dict) -> Grader:
    """Import the grader and check that it takes `args`.

    Raises ValueError for an unknown name, a module that cannot be imported, or arguments that the function does not take.
    """
    place = BUILT_IN.get(name, name)
    module_name, colon, function_name = place.partition(":")
    if not colon:
        near = difflib.get_close_matches(name, BUILT_IN, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(BUILT_IN)}"
        raise ValueError(f"reward.grader {name!r} is unknown; {hint} (your own is written package.module:function)")
    try:
        module = importlib.import_module(module_name)
    except Exception as exc:
        hint = "; is its folder on PYTHONPATH?" if isinstance(exc, ModuleNotFoundError) else ""
        raise ValueError(
            f"reward.grader {name!r}: importing {module_name} failed: {type(exc).__name__}: {exc}{hint}"
        ) from exc
    function = getattr(module, function_name, None)
    if not callable(function):
        near = difflib.get_close_matches(function_name, dir(module), n=1)
        raise ValueError(f"reward.grader {name!r}: {module_name} has no function {function_name}{_did_you_mean(near)}")
    _check_args(name, function, args)
    return function


def _check_args(name: str, function: Grader, args: dict) -> None:
    signature = inspect.signature(function)
    try:
        signature.bind("text", "answer", **args)
    except TypeError as exc:
        options = [p for p in signature.parameters if p not in ("text", "answer")]
        near = [m for a in args if a not in options for m in difflib.get_close_matches(a, options, n=1)]
        hint = _did_you_mean(near) or f"; it is called as {name}(text, answer, {', '.join(options)})"
        raise ValueError(f"reward.args do not fit grader {name!r}: {exc}{hint}") from exc


def _did_you_mean(near: list[str]) -> str:
    return f"; did you mean {near[0]!r}?" if near else ""
