"""Writes tiny random models in float32 for tests of several ranks."""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Generator, Tensor

from examples.laptop.recipe import TinyModelConfig
from megagrpo.certify.tiny_model import hf_config, random_tensors
from megagrpo.families.table import architecture_of
from megagrpo.weights.hf_folder import write_hf_folder
from tests.dist.workers.samples import VOCAB

Change = Callable[[str, Tensor, Generator], Tensor]


def write_tiny(
    folder: Path, change: Change = lambda name, tensor, generator: tensor, vocab_size: int = VOCAB, **sizes: object
) -> str:
    """Writes FOLDER/model and returns its path; sizes: of TinyModelConfig; `change` replaces each random tensor."""
    config = TinyModelConfig.model_validate({"path": str(folder), **sizes})
    description = hf_config(config) | {"vocab_size": vocab_size}
    like, generator = folder / "description", Generator().manual_seed(0)
    like.mkdir(parents=True)
    (like / "config.json").write_text(json.dumps(description))
    tensors = random_tensors(architecture_of(description), generator)
    tensors = {name: change(name, tensor, generator) for name, tensor in tensors.items()}
    write_hf_folder(folder / "model", iter([tensors]), like=like, dtype=torch.float32)
    return str(folder / "model")


def write_router_model(folder: Path, family: str, num_kv_heads: int = 2) -> str:
    """Writes a model whose routers have biases and choose experts unequally."""

    def change(name: str, tensor: Tensor, generator: Generator) -> Tensor:
        if name.endswith("e_score_correction_bias"):
            return 0.05 * torch.randn(tensor.shape, generator=generator)
        return 5.0 * tensor if name.endswith("mlp.gate.weight") else tensor  # balanced experts: next to no gradient

    heads = {"num_heads": 4, "num_kv_heads": num_kv_heads, "head_dim": 16}
    return write_tiny(folder, change, family=family, hidden_size=64, ffn_size=96, expert_ffn_size=48, **heads)
