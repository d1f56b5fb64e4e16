"""Nemotron-H and Nemotron-3 (Nano, Super, Ultra): layers of one part each, Mamba-2, attention
without positions, experts or an MLP, in the order that config.json gives.

MLPs and experts are two projections around a squared ReLU. Experts of Super and Ultra work in a
latent space, between two projections. Multi-token-prediction layers (mtp.*) are not loaded.
transformers' torch path bounds Mamba's steps below by `time_step_min`, and of several chunks adds
states of later ones to earlier ones; its kernels and engines do neither, nor does this.
"""

from dataclasses import replace

from megagrpo.models.architecture import Part
from megagrpo.models.config_json import (
    HfConfig,
    every_scaling_refused,
    missing_keys,
    other_values,
)
from megagrpo.models.families.sigmoid_moe import group_refusals
from megagrpo.models.family import Family
from megagrpo.models.kinds.experts.describe import ExpertNames, Experts
from megagrpo.models.kinds.grouped_query.describe import GroupedQuery
from megagrpo.models.kinds.mamba2.describe import Mamba2
from megagrpo.models.tensors import PLAIN_NAMES

_LETTERS: dict[str, Part] = {"M": "mamba", "*": "attention", "E": "moe", "-": "mlp"}
_EXPERT_KEYS = (
    "n_routed_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "moe_shared_expert_intermediate_size",
)
_EXPERT_NAMES = ExpertNames(
    projections=PLAIN_NAMES,
    shared_projections=PLAIN_NAMES,
    shared_size="moe_shared_expert_intermediate_size",
)
_ENGINE_GROUPS = 8  # SGLang's n_groups if config.json has no mamba_n_groups, whatever n_groups says
_UNBOUNDED = [0.0, {"__float__": "Infinity"}]  # as transformers writes it
_ONLY: dict[str, object] = {  # the values of keys that may be absent
    "mlp_hidden_act": "relu2",
    "mamba_hidden_act": "silu",
    "use_bias": False,
    "mamba_proj_bias": False,
    "use_conv_bias": True,
    "residual_in_fp32": False,
    "sliding_window": None,
    "norm_topk_prob": True,
    "n_shared_experts": 1,
    "time_step_limit": ([0.0, float("inf")], _UNBOUNDED, None),
}


class NemotronH(Family):
    """Reads layers by `layers_block_type`, or by `hybrid_override_pattern`."""

    REQUIRED_KEYS = (
        *("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel"),
        "layer_norm_epsilon",
    )
    ROPE_SCALING_REFUSALS = staticmethod(every_scaling_refused)
    GATED = False
    LEFT_OUT = ("mtp.",)
    DRAFT_REFUSAL = "its multi-token-prediction layers (mtp.*) are not loaded"
    FP8_REFUSAL = "not for models with Mamba-2 layers"

    def common(self, hf: HfConfig) -> HfConfig:
        return {
            "head_dim": 128,  # of transformers' and SGLang's classes, if config.json has none
            **hf,
            "num_hidden_layers": len(_words(hf)),
            "rms_norm_eps": hf.get("layer_norm_epsilon"),
        }

    def own_refusals(self, hf: HfConfig) -> list[str]:
        problems = other_values(hf, _ONLY)
        unknown = sorted(set(_words(hf)) - {*_LETTERS.values()})
        if unknown or not _words(hf):
            problems.append(
                f"hybrid_override_pattern (layers_block_type) has {', '.join(unknown) or 'no layer'}; "
                f"supported: {', '.join(_LETTERS)}"
            )
        elif not {"mamba", "attention"} <= {*_words(hf)}:
            problems.append("a model without Mamba-2 layers or without attention is not supported")
        if not isinstance(hf["intermediate_size"], int):
            problems.append(
                "intermediate_size must be one number: MLPs of several are not supported"
            )
        if hf["mamba_num_heads"] % hf["n_groups"]:
            problems.append("n_groups must divide mamba_num_heads")
        if (engines := hf.get("mamba_n_groups", _ENGINE_GROUPS)) != hf["n_groups"]:
            problems.append(
                f"n_groups is {hf['n_groups']}, but SGLang would compute with {engines} "
                "(mamba_n_groups); write both alike"
            )
        if "moe" in _words(hf):
            problems += missing_keys(hf, _EXPERT_KEYS) or group_refusals(hf)
        return problems

    def attention(self, hf: HfConfig) -> GroupedQuery:
        attention = GroupedQuery.read(hf)  # whose positions config.json describes, and nobody turns
        return replace(attention, rotary=replace(attention.rotary, fraction=0.0))

    def recurrent(self, hf: HfConfig) -> Mamba2:
        return Mamba2.read(hf, tuple(part == "mamba" for part in self.parts(hf)))

    def parts(self, hf: HfConfig) -> tuple[Part, ...]:
        return tuple(_words(hf))

    def experts(self, hf: HfConfig) -> Experts | None:
        if "moe" not in _words(hf):
            return None
        groups = hf.get("n_group") or 1
        return Experts.read(
            hf,
            "n_routed_experts",
            _EXPERT_NAMES,
            shared_ffn_size=hf["moe_shared_expert_intermediate_size"],
            latent_size=hf.get("moe_latent_size") or 0,
            sigmoid=True,
            router_bias=True,
            groups=groups,
            top_groups=hf["topk_group"] if groups > 1 else 1,
            scale=float(hf.get("routed_scaling_factor", 1.0)),
            unreported="SGLang's Nemotron-H does not say which layer chose experts",
        )

    def stored_name(self, name: str) -> str:
        outside = {
            "model.embed_tokens.weight": "backbone.embeddings.weight",
            "model.norm.weight": "backbone.norm_f.weight",
        }
        if not name.startswith("model.layers."):
            return outside.get(name, name)
        _, _, index, part, inner = name.split(".", 4)
        part = "norm" if part.endswith("layernorm") else "mixer"
        return f"backbone.layers.{index}.{part}.{inner.replace('gated_norm.', 'norm.')}"

    def engine_path(self, path: str) -> str:
        stored = self.stored_name(path + ".weight").removesuffix(".weight")
        return stored.replace("backbone.", "model.").replace("embeddings", "embed_tokens")


def _words(hf: HfConfig) -> list[Part]:
    """Returns what each layer is, unknown ones as they stand; engines prefer words to a pattern."""
    if (words := hf.get("layers_block_type")) is not None:
        return list(words)
    return [_LETTERS.get(letter, letter) for letter in hf.get("hybrid_override_pattern") or ()]
