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
from megagrpo.models.stored.files import StoredTensors
from megagrpo.models.stored.quantization import fp8_config
from megagrpo.models.table import (
    FAMILIES,
    architecture_of,
    exported_config,
    is_left_out,
    model_tensors,
    read_description,
)

if TYPE_CHECKING:  # seconds to import
    import torch

# of every library, as a folder may have the same weights for several
_WEIGHT_SUFFIXES = {
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".gguf",
    ".h5",
    ".msgpack",
}
ADAPTERS = "adapter_config.json"  # PEFT's
TEMPLATES = "additional_chat_templates/*"  # transformers' files of a tokenizer's further ones
MERGE = "merge the adapters into the model first (PEFT's merge_and_unload)"
_NAMED = 3  # tensors in a message
_COMPARED_ROWS = 256  # of an output layer with the input embedding
# what is in the names of tensors that no family reads, and what to do
_REMEDIES = {
    ".lora_": MERGE,
    ".mlp.experts.gate_up_proj": "experts are fused here: name the published model, whose experts are apart",
}


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
                f"{path} does not exist; a model is a Hugging Face folder with a config.json"
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

    def refuse_weights(self) -> None:
        """Raises ValueError, naming the file, if weights are there, in whichever format, and are not
        those of config.json in safetensors files."""
        if any(is_weights(file) for file in self.folder.iterdir()):
            refuse_tensors(self.folder, self.arch, StoredTensors.read(self.folder))

    @property
    def sees_images(self) -> bool:
        """Tells whether it is a vision-language model, of which more than the text part is
        loaded."""
        return "vision_config" in self.description and self.arch.vision is not None


def refuse_tensors(folder: Path, arch: Architecture, stored: StoredTensors) -> None:
    """Raises ValueError unless the files hold the tensors of config.json, and no others but those
    that is_left_out names; and if adapters are beside them."""
    expected = {spec.name: spec for spec in model_tensors(arch)}
    shapes = {n: t.shape for n, t in stored.shown.items() if not is_left_out(arch, n)}
    missing = [name for name in expected if name not in shapes]
    unknown = [name for name in shapes if name not in expected]
    found = []
    if (folder / ADAPTERS).exists():
        found.append(
            f"has {ADAPTERS}, whose adapters transformers adds to them, and no trainer or engine does "
            f"({MERGE}; remove that file if they are merged)"
        )
    if missing:
        found.append(f"lacks {len(missing)} of its {len(expected)}: {_named(missing)}")
    if unknown:
        found.append(f"has {len(unknown)} that a {arch.family} model has not: {_named(unknown)}")
    if found:
        remedies = [
            text
            for part, text in _REMEDIES.items()
            if any(part in n for n in unknown) and not any(part in n for n in expected)
        ]
        problem = f"{folder}: the tensors are not those of config.json: it {' and '.join(found)}"
        raise ValueError("; ".join([problem, *remedies]))
    for name, shape in shapes.items():
        spec = expected[name]
        if shape == spec.shape:
            continue
        problem = f"{folder}: tensor {name} has the shape {shape}, but {spec.shape} by config.json"
        if spec.expert and len(shape) == 3:  # fused, as in Qwen3-VL-MoE
            problem += "; transformers 5 saves experts transposed: name the published model, or transpose them back"
        raise ValueError(problem)
    if arch.tied and (head := stored.shown.get("lm_head.weight")):
        name = FAMILIES[arch.family].stored_name("model.embed_tokens.weight")
        if not head.like(stored.shown[name], _COMPARED_ROWS):
            raise ValueError(
                f"{folder}: config.json says tie_word_embeddings, but lm_head.weight is not {name}: "
                "set tie_word_embeddings: false there to train and export this output layer, or remove lm_head.weight"
            )


def _named(names: list[str]) -> str:
    return ", ".join(names[:_NAMED]) + ", ..." * (len(names) > _NAMED)


def is_weights(file: Path) -> bool:
    """Tells whether a file of a model folder has weights, or is an index of some."""
    return file.suffix in _WEIGHT_SUFFIXES or file.name.endswith(".index.json")


def copy_file(file: Path, source: Path, folder: Path) -> None:
    """Copies a file of one folder, or of a folder in it, to the same place in another."""
    copy = folder / file.relative_to(source)
    copy.parent.mkdir(exist_ok=True)
    shutil.copyfile(file, copy)


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
    for file in (*like.iterdir(), *like.glob(TEMPLATES)):
        if file.is_file() and not is_weights(file):
            copy_file(file, like, folder)
    config = exported_config(read_description(like / "config.json"), draft)
    if dtype is not None:
        for key in {"dtype", "torch_dtype"} & config.keys() or {"dtype"}:
            config[key] = str(dtype).removeprefix("torch.")
    if fp8:
        config = fp8_config(config)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
