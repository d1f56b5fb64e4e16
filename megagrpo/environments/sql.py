"""The environment `sql`: the model queries a private SQLite database until a query of its tables is
the answer.

A query runs on a read-only copy in memory, for a bounded number of steps of SQLite's machine, some of
which take seconds, and for a bounded processor time.
"""

import re
import sqlite3
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import closing
from typing import Any

from megagrpo.environments.answers import shortened
from megagrpo.rollout.agents import UnusableRow

_ALLOWED = {
    sqlite3.SQLITE_SELECT,
    sqlite3.SQLITE_READ,
    sqlite3.SQLITE_FUNCTION,
    sqlite3.SQLITE_RECURSIVE,
}
# texts, names and comments
_QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"|`[^`]*`|\[[^\[\]]*\]|--[^\n]*|/\*.*?\*/", re.DOTALL)
_FENCE = re.compile(r"\A```(?:(?!(?:select|with|values)\b)\w+\s*\n|sql(?:ite)?\b)?", re.IGNORECASE)
_INNERMOST = re.compile(r"\([^()]*\)")
_ORDER = re.compile(r"\border\s+by\b", re.IGNORECASE)
_TICK = 10  # steps of SQLite's machine between two looks at the budget
_STEP_S = 5e-6  # of processor time for a step, on average
_CPU_S = 5.0  # for a query of few steps
_MAX_PATTERN = 1000  # bytes of LIKE's, whose steps are the product of pattern and text
_MAX_BYTES = 1_000_000  # of one value, a query included
_MAX_RESULT = 16_000_000  # bytes of a query's rows
_FAILURES = (sqlite3.Error, ValueError)  # a ValueError: half a character


def _is_ordered(query: str) -> bool:
    """Returns whether a query itself orders its rows, not one inside it."""
    rest = _QUOTED.sub("", query)
    number = 1
    while number:
        rest, number = _INNERMOST.subn("", rest)
    return _ORDER.search(rest) is not None


class Sql:
    """Text to SQL. A row's `answer` is a query, `extra.database` the statements that make the
    database.

    A query that reads a table is the model's answer. Its reward is 1 if it returns the same rows as
    the query in the data, in any order unless that query orders them. The model sees the results of
    other queries (on the schema, or on no table) and errors, and gets another turn. max_rows: rows
    that it sees. max_chars: the limit for a message. max_steps: steps of SQLite's machine for one
    query.
    """

    def __init__(
        self,
        row: Mapping[str, Any],
        seed: int,
        max_rows: int = 20,
        max_chars: int = 2000,
        max_steps: int = 1_000_000,
    ):
        self._max_rows = max_rows
        self._max_chars = max_chars
        self._max_steps = max_steps
        try:
            with closing(sqlite3.connect(":memory:")) as database:
                database.executescript(row["extra"]["database"])
                self._tables = {
                    name.lower() for (name,) in database.execute("select name from sqlite_master")
                }
                self._image = database.serialize()
            self._ordered = _is_ordered(row["answer"])
            self._expected, _ = self._rows(row["answer"])
        except (*_FAILURES, KeyError, TypeError) as exc:
            raise UnusableRow(f"database or answer: {type(exc).__name__}: {exc}") from exc

    def reset(self) -> None:
        """Leaves the prompt of the data as it is."""

    def step(self, text: str) -> tuple[str | None, float, bool]:
        """Returns rows or an error, and the reward of an answer, which ends the rollout."""
        try:
            # without the fences of a code block around it
            rows, tables = self._rows(_FENCE.sub("", text.strip().removesuffix("```")).strip())
        except _FAILURES as exc:
            return shortened(f"error: {exc}", self._max_chars) + "\n", 0.0, False
        if not tables & self._tables:  # but the schema's, or a query's own
            lines = ["|".join(map(str, row)) for row in rows[: self._max_rows]]
            if len(rows) > self._max_rows:
                lines.append("...")
            return shortened("\n".join(lines), self._max_chars) + "\n", 0.0, False
        same = rows == self._expected
        if not self._ordered:
            same = Counter(rows) == Counter(self._expected)
        return None, float(same), True

    def _rows(self, query: str) -> tuple[list[tuple], set[str]]:
        """Returns the rows of a query and the tables that it reads. Raises _FAILURES."""
        tables: set[str] = set()
        left = self._max_steps // _TICK
        until = time.thread_time() + max(_CPU_S, self._max_steps * _STEP_S)

        def authorize(action: int, name: str | None, *_: object) -> int:
            if action == sqlite3.SQLITE_READ:
                tables.add(str(name).lower())
            if action in _ALLOWED or (action == sqlite3.SQLITE_PRAGMA and name == "table_info"):
                return sqlite3.SQLITE_OK
            return sqlite3.SQLITE_DENY

        def tick() -> bool:
            nonlocal left
            left -= 1
            return left < 0 or time.thread_time() > until

        with closing(sqlite3.connect(":memory:")) as copy:
            copy.deserialize(self._image)
            copy.execute("pragma temp_store = memory")
            copy.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MAX_BYTES)
            copy.setlimit(sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH, _MAX_PATTERN)
            copy.set_authorizer(authorize)
            copy.set_progress_handler(tick, _TICK)
            rows = []
            size = 0
            for row in copy.execute(query):
                rows.append(row)
                size += sum(len(value) if isinstance(value, str | bytes) else 8 for value in row)
                if size > _MAX_RESULT:
                    raise sqlite3.DataError(f"more than {_MAX_RESULT:,} bytes of rows")
            return rows, tables
