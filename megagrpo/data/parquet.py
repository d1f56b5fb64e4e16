"""Reads parquet files: rows as Python objects, with times as texts and short floats by their digits."""

from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pyarrow
import pyarrow.parquet
from pyarrow import types

from megagrpo.config.fields import repeated
from megagrpo.system.errors import explained

_ROWS_AT_ONCE = 256  # they may hold images
_BYTES_AT_ONCE = 2**16  # of each column


def parquet_rows(path: Path) -> Iterator[tuple[int, object]]:
    """Yields rows with the number of rows before each. Raises ValueError with the file."""
    # Without a buffer it would read whole row groups: a file may consist of a single one.
    # also a page that is damaged, behind a readable footer
    with (
        explained(f"{path}: not a readable parquet file"),
        pyarrow.parquet.ParquetFile(path, pre_buffer=False, buffer_size=_BYTES_AT_ONCE) as file,
    ):
        fields = file.schema_arrow
        if doubled := repeated(fields.names):
            raise ValueError(f"two columns are called {doubled[0]!r}")
        texts, values = (
            pyarrow.schema(_read_as(pyarrow.struct(fields), floats))
            for floats in (pyarrow.string(), pyarrow.float64())
        )
        batches = file.iter_batches(batch_size=_ROWS_AT_ONCE)
        rows = (
            batch.cast(texts).cast(values).to_pylist(maps_as_pydicts="strict") for batch in batches
        )
        yield from enumerate(chain.from_iterable(rows))


def _read_as(kind: pyarrow.DataType, floats: pyarrow.DataType) -> pyarrow.DataType:
    """Returns the type of a column, or inside one, as rows have it: times are texts, because Python
    has no nanoseconds and no year 10000. floats: of numbers of 32 bits, which have the digits of
    their text: 0.1 is no 0.10000000149011612."""
    if types.is_temporal(kind) or types.is_null(kind):  # a cast to null loses rows in lists
        return pyarrow.string()
    if types.is_float32(kind):
        return floats
    if types.is_struct(kind):
        return pyarrow.struct([(part.name, _read_as(part.type, floats)) for part in kind])
    if types.is_map(kind):
        return pyarrow.map_(_read_as(kind.key_type, floats), _read_as(kind.item_type, floats))
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return pyarrow.list_(_read_as(kind.value_type, floats))
    return kind
