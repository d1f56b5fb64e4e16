"""A randomly initialised model and tokenizer for laptops, written as the Hugging Face folder that everything else reads.

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
from megagrpo.hf_files import write_hf_folder
from megagrpo.tiny.datasets import make_dataset
from megagrpo.tiny.description import MAX_POSITIONS, SPECIAL_TOKENS, hf_config


def prepare(config: ExperimentConfig) -> None:
    """Make what the experiment's `prepare` section asks for, printing what was made.

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


def make_tiny_model(config: TinyModelConfig, seed: int) -> int:
    """Write config.json, model.safetensors (float32), a character tokenizer and generation_config.json to `config.path`.

    Returns the number of parameters. The folder is whole or absent. Raises ValueError for sizes that the family cannot have.
    """
    hf = hf_config(config)
    tensors = random_tensors(config, hf["vocab_size"], torch.Generator().manual_seed(seed))
    with tempfile.TemporaryDirectory() as description:
        character_tokenizer(config.alphabet).save_pretrained(description)
        _write_json(Path(description) / "config.json", hf)
        _write_json(
            Path(description) / "generation_config.json",
            {k: hf[k] for k in ("bos_token_id", "eos_token_id", "pad_token_id")},
        )
        write_hf_folder(config.path, iter([tensors]), like=description, dtype=torch.float32)
    return sum(t.numel() for t in tensors.values())


def character_tokenizer(alphabet: str) -> PreTrainedTokenizerFast:
    """One token per character of `alphabet`; ids 0..3 are <pad>, <bos>, <eos>, <unk>. Adds no special token by itself."""
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


def random_tensors(config: TinyModelConfig, vocab_size: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Names and shapes as on disk. Matrices are normal with standard deviation 1/sqrt(columns): the 0.02 that suits wide
    models starts a narrow one so small that it takes many steps to learn anything."""
    hidden, dim = config.hidden_size, config.head_dim
    q, kv = config.num_heads * dim, config.num_kv_heads * dim

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator) * columns**-0.5

    tensors = {"model.embed_tokens.weight": matrix(vocab_size, hidden)}
    for i in range(config.num_layers):
        layer = f"model.layers.{i}."
        attention = {
            "q_proj": matrix(q, hidden),
            "k_proj": matrix(kv, hidden),
            "v_proj": matrix(kv, hidden),
            "o_proj": matrix(hidden, q),
        }
        tensors |= {f"{layer}self_attn.{name}.weight": t for name, t in attention.items()}
        if config.family == "qwen2":
            tensors |= {
                f"{layer}self_attn.{name}.bias": torch.zeros(len(attention[name]))
                for name in ("q_proj", "k_proj", "v_proj")
            }
        if config.family in ("qwen3", "qwen3_moe"):
            tensors |= {f"{layer}self_attn.{name}.weight": torch.ones(dim) for name in ("q_norm", "k_norm")}
        tensors |= {
            f"{layer}{name}.weight": torch.ones(hidden) for name in ("input_layernorm", "post_attention_layernorm")
        }
        mlps = {"mlp": config.ffn_size}
        if config.family == "qwen3_moe":
            tensors[f"{layer}mlp.gate.weight"] = matrix(config.num_experts, hidden)
            mlps = {f"mlp.experts.{e}": config.expert_ffn_size for e in range(config.num_experts)}
        for name, size in mlps.items():
            tensors[f"{layer}{name}.gate_proj.weight"] = matrix(size, hidden)
            tensors[f"{layer}{name}.up_proj.weight"] = matrix(size, hidden)
            tensors[f"{layer}{name}.down_proj.weight"] = matrix(hidden, size)
    tensors["model.norm.weight"] = torch.ones(hidden)
    if not config.tie_embeddings:
        tensors["lm_head.weight"] = matrix(vocab_size, hidden)
    return tensors


def _write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
