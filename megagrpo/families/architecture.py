"""Reads what config.json has in common for all families, and refuses what would be silently wrong."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# the constants of Megatron's own llama3 scaling; only the factor is free
_LLAMA3_SCALING = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_REQUIRED_KEYS = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "vocab_size",
    "max_position_embeddings",
    "rms_norm_eps",
)
# Keys of config.json that say how large a model is, not how it computes; a smaller model of the kind changes them
# alone.
COMMON_SIZE_KEYS = frozenset(
    {
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "intermediate_size",
        "max_position_embeddings",
        "vocab_size",
        "dtype",
        "torch_dtype",
        "layer_types",
        "max_window_layers",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
    }
)


@dataclass(frozen=True)
class Architecture:
    """Holds the numbers of one HF config.json that the actor needs, with the family's defaults filled in."""

    family: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int  # intermediate width of a dense MLP
    vocab_size: int
    max_positions: int  # tokens
    rms_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    tied: bool  # the output layer is the input embedding
    qkv_bias: bool
    qk_norm: bool  # RMSNorm over each head of queries and keys
    num_experts: int = 0  # 0: dense
    experts_per_token: int = 0
    expert_ffn_size: int = 0
    norm_topk_prob: bool = True

    @property
    def is_moe(self) -> bool:
        """Tells whether layers have experts."""
        return self.num_experts > 0

    @property
    def attention_length(self) -> int:
        """Returns the sequence length, in tokens, at which attention costs as much as all other matrix products.

        Attention's own products are queries with keys and weights with values, under a causal mask.
        """
        heads = self.num_heads * self.head_dim
        projections = 2 * self.hidden_size * (heads + self.num_kv_heads * self.head_dim)
        feed_forward = (
            3 * self.hidden_size * (self.experts_per_token * self.expert_ffn_size if self.is_moe else self.ffn_size)
        )
        # of a token at the end of a sequence of n: heads * n multiply-adds, twice, and half of that on average
        per_layer = projections + feed_forward + self.hidden_size * self.vocab_size // self.num_layers
        return max(per_layer // heads, 1)


def missing_keys(hf: Mapping[str, Any], keys: tuple[str, ...] = ()) -> list[str]:
    """Returns a problem for each key that config.json must have, the common ones and `keys`, and has not."""
    return [f"config.json lacks {key}" for key in (*_REQUIRED_KEYS, *keys) if key not in hf]


def common_refusals(hf: Mapping[str, Any]) -> list[str]:
    """Returns what no family's decoder layer of ours computes, each problem by the name of its key."""
    problems = []
    scaling = _rope_scaling(hf)
    if scaling and {key: scaling.get(key) for key in _LLAMA3_SCALING} != _LLAMA3_SCALING:
        problems.append(
            f"rope scaling {scaling} is not supported; supported: none, or {_LLAMA3_SCALING} with any factor"
        )
    if hf.get("mlp_bias"):
        problems.append("mlp_bias puts biases on projections that are not loaded; it must be false")
    if hf.get("hidden_act", "silu") != "silu":
        problems.append(f"hidden_act {hf['hidden_act']!r} is not supported; supported: silu")
    if hf.get("use_sliding_window"):
        problems.append("use_sliding_window is not supported: attention here sees every earlier token")
    return problems


def attention_bias_refusals(hf: Mapping[str, Any]) -> list[str]:
    """Returns a problem when attention_bias asks for biases that the family's layers do not load."""
    wrong = "attention_bias puts biases on projections that are not loaded; it must be false"
    return [wrong] if hf.get("attention_bias") else []


def decoder_architecture(
    hf: Mapping[str, Any],
    qkv_bias: bool = False,
    qk_norm: bool = False,
    num_experts: int = 0,
    experts_per_token: int = 0,
    expert_ffn_size: int = 0,
    norm_topk_prob: bool = True,
) -> Architecture:
    """Reads a config.json that has no refusals; the other arguments are what the family alone knows."""
    rope = hf.get("rope_parameters") or {}  # transformers 5's place for rope_theta and rope_scaling
    return Architecture(
        family=hf["model_type"],
        hidden_size=hf["hidden_size"],
        num_layers=hf["num_hidden_layers"],
        num_heads=hf["num_attention_heads"],
        num_kv_heads=hf.get("num_key_value_heads", hf["num_attention_heads"]),
        head_dim=hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"],
        ffn_size=hf["intermediate_size"],
        vocab_size=hf["vocab_size"],
        max_positions=hf["max_position_embeddings"],
        rms_eps=hf["rms_norm_eps"],
        rope_theta=float(hf.get("rope_theta") or rope.get("rope_theta") or 10000.0),
        rope_scaling=_rope_scaling(hf),
        tied=bool(hf.get("tie_word_embeddings", False)),
        qkv_bias=qkv_bias,
        qk_norm=qk_norm,
        num_experts=num_experts,
        experts_per_token=experts_per_token,
        expert_ffn_size=expert_ffn_size,
        norm_topk_prob=norm_topk_prob,
    )


def _rope_scaling(hf: Mapping[str, Any]) -> dict[str, Any] | None:
    rope = hf.get("rope_parameters") or {}
    return hf.get("rope_scaling") or (rope if rope.get("rope_type", "default") != "default" else None)
