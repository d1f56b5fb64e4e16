"""A tiny model of any family: its config.json and random tensors, named as in released
checkpoints."""

import math

import torch
from torch import Tensor

from megagrpo.models.architecture import Architecture
from megagrpo.models.family import TinySizes
from megagrpo.models.table import FAMILIES, model_tensors
from megagrpo.models.tensors import TensorSpec

MAX_POSITIONS = 2048
VOCAB = 32


def hf_config(sizes: TinySizes) -> dict[str, object]:
    """Returns a config.json in the spelling of released checkpoints, which transformers, SGLang and
    the actor read."""
    family = FAMILIES[sizes.family]
    hf = {
        "architectures": [family.HF_CLASS],
        "model_type": sizes.family,
        "vocab_size": VOCAB,
        "hidden_size": sizes.hidden_size,
        "num_hidden_layers": sizes.num_layers,
        "num_attention_heads": sizes.num_heads,
        "num_key_value_heads": sizes.num_kv_heads,
        "head_dim": sizes.head_dim,
        "intermediate_size": sizes.ffn_size,
        "hidden_act": "silu",
        "max_position_embeddings": MAX_POSITIONS,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "tie_word_embeddings": sizes.tie_embeddings,
        "use_sliding_window": False,
        "dtype": "float32",
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return hf | family.tiny_options(sizes)


def random_tensors(arch: Architecture, generator: torch.Generator) -> dict[str, Tensor]:
    """Returns a model's tensors by their names on disk: norms 1, biases 0, matrices [rows, columns]
    normal.

    The standard deviation is 1/sqrt(columns): the usual 0.02 suits wide models; a narrow one would
    start so small that it needs many steps to learn anything.
    """
    return {spec.name: _initial(spec, generator) for spec in model_tensors(arch)}


def _initial(spec: TensorSpec, generator: torch.Generator) -> Tensor:
    match spec.kind:
        case "matrix":
            inputs = spec.shape[-1] if len(spec.shape) == 2 else math.prod(spec.shape[1:])
            # experts together, transposed
            inputs = spec.shape[1] if spec.expert and len(spec.shape) == 3 else inputs
            return torch.randn(spec.shape, generator=generator) * inputs**-0.5
        case "norm":
            return torch.ones(spec.shape)
        case "bias" | "centered norm":
            return torch.zeros(spec.shape)
        case "choice":
            keys = torch.rand(spec.shape[0], spec.below, generator=generator)
            return keys.argsort()[:, : spec.shape[1]]
        case "convolution":  # larger values would sharpen the norm behind a gated delta rule
            return torch.randn(spec.shape, generator=generator) * 0.1
