"""Common to DeepSeek-V3 and GLM-4.5: a sigmoid router with a bias, shared experts, first layers without experts.

Megatron's router scores a group of experts by as many of its best as one chosen group contributes, the published models
by its best 2; it always divides the chosen scores by their sum, except for one expert a token. Where these differ the
model is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megagrpo.families.architecture import Architecture
from megagrpo.families.loading import RankPlace, load_experts, load_mlp
from megagrpo.families.tensors import TensorSpec, layer_prefix, mlp_tensors, router_tensor
from megagrpo.families.tiny import TinySizes

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_layer import TransformerLayer
    from torch import Tensor

REQUIRED_KEYS = (
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
_COMPUTING_KEYS = {"norm_topk_prob", "routed_scaling_factor"}  # they say how, not how large
SIZE_KEYS = frozenset(REQUIRED_KEYS) - _COMPUTING_KEYS | {"num_nextn_predict_layers"}
_GROUP_SCORE_EXPERTS = 2  # the published models' score of a group: its best experts' together


def router_refusals(hf: Mapping[str, Any]) -> list[str]:
    """Returns what of the router and the order of layers is not computed, each problem by the name of its key."""
    problems = []
    expected = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "norm_topk_prob": True, "moe_layer_freq": 1}
    for key, value in expected.items():
        if hf.get(key, value) != value:
            problems.append(f"{key} {hf[key]!r} is not supported; supported: {value!r}")
    if hf["num_experts_per_tok"] == 1:
        problems.append("num_experts_per_tok 1 is not supported: one expert's score would not be divided by itself")
    layers, dense = hf["num_hidden_layers"], hf["first_k_dense_replace"]
    if not 0 <= dense < layers:
        problems.append(f"first_k_dense_replace {dense} must be less than num_hidden_layers {layers}")
    return problems + _group_refusals(hf)


def _group_refusals(hf: Mapping[str, Any]) -> list[str]:
    experts, chosen = hf["n_routed_experts"], hf["num_experts_per_tok"]
    groups, top = hf["n_group"] or 1, hf["topk_group"] or 1
    if groups == 1:
        return []
    if experts % groups or not 1 <= top <= groups:
        return [f"n_group {groups} must divide n_routed_experts {experts}, and topk_group {top} be at most n_group"]
    if chosen // top != _GROUP_SCORE_EXPERTS:
        return [
            f"topk_group {top} with num_experts_per_tok {chosen} is not supported: a group's score would be that of "
            f"its best {chosen // top} experts, not of its best {_GROUP_SCORE_EXPERTS}"
        ]
    return []


def with_sigmoid_moe(arch: Architecture, hf: Mapping[str, Any]) -> Architecture:
    """Returns the architecture with experts, router and first layers from config.json."""
    groups = hf["n_group"] or 1
    return replace(
        arch,
        num_experts=hf["n_routed_experts"],
        experts_per_token=hf["num_experts_per_tok"],
        expert_ffn_size=hf["moe_intermediate_size"],
        shared_ffn_size=hf["moe_intermediate_size"] * (hf["n_shared_experts"] or 0),
        dense_layers=hf["first_k_dense_replace"],
        sigmoid_router=True,
        router_bias=True,
        router_groups=groups,
        router_top_groups=hf["topk_group"] if groups > 1 else 1,
        routed_scale=float(hf["routed_scaling_factor"]),
    )


def load_feed_forward(layer: TransformerLayer, arch: Architecture, hf: Mapping[str, Tensor], place: RankPlace) -> None:
    """Loads the MLP of one of the first layers, or router, its bias, shared experts and this rank's experts."""
    index = layer.layer_number - 1
    prefix = layer_prefix(index) + "mlp."
    if index < arch.dense_layers:
        load_mlp(layer.mlp, hf, prefix, place.tensor)
        return
    layer.mlp.router.weight.copy_(hf[prefix + "gate.weight"])
    layer.mlp.router.expert_bias.copy_(hf[prefix + "gate.e_score_correction_bias"])
    if arch.shared_ffn_size:
        load_mlp(layer.mlp.shared_experts, hf, prefix + "shared_experts.", place.tensor)
    load_experts(layer.mlp, hf, prefix + "experts.", place.expert)


def feed_forward_tensors(arch: Architecture, index: int) -> Iterator[TensorSpec]:
    """Yields what `load_feed_forward` reads of all ranks."""
    prefix, hidden = layer_prefix(index) + "mlp.", arch.hidden_size
    if index < arch.dense_layers:
        yield from mlp_tensors(hidden, arch.ffn_size, prefix)
        return
    yield router_tensor(arch, prefix)
    bias = prefix + "gate.e_score_correction_bias"
    yield TensorSpec(bias, (arch.num_experts,), "bias", dtype="float32", trained=False)
    if arch.shared_ffn_size:
        yield from mlp_tensors(hidden, arch.shared_ffn_size, prefix + "shared_experts.")
    for expert in range(arch.num_experts):
        yield from mlp_tensors(hidden, arch.expert_ffn_size, f"{prefix}experts.{expert}.", expert=True)


def tiny_moe_options(sizes: TinySizes, groups: bool) -> dict[str, Any]:
    """Returns the keys of experts in a tiny model's config.json. groups: grouped experts, if sizes allow."""
    top = sizes.experts_per_token // _GROUP_SCORE_EXPERTS
    grouped = groups and top > 0 and sizes.num_experts % (2 * top) == 0
    return {
        "n_routed_experts": sizes.num_experts,
        "num_experts_per_tok": sizes.experts_per_token,
        "moe_intermediate_size": sizes.expert_ffn_size,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 2 * top if grouped else 1,
        "topk_group": top if grouped else 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "num_nextn_predict_layers": 0,
    }
