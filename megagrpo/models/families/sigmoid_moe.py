"""Families with a sigmoid router with a bias, shared experts and first layers without experts;
GLM-4.5 is one.

Megatron's router scores a group of experts by as many of its best as one chosen group contributes,
the published models by its best 2; it always divides the chosen scores by their sum, except for one
expert a token. A model is refused if these differ.
"""

from dataclasses import replace
from typing import ClassVar

from megagrpo.models.config_json import (
    HfConfig,
    every_scaling_refused,
    other_values,
)
from megagrpo.models.family import Family
from megagrpo.models.kinds.experts.describe import Experts
from megagrpo.models.kinds.grouped_query.describe import GroupedQuery

_GROUP_SCORE_EXPERTS = 2  # the published models' score of a group: its best experts' together
_ROTARY_FRACTION = 0.5  # of transformers' Glm4MoeConfig, if config.json has none
# of keys that may be absent
ROUTER_VALUES = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}


class SigmoidMoe(Family):
    """The feed-forward part that DeepSeek-V3 and GLM-4.5 have in common."""

    REQUIRED_KEYS: ClassVar[tuple[str, ...]] = (
        "n_routed_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
        "n_shared_experts",
        "first_k_dense_replace",
        "n_group",
        "topk_group",
        "norm_topk_prob",
        "routed_scaling_factor",
    )

    def own_refusals(self, hf: HfConfig) -> list[str]:
        """Returns the problems of the router and of the order of layers, each by the name of its
        key."""
        problems = other_values(hf, {"norm_topk_prob": True, **ROUTER_VALUES})
        layers, dense = hf["num_hidden_layers"], hf["first_k_dense_replace"]
        if not 0 <= dense < layers:
            problems.append(
                f"first_k_dense_replace {dense} must be less than num_hidden_layers {layers}"
            )
        return problems + group_refusals(hf)

    def experts(self, hf: HfConfig) -> Experts:
        groups = hf["n_group"] or 1
        return Experts.read(
            hf,
            "n_routed_experts",
            shared_ffn_size=hf["moe_intermediate_size"] * (hf["n_shared_experts"] or 0),
            dense_layers=hf["first_k_dense_replace"],
            sigmoid=True,
            router_bias=True,
            groups=groups,
            top_groups=hf["topk_group"] if groups > 1 else 1,
            scale=float(hf["routed_scaling_factor"]),
        )


def group_refusals(hf: HfConfig) -> list[str]:
    """Returns why Megatron's router would choose other groups of experts than the model's."""
    experts, chosen = hf["n_routed_experts"], hf["num_experts_per_tok"]
    groups = hf.get("n_group") or 1
    top = hf.get("topk_group") or 1
    if groups == 1:
        return []
    if experts % groups or not 1 <= top <= groups:
        return [
            f"n_group {groups} must divide n_routed_experts {experts}, and topk_group {top} be at most n_group"
        ]
    if chosen // top != _GROUP_SCORE_EXPERTS:
        return [
            f"topk_group {top} with num_experts_per_tok {chosen} is not supported: a "
            f"group's score would be that of its best {chosen // top} experts, not of its "
            f"best {_GROUP_SCORE_EXPERTS}"
        ]
    return []


class Glm4Moe(SigmoidMoe):
    """GLM-4.5, Air and GLM-4.6: grouped-query attention with partial rotary embedding."""

    ROPE_SCALING_REFUSALS = staticmethod(every_scaling_refused)
    PARTIAL_ROTARY = True
    LOADS_ATTENTION_BIAS = True

    def attention(self, hf: HfConfig) -> GroupedQuery:
        """Reads the attention of a config.json; attention_bias is of queries, keys and values
        only."""
        return replace(
            GroupedQuery.read(hf, _ROTARY_FRACTION),
            qkv_bias=bool(hf.get("attention_bias")),
            qk_norm=bool(hf.get("use_qk_norm")),
        )
