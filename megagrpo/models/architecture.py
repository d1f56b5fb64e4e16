"""Reads the parts of config.json common to all families; rejects values that would be silently
wrong."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megagrpo.models.kinds.vision.describe import Vision

HfConfig = Mapping[str, Any]  # a parsed config.json, or an object in it

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
# keys beside text_config that count when it has them, too
_OF_THE_WHOLE = ("model_type", "tie_word_embeddings")
# Keys of config.json that say how large a model is, not how it computes; a smaller model of the
# kind changes them alone.
COMMON_SIZE_KEYS = frozenset(_REQUIRED_KEYS) - {"rms_norm_eps"} | {
    "num_key_value_heads",
    "head_dim",
    "dtype",
    "torch_dtype",
    "layer_types",
    "max_window_layers",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
}


@dataclass(frozen=True)
class LatentAttention:
    """Holds the widths of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434); of the
    heads: of one each."""

    q_lora_rank: int | None  # None: queries are one projection
    kv_lora_rank: int  # of the latent that keys and values are computed from
    nope_dim: int  # of queries and keys without a position
    rope_dim: int  # of queries and keys with one; all key heads share it
    v_dim: int


@dataclass(frozen=True)
class LinearAttention:
    """Holds the sizes of gated delta nets (arXiv 2412.06464) and the layers that have one in place
    of attention."""

    key_heads: int
    value_heads: int  # a multiple
    key_dim: int  # of a head; of queries, too
    value_dim: int
    kernel: int  # tokens of the convolution
    layers: tuple[bool, ...]
    grouped: bool = False  # rows of files stand key head by key head; else kind by kind

    @property
    def channels(self) -> int:
        """Counts what the convolution mixes along the sequence: queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


@dataclass(frozen=True)
class LightningIndexer:
    """Holds the sizes of what chooses keys in DeepSeek sparse attention (DeepSeek-V3.2, arXiv
    2512.02556, 2.1)."""

    heads: int
    head_dim: int
    topk: int  # keys that each query sees; sequences of as many tokens are dense
    in_pairs: bool  # its rotary embedding turns neighbours; else, as usual, halves
    # Layers from `offset` on choose every `freq`-th time, and share that choice until the next
    # (IndexShare, arXiv 2603.12201); both count from 1.
    freq: int = 1
    offset: int = 1

    def source(self, index: int) -> int:
        """Returns the layer, counted from 0, whose choice layer `index` sees: itself, or one before."""
        return index - max(index + 1 - self.offset, 0) % self.freq


@dataclass(frozen=True)
class Architecture:
    """Holds the numbers of one HF config.json that the actor needs, with the family's defaults
    filled in."""

    family: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int  # of a query
    ffn_size: int  # intermediate width of a dense MLP
    vocab_size: int
    max_positions: int  # tokens
    rms_eps: float
    rope_theta: float
    rope_scaling: HfConfig | None = field(hash=False)
    tied: bool  # the output layer is the input embedding
    qkv_bias: bool = False
    qk_norm: bool = False  # RMSNorm over each head of queries and keys
    norm_over_heads: bool = False  # that one is over all heads of a token together
    num_experts: int = 0  # 0: dense
    experts_per_token: int = 0
    expert_ffn_size: int = 0
    norm_topk_prob: bool = True
    mla: LatentAttention | None = None  # None: grouped-query attention
    rotary_fraction: float = 1.0  # of a head's dimensions that turn, the first ones
    sigmoid_router: bool = False  # scores are sigmoids; else a softmax
    router_bias: bool = False  # a float32 for each expert, added to scores for the choice alone
    router_groups: int = 1  # equal groups of experts, of which a token's experts come from the best
    router_top_groups: int = 1
    routed_scale: float = 1.0  # times the output of routed experts
    dense_layers: int = 0  # first layers, which have one MLP and no experts
    shared_ffn_size: int = 0  # of the experts that every token meets, together; 0: none
    shared_gate: bool = False  # times a sigmoid of the token
    output_gate: bool = False  # attention's output is multiplied by a sigmoid of the token
    centered_norms: bool = False  # RMSNorms multiply by 1 + weight
    linear: LinearAttention | None = None  # None: attention in every layer
    vision: Vision | None = None  # None: a text-only model
    draft: bool = False  # with the multi-token-prediction layer, which proposes tokens to engines
    indexer: LightningIndexer | None = None  # None: a query sees every key before it

    @property
    def is_moe(self) -> bool:
        """Tells whether layers have experts."""
        return self.num_experts > 0

    def has_experts(self, index: int) -> bool:
        """Tells whether layer `index`, counted from 0, has experts."""
        return self.is_moe and index >= self.dense_layers

    @property
    def attention_layers(self) -> int:
        """Counts the layers whose cost grows with the square of a sequence, which keep keys and
        values."""
        return self.num_layers - (sum(self.linear.layers) if self.linear else 0)

    def is_linear(self, index: int) -> bool:
        """Tells whether layer `index`, counted from 0, has linear attention."""
        return self.linear is not None and self.linear.layers[index]

    @property
    def expert_id_type(self) -> str:
        """Returns the name of the smallest type that holds every expert's number, in numpy and
        torch."""
        return "uint8" if self.num_experts <= 256 else "int16"


def missing_keys(hf: HfConfig, keys: tuple[str, ...] = ()) -> list[str]:
    """Returns a problem for each key that config.json must have, the common ones and `keys`, and
    has not."""
    return [f"config.json lacks {key}" for key in (*_REQUIRED_KEYS, *keys) if key not in hf]


def llama3_refusals(scaling: HfConfig) -> list[str]:
    """Returns a problem unless a rotary scaling is Llama 3's, with any factor."""
    if {key: scaling.get(key) for key in _LLAMA3_SCALING} == _LLAMA3_SCALING:
        return []
    return [
        f"rope scaling {scaling} is not supported; supported: none, or "
        f"{_LLAMA3_SCALING} with any factor"
    ]


def every_scaling_refused(scaling: HfConfig) -> list[str]:
    """Returns a problem with any rotary scaling: the family is computed without."""
    return [f"rope scaling {scaling} is not supported by this family; supported: none"]


def decoder_architecture(hf: HfConfig) -> Architecture:
    """Reads from a config.json without refusals what all families have; the rest is left as in
    Llama."""
    rope = hf.get("rope_parameters") or {}  # transformers 5's place for rope_theta and rope_scaling
    return Architecture(
        family=hf["model_type"],
        hidden_size=hf["hidden_size"],
        num_layers=hf["num_hidden_layers"],
        num_heads=hf["num_attention_heads"],
        num_kv_heads=hf.get("num_key_value_heads") or hf["num_attention_heads"],
        head_dim=hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"],
        ffn_size=hf["intermediate_size"],
        vocab_size=hf["vocab_size"],
        max_positions=hf["max_position_embeddings"],
        rms_eps=hf["rms_norm_eps"],
        rope_theta=float(hf.get("rope_theta") or rope.get("rope_theta") or 10000.0),
        rope_scaling=rope_scaling(hf),
        tied=bool(hf.get("tie_word_embeddings", False)),
    )


def rotary_fraction(hf: HfConfig, default: float = 1.0) -> float:
    """Returns the fraction of a head with rotary embedding; `default` if config.json has none."""
    rope = hf.get("rope_parameters") or {}
    return float(hf.get("partial_rotary_factor") or rope.get("partial_rotary_factor") or default)


def rope_scaling(hf: HfConfig) -> HfConfig | None:
    """Returns the scaling of rotary embedding, None if there is none.

    Sections of M-RoPE are none: they change nothing where the positions in time, height and width
    are equal.
    """
    given = hf.get("rope_scaling")
    scaling = given or hf.get("rope_parameters") or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    is_plain = kind == "default" and not given
    is_sections = kind in ("default", "mrope") and "mrope_section" in scaling
    return None if is_plain or is_sections else scaling


def text_part(hf: HfConfig) -> dict[str, Any]:
    """Returns the keys of a config.json as a text-only model has them, wherever they stand."""
    whole = {key: hf[key] for key in _OF_THE_WHOLE if key in hf}
    text = {**hf, **(hf.get("text_config") or {}), **whole}
    text.pop("text_config", None)
    return text
