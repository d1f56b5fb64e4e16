"""Groups in one binary file: token values as arrays, everything else as JSON; and how ranks gather
and share those of a file."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import numpy as np
from numpy.lib.format import header_data_from_array_1_0, write_array_header_1_0

from megagrpo.mesh import Mesh
from megagrpo.system.run_folder import json_bytes
from megagrpo.types import ImageRef, Outcome, Prompt, RolloutGroup, Sample, TeacherScores

Record = dict[str, Any]  # JSON
# in the file: the JSON text; in addition one flat array per type, named after the type
_RECORDS = "records"
# in the file: the key of a reference to a part of such an array, which no data has by accident
_ARRAY = "\0array"
_LOCATION = "place"  # in the file: a prompt's location


def write_groups(path: Path, groups: Sequence[RolloutGroup]) -> None:
    """Writes the groups to a new file, on disk when this returns."""
    parts: dict[str, list[np.ndarray]] = {}
    sizes: dict[str, int] = {}

    def reference(array: np.ndarray) -> Record:
        kind = array.dtype.name
        start = sizes.get(kind, 0)
        parts.setdefault(kind, []).append(array.reshape(-1))
        sizes[kind] = start + array.size
        return {
            _ARRAY: [kind, start, sizes[kind]],
            **({"shape": array.shape} if array.ndim != 1 else {}),
        }

    def plain(value: object) -> Record:
        if isinstance(value, np.ndarray | np.generic):
            return reference(np.asarray(value))
        record = dict(vars(value))
        if isinstance(value, Prompt):
            record[_LOCATION] = record.pop("location")
            record["extra"] = json.dumps(record["extra"])  # the data's, which may have NaN in it
        return record

    records = json_bytes(list(groups), plain)
    parts[_RECORDS] = [np.frombuffer(records, np.uint8)]
    with path.open("wb") as file:
        with ZipFile(file, "w") as archive:  # as numpy.savez does, which needs each array in one
            for name, found in parts.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                    of_whole = header_data_from_array_1_0(found[0])
                    write_array_header_1_0(entry, of_whole | {"shape": (sum(map(len, found)),)})
                    entry.writelines(array.data for array in found)
        file.flush()
        os.fsync(file.fileno())


def read_groups(path: Path) -> list[RolloutGroup]:
    """Reads what `write_groups` wrote."""
    with np.load(path, allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files}

    def fetch(record: Record) -> Record | np.ndarray:
        if _ARRAY not in record:
            return record
        kind, start, end = record[_ARRAY]
        return arrays[kind][start:end].reshape(record.get("shape", -1))

    return [_group(record) for record in json.loads(arrays[_RECORDS].tobytes(), object_hook=fetch)]


def _group(record: Record) -> RolloutGroup:
    greedy = record["greedy"]
    greedy_outcome = record["greedy_outcome"]
    prompt = record["prompt"]
    location = prompt.pop(_LOCATION, "")
    prompt.pop("question", None)  # of older checkpoints
    extra = json.loads(prompt.pop("extra"))
    images = tuple(
        ImageRef(image["key"], image["start"], tuple(image["grid"]))
        for image in prompt.pop("images", ())
    )
    teachers = tuple((name, weight) for name, weight in prompt.pop("teachers", ()))
    return RolloutGroup(
        group_id=record["group_id"],
        prompt=Prompt(**prompt, location=location, extra=extra, images=images, teachers=teachers),
        samples=tuple(map(_sample, record["samples"])),
        outcomes=tuple(map(_outcome, record["outcomes"])),
        greedy=None if greedy is None else _sample(greedy),
        greedy_outcome=None if greedy_outcome is None else _outcome(greedy_outcome),
    )


def _sample(record: Record) -> Sample:
    scores = record.pop("teacher", None)  # there is none in older checkpoints
    teacher = None if scores is None else TeacherScores(**scores)
    return Sample(**{**record, "newer": tuple(map(tuple, record["newer"])), "teacher": teacher})


def _outcome(record: Record) -> Outcome:
    parts = {name: _outcome(part) for name, part in record["parts"].items()}
    token_rewards = tuple((index, reward) for index, reward in record["token_rewards"])
    turn_rewards = tuple(record["turn_rewards"])
    return Outcome(
        **{**record, "parts": parts, "token_rewards": token_rewards, "turn_rewards": turn_rewards}
    )


def gather_surplus(surplus: Sequence[RolloutGroup], mesh: Mesh) -> list[RolloutGroup]:
    """Collective over data-parallel ranks. Returns all ranks' surplus by id, on the main rank, for
    a checkpoint."""
    everyone = [group for part in mesh.gather_dp_to_main(list(surplus)) for group in part]
    return sorted(everyone, key=lambda group: group.group_id)


def deal_surplus(surplus: Sequence[RolloutGroup], mesh: Mesh) -> list[RolloutGroup]:
    """Returns this rank's share of a whole surplus, for any number of ranks."""
    first, last = (len(surplus) * rank // mesh.dp_size for rank in (mesh.dp_rank, mesh.dp_rank + 1))
    return list(surplus[first:last])
