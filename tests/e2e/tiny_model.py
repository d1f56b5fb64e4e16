"""Random models of 150,000 parameters with a byte-level tokenizer, as Hugging Face folders."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

import megagrpo.cpu.engine.sitecustomize  # noqa: F401  before transformers, whose models load torchvision, see there

# isort: split
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    Glm4MoeLiteConfig,
    Glm4MoeLiteForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

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


_ROUTED = {
    "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.5,
}  # fmt: skip
_LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 16, "head_dim": 8,
}  # fmt: skip
_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_DRAFTING = {
    "glm4_moe": lambda rest: Glm4MoeForCausalLM(
        Glm4MoeConfig(**rest, use_qk_norm=True, attention_bias=True,
                      rope_parameters={**_ROPE, "partial_rotary_factor": 0.5})
    ),
    "deepseek_v3": lambda rest: DeepseekV3ForCausalLM(DeepseekV3Config(**(rest | _LATENT), rope_parameters=_ROPE)),
    "glm4_moe_lite": lambda rest: Glm4MoeLiteForCausalLM(Glm4MoeLiteConfig(**(rest | _LATENT), rope_parameters=_ROPE)),
}  # fmt: skip


def make_drafting_model(folder: Path, family: str = "glm4_moe", seed: int = 0) -> Path:
    """A model with a layer that drafts: the last layer again, over the embedding of the newest token.

    Embeddings and logits are large, so that the draft is often the most probable token and one token is often likely.
    """
    make_tiny_model(folder, seed)  # tokenizer files
    rest = {"max_position_embeddings": 2048, "pad_token_id": PAD, "tie_word_embeddings": False}
    torch.manual_seed(seed)
    model = _DRAFTING[family](SIZES | _ROUTED | rest | {"vocab_size": 320})
    with torch.no_grad():
        for vector in (p for p in model.parameters() if p.dim() == 1):
            vector += 0.2 * torch.randn_like(vector)  # norms of one and biases of zero would hide a mistake
        model.model.embed_tokens.weight *= 50.0
        model.lm_head.weight *= 3.5
    model.save_pretrained(folder)
    file, description = folder / "model.safetensors", folder / "config.json"
    tensors, hidden, last = load_file(file), SIZES["hidden_size"], SIZES["num_hidden_layers"]
    prefix, own = f"model.layers.{last}.", f"model.layers.{last - 1}."
    tensors |= {name.replace(own, prefix): x.clone() for name, x in tensors.items() if name.startswith(own)}
    embedding, both = tensors["model.embed_tokens.weight"], torch.eye(hidden)
    tensors[prefix + "enorm.weight"] = torch.full((hidden,), float(embedding.square().mean().sqrt()))
    tensors[prefix + "hnorm.weight"] = torch.ones(hidden)
    tensors[prefix + "eh_proj.weight"] = torch.cat([both, 0.1 * both], 1)
    tensors[prefix + "shared_head.norm.weight"] = tensors["model.norm.weight"].clone()
    save_file(tensors, file, {"format": "pt"})
    # published files have these, engines ask for them, transformers drops them
    more = {"num_nextn_predict_layers": 1, "moe_layer_freq": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}
    description.write_text(json.dumps(json.loads(description.read_text()) | more))
    return folder
