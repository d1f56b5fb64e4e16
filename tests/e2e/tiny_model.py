"""Random models of 150,000 parameters with a byte-level tokenizer, as Hugging Face folders."""

from pathlib import Path

import torch

import megagrpo.rollout.cpu.sitecustomize  # noqa: F401  before transformers, whose models load torchvision, see there

# isort: split
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

PAD, BOS, EOS = 0, 1, 2
SIZES = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "intermediate_size": 128, "bos_token_id": BOS, "eos_token_id": EOS,
    "initializer_range": 0.15,  # peaked enough that samples differ from noise
}  # fmt: skip
EXPERTS = {"moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 2, "decoder_sparse_step": 1}


def make_tiny_model(folder: Path, seed: int = 0, dtype: torch.dtype = torch.float32) -> Path:
    """A Qwen3-MoE."""
    tokens = ["<pad>", "<bos>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    rest = {"norm_topk_prob": True, "max_position_embeddings": 2048, "pad_token_id": PAD, "tie_word_embeddings": False}
    config = Qwen3MoeConfig(**SIZES, **EXPERTS, **rest, vocab_size=320)
    torch.manual_seed(seed)
    Qwen3MoeForCausalLM(config).to(dtype).save_pretrained(folder)
    specials = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **specials).save_pretrained(folder)
    return folder


def make_tied_model(folder: Path, seed: int) -> Path:
    """A dense Qwen3 with tied embeddings, whose 300 words an engine pads to 320."""
    make_tiny_model(folder, seed)  # tokenizer files
    config = Qwen3Config(**SIZES, vocab_size=300, tie_word_embeddings=True)
    torch.manual_seed(seed)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder
