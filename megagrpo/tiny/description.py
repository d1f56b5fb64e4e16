"""The tiny model's config.json, without torch: `megagrpo check` explains a model before `megagrpo prepare` has made it."""

from megagrpo.config.schema import TinyModelConfig

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<unk>")  # ids 0..3; the alphabet follows
MAX_POSITIONS = 2048
_VOCAB_MULTIPLE = (
    32  # so that any small tensor-parallel size divides it; the spare rows are never sampled after warm-up
)
_ARCHITECTURE = {
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "llama": "LlamaForCausalLM",
}


def hf_config(config: TinyModelConfig) -> dict:
    """config.json in the spelling of the released checkpoints, which transformers, SGLang and our actor all read.

    Raises ValueError for sizes that the family cannot have.
    """
    _check(config)
    hf = {
        "architectures": [_ARCHITECTURE[config.family]],
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
    if config.family == "qwen3_moe":
        hf |= {
            "num_experts": config.num_experts,
            "num_experts_per_tok": config.experts_per_token,
            "moe_intermediate_size": config.expert_ffn_size,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "router_aux_loss_coef": 0.0,
        }
    return hf


def _check(c: TinyModelConfig) -> None:
    repeated = sorted({char for char in c.alphabet if c.alphabet.count(char) > 1})
    if repeated or not c.alphabet:
        raise ValueError(
            f"prepare.model.alphabet {c.alphabet!r}: {'repeats ' + ''.join(repeated) if repeated else 'is empty'}"
        )
    if c.num_heads % c.num_kv_heads:
        raise ValueError(f"prepare.model.num_heads {c.num_heads} is not a multiple of num_kv_heads {c.num_kv_heads}")
    if c.head_dim % 2:
        raise ValueError(f"prepare.model.head_dim {c.head_dim} is odd: rotary embedding turns pairs")
    if c.family in ("qwen2", "llama") and c.num_heads * c.head_dim != c.hidden_size:
        raise ValueError(
            f"prepare.model: {c.family} needs num_heads x head_dim = hidden_size, not {c.num_heads} x {c.head_dim} != {c.hidden_size}"
        )
    if c.family == "qwen3_moe" and c.experts_per_token > c.num_experts:
        raise ValueError(
            f"prepare.model.experts_per_token {c.experts_per_token} is more than num_experts {c.num_experts}"
        )
