"""Groups in one binary file, and how ranks share those of all files.

Token values are arrays, everything else is JSON.
"""

import json
import os
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import msgspec
import numpy as np
from numpy.lib.format import header_data_from_array_1_0, write_array_header_1_0

from megagrpo.mesh import Mesh
from megagrpo.types import Prompt, RolloutGroup

Record = dict[str, Any]  # JSON
# The file has the JSON text under this name, and one flat array per type under the type's name.
_RECORDS = "records"
# the key of a reference to a part of such an array; no data has it by accident
_ARRAY = "\0array"
_LOCATION = "place"  # the key of a prompt's location


def write_groups(path: Path, groups: Sequence[RolloutGroup]) -> None:
    """Writes the groups to a new file, which is on disk when this returns."""
    parts: dict[str, list[np.ndarray]] = {}
    sizes: dict[str, int] = {}

    def reference(array: np.ndarray) -> Record:
        kind = array.dtype.name
        start = sizes.get(kind, 0)
        parts.setdefault(kind, []).append(array.reshape(-1))
        sizes[kind] = start + array.size
        record: Record = {_ARRAY: [kind, start, sizes[kind]]}
        if array.ndim != 1:
            record["shape"] = array.shape
        return record

    def plain(value: object) -> Record:
        if isinstance(value, np.ndarray | np.generic):
            return reference(np.asarray(value))
        record = dict(vars(value))
        if isinstance(value, Prompt):
            record[_LOCATION] = record.pop("location")
            record["extra"] = json.dumps(record["extra"])  # it may contain NaN
        return record

    # not orjson, which writes null for a sum of rewards that is not finite
    records = json.dumps(list(groups), default=plain).encode()
    parts[_RECORDS] = [np.frombuffer(records, np.uint8)]
    with path.open("wb") as file:
        with ZipFile(file, "w") as archive:  # as numpy.savez, but no array is joined in memory
            for name, arrays in parts.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                    header = header_data_from_array_1_0(arrays[0])
                    write_array_header_1_0(entry, header | {"shape": (sum(map(len, arrays)),)})
                    entry.writelines(array.data for array in arrays)
        file.flush()
        os.fsync(file.fileno())


def read_groups(path: Path) -> list[RolloutGroup]:
    """Reads what `write_groups` wrote."""
    with np.load(path, allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files}

    def fetch(record: Record) -> object:
        if _ARRAY not in record:
            return record
        kind, start, end = record[_ARRAY]
        # a view would keep the whole file in memory
        values = arrays[kind][start:end].reshape(record.get("shape", -1)).copy()
        return values if values.ndim else values.item()

    records = json.loads(arrays[_RECORDS].tobytes(), object_hook=fetch)
    for record in records:
        prompt = record["prompt"]
        prompt["location"] = prompt.pop(_LOCATION, "")
        prompt["extra"] = json.loads(prompt["extra"])
    # fields that older checkpoints lack have their defaults, and those that are gone are left out
    return msgspec.convert(records, list[RolloutGroup], dec_hook=lambda kind, value: value)


def saved_groups(folder: Path, name: str, mesh: Mesh, own: bool = False) -> list[RolloutGroup]:
    """Returns the groups of all leaders' files NAME-*.npz in a checkpoint, by id; [] on other ranks
    than leaders, which hold no texts. own: of this leader's file only, because all may take more
    memory than a node has."""
    if not mesh.is_leader:
        return []
    # older checkpoints have one file, without a number
    files = folder.glob(f"{name}-{mesh.dp_rank:05}.npz" if own else f"{name}*.npz")
    groups = chain.from_iterable(map(read_groups, files))
    return sorted(groups, key=lambda group: group.group_id)


def shared_groups(groups: list[RolloutGroup], mesh: Mesh) -> list[RolloutGroup]:
    """Collective. Returns the groups of this replica's leader, as its other ranks need them."""
    others = mesh.from_leader(lambda: [group.for_other_ranks() for group in groups], "deal groups")
    return groups if mesh.is_leader else others
