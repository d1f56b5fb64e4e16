"""Writes the actor's live weights as a Hugging Face folder."""

import json
from collections.abc import Iterator
from functools import partial
from itertools import chain
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from megagrpo.config.schema import ExperimentConfig
from megagrpo.mesh import Mesh
from megagrpo.models.config_json import end_tokens, text_part
from megagrpo.models.folder import TEMPLATES, copy_file
from megagrpo.models.table import begin_of_kept, read_description
from megagrpo.weights.actor_weights import ActorWeights
from megagrpo.weights.hf_folder import HfFolder, write_hf_folder
from megagrpo.weights.transports.gather_plan import (
    gather_copies,
    gather_to_main,
    make_gather_plan,
    published_specs,
)

_TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "chat_template*",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    TEMPLATES,
)
_ENDING_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


def export_hf(
    target: str | Path, weights: ActorWeights, mesh: Mesh, config: ExperimentConfig, like: str
) -> None:
    """Collective. Writes the live weights, adapters merged, as an HF folder, complete or not at all.

    like: the folder that all files come from, also the tensors that are not trained, but for
    config.model.tokenizer. Trained tensors have config.actor.dtype or a fixed one
    (ActorWeights.fixed_dtypes). Raises LeaderError on every rank.
    """
    published: torch.dtype = getattr(torch, config.actor.dtype)
    specs = published_specs(weights.hf_specs, published, weights.fixed_dtypes)
    copies = gather_copies(weights.copies, mesh)
    plan = make_gather_plan(copies, specs, config.weights.bucket_bytes)

    def write(buckets: Iterator[dict[str, Tensor]]) -> None:
        shards = chain(buckets, untrained_tensors(Path(like)))
        finish = partial(take_tokenizer, source=Path(config.model.tokenizer or like))
        write_hf_folder(target, shards, like, published, finish=finish)

    with weights.merged():
        gather_to_main(plan, weights.parameters(), mesh, write, f"export to {target}")


def take_tokenizer(folder: Path, source: Path) -> None:
    """Replaces the tokenizer files of an HF folder, and lets generation_config.json name all end
    tokens."""
    for pattern in _TOKENIZER_FILES:
        for file in folder.glob(pattern):
            file.unlink()
        for file in filter(Path.is_file, source.glob(pattern)):
            copy_file(file, source, folder)
    _write_ends(folder)


def _write_ends(folder: Path) -> None:
    """Lets generation_config.json name the tokens at which engines end a response of the run: those
    of the tokenizer and of config.json, too."""
    tokenizer, settings, generation = (folder / name for name in _ENDING_FILES)
    described = read_description(generation)
    named = end_tokens(described)
    ends = list(named)
    if tokenizer.is_file() and (token := read_description(settings).get("eos_token")):
        content = token["content"] if isinstance(token, dict) else token
        ends.insert(0, Tokenizer.from_file(str(tokenizer)).token_to_id(content))
    ends += end_tokens(text_part(read_description(folder / "config.json")))
    ends = [end for end in dict.fromkeys(ends) if end is not None]
    if set(ends) != set(named):
        described["eos_token_id"] = ends
        generation.write_text(json.dumps(described, indent=2) + "\n")


def untrained_tensors(folder: Path) -> Iterator[dict[str, Tensor]]:
    """Yields the tensors that are left out of training, but that an export's config.json describes,
    those of one file at a time."""
    begin = begin_of_kept(read_description(folder / "config.json"))
    if not begin:
        return
    hf = HfFolder(folder)
    kept = [name for name in hf if name.startswith(begin)]
    for file in sorted({hf.files.shown[name].file for name in kept}):
        yield {name: hf[name] for name in kept if hf.files.shown[name].file == file}
