"""Turns an exception of a library or of a user's code into one message that names the input."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_POINTER = b"version https://git-lfs"  # begins the file that git-lfs has in a large file's place


@contextmanager
def explained(problem: str, hint: Callable[[Exception], str] = lambda exc: "") -> Iterator[None]:
    """Raises ValueError "problem: reason, hint" for any exception inside the block.

    A user's templates, modules and files may raise anything.
    """
    try:
        yield
    except Exception as exc:
        raise ValueError(f"{problem}: {type(exc).__name__}: {exc}{hint(exc)}") from exc


@contextmanager
def collected(problems: list[str] | None) -> Iterator[None]:
    """Adds the text of a ValueError inside the block to `problems`. None: raises it."""
    try:
        yield
    except ValueError as exc:
        if problems is None:
            raise
        problems.append(str(exc))


@contextmanager
def translated(
    problem: str, *errors: type[BaseException], raised: type[Exception] = ValueError
) -> Iterator[None]:
    """Turns these errors inside the block into one `raised`, "problem: reason"."""
    try:
        yield
    except errors as exc:
        raise raised(f"{problem}: {exc}") from exc


def git_lfs_hint(path: Path) -> str:
    """Returns what to do about a file that is a pointer of git-lfs; "" if it is none."""
    with suppress(OSError), path.open("rb") as file:
        if file.read(len(_POINTER)) == _POINTER:
            return f" (a git-lfs pointer: run `git lfs pull` in {path.parent})"
    return ""
