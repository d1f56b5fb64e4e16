"""GLM-5.3-Flash: three layers of Kimi Delta Attention to one of sparse latent attention, which knows
no positions, all between residual streams; clamped experts as in sigmoid_moe.py.

The text part of published files: the vision tower and the multi-token-prediction layer are not
loaded. The indexer is frozen, as in sparse_attention.py.
"""

from dataclasses import replace

from megagrpo.models.config_json import HfConfig, every_scaling_refused, other_values
from megagrpo.models.families.sigmoid_moe import ROUTER_VALUES
from megagrpo.models.families.sparse_attention import GlmMoeDsa
from megagrpo.models.kinds.experts.describe import Experts
from megagrpo.models.kinds.hyper_connections.describe import HyperConnections
from megagrpo.models.kinds.kda.describe import Kda, linear_refusals
from megagrpo.models.kinds.latent.describe import LatentAttention

_ONLY: dict[str, object] = {  # the values of keys that may be absent
    "mla_use_nope": True,
    "qk_rope_head_dim": 0,
    "index_kpool_compress": True,
    "index_kpool_always_select_tail": True,
    "index_topk_freq": 1,
    "mhc": True,
}


class Glm5Next(GlmMoeDsa):
    """Reads layers by linear_attn_config, which counts them from 0."""

    REQUIRED_KEYS = (
        *GlmMoeDsa.REQUIRED_KEYS,
        *("linear_attn_config", "index_kpool", "mhc", "hc_mult", "hc_sinkhorn_iters", "hc_eps"),
        "swiglu_limit",
    )
    ROPE_SCALING_REFUSALS = staticmethod(every_scaling_refused)
    LEFT_OUT = ("model.visual.",)
    LAYERS = "model.language_model.layers."
    DRAFT_REFUSAL = "its multi-token-prediction layer is not loaded"
    FP8_REFUSAL = "no test compares GLM-5.3-Flash in FP8 with SGLang's"

    def own_refusals(self, hf: HfConfig) -> list[str]:
        problems = super().own_refusals({**ROUTER_VALUES, **hf, "index_kpool": 1})
        problems += other_values(hf, _ONLY) + linear_refusals(hf, 0)
        rules = {
            "linear_attn_config must have gate_lower_bound, below 0": (
                ((hf["linear_attn_config"] or {}).get("gate_lower_bound") or 0) < 0
            ),
            "index_kpool must be at least 2, and divide index_topk": (
                hf["index_kpool"] > 1 and hf["index_topk"] % hf["index_kpool"] == 0
            ),
            "hc_mult must be at least 2": hf["hc_mult"] > 1,
            "swiglu_limit must be above 0": (hf["swiglu_limit"] or 0) > 0,
        }
        return problems + [text for text, holds in rules.items() if not holds]

    def attention(self, hf: HfConfig) -> LatentAttention:
        attention = super().attention(hf)
        return replace(attention, rotary=replace(attention.rotary, fraction=0.0))

    def recurrent(self, hf: HfConfig) -> Kda:
        return Kda.read(hf, 0)

    def streams(self, hf: HfConfig) -> HyperConnections:
        return HyperConnections.read(hf, has_head=False)

    def experts(self, hf: HfConfig) -> Experts:
        return replace(super().experts(hf), limit=float(hf["swiglu_limit"]))

    def stored_name(self, name: str) -> str:
        name = name.replace(".hc_attn.", ".hc_attn_").replace(".hc_ffn.", ".hc_ffn_")
        return super().stored_name(name)
