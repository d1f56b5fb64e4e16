"""Kimi-Linear: three layers of Kimi Delta Attention to one of latent attention, which knows no
positions; experts as in sigmoid_moe.py, under names of its own.

The norm of latents has the model's epsilon, as in engines; transformers' own gives it 1e-6.
"""

import re
from dataclasses import replace

from megagrpo.models.config_json import (
    HfConfig,
    every_scaling_refused,
    latent_refusals,
    other_values,
)
from megagrpo.models.families.sigmoid_moe import SigmoidMoe
from megagrpo.models.kinds.experts.describe import MIXTRAL_NAMES, ExpertNames, Experts
from megagrpo.models.kinds.kda.describe import Kda, linear_refusals
from megagrpo.models.kinds.latent.describe import LatentAttention

_NAMES = {  # of keys: other families', and of this one's config.json
    "max_position_embeddings": "model_max_length",
    "n_routed_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_token",
    "n_shared_experts": "num_shared_experts",
    "n_group": "num_expert_group",
    "norm_topk_prob": "moe_renormalize",
    "scoring_func": "moe_router_activation_func",
}
_EXPERT_NAMES = ExpertNames(
    module="block_sparse_moe",
    projections=MIXTRAL_NAMES.projections,
    shared_size="num_shared_experts x moe_intermediate_size",
)
# the values that are supported of keys, "linear_attn_config." before those in there
_ONLY: dict[str, object] = {
    "mla_use_nope": True,  # SGLang turns nothing, whatever it says
    "q_lora_rank": None,  # SGLang does not load queries from a latent
    "rms_norm_eps": 1e-5,  # of SGLang's norm in Kimi Delta Attention, whatever this says
    **dict.fromkeys(
        (
            "attn_res_block_size",
            "routed_expert_hidden_size",
            "mla_use_output_gate",
            "linear_attn_config.use_full_rank_gate",
            "linear_attn_config.gate_lower_bound",
        ),
        (None, False),
    ),
}


class KimiLinear(SigmoidMoe):
    """Reads layers by linear_attn_config, which counts them from 1."""

    REQUIRED_KEYS = (
        *("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
        *("linear_attn_config", "moe_intermediate_size", "mla_use_nope"),
        *(*_NAMES, "first_k_dense_replace", "topk_group", "routed_scaling_factor"),
    )
    ROPE_SCALING_REFUSALS = staticmethod(every_scaling_refused)
    DRAFT_REFUSAL = "SGLang has no multi-token-prediction layers for it"
    SHARES_ATTENTION = False
    FP8_REFUSAL = "not for models with Kimi Delta Attention"

    def common(self, hf: HfConfig) -> HfConfig:
        return {**hf, **{theirs: hf[own] for theirs, own in _NAMES.items() if own in hf}}

    def refusals(self, hf: HfConfig) -> list[str]:
        problems = super().refusals(hf)
        for theirs, own in _NAMES.items():
            problems = [re.sub(rf"\b{theirs}\b", own, text) for text in problems]
        return problems

    def own_refusals(self, hf: HfConfig) -> list[str]:
        linear = hf["linear_attn_config"] or {}
        known = {**hf, **{f"linear_attn_config.{key}": value for key, value in linear.items()}}
        problems = super().own_refusals(hf) + other_values(known, _ONLY) + latent_refusals(hf)
        return problems + linear_refusals(hf, 1)

    def attention(self, hf: HfConfig) -> LatentAttention:
        attention = LatentAttention.read({"q_lora_rank": None, **hf})
        return replace(attention, rotary=replace(attention.rotary, fraction=0.0))

    def recurrent(self, hf: HfConfig) -> Kda:
        return Kda.read(hf, 1)

    def experts(self, hf: HfConfig) -> Experts:
        return replace(
            super().experts(hf),
            names=_EXPERT_NAMES,
            unreported="SGLang's Kimi-Linear does not say which layer chose experts",
            bias_dtype=None,  # SGLang's is of the engine's dtype
        )
