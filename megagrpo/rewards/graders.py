"""Graders by name. A grader is a function `grade(text, answer, **args) -> float`."""

import inspect
from collections.abc import Callable
from typing import Any

from megagrpo.user_function import did_you_mean, load_function

GraderFunction = Callable[..., float]  # (response text, answer of the data file, **reward.args) -> score

BUILT_IN = {  # named by place and not imported here: only `math` should pay for sympy
    "exact": "megagrpo.rewards.format:exact",
    "format": "megagrpo.rewards.format:grade",
    "gsm8k": "megagrpo.rewards.gsm8k:grade",
    "math": "megagrpo.rewards.math:grade",
}


def load_grader(name: str, args: dict[str, Any]) -> GraderFunction:
    """Imports the grader `name`, a built-in or the user's own `package.module:function`, and checks that it takes
    `args`.

    Raises ValueError for an unknown name, a module that cannot be imported, or arguments that the function does not
    take.
    """
    function = load_function(name, BUILT_IN, "reward.grader")
    _check_args(name, function, args)
    return function


def _check_args(name: str, function: GraderFunction, args: dict[str, Any]) -> None:
    signature = inspect.signature(function)
    try:
        signature.bind("text", "answer", **args)
    except TypeError as exc:
        options = [p for p in signature.parameters if p not in ("text", "answer")]
        hints = [did_you_mean(arg, options) for arg in args if arg not in options]
        hint = next(filter(None, hints), f"; it is called as {name}(text, answer, {', '.join(options)})")
        raise ValueError(f"reward.args do not fit grader {name!r}: {exc}{hint}") from exc
