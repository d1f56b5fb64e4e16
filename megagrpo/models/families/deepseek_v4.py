"""DeepSeek-V4: several residual streams, compressed attention, experts that a table chooses in the
first layers.

Config.json is read in the published spelling and in transformers'. Multi-token-prediction layers
(mtp.*) are not loaded. An indexer is frozen, as in sparse_attention.py.
"""

from __future__ import annotations

from typing import ClassVar

from megagrpo.models.architecture import Architecture
from megagrpo.models.config_json import COMMON_SIZE_KEYS, YARN_KEYS, HfConfig, Rotary, yarn_refusals
from megagrpo.models.family import Family, TinySizes
from megagrpo.models.kinds.compressed.describe import INDEXED, CompressedAttention
from megagrpo.models.kinds.experts.describe import ExpertNames
from megagrpo.models.kinds.hashed.describe import HashedExperts
from megagrpo.models.kinds.hyper_connections.describe import HyperConnections
from megagrpo.models.tensors import GatedNames

_SIZES = (
    *("head_dim", "q_lora_rank", "o_groups", "o_lora_rank", "sliding_window"),
    *("index_n_heads", "index_head_dim", "index_topk"),
    *("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size"),
)
# transformers' words for layers; "hash_moe" for a feed-forward part with a table
_WINDOW = "sliding_attention"
_INDEXED = "compressed_sparse_attention"
_ALL = "heavily_compressed_attention"
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
_EXPERT_NAMES = ExpertNames(bias="gate.bias", projections=GatedNames(gate="w1", up="w3", down="w2"))


class DeepseekV4(Family):
    """DeepSeek-V4-Flash and Pro."""

    HF_CLASS = "DeepseekV4ForCausalLM"
    REQUIRED_KEYS: ClassVar[tuple[str, ...]] = (
        *_SIZES,
        *("hc_mult", "hc_sinkhorn_iters", "hc_eps", "routed_scaling_factor", "swiglu_limit"),
        *("qk_rope_head_dim", "compress_ratios", "compress_rope_theta", "num_hash_layers"),
    )
    SIZE_KEYS = COMMON_SIZE_KEYS | {
        *(*_SIZES, "qk_rope_head_dim", "partial_rotary_factor", "num_nextn_predict_layers"),
        *("compress_ratios", "num_hash_layers", "compress_rates", "mlp_layer_types"),
    }
    PARTIAL_ROTARY = True
    LEFT_OUT = ("mtp.",)
    DRAFT_REFUSAL = "its multi-token-prediction layers (mtp.*) are not loaded"
    FP8_REFUSAL = "no test compares DeepSeek-V4 in FP8 with SGLang's"

    @staticmethod
    def ROPE_SCALING_REFUSALS(scaling: HfConfig) -> list[str]:  # noqa: N802  as others name it
        """Returns why a scaling is not YaRN without a factor of its own."""
        problems = yarn_refusals(scaling, YARN_KEYS[:4], "attention_factor")
        if scaling.get("attention_factor", 1.0) != 1.0:
            problems.append(f"attention_factor {scaling['attention_factor']} must be 1")
        return problems

    def refusals(self, hf: HfConfig) -> list[str]:
        return super().refusals(_published(hf))

    def own_refusals(self, hf: HfConfig) -> list[str]:
        problems = [
            f"{key} {hf[key]!r} is not supported; supported: {value!r}"
            for key, value in _ONLY.items()
            if hf.get(key, value) != value
        ]
        layers = hf["num_hidden_layers"]
        ratios = hf["compress_ratios"][:layers]
        if len(ratios) < layers or any(0 < ratio < INDEXED or ratio < 0 for ratio in ratios):
            problems.append(
                f"compress_ratios must give each of {layers} layers 0, or at least {INDEXED} tokens"
            )
        if not 0 <= hf["num_hash_layers"] <= layers:
            problems.append(f"num_hash_layers must be 0 to {layers}: the first layers have tables")
        if hf["num_experts_per_tok"] == 1:
            problems.append(
                "num_experts_per_tok 1 is not supported: one expert's score would "
                "not be divided by itself"
            )
        if hf["num_attention_heads"] % hf["o_groups"]:
            problems.append("o_groups must divide num_attention_heads")
        turned = hf["qk_rope_head_dim"]
        if turned % 2 or turned > min(hf["head_dim"], hf["index_head_dim"]):
            problems.append(
                f"qk_rope_head_dim {turned} must be even, and at most head_dim and index_head_dim"
            )
        if hf["hc_mult"] < 2:
            problems.append("hc_mult must be at least 2: residual streams that are mixed")
        return problems

    def architecture(self, hf: HfConfig) -> Architecture:
        return super().architecture(_published(hf))

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
            rotary=Rotary(float(hf.get("rope_theta") or 10000.0)),
            far_rotary=Rotary(float(hf["compress_rope_theta"]), hf.get("rope_scaling")),
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
            limit=float(hf["swiglu_limit"]),
        )

    def stored_name(self, name: str) -> str:
        for theirs, stored in _NAMES:
            name = name.replace(theirs, stored)
        return name

    def tiny_options(self, sizes: TinySizes) -> dict[str, object]:
        """Samples of a certificate are longer than the window, and than three windows of keys."""
        kinds = (_WINDOW, _INDEXED, _ALL, _INDEXED)
        rope = max(sizes.head_dim // 4, 2)
        yarn = {"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 256}
        return {
            "num_key_value_heads": 1,
            "qk_rope_head_dim": rope,
            "q_lora_rank": sizes.hidden_size // 4,
            "o_groups": max(sizes.num_heads // 2, 1),
            "o_lora_rank": sizes.hidden_size // 4,
            "sliding_window": 8,
            "layer_types": [kinds[index % 4] for index in range(sizes.num_layers)],
            "compress_rates": {_INDEXED: INDEXED, _ALL: 8},
            "compress_rope_theta": 160000.0,
            "rope_scaling": {**yarn, "beta_fast": 32.0, "beta_slow": 1.0},
            "index_n_heads": 8,
            "index_head_dim": sizes.head_dim,
            "index_topk": 3,
            "hc_mult": 4,
            "hc_sinkhorn_iters": 20,
            "hc_eps": 1e-6,
            "mlp_layer_types": ["hash_moe"] + ["moe"] * (sizes.num_layers - 1),
            "n_routed_experts": sizes.num_experts,
            "num_experts_per_tok": max(sizes.experts_per_token, 2),
            "moe_intermediate_size": sizes.expert_ffn_size,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.5,
            "scoring_func": "sqrtsoftplus",
            "topk_method": "noaux_tc",
            "swiglu_limit": 2.0,
        }


def _published(hf: HfConfig) -> HfConfig:
    """Returns a config.json in the published spelling, with the one key that it lacks."""
    own = {"intermediate_size": hf.get("moe_intermediate_size"), **hf}
    rope = own.pop("rope_parameters", None) or {}
    if "compress" in rope:
        far = rope["compress"]
        own["rope_theta"] = rope["main"]["rope_theta"]
        own["compress_rope_theta"] = far["rope_theta"]
        own["rope_scaling"] = far if far.get("rope_type") == "yarn" else None
    if (fraction := hf.get("partial_rotary_factor")) and "head_dim" in hf:
        own.setdefault("qk_rope_head_dim", int(hf["head_dim"] * fraction))
    if kinds := hf.get("layer_types"):
        ratios = {_WINDOW: 0, **(hf.get("compress_rates") or {})}
        own["compress_ratios"] = [ratios.get(kind, -1) for kind in kinds]
    if kinds := hf.get("mlp_layer_types"):
        hashed = kinds.count("hash_moe")
        in_front = kinds[:hashed].count("hash_moe") == hashed
        own["num_hash_layers"] = hashed if in_front else -1
    return own
