"""MiniMax-M2 and its successors: partial rotary embedding, one norm over all heads, a sigmoid router
with a bias."""

from dataclasses import replace

from megagrpo.models.config_json import (
    HfConfig,
    every_scaling_refused,
    other_values,
)
from megagrpo.models.family import Family
from megagrpo.models.kinds.experts.describe import MIXTRAL_NAMES, Experts
from megagrpo.models.kinds.grouped_query.describe import GroupedQuery

# of published files; SGLang reads them, transformers 5 neither reads nor writes them
_EXPECTED = {
    "use_qk_norm": True,
    "qk_norm_type": "per_layer",
    "scoring_func": "sigmoid",
    "use_routing_bias": True,
}


class MiniMaxM2(Family):
    """Grouped-query attention with Mixtral's names of experts."""

    ROPE_THETA = 5e6
    REQUIRED_KEYS = ("num_local_experts", "num_experts_per_tok", "rotary_dim", *_EXPECTED)
    ROPE_SCALING_REFUSALS = staticmethod(every_scaling_refused)
    PARTIAL_ROTARY = True

    def own_refusals(self, hf: HfConfig) -> list[str]:
        problems = other_values(hf, {**_EXPECTED, "shared_intermediate_size": (0, None)})
        turning = hf["rotary_dim"]
        head_dim = GroupedQuery.read(hf).head_dim
        if turning % 2 or not 0 < turning <= head_dim:
            problems.append(f"rotary_dim {turning} must be even and at most head_dim {head_dim}")
        for place in (hf, hf.get("rope_parameters") or {}):
            factor = place.get("partial_rotary_factor") or turning / head_dim
            if factor * head_dim != turning:
                problems.append(
                    f"partial_rotary_factor {factor} of head_dim {head_dim} is not rotary_dim "
                    f"{turning}: transformers reads the one, engines the other"
                )
        if any(kind != 1 for kind in hf.get("attn_type_list") or ()):
            problems.append("attn_type_list: linear attention is not supported; supported: 1")
        return problems

    def attention(self, hf: HfConfig) -> GroupedQuery:
        plain = GroupedQuery.read(hf)
        rotary = replace(plain.rotary, fraction=hf["rotary_dim"] / plain.head_dim)
        return replace(plain, rotary=rotary, qk_norm=True, norm_over_heads=True)

    def experts(self, hf: HfConfig) -> Experts:
        return Experts.read(
            hf,
            "num_local_experts",
            MIXTRAL_NAMES,
            sigmoid=True,
            router_bias=True,
            unreported="SGLang's MiniMax-M2 does not say which layer chose experts",
        )

    def exported_config(self, hf: HfConfig) -> HfConfig:
        """Adds the fraction that transformers reads in the place of rotary_dim."""
        return {**hf, "partial_rotary_factor": self.attention(hf).rotary.fraction}
