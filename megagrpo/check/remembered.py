"""Remembers what libraries accepted, because to ask them again takes seconds of imports."""

import hashlib
import json
import os
from collections.abc import Iterable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import megagrpo
from megagrpo.system import environment

_LIBRARIES = ("megatron-core", "sglang", "torch", "transformers", "transformer-engine")
_VARIABLES = ("SGLANG_", "CUDA", "TORCH", "PYTORCH", "NVTE_", "HF_")


class Accepted:
    """Whether libraries accepted `question` before: with the same versions, the same megagrpo, the
    same machine and the same variables.

    question: whatever JSON can hold. files: folders whose files are a part of it.
    """

    def __init__(self, question: object, files: Iterable[str] = ()):
        package = Path(megagrpo.__file__).parent
        stamps = [*_stamps(package, "**/*.py")]
        stamps += [stamp for folder in files for stamp in _stamps(Path(folder), "*")]
        installed = [_version(name) for name in _LIBRARIES]
        variables = environment.with_prefixes(_VARIABLES)
        asked = [question, stamps, installed, variables, os.uname()]
        digest = hashlib.sha256(json.dumps(asked, sort_keys=True, default=str).encode())
        self._file = environment.cache_folder() / "accepted" / digest.hexdigest()

    def __bool__(self) -> bool:
        return os.path.isfile(self._file)  # Path's raises in a home of somebody else

    def remember(self) -> None:
        """Remembers it; no effect if the user's cache cannot be written."""
        with suppress(OSError):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._file.touch()


def _stamps(folder: Path, pattern: str) -> list[tuple[str, int, int]]:
    """Returns the name, size and time of change of a folder's files."""
    files = [(str(file), file.stat()) for file in sorted(folder.glob(pattern)) if file.is_file()]
    return [(name, status.st_size, status.st_mtime_ns) for name, status in files]


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
