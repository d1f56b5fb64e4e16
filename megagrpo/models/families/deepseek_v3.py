"""DeepSeek-V3, R1, Kimi-K2, Kimi-K2.5, Moonlight and GLM-4.7-Flash: multi-head latent attention,
experts as in sigmoid_moe.py."""

from functools import partial

from megagrpo.models.config_json import (
    YARN_KEYS,
    HfConfig,
    latent_refusals,
    other_values,
    text_part,
    yarn_refusals,
)
from megagrpo.models.families.sigmoid_moe import ROUTER_VALUES, SigmoidMoe
from megagrpo.models.kinds.latent.describe import LatentAttention

# what config.json of the plain model calls it
DEEPSEEK_V3 = {"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"]}


class DeepseekV3(SigmoidMoe):
    """Latent attention."""

    REQUIRED_KEYS = (
        *("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
        *SigmoidMoe.REQUIRED_KEYS,
    )
    ROPE_SCALING_REFUSALS = staticmethod(partial(yarn_refusals, needed=YARN_KEYS))

    def own_refusals(self, hf: HfConfig) -> list[str]:
        problems = super().own_refusals(hf) + latent_refusals(hf)
        # else rows of the projections would have to be permuted
        problems += other_values(hf, {"rope_interleave": True})
        problems += [
            f'config.json lacks "{key}": {value!r}, which engines read; transformers 5 does not write it'
            for key, value in ROUTER_VALUES.items()
            if key not in hf
        ]
        dense = hf["first_k_dense_replace"]
        kinds = hf.get("mlp_layer_types") or []
        if kinds and kinds != ["dense"] * dense + ["sparse"] * (hf["num_hidden_layers"] - dense):
            problems.append(
                f"mlp_layer_types must begin with first_k_dense_replace {dense} times 'dense', and "
                "have 'sparse' for every other layer"
            )
        return problems

    def attention(self, hf: HfConfig) -> LatentAttention:
        return LatentAttention.read(hf)


class KimiK25(DeepseekV3):
    """The text part of Kimi-K2.5 and 2.6, which is exported, and runs in engines, as the model of
    DeepSeek-V3's architecture that it is."""

    LEFT_OUT = ("vision_tower.", "mm_projector.")

    def exported_config(self, hf: HfConfig) -> HfConfig:
        own = text_part(hf)
        for key in ("auto_map", "vision_config"):
            own.pop(key, None)
        return {**own, **DEEPSEEK_V3}


class Glm4MoeLite(DeepseekV3):
    """GLM-4.7-Flash: plain rotary embedding, as published; engines read no ROUTER_VALUES."""

    FP8_REFUSAL = "no test compares GLM-4.7-Flash in FP8 with SGLang's"

    def own_refusals(self, hf: HfConfig) -> list[str]:
        problems = super().own_refusals({**ROUTER_VALUES, **hf})
        if hf["q_lora_rank"] is None:
            problems.append("q_lora_rank null: SGLang does not load such queries of this family")
        return problems
