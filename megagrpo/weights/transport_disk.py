"""Through the file system: a checkpoint that every engine reads. The reference transport, and one that needs no process group."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from megagrpo.hf_files import write_hf_folder
from megagrpo.weights.engine_client import EngineConnection

Each = Callable[
    [Callable[[EngineConnection], None]], None
]  # runs a function for every engine that is still alive, in threads


class DiskTransport:
    """`folder` must be visible, under the same path, to the trainer's rank 0 and to every engine."""

    def __init__(self, folder: Path, like: Path, dtype: torch.dtype, device: torch.device):
        self.folder, self.like, self.dtype = folder, like, dtype

    def send(self, version: int, buckets: Iterator[dict[str, Tensor]], each: Each) -> None:
        target = (self.folder / f"v{version}").resolve()
        write_hf_folder(target, buckets, self.like, self.dtype)
        each(lambda engine: engine.post("/update_weights_from_disk", {"model_path": str(target), "flush_cache": False}))
        for old in self.folder.glob("v*"):
            if old.name != target.name:
                shutil.rmtree(old)
