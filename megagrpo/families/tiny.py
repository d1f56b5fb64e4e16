"""The sizes of a tiny model of any family, from which a family writes its part of config.json."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class TinySizes:
    """Sizes of a tiny model; the defaults make one of 2 million parameters. Dense families ignore the experts."""

    family: str = "qwen3_moe"
    hidden_size: int = 128
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    ffn_size: int = 256
    num_experts: int = 8
    experts_per_token: int = 2
    expert_ffn_size: int = 128
    tie_embeddings: bool = False
