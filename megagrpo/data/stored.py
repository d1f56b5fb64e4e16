"""Prompts on disk: a data set of a million rows takes 8 MB of memory in each process."""

import os
import pickle
import tempfile
from array import array
from collections.abc import Iterable, Sequence

from megagrpo.system.errors import translated
from megagrpo.types import Prompt


class StoredPrompts(Sequence[Prompt]):
    """Prompts in a temporary file without a name, which the system removes with the process.

    In memory a prompt takes about 2 kB, mostly its text, its messages and its token ids.
    """

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the prompts
        self._ends = array("q", [0])

    def extend(self, prompts: Iterable[Prompt]) -> None:
        """Adds prompts. Raises ValueError if the disk is full."""
        folder = tempfile.gettempdir()
        with translated(f"{folder} cannot hold the prompts; set TMPDIR to a larger disk", OSError):
            for prompt in prompts:
                record = pickle.dumps(tuple(vars(prompt).values()), protocol=5)
                self._file.write(record)
                self._ends.append(self._ends[-1] + len(record))
            self._file.flush()

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, index):
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        number = range(len(self))[index]
        start, end = self._ends[number : number + 2]
        # no common position, so several threads may read
        return Prompt(*pickle.loads(os.pread(self._file.fileno(), end - start, start)))
