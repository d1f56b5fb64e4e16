"""A Hugging Face model folder: its config.json is read once and handed down, and written for
weights that are exported."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from megagrpo.config.schema import ExperimentConfig
from megagrpo.models.architecture import Architecture
from megagrpo.models.config_json import HfConfig
from megagrpo.models.stored.quantization import fp8_config
from megagrpo.models.table import architecture_of, exported_config, read_description

if TYPE_CHECKING:  # seconds to import
    import torch

_WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth"}


@dataclass(frozen=True)
class Model:
    """A model folder: its paths, its config.json, and the architecture that this describes."""

    folder: Path
    tokenizer_folder: Path
    description: HfConfig  # the values of config.json
    draft: bool  # its multi-token-prediction layer is loaded, too

    @classmethod
    def read(
        cls, folder: str | Path, tokenizer: str | Path | None = None, draft: bool = False
    ) -> Model:
        """Reads config.json of a folder. Raises ValueError, naming the file, if it is missing or
        not JSON.

        tokenizer: another folder with the tokenizer.
        """
        path = Path(folder) / "config.json"
        if not path.is_file():
            raise ValueError(
                f"{path} does not exist; model.path must be a Hugging Face model "
                "folder with a config.json"
            )
        return cls(Path(folder), Path(tokenizer or folder), read_description(path), draft)

    @classmethod
    def of(cls, config: ExperimentConfig) -> Model:
        """Reads the model of an experiment. Raises ValueError as `read` does."""
        return cls.read(config.model.path, config.model.tokenizer, config.actor.has_draft)

    @cached_property
    def arch(self) -> Architecture:
        """Returns the architecture. Raises ValueError, naming the file, with every problem."""
        return architecture_of(self.description, self.draft, f"{self.folder / 'config.json'}: ")

    @property
    def sees_images(self) -> bool:
        """Tells whether it is a vision-language model, of which more than the text part is
        loaded."""
        return "vision_config" in self.description and self.arch.vision is not None


def write_description(
    like: str | Path,
    target: str | Path,
    dtype: torch.dtype | None = None,
    fp8: bool = False,
    draft: bool = False,
) -> None:
    """Copies all but the weights of an HF folder (tokenizer, settings) into another; config.json
    without quantization.

    dtype: of the weights, for config.json. fp8: which then says FP8 in blocks. draft: whether the
    weights have one. Raises ValueError if `like` has no config.json.
    """
    like = Path(like)
    folder = Path(target)
    if not (like / "config.json").exists():
        raise ValueError(
            f"{like / 'config.json'}: missing; it describes the checkpoint to be written"
        )
    folder.mkdir(parents=True, exist_ok=True)
    for file in like.iterdir():
        if (
            file.is_file()
            and file.suffix not in _WEIGHT_SUFFIXES
            and not file.name.endswith(".index.json")
        ):
            shutil.copyfile(file, folder / file.name)
    config = exported_config(read_description(like / "config.json"), draft)
    if dtype is not None:
        for key in {"dtype", "torch_dtype"} & config.keys() or {"dtype"}:
            config[key] = str(dtype).removeprefix("torch.")
    if fp8:
        config = fp8_config(config)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
