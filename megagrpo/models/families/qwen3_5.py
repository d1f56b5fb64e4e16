"""Qwen3-Next, and the text part of Qwen3.5 and 3.6: gated delta nets, and gated attention in every
fourth layer.

Published files of Qwen3.5 are of vision-language models, whose tower (model.visual.*) is not loaded,
nor are multi-token-prediction layers (mtp.*) of any.
"""

from __future__ import annotations

from typing import ClassVar

from megagrpo.models.config_json import (
    COMMON_SIZE_KEYS,
    HfConfig,
    every_scaling_refused,
    other_values,
)
from megagrpo.models.family import Family, TinySizes
from megagrpo.models.kinds.experts.describe import ExpertNames, Experts
from megagrpo.models.kinds.gated_delta.describe import GatedDelta
from megagrpo.models.kinds.grouped_query.describe import GroupedQuery
from megagrpo.models.stored.fused_experts import FusedExperts

_LINEAR_SIZES = (
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
)
_ATTENTION = ("linear_attention", "full_attention")
_EXPERT_NAMES = ExpertNames(shared="shared_expert", shared_size="shared_expert_intermediate_size")
_ONLY: dict[str, object] = {  # the values of keys that may be absent
    "attn_output_gate": True,
    "mlp_only_layers": ([], None),
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
}
_INTERVAL = 4  # of transformers' and SGLang's classes, if config.json has none
_ROTARY_FRACTION = 0.25  # likewise


class Qwen35(Family):
    """The dense models."""

    HF_CLASS = "Qwen3_5ForCausalLM"
    REQUIRED_KEYS: ClassVar[tuple[str, ...]] = _LINEAR_SIZES
    SIZE_KEYS = COMMON_SIZE_KEYS | {*_LINEAR_SIZES[:4], "full_attention_interval"}
    ROPE_SCALING_REFUSALS = staticmethod(every_scaling_refused)
    PARTIAL_ROTARY = True
    CENTERED_NORMS = True
    DRAFT_REFUSAL = "its multi-token-prediction layers (mtp.*) are not loaded"
    LEFT_OUT: ClassVar[tuple[str, ...]] = ("model.visual.", "mtp.")
    GROUPED: ClassVar[bool] = False  # of GatedDelta
    GATES: ClassVar[tuple[str | None, ...]] = ("swish", "silu", None)  # of its output

    def own_refusals(self, hf: HfConfig) -> list[str]:
        problems = other_values(hf, _ONLY | {"output_gate_type": self.GATES})
        kinds = [_ATTENTION[not linear] for linear in _are_linear(hf)]
        if hf.get("layer_types") not in (None, kinds):
            problems.append(
                f"layer_types is not full attention in every {_interval(hf)}-th of "
                f"{hf['num_hidden_layers']} layers (full_attention_interval), as engines build them"
            )
        if hf["linear_num_value_heads"] % hf["linear_num_key_heads"]:
            problems.append("linear_num_key_heads must divide linear_num_value_heads")
        return problems

    def attention(self, hf: HfConfig) -> GroupedQuery:
        return GroupedQuery.read(hf, _ROTARY_FRACTION, qk_norm=True, output_gate=True)

    def recurrent(self, hf: HfConfig) -> GatedDelta:
        return GatedDelta.read(hf, _are_linear(hf), self.GROUPED)

    def tiny_options(self, sizes: TinySizes) -> dict[str, object]:
        rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}
        return {
            "rope_parameters": rope,
            "linear_num_key_heads": sizes.num_heads,
            "linear_num_value_heads": 2 * sizes.num_heads,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "linear_conv_kernel_dim": 4,
            "full_attention_interval": 4,
        }


class Qwen35Moe(FusedExperts, Qwen35):
    """With experts in every layer, and one that every token meets, times a sigmoid of the token."""

    HF_CLASS = "Qwen3_5MoeForCausalLM"
    REQUIRED_KEYS = (
        *_LINEAR_SIZES,
        "num_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
        "shared_expert_intermediate_size",
    )
    SIZE_KEYS = Qwen35.SIZE_KEYS | {*REQUIRED_KEYS[5:]}

    def common(self, hf: HfConfig) -> HfConfig:
        # transformers' class does not write it where every layer has experts
        return {"intermediate_size": hf.get("moe_intermediate_size"), **hf}

    def experts(self, hf: HfConfig) -> Experts:
        shared = hf["shared_expert_intermediate_size"]
        return Experts.read(
            hf, "num_experts", _EXPERT_NAMES, shared_ffn_size=shared, shared_gate=True
        )

    @property
    def fuses_experts(self) -> bool:
        return bool(self._part)

    def tiny_options(self, sizes: TinySizes) -> dict[str, object]:
        return super().tiny_options(sizes) | {
            "num_experts": sizes.num_experts,
            "num_experts_per_tok": sizes.experts_per_token,
            "moe_intermediate_size": sizes.expert_ffn_size,
            "shared_expert_intermediate_size": sizes.expert_ffn_size,
            "router_aux_loss_coef": 0.0,
        }


class Qwen3Next(Qwen35Moe):
    """The text model before Qwen3.5; its files have the rows of two projections together."""

    HF_CLASS = "Qwen3NextForCausalLM"
    LEFT_OUT = ("mtp.",)
    GROUPED = True


def _interval(hf: HfConfig) -> int:
    return hf.get("full_attention_interval") or _INTERVAL


def _are_linear(hf: HfConfig) -> tuple[bool, ...]:
    return tuple((index + 1) % _interval(hf) > 0 for index in range(hf["num_hidden_layers"]))
