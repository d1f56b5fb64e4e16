"""DeepSeek-V4: several residual streams, compressed attention, experts that a table chooses in the
first layers.

Config.json is read in the published spelling. Multi-token-prediction layers (mtp.*) are not loaded.
An indexer is frozen, as in sparse_attention.py.
"""

from functools import partial

from megagrpo.models.config_json import (
    YARN_KEYS,
    HfConfig,
    Rotary,
    other_values,
    rope_scaling,
    rotary_fraction,
    yarn_refusals,
)
from megagrpo.models.family import Family
from megagrpo.models.kinds.compressed.describe import INDEXED, CompressedAttention
from megagrpo.models.kinds.experts.describe import MIXTRAL_NAMES, ExpertNames
from megagrpo.models.kinds.hashed.describe import HashedExperts
from megagrpo.models.kinds.hyper_connections.describe import HyperConnections

_ONLY: dict[str, object] = {  # the values of keys that may be absent
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "n_shared_experts": 1,
    "num_key_value_heads": 1,
    "n_group": 1,
    "first_k_dense_replace": 0,
}
_NAMES = (  # what other families call parts of names, and what files do
    ("model.embed_tokens.", "embed."),
    ("model.norm.", "norm."),
    ("lm_head.", "head."),
    ("model.hc_head.", "hc_head_"),
    ("model.layers.", "layers."),
    (".input_layernorm.", ".attn_norm."),
    (".post_attention_layernorm.", ".ffn_norm."),
    (".self_attn.", ".attn."),
    (".q_b_proj.", ".wq_b."),
    (".mlp.", ".ffn."),
    (".hc_attn.", ".hc_attn_"),
    (".hc_ffn.", ".hc_ffn_"),
)
_EXPERT_NAMES = ExpertNames(
    bias="gate.bias",
    projections=MIXTRAL_NAMES.projections,
    shared_projections=MIXTRAL_NAMES.projections,
)


class DeepseekV4(Family):
    """DeepSeek-V4-Flash and Pro."""

    REQUIRED_KEYS = (
        *("head_dim", "q_lora_rank", "o_groups", "o_lora_rank", "sliding_window"),
        *("index_n_heads", "index_head_dim", "index_topk"),
        *("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size"),
        *("hc_mult", "hc_sinkhorn_iters", "hc_eps", "routed_scaling_factor", "swiglu_limit"),
        *("qk_rope_head_dim", "compress_ratios", "compress_rope_theta", "num_hash_layers"),
    )
    PARTIAL_ROTARY = True
    LEFT_OUT = ("mtp.",)
    CHAT_MODULE = "srt/entrypoints/openai/encoding_dsv4.py"
    DRAFT_REFUSAL = "its multi-token-prediction layers (mtp.*) are not loaded"
    FP8_REFUSAL = "no test compares DeepSeek-V4 in FP8 with SGLang's"

    ROPE_SCALING_REFUSALS = staticmethod(partial(yarn_refusals, needed=YARN_KEYS[:4]))

    def common(self, hf: HfConfig) -> HfConfig:
        return {"intermediate_size": hf.get("moe_intermediate_size"), **hf}

    def own_refusals(self, hf: HfConfig) -> list[str]:
        layers = hf["num_hidden_layers"]
        ratios = hf["compress_ratios"]
        turned = hf["qk_rope_head_dim"]
        rules = {
            f"compress_ratios must give each of {layers} layers 0, or at least {INDEXED} tokens": (
                len(ratios) >= layers and all(r == 0 or r >= INDEXED for r in ratios)
            ),
            f"num_hash_layers must be 0 to {layers}": 0 <= hf["num_hash_layers"] <= layers,
            "o_groups must divide num_attention_heads": (
                hf["num_attention_heads"] % hf["o_groups"] == 0
            ),
            f"qk_rope_head_dim {turned} must be even, and at most head_dim and index_head_dim": (
                turned % 2 == 0 and turned <= min(hf["head_dim"], hf["index_head_dim"])
            ),
            "partial_rotary_factor must give qk_rope_head_dim": (
                hf["head_dim"] * rotary_fraction(hf, turned / hf["head_dim"]) == turned
            ),
            "hc_mult must be at least 2": hf["hc_mult"] > 1,
        }
        return other_values(hf, _ONLY) + [text for text, holds in rules.items() if not holds]

    def attention(self, hf: HfConfig) -> CompressedAttention:
        return CompressedAttention(
            heads=hf["num_attention_heads"],
            head_dim=hf["head_dim"],
            rope_dim=hf["qk_rope_head_dim"],
            q_lora_rank=hf["q_lora_rank"],
            groups=hf["o_groups"],
            group_rank=hf["o_lora_rank"],
            window=hf["sliding_window"],
            ratios=tuple(hf["compress_ratios"][: hf["num_hidden_layers"]]),
            index_heads=hf["index_n_heads"],
            index_dim=hf["index_head_dim"],
            topk=hf["index_topk"],
            rotary=Rotary(Rotary.read(hf).theta),
            far_rotary=Rotary(float(hf["compress_rope_theta"]), rope_scaling(hf)),
        )

    def streams(self, hf: HfConfig) -> HyperConnections:
        return HyperConnections.read(hf)

    def experts(self, hf: HfConfig) -> HashedExperts:
        return HashedExperts.read(
            hf,
            "n_routed_experts",
            _EXPERT_NAMES,
            sigmoid=True,  # a router of its kind, with another function
            router_bias=True,
            scale=float(hf["routed_scaling_factor"]),
            shared_ffn_size=hf["moe_intermediate_size"],
            hashed=hf["num_hash_layers"],
            vocabulary=hf["vocab_size"],
            limit=float(hf["swiglu_limit"]),
        )

    def exported_config(self, hf: HfConfig) -> HfConfig:
        """Returns it without the format of published experts, which are exported in bfloat16."""
        return {key: value for key, value in hf.items() if key != "expert_dtype"}

    def stored_name(self, name: str) -> str:
        for theirs, stored in _NAMES:
            name = name.replace(theirs, stored)
        return name
