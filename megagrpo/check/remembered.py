"""Remembers what libraries accepted, because to ask them again takes seconds of imports."""

import hashlib
import json
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from megagrpo.system import environment

_SOURCES = ("megagrpo", "megatron", "sglang")
_VARIABLES = ("SGLANG_", "CUDA", "TORCH", "PYTORCH", "NVTE_", "HF_")


class Accepted:
    """Tells whether libraries accepted `question` before: with the same installed packages, source of
    these libraries and of megagrpo, machine and variables.

    question: whatever JSON can hold. The files and folders that it names are a part of it.
    """

    def __init__(self, question: object):
        stamps = [stamp for path in sorted(set(_paths(question))) for stamp in _stamps(path, "*")]
        variables = environment.with_prefixes(_VARIABLES)
        asked = [question, stamps, _installed(tuple(sys.path)), variables, os.uname()]
        digest = hashlib.sha256(json.dumps(asked, sort_keys=True, default=str).encode())
        self._file = environment.cache_folder() / "accepted" / digest.hexdigest()

    def __bool__(self) -> bool:
        return os.path.isfile(self._file)  # Path.is_file raises in another user's home

    def remember(self) -> None:
        """Remembers it; no effect if the user's cache cannot be written."""
        with suppress(OSError):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._file.touch()


def _paths(value: object) -> Iterator[Path]:
    """Yields the files and folders that a value names."""
    if isinstance(value, str):
        words = value, value.partition("=")[2]
        yield from map(Path, filter(os.path.exists, words))  # no error for a text that is too long
    elif isinstance(value, dict | list | tuple):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _paths(part)


def _stamps(root: Path, pattern: str) -> list[tuple[str, int, int]]:
    """Returns the name, size and time of change of a file, or of a folder's files."""
    files = [root] if root.is_file() else sorted(root.glob(pattern))
    stats = [(str(file), file.stat()) for file in files if file.is_file()]
    return [(name, status.st_size, status.st_mtime_ns) for name, status in stats]


@cache
def _installed(path: tuple[str, ...]) -> list[object]:
    """Returns the names and versions of packages, and stamps of the source of megagrpo and of the
    libraries that are asked: a checkout or a changed file keeps its version. path: sys.path."""
    packages = sorted(info.name for place in path for info in Path(place).glob("*.dist-info"))
    specs = filter(None, map(find_spec, _SOURCES))
    places = sorted(place for spec in specs for place in spec.submodule_search_locations or ())
    return [sys.version, packages, [_stamps(Path(place), "**/*.py") for place in places]]
