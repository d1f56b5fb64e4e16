"""Hugging Face checkpoint folders of safetensors: read lazily, written atomically.

Tensors in FP8, INT4 and MXFP4 are read as the bfloat16 tensors that models/stored/files.py shows.
"""

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from math import prod
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import _TYPES, save_file
from torch import Tensor

from megagrpo.models.folder import write_description
from megagrpo.models.stored import mxfp4
from megagrpo.models.stored.files import INDEX, SINGLE, StoredTensors
from megagrpo.models.stored.packed_int4 import unpack_into
from megagrpo.models.stored.quantization import BLOCK_SCALES, BLOCKS, PACKED, SCALE, SCALES
from megagrpo.models.table import has_draft
from megagrpo.system.errors import translated
from megagrpo.system.run_folder import whole_folder
from megagrpo.weights.copies.views import Box

# by safetensors' names; its table lacks the type of MXFP4's scales and may have None for others
_DTYPES = {name: dtype for name, dtype in _TYPES.items() if dtype is not None}
_DTYPES["F8_E8M0"] = torch.float8_e8m0fnu
_FILE_BYTES = 2 << 30
_SECONDS_BETWEEN_LINES = 5.0


class HfFolder(Mapping[str, Tensor]):
    """Maps names to the tensors of an HF checkpoint. A memory map reads them page by page, when they
    are copied.

    A slice of columns also reads the bytes between its pieces, because the node's other
    tensor-parallel ranks then find them in the page cache; reading only the pieces was three times
    slower. Raises ValueError for a missing, unreadable or incomplete checkpoint, naming the file.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.files = files = StoredTensors.read(self.path)
        # name -> shape and dtype, from the headers
        self.specs: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        with translated(f"{self.path}: tensors of an unknown type", KeyError):
            for name, tensor in files.shown.items():
                self.specs[name] = tensor.shape, _DTYPES[tensor.dtype]
        self.bytes_read = 0  # from the files, by `read_into`
        self._opened: dict[Path, safe_open] = {}
        for file in {tensor.file for tensor in files.files.values()}:
            with translated(f"{file}: unreadable", SafetensorError, OSError):
                self._opened[file] = safe_open(file, "pt")

    def __getitem__(self, name: str) -> Tensor:
        if self.files.shown[name] is self.files.files.get(name):  # as it is stored
            return self._stored(name)
        products = torch.empty(self.specs[name][0], dtype=torch.bfloat16)
        self.read_into(products, name, (0,) * products.dim())
        return products

    def read_into(self, target: Tensor, name: str, start: tuple[int, ...]) -> None:
        """Copies the box at `start` with the shape of `target`. FP8 takes additional memory for one
        or two rows of blocks in float32."""
        if name in self.files.fp8:
            self._dequantize(target, name, start)
        elif name in self.files.int4:
            rows = slice(start[0], start[0] + len(target))
            words, scales = self._stored(name + PACKED)[rows], self._stored(name + SCALE)[rows]
            unpack_into(target, words, scales, start[1])
        elif name in self.files.mxfp4:
            blocks = self._stored(name + BLOCKS)
            scales = self._stored(name + BLOCK_SCALES)
            mxfp4.unpack_into(target, blocks, scales, start)
        else:
            target.copy_(self._stored(name)[Box(start, tuple(target.shape)).slices])
        self.bytes_read += self.stored_bytes(name, target.shape)

    def stored_bytes(self, name: str, size: tuple[int, ...]) -> int:
        """Returns the bytes of a box of a tensor in the files, without scales."""
        stored = self.files.shown[name]
        return prod(size) * stored.bytes // prod(stored.shape)

    def _dequantize(self, target: Tensor, name: str, start: tuple[int, ...]) -> None:
        """Computes bfloat16(weight * scale of its block) as SGLang's block_quant_dequant, a row of
        blocks at a time."""
        weight = self._stored(name)
        scales = self._stored(name + SCALES)
        top, left = start
        height, width = self.files.block
        bottom = top + target.shape[0]
        right = left + target.shape[1]
        part = scales[top // height : -(-bottom // height), left // width : -(-right // width)]
        self.bytes_read += part.nbytes
        block_of_column = torch.arange(left, right, device=target.device) // width - left // width
        # [rows of blocks, columns]
        by_column = part.to(target.device, torch.float32)[:, block_of_column]
        for first, scale in zip(range(top - top % height, bottom, height), by_column, strict=True):
            rows = slice(max(first, top), min(first + height, bottom))
            values = weight[rows, left:right].to(target.device).float()
            values *= scale
            target[rows.start - top : rows.stop - top].copy_(values.bfloat16())

    def _stored(self, name: str) -> Tensor:
        tensor = self.files.files[name]
        return self._opened[tensor.file].get_tensor(tensor.name)

    def fingerprint(self) -> str:
        """Returns a digest of all names, shapes, dtypes, and the first elements of every tensor."""
        digest = hashlib.sha256()
        for name, (shape, dtype) in sorted(self.specs.items()):
            own = PACKED * (name in self.files.int4) + BLOCKS * (name in self.files.mxfp4)
            stored = self._stored(name + own)
            part = stored[:1] if len(shape) > 1 else stored.flatten()  # a matrix's first row
            digest.update(
                f"{name} {shape} {dtype}".encode()
                + part.contiguous().view(torch.uint8).numpy().tobytes()
            )
        return digest.hexdigest()[:16]

    def __iter__(self) -> Iterator[str]:
        return iter(self.specs)

    def __len__(self) -> int:
        return len(self.specs)


class ReadingProgress:
    """Prints the progress of reading `total_bytes`, a line every few seconds. A small model gets
    none."""

    def __init__(self, total_bytes: int):
        self._total = total_bytes
        self._started = self._printed = time.monotonic()

    def show(self, bytes_read: int) -> None:
        """Prints a line if the last one is old enough."""
        now = time.monotonic()
        if now - self._printed < _SECONDS_BETWEEN_LINES or not bytes_read:
            return
        self._printed = now
        seconds = now - self._started
        left = seconds * (self._total - bytes_read) / bytes_read
        print(
            f"reading the model: {bytes_read / 1e9:.1f} of {self._total / 1e9:.1f} GB a rank, "
            f"{seconds:.0f} s, {left:.0f} s left",
            flush=True,
        )


def write_hf_folder(
    target: str | Path,
    tensors: Iterator[dict[str, Tensor]],
    like: str | Path,
    dtype: torch.dtype,
    fp8: bool = False,
    finish: Callable[[Path], None] = lambda draft: None,
) -> None:
    """Writes an HF checkpoint. Dicts of `tensors` share a file until it has _FILE_BYTES.

    like: the folder that config.json and the tokenizer files come from. dtype, fp8: only for
    config.json; tensors are written as they are. finish: changes the files before they are
    `target`, which is complete or absent, see whole_folder. Raises OSError (disk full, ...) naming the folder.
    """
    target = Path(target)
    problem = f"cannot write the checkpoint {target}, whose unfinished copy was removed"
    errors = (OSError, SafetensorError)
    with translated(problem, *errors, raised=OSError), whole_folder(target) as draft:
        names = _write_shards(draft, tensors)
        write_description(like, draft, dtype, fp8, has_draft(names))
        finish(draft)


def host_shards(tensors: Iterator[dict[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """Yields copies in host memory, those of a file together."""
    shard = dict[str, Tensor]()
    size = 0
    for bucket in tensors:
        # Separate and contiguous, because safetensors refuses tensors that share memory.
        shard |= {name: t.detach().to("cpu", copy=True).contiguous() for name, t in bucket.items()}
        size += sum(t.nbytes for t in bucket.values())
        if size >= _FILE_BYTES:
            yield shard
            shard = {}
            size = 0
    if shard:
        yield shard


def _write_shards(folder: Path, tensors: Iterator[dict[str, Tensor]]) -> list[str]:
    """Writes the shards, and an index if there are several. Returns the names of all tensors."""
    files: list[tuple[Path, list[str]]] = []
    size = 0
    for shard in host_shards(tensors):
        file = folder / f"shard-{len(files) + 1:05d}.safetensors"
        save_file(shard, file, metadata={"format": "pt"})
        files.append((file, list(shard)))
        size += sum(t.nbytes for t in shard.values())
    if not files:
        raise ValueError(f"no tensors to write to {folder}")
    if len(files) == 1:
        files[0][0].rename(folder / SINGLE)
        return files[0][1]
    file_of: dict[str, str] = {}
    for number, (file, names) in enumerate(files, 1):
        final = file.rename(folder / f"model-{number:05d}-of-{len(files):05d}.safetensors")
        file_of |= dict.fromkeys(names, final.name)
    (folder / INDEX).write_text(
        json.dumps({"metadata": {"total_size": size}, "weight_map": file_of}, indent=1)
    )
    return list(file_of)
