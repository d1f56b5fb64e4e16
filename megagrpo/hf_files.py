"""HF checkpoint folders, read lazily and written atomically: one file or shards with an index, always safetensors."""

import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth"}
_SECONDS_BETWEEN_LINES, _BAR_WIDTH = 5.0, 24
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class HfFolder(Mapping[str, Tensor]):
    """Maps names to the tensors of an HF checkpoint, read through a memory map: page by page, when they are copied.

    A slice of rows reads its own pages. A slice of columns also brings in what lies between its pieces, which the
    node's other tensor-parallel ranks then find in memory; reading the pieces alone was three times slower.
    Raises ValueError for a missing, unreadable or incomplete checkpoint, naming the file.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        if not self.path.is_dir():
            raise ValueError(
                f"{self.path}: no such folder; expected an HF checkpoint with config.json and *.safetensors"
            )
        self.specs: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}  # name -> shape and dtype, from the headers
        self._handles: dict[str, safe_open] = {}  # by the names of the tensors; those of one file share a handle
        for file, names in self._names_by_file().items():
            self._read_header(self.path / file, names)

    def _names_by_file(self) -> dict[str, list[str]]:
        """Returns which tensors the index wants from which file; an empty list means all that are there."""
        index = self.path / INDEX
        if index.exists():
            try:
                places = json.loads(index.read_text())["weight_map"]
            except (json.JSONDecodeError, KeyError, UnicodeDecodeError) as exc:
                raise ValueError(f"{index}: not a safetensors index ({type(exc).__name__}: {exc})") from None
            names: dict[str, list[str]] = {}
            for name, file in places.items():
                names.setdefault(file, []).append(name)
            return names
        if (self.path / SINGLE).exists():
            return {SINGLE: []}
        raise ValueError(f"{self.path}: neither {SINGLE} nor {INDEX} is there; only safetensors checkpoints are read")

    def _read_header(self, path: Path, names: list[str]) -> None:
        if not path.exists():
            raise ValueError(f"{path}: missing, but {INDEX} names it")
        try:
            handle = safe_open(path, "pt")
        except (SafetensorError, OSError) as exc:
            raise ValueError(f"{path}: unreadable or cut short ({exc})") from None
        missing = set(names) - set(handle.keys())
        if missing:
            raise ValueError(f"{path}: lacks {min(missing)} ({len(missing)} in all) that {INDEX} names")
        for name in names or handle.keys():
            part = handle.get_slice(name)
            if part.get_dtype() not in _DTYPES:
                raise ValueError(f"{path}: tensor {name} has dtype {part.get_dtype()}, which is not supported")
            self.specs[name] = (tuple(part.get_shape()), _DTYPES[part.get_dtype()])
            self._handles[name] = handle

    def __getitem__(self, name: str) -> Tensor:
        return self._handles[name].get_tensor(name)

    def fingerprint(self) -> str:
        """Returns what tells these weights from others: a digest of names, shapes, dtypes, and of every tensor's
        beginning.
        """
        digest = hashlib.sha256()
        for name, (shape, dtype) in sorted(self.specs.items()):
            part = self._handles[name].get_slice(name)[: 1 if len(shape) > 1 else None]  # a matrix's first row
            digest.update(f"{name} {shape} {dtype}".encode() + part.contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()[:16]

    def __iter__(self) -> Iterator[str]:
        return iter(self.specs)

    def __len__(self) -> int:
        return len(self.specs)


class ReadingProgress(Mapping[str, Tensor]):
    """Passes tensors on and says how far the reading is: a line every few seconds, so none for a small model.

    num_bytes: what this reader wants of each tensor. shown: whether to print; `bytes_read` is counted either way.
    """

    def __init__(self, tensors: Mapping[str, Tensor], num_bytes: Mapping[str, int], shown: bool):
        self._tensors, self._left, self._shown = tensors, dict(num_bytes), shown
        self._total = sum(num_bytes.values())
        self._started = self._told = time.monotonic()
        self.bytes_read = 0

    def __getitem__(self, name: str) -> Tensor:
        now = time.monotonic()
        if self._shown and now - self._told >= _SECONDS_BETWEEN_LINES:  # what was asked for before has been read
            self._told = now
            print(self._line(now - self._started), flush=True)
        self.bytes_read += self._left.pop(name, 0)
        return self._tensors[name]

    def _line(self, seconds: float) -> str:
        done = self.bytes_read / self._total if self._total else 1.0
        bar = "#" * int(done * _BAR_WIDTH)
        left = seconds / done - seconds if done else 0.0
        return (
            f"reading the model [{bar:-<{_BAR_WIDTH}}] {self.bytes_read / 1e9:.1f} of {self._total / 1e9:.1f} GB "
            f"a rank, {seconds:.0f} s, {left:.0f} s left"
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def write_hf_folder(
    target: str | Path, tensors: Iterator[dict[str, Tensor]], like: str | Path, dtype: torch.dtype
) -> int:
    """Writes an HF checkpoint, one shard per dict of `tensors`; config.json and tokenizer files come from `like`.

    dtype: what config.json will say. The tensors are written in the dtypes that they have.

    The folder is written beside `target` and renamed when it is complete and on disk: `target` is whole or absent,
    and an older one is replaced. Returns the bytes of all tensors. Raises OSError (disk full, ...) naming the folder,
    after removing what was written.
    """
    target, like = Path(target), Path(like)
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        size = _write_shards(partial, tensors)
        _copy_description(like, partial, dtype)
        for file in partial.iterdir():
            _sync(file)
        _sync(partial)
        older = target.with_name(f".{target.name}.older")
        shutil.rmtree(older, ignore_errors=True)
        if target.exists():
            target.rename(older)
        partial.rename(target)
        _sync(target.parent)
        shutil.rmtree(older, ignore_errors=True)
    except BaseException as exc:
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(exc, OSError | SafetensorError):
            raise OSError(f"cannot write the checkpoint {target}: {exc}; the unfinished copy was removed") from exc
        raise
    return size


def _write_shards(folder: Path, tensors: Iterator[dict[str, Tensor]]) -> int:
    """Writes the shards, and the index if there are several; returns the bytes of all tensors."""
    files: list[tuple[Path, list[str]]] = []
    places: dict[str, str] = {}
    size = 0
    for shard in tensors:
        if not shard:
            continue
        # A contiguous CPU copy of its own: safetensors refuses tensors that share memory.
        shard = {name: t.detach().to("cpu", copy=True).contiguous() for name, t in shard.items()}
        file = folder / f"shard-{len(files) + 1:05d}.safetensors"
        save_file(shard, file, metadata={"format": "pt"})
        files.append((file, list(shard)))
        size += sum(t.numel() * t.element_size() for t in shard.values())
    if not files:
        raise ValueError(f"no tensors to write to {folder}")
    if len(files) == 1:
        files[0][0].rename(folder / SINGLE)
        return size
    for number, (file, names) in enumerate(files, 1):
        final = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        file.rename(folder / final)
        places |= dict.fromkeys(names, final)
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": size}, "weight_map": places}, indent=1))
    return size


def _copy_description(like: Path, folder: Path, dtype: torch.dtype) -> None:
    """Writes config.json with the dtype of the weights, and copies what is no weight (tokenizer, settings)."""
    if not (like / "config.json").exists():
        raise ValueError(f"{like / 'config.json'}: missing; it describes the checkpoint to be written")
    for file in like.iterdir():
        weights = file.suffix in _WEIGHT_SUFFIXES or file.name.endswith(".index.json")
        if file.is_file() and not weights:
            shutil.copyfile(file, folder / file.name)
    config = json.loads((like / "config.json").read_text())
    for key in {"dtype", "torch_dtype"} & config.keys() or {"dtype"}:
        config[key] = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _sync(path: Path) -> None:
    """Brings a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
