"""A Hugging Face model folder, whose config.json is read once and handed down."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from megagrpo.families.architecture import Architecture, HfConfig
from megagrpo.families.table import architecture_of, read_description


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
                f"{path} does not exist; model.path must be a Hugging Face model folder with a "
                "config.json"
            )
        return cls(Path(folder), Path(tokenizer or folder), read_description(path), draft)

    @cached_property
    def arch(self) -> Architecture:
        """Returns the architecture. Raises ValueError, naming the file, with every problem."""
        return architecture_of(self.description, self.draft, f"{self.folder / 'config.json'}: ")

    @property
    def sees_images(self) -> bool:
        """Tells whether it is a vision-language model."""
        return "vision_config" in self.description
