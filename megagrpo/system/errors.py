"""Turns what a library or a user's code raises about the user's input into one message that names
the input."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def explained(problem: str, hint: Callable[[Exception], str] = lambda exc: "") -> Iterator[None]:
    """Raises ValueError "problem: reason, hint" for any exception inside the block.

    Templates, modules and files of a user raise anything.
    """
    try:
        yield
    except Exception as exc:
        raise ValueError(f"{problem}: {type(exc).__name__}: {exc}{hint(exc)}") from exc


@contextmanager
def collected(problems: list[str] | None) -> Iterator[None]:
    """Adds the text of a ValueError inside to `problems`; None: it is raised."""
    try:
        yield
    except ValueError as exc:
        if problems is None:
            raise
        problems.append(str(exc))


@contextmanager
def translated(
    what: str, *errors: type[Exception], raised: type[Exception] = ValueError
) -> Iterator[None]:
    """Turns these errors inside into one "what: reason"."""
    try:
        yield
    except errors as exc:
        raise raised(f"{what}: {exc}") from exc
