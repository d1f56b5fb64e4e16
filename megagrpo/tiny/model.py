"""Makes a randomly initialised model and tokenizer for laptops: a Hugging Face folder like any other.

Same families, same tensor names, same loaders as the big ones: only the numbers are small.
"""

import json
import tempfile
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from megagrpo.config.schema import ExperimentConfig, TinyModelConfig
from megagrpo.families.architecture import Architecture
from megagrpo.families.table import architecture_of, model_tensors
from megagrpo.families.tensors import TensorSpec
from megagrpo.tiny.datasets import make_dataset
from megagrpo.tiny.description import MAX_POSITIONS, SPECIAL_TOKENS, hf_config
from megagrpo.tiny.pretrained import make_pretrained_model
from megagrpo.weights.hf_folder import write_hf_folder


def prepare(config: ExperimentConfig) -> None:
    """Makes what the experiment's `prepare` section asks for, and prints what was made.

    Raises ValueError when there is no such section or when it cannot be made as asked.
    """
    if config.prepare is None:
        raise ValueError(f"experiment {config.name!r} has no prepare section: its model and data already exist")
    if config.prepare.dataset is not None:
        for name, count in make_dataset(config.prepare.dataset, config.seed).items():
            print(f"{config.prepare.dataset.folder}: {name} {count}")
    if config.prepare.model is not None:
        size = make_tiny_model(config.prepare.model, config.seed)
        print(f"{config.prepare.model.path}: {config.prepare.model.family}, {size:,} parameters")
    if config.prepare.pretrained is not None:
        size = make_pretrained_model(config.prepare.pretrained)
        print(f"{config.prepare.pretrained.path}: from {config.prepare.pretrained.package}, {size:,} parameters")


def make_tiny_model(config: TinyModelConfig, seed: int) -> int:
    """Writes config.json, model.safetensors (float32), a character tokenizer and generation_config.json.

    Returns the number of parameters. The folder `config.path` is whole or absent. Raises ValueError for sizes that
    the family cannot have.
    """
    hf = hf_config(config)
    tensors = random_tensors(architecture_of(hf), torch.Generator().manual_seed(seed))
    write_model(config.path, hf, tensors, config.alphabet)
    return sum(t.numel() for t in tensors.values())


def write_model(path: str | Path, hf: dict, tensors: dict[str, Tensor], alphabet: str) -> None:
    """Writes a model folder in float32, whole or not at all. hf: its config.json, which describes the tensors."""
    with tempfile.TemporaryDirectory() as description:
        character_tokenizer(alphabet).save_pretrained(description)
        _write_json(Path(description) / "config.json", hf)
        _write_json(
            Path(description) / "generation_config.json",
            {k: hf[k] for k in ("bos_token_id", "eos_token_id", "pad_token_id")},
        )
        write_hf_folder(path, iter([tensors]), like=description, dtype=torch.float32)


def character_tokenizer(alphabet: str) -> PreTrainedTokenizerFast:
    """Returns a tokenizer with one token per character of `alphabet` after ids 0..3: <pad>, <bos>, <eos>, <unk>.

    It adds no special token by itself.
    """
    vocab = {token: i for i, token in enumerate([*SPECIAL_TOKENS, *alphabet])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"(?m:.)"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    pad, bos, eos, unk = SPECIAL_TOKENS
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=pad,
        bos_token=bos,
        eos_token=eos,
        unk_token=unk,
        clean_up_tokenization_spaces=False,  # decoding must give back exactly what was sampled
        model_max_length=MAX_POSITIONS,
    )


def random_tensors(arch: Architecture, generator: torch.Generator) -> dict[str, Tensor]:
    """Returns a model's tensors by their names on disk: norms 1, biases 0, matrices [rows, columns] normal.

    Their standard deviation is 1/sqrt(columns): the 0.02 that suits wide models starts a narrow one so small that it
    takes many steps to learn anything.
    """
    return {spec.name: _initial(spec, generator) for spec in model_tensors(arch)}


def _initial(spec: TensorSpec, generator: torch.Generator) -> Tensor:
    match spec.kind:
        case "matrix":
            return torch.randn(spec.shape, generator=generator) * spec.shape[-1] ** -0.5
        case "norm":
            return torch.ones(spec.shape)
        case "bias":
            return torch.zeros(spec.shape)


def _write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
