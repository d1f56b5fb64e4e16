"""Describes the tiny model without torch: `megagrpo check` explains it before `megagrpo prepare` has made it."""

from typing import Any

from megagrpo.config.schema import TinyModelConfig
from megagrpo.families.table import FAMILIES

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<unk>")  # ids 0..3; the alphabet follows
MAX_POSITIONS = 2048
# so that any small tensor-parallel size divides it; the spare rows are never sampled after warm-up
_VOCAB_MULTIPLE = 32


def hf_config(config: TinyModelConfig) -> dict[str, Any]:
    """Returns config.json in the spelling of released checkpoints, which transformers, SGLang and our actor read.

    Raises ValueError for sizes that the family cannot have.
    """
    problems = _problems(config)
    if problems:
        raise ValueError("prepare.model: " + "; ".join(problems))
    family = FAMILIES[config.family]
    hf = {
        "architectures": [family.HF_CLASS],
        "model_type": config.family,
        "vocab_size": -(-(len(SPECIAL_TOKENS) + len(config.alphabet)) // _VOCAB_MULTIPLE) * _VOCAB_MULTIPLE,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.ffn_size,
        "hidden_act": "silu",
        "max_position_embeddings": MAX_POSITIONS,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "tie_word_embeddings": config.tie_embeddings,
        "use_sliding_window": False,
        "dtype": "float32",
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return hf | family.tiny_options(config)


def _problems(sizes: TinyModelConfig) -> list[str]:
    problems = []
    repeated = sorted({char for char in sizes.alphabet if sizes.alphabet.count(char) > 1})
    if repeated:
        problems.append(f"alphabet {sizes.alphabet!r}: repeats {''.join(repeated)}")
    if not sizes.alphabet:
        problems.append("alphabet is empty")
    if sizes.num_heads % sizes.num_kv_heads:
        problems.append(f"num_heads {sizes.num_heads} is not a multiple of num_kv_heads {sizes.num_kv_heads}")
    if sizes.head_dim % 2:
        problems.append(f"head_dim {sizes.head_dim} is odd: rotary embedding turns pairs")
    return problems + FAMILIES[sizes.family].tiny_problems(sizes)
