"""The tensors of a model folder's safetensors files, from the headers: it reads no weights and loads
no torch.

An FP8 tensor X has block scales in `X_scale_inv`; INT4 and MXFP4 are in the tensors of
packed_int4.py and mxfp4.py. All are shown as the bfloat16 tensor of the products. The tensors of a
language model inside another model have the names of a plain language model; DeepSeek-V4's scales,
`Y.scale` of `Y.weight`, have the names that go with the weight's format.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import numpy as np

from megagrpo.models.config_json import HfConfig, text_part
from megagrpo.models.stored.quantization import (
    BLOCK_SCALES,
    BLOCKS,
    INT4_WORD,
    MXFP4_BLOCK,
    PACKED,
    SCALE,
    SCALES,
    SHAPE,
    fp8_block,
    int4_group,
)
from megagrpo.models.table import read_description
from megagrpo.system.errors import git_lfs_hint, translated

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_TEXT_PART = "language_model."  # the prefix of Kimi-K2.5's names
_SCALE = ".scale"  # in place of .weight: DeepSeek-V4's scales
_FP8, _FP4 = "F8_E4M3", "I8"  # two numbers in a byte
_LENGTH_BYTES = 8  # a header's length, at the start of a file
Size = TypeVar("Size")


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file."""

    file: Path
    name: str  # in the file
    dtype: str  # as safetensors names it
    shape: tuple[int, ...]
    start: int  # its first byte in the file
    bytes: int

    def like(self, other: "StoredTensor", rows: int) -> bool:
        """Returns whether another tensor has the same type, shape, and values in about this many
        rows, at equal distances."""
        if (self.dtype, self.shape) != (other.dtype, other.shape):
            return False
        return np.array_equal(self._rows(rows), other._rows(rows))

    def _rows(self, number: int) -> np.ndarray:
        size = self.shape[0]
        shape = (size, self.bytes // size)
        memory = np.memmap(self.file, np.uint8, "r", self.start, shape)
        return memory[:: max(size // number, 1)]


@dataclass(frozen=True)
class StoredTensors:
    """The tensors of a model folder by name, with those in FP8, INT4 and MXFP4 as
    bfloat16.

    files: all tensors, as they are stored. block: rows and columns of FP8 with one scale.
    """

    shown: Mapping[str, StoredTensor]
    files: Mapping[str, StoredTensor]
    fp8: frozenset[str]
    int4: frozenset[str]
    mxfp4: frozenset[str]
    block: tuple[int, int]

    @classmethod
    def read(cls, folder: Path) -> "StoredTensors":
        """Raises ValueError, naming the file, for a missing, unreadable or incomplete folder."""
        if not folder.is_dir():
            raise ValueError(
                f"{folder}: no such folder; expected an HF checkpoint with config.json and *.safetensors"
            )
        files = {tensor.name.removeprefix(_TEXT_PART): tensor for tensor in as_stored(folder)}
        for name in [name for name in files if name.endswith(_SCALE)]:
            weight = name.removesuffix(_SCALE) + ".weight"
            form = files[weight].dtype if weight in files else None
            if form == _FP8:
                files[weight + SCALES] = files.pop(name)
            elif form == _FP4:
                files[weight + BLOCKS] = files.pop(weight)
                files[weight + BLOCK_SCALES] = files.pop(name)
        shown = dict(files)
        block = (1, 1)
        fp8 = frozenset(name for name, tensor in files.items() if tensor.dtype == _FP8)
        if fp8:
            block = _described(folder, fp8_block, min(fp8), "FP8")
        for name in fp8:
            _show_dequantized(folder, shown, name, block)
        packed = ".weight" + PACKED
        int4 = frozenset(name.removesuffix(PACKED) for name in files if name.endswith(packed))
        if int4:
            group = _described(folder, int4_group, min(int4), "INT4")
            for name in int4:
                _show_unpacked(folder, shown, name, group)
        mxfp4 = frozenset(name.removesuffix(BLOCKS) for name in files if name.endswith(BLOCKS))
        for name in mxfp4:
            _show_blocks(folder, shown, name)
        return cls(shown, files, fp8, int4, mxfp4, block)


def as_stored(folder: Path) -> Iterator[StoredTensor]:
    """Yields the tensors of a folder's files, in any form. Raises ValueError as `StoredTensors.read`
    does for a missing, unreadable or incomplete one."""
    for file, names in _names_by_file(folder).items():
        yield from _listed(folder / file, names)


def _names_by_file(folder: Path) -> dict[str, list[str]]:
    """Returns the tensors that the index lists in each file; [] means all tensors of the file."""
    index = folder / INDEX
    if index.exists():
        names: dict[str, list[str]] = {}
        errors = (ValueError, KeyError, TypeError, AttributeError)  # JSON of another kind, too
        with translated(f"{index}: not a safetensors index{git_lfs_hint(index)}", *errors):
            for name, file in json.loads(index.read_text())["weight_map"].items():
                names.setdefault(file, []).append(name)
        return names
    if (folder / SINGLE).exists():
        return {SINGLE: []}
    raise ValueError(
        f"{folder}: has neither {SINGLE} nor {INDEX}; only safetensors checkpoints are read"
    )


def _listed(path: Path, names: list[str]) -> Iterator[StoredTensor]:
    """Yields the tensors of a file that the index lists there."""
    if not path.exists():
        raise ValueError(f"{path}: missing, but {INDEX} names it: the download is incomplete")
    tensors = {tensor.name: tensor for tensor in _tensors(path)}
    if missing := set(names) - tensors.keys():
        raise ValueError(f"{path}: lacks {min(missing)} ({len(missing)} in all) that {INDEX} names")
    yield from (tensors[name] for name in names or tensors)


def _tensors(path: Path) -> list[StoredTensor]:
    """Returns the tensors of a file, which has all their bytes."""
    problem = f"{path}: unreadable or cut short{git_lfs_hint(path)}"
    with translated(problem, OSError, ValueError, KeyError, TypeError), path.open("rb") as file:
        size = path.stat().st_size
        start = int.from_bytes(file.read(_LENGTH_BYTES), "little") + _LENGTH_BYTES
        if start > size:
            raise ValueError(f"its header has {start} bytes, the file {size}")
        header = json.loads(file.read(start - _LENGTH_BYTES))
        header.pop("__metadata__", None)
        found = []
        for name, entry in header.items():
            first, end = entry["data_offsets"]
            shape = tuple(entry["shape"])
            found.append(
                StoredTensor(path, name, entry["dtype"], shape, start + first, end - first)
            )
        end = max((tensor.start + tensor.bytes for tensor in found), default=start)
        if end > size:
            raise ValueError(f"its tensors need {end} bytes, the file has {size}")
    return found


def _described(
    folder: Path, read: Callable[[HfConfig], Size | None], tensor: str, form: str
) -> Size:
    """Returns config.json's value for the elements that share a scale."""
    description = folder / "config.json"
    with translated(str(description), ValueError):
        if size := read(text_part(read_description(description))):
            return size
    raise ValueError(
        f"{folder}: tensor {tensor} is in {form}, but config.json has no "
        "quantization_config for it, which names the elements that share a scale"
    )


def _show_dequantized(
    folder: Path, shown: dict[str, StoredTensor], name: str, block: tuple[int, int]
) -> None:
    """Shows an FP8 tensor as the products, and hides the scales."""
    shape = shown[name].shape
    scales = shown.pop(name + SCALES, None)
    expected = tuple(-(-size // part) for size, part in zip(shape, block, strict=False))
    if len(shape) != 2 or scales is None or scales.shape != expected or "F" not in scales.dtype:
        raise ValueError(
            f"{folder}: tensor {name} {shape} in FP8 needs scales {name}{SCALES} of shape "
            f"{expected}, one for each block of {block}; the files have {scales.shape if scales else 'none'}"
        )
    shown[name] = replace(shown[name], dtype="BF16")


def _show_unpacked(folder: Path, shown: dict[str, StoredTensor], name: str, group: int) -> None:
    """Shows an INT4 tensor as the products, and hides the words and scales."""
    stored = shown.pop(name + PACKED)
    scales = shown.pop(name + SCALE, None)
    shown.pop(name + SHAPE, None)
    rows, columns = stored.shape[0], stored.shape[1] * INT4_WORD
    if scales is None or scales.shape != (rows, columns // group) or columns % group:
        raise ValueError(
            f"{folder}: tensor {name} [{rows}, {columns}] in INT4 needs a scale for "
            f"each {group} columns in {name}{SCALE}; the files have {scales.shape if scales else 'none'}"
        )
    shown[name] = replace(stored, dtype="BF16", shape=(rows, columns))


def _show_blocks(folder: Path, shown: dict[str, StoredTensor], name: str) -> None:
    """Shows an MXFP4 tensor as the products, and hides blocks and scales."""
    stored = shown.pop(name + BLOCKS)
    scales = shown.pop(name + BLOCK_SCALES, None)
    shape: tuple[int, ...] = ()
    expected: tuple[float, ...] = stored.shape[:-1]
    if stored.dtype == _FP4:  # a matrix
        rows, width = stored.shape
        shape = (rows, 2 * width)
        expected = (rows, 2 * width / MXFP4_BLOCK)
    elif stored.shape[3:] == (MXFP4_BLOCK // 2,):  # a layer's experts, inputs before outputs
        experts, outputs, blocks = stored.shape[:3]
        shape = (experts, blocks * MXFP4_BLOCK, outputs)
    if (
        not shape
        or scales is None
        or scales.shape != expected
        or scales.bytes * MXFP4_BLOCK != 2 * stored.bytes
    ):
        raise ValueError(
            f"{folder}: tensor {name}{BLOCKS} {stored.shape} in MXFP4 needs blocks of 16 bytes and a "
            f"scale for each, of a byte, in {name}{BLOCK_SCALES}; the files have "
            f"{scales and (scales.dtype, scales.shape)}"
        )
    shown[name] = replace(stored, dtype="BF16", shape=shape)
