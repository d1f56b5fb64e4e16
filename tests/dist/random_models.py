"""Random models as folders, whose tensors no transformers made: for ranks that are compared with other ranks."""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Generator, Tensor

from examples.laptop.recipe import TinyModelConfig
from megagrpo.models.table import architecture_of
from megagrpo.tools.certify.tiny_model import hf_config, random_tensors
from megagrpo.weights.hf_folder import write_hf_folder
from tests.dist.workers.samples import VOCAB


def write_random_model(
    folder: Path,
    sizes: dict,
    change: Callable[[str, Tensor, Generator], Tensor] = lambda name, tensor, generator: tensor,
    vocab: int = VOCAB,
) -> Path:
    """Leaves FOLDER/model with the tensors that `change` makes of random ones; sizes: of TinyModelConfig."""
    tiny = TinyModelConfig(path=str(folder), **sizes)
    description = hf_config(tiny) | {"vocab_size": vocab} | ({"num_nextn_predict_layers": 1} if tiny.draft else {})
    like = folder / "description"
    like.mkdir(parents=True)
    (like / "config.json").write_text(json.dumps(description))
    generator = torch.Generator().manual_seed(0)
    tensors = random_tensors(architecture_of(description, tiny.draft), generator)
    tensors = {name: change(name, tensor, generator) for name, tensor in tensors.items()}
    write_hf_folder(folder / "model", iter([tensors]), like=like, dtype=torch.float32)
    return folder / "model"


def write_model(folder: Path, family: str, num_kv_heads: int = 2) -> Path:
    """Routers have biases, and experts that differ: balanced ones would have next to no gradient."""
    sizes = {"family": family, "hidden_size": 64, "num_heads": 4, "num_kv_heads": num_kv_heads, "head_dim": 16}

    def change(name: str, tensor: Tensor, generator: Generator) -> Tensor:
        if name.endswith("e_score_correction_bias"):
            return 0.05 * torch.randn(tensor.shape, generator=generator)
        return tensor * 5.0 if name.endswith(".gate.weight") else tensor

    return write_random_model(folder, {**sizes, "ffn_size": 96, "expert_ffn_size": 48}, change)
