"""Makes a randomly initialized model and tokenizer for laptops: a Hugging Face folder like any
other.

Families, tensor names and loaders are those of large models. Only the sizes are small.
"""

import json
import tempfile
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from examples.laptop.recipe import TinyModelConfig
from examples.laptop.squares import FAMILY, make_seeing_model
from megagrpo.models.table import FAMILIES, architecture_of, model_problems
from megagrpo.tools.certify.tiny_model import hf_config, random_tensors
from megagrpo.weights.hf_folder import write_hf_folder

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<unk>")  # ids 0..3; the alphabet follows
_NO_HEAD_DIM = ("llama", "qwen2")  # families whose heads fill hidden_size
# half of a head turns, in pairs
_HALF_ROTARY: tuple[str, ...] = (
    *("glm4_moe", "deepseek_v3", "kimi_k2", "deepseek_v32", "glm_moe_dsa", "kimi_k25"),
    *("minimax_m2", "glm4_moe_lite"),
)


def make_tiny_model(config: TinyModelConfig, seed: int) -> int:
    """Writes config.json, model.safetensors (float32), a character tokenizer and
    generation_config.json.

    Returns the number of parameters. The folder `config.path` is complete or absent. Raises ValueError
    for sizes that the family cannot have.
    """
    if config.family == FAMILY:
        return make_seeing_model(config.path, seed)
    vocab = (
        -(-(len(SPECIAL_TOKENS) + len(config.alphabet)) // 32) * 32
    )  # spare rows are never sampled
    hf = (
        hf_config(config)
        | {"vocab_size": vocab}
        | ({"num_nextn_predict_layers": 1} if config.draft else {})
    )
    problems = _problems(config) or model_problems(hf)
    if problems:
        raise ValueError("model: " + "; ".join(problems))
    tensors = random_tensors(architecture_of(hf, config.draft), torch.Generator().manual_seed(seed))
    write_model(config.path, hf, tensors, config.alphabet)
    return sum(t.numel() for t in tensors.values())


def write_model(path: str | Path, hf: dict, tensors: dict[str, Tensor], alphabet: str) -> None:
    """Writes a model folder in float32, completely or not at all. hf: its config.json, which describes
    the tensors."""
    with tempfile.TemporaryDirectory() as description:
        character_tokenizer(alphabet).save_pretrained(description)
        _write_json(Path(description) / "config.json", hf)
        _write_json(
            Path(description) / "generation_config.json",
            {k: hf[k] for k in ("bos_token_id", "eos_token_id", "pad_token_id")},
        )
        write_hf_folder(path, iter([tensors]), like=description, dtype=torch.float32)


def character_tokenizer(alphabet: str) -> PreTrainedTokenizerFast:
    """Returns a tokenizer with one token per character of `alphabet` after ids 0..3: <pad>, <bos>,
    <eos>, <unk>.

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
        model_max_length=2048,  # as tools/certify/tiny.yaml has it
    )


def _problems(config: TinyModelConfig) -> list[str]:
    problems = []
    repeated = sorted({char for char in config.alphabet if config.alphabet.count(char) > 1})
    width = config.num_heads * config.head_dim
    if repeated or not config.alphabet:
        problems.append(f"alphabet {config.alphabet!r}: repeats {''.join(repeated)}")
    if config.num_heads % config.num_kv_heads:
        problems.append(
            f"num_heads {config.num_heads} is not a multiple of num_kv_heads {config.num_kv_heads}"
        )
    if config.head_dim % (4 if config.family in _HALF_ROTARY else 2):
        problems.append(
            f"head_dim {config.head_dim} is odd or, for {', '.join(_HALF_ROTARY)}, not a multiple "
            "of 4"
        )
    if config.family in _NO_HEAD_DIM and width != config.hidden_size:
        problems.append(
            f"{config.family} needs num_heads x head_dim {width} = hidden_size {config.hidden_size}"
        )
    if f"{config.family}_text" in FAMILIES:
        problems.append(
            f"family {config.family} is a part of a vision-language model's files; its tiny one is "
            f"{config.family}_text"
        )
    if config.experts_per_token > config.num_experts:
        problems.append(
            f"experts_per_token {config.experts_per_token} is more than num_experts "
            f"{config.num_experts}"
        )
    return problems


def _write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
