"""Functions of the algorithm that a user names, as graders are named: a loss, an estimator, a
filter of groups."""

import hashlib
import inspect
import json
import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field

from megagrpo.config.fields import Section
from megagrpo.system.user_function import check_arguments, load_function

FunctionName = Annotated[str, Field(pattern=r"^.+:\w+$")]
OwnArguments = dict[str, str | int | float | bool]


class OwnFunction(Section):
    """Name a function: `loss: {name: "mine.py:gmpo", args: {...}}`."""

    key: ClassVar[str]  # of the experiment, for messages

    function: FunctionName
    """"package.module:function" or "folder/file.py:function", which is called as function(inputs,
    **args)."""
    args: OwnArguments = Field(default={})
    """Keyword arguments for the function."""

    @property
    def shown_name(self) -> str:
        """What stands for a published name or formula."""
        return self.function

    shown_formula = shown_name

    def load(self) -> Callable[[object], Any]:
        """Returns the function with its arguments. Raises ValueError if it cannot be loaded or
        does not take them."""
        return own_function(self.key, self.function, "inputs", json.dumps(self.args))


@cache
def own_function(key: str, name: str, inputs: str, args: str) -> Callable[..., Any]:
    """Returns a user's function with its keyword arguments (JSON). Raises ValueError as `load`."""
    function = load_function(name, {}, key)
    named = json.loads(args)
    check_arguments(f"{key}.args do not fit", name, function, [inputs], named)
    return partial(function, **named)


def own_digest(key: str, name: str) -> str:
    """Returns a line about a user's function for the record: its name, and the SHA-256 of its
    file, that of its module if it is another callable."""
    function = inspect.unwrap(load_function(name, {}, key))  # not the file of what decorates it
    file: str | None = name.rpartition(":")[0]
    if inspect.isfunction(function):
        file = inspect.getsourcefile(function)
    elif file in sys.modules:  # else it is a file's name
        file = sys.modules[file].__file__
    digest = hashlib.sha256(Path(file).read_bytes()).hexdigest() if file else "unknown"
    return f"{key}: {name}, sha256 {digest}"


def with_names_of_functions(given: object) -> object:
    """Returns an `algorithm` section in which a name with a colon is that of a user's function: reads
    `{name: "mine.py:gmpo"}` as `{name: own, function: "mine.py:gmpo"}`."""
    if not isinstance(given, dict):
        return given
    found = dict(given)
    for key in ("loss", "advantage"):
        section = given.get(key)
        if not isinstance(section, dict):
            continue
        name = section.get("name")
        if isinstance(name, str) and ":" in name:
            found[key] = section | {"name": "own", "function": name}
    return found
