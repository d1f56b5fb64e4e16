"""The description of a family: Llama's way, and what a subclass in models/ says or does
differently."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from megagrpo.models.architecture import Architecture, Attention
from megagrpo.models.config_json import (
    COMMON_SIZE_KEYS,
    HfConfig,
    llama3_refusals,
    missing_keys,
    rope_scaling,
    rotary_fraction,
)
from megagrpo.models.kinds.experts.describe import Experts
from megagrpo.models.kinds.gated_delta.describe import GatedDelta
from megagrpo.models.kinds.grouped_query.describe import GroupedQuery
from megagrpo.models.kinds.vision.describe import Vision
from megagrpo.models.loading import RankPlace, load_attention, load_mlp, mlp_weights
from megagrpo.models.tensors import (
    GATED_NAMES,
    GatedNames,
    TensorSpec,
    attention_tensors,
    layer_prefix,
    mlp_tensors,
    norm_tensor,
)

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_layer import TransformerLayer
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class TinySizes:
    """Sizes of a tiny model; the defaults make one of 2 million parameters. Dense families ignore
    the experts."""

    family: str = "qwen3_moe"
    hidden_size: int = 128
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    ffn_size: int = 256
    num_experts: int = 8
    experts_per_token: int = 2
    expert_ffn_size: int = 128
    tie_embeddings: bool = False


class Family:
    """Reads, loads and lists models of one architecture."""

    HF_CLASS: ClassVar[str]  # the model's class in transformers, as config.json names it
    REQUIRED_KEYS: ClassVar[tuple[str, ...]] = ()  # of config.json, besides the common ones
    # keys that a smaller model of the same kind changes
    SIZE_KEYS: ClassVar[frozenset[str]] = COMMON_SIZE_KEYS
    MLP: ClassVar[str] = "mlp."  # begins the names of an MLP, or of router and experts, in a layer
    SHARED_MLP: ClassVar[str] = "shared_experts."  # of the experts that every token meets
    ROUTER_BIAS: ClassVar[str] = "gate.e_score_correction_bias"  # after MLP
    PROJECTIONS: ClassVar[GatedNames] = GATED_NAMES  # of MLPs and experts
    ROPE_SCALING_REFUSALS = staticmethod(llama3_refusals)
    PARTIAL_ROTARY: ClassVar[bool] = False  # rotary embedding may apply to part of a head
    LOADS_ATTENTION_BIAS: ClassVar[bool] = False
    FP8_REFUSAL: ClassVar[str] = ""  # why engines cannot have weights of such a model in FP8
    ENGINE_ATTENTION: ClassVar[str] = "self_attn"  # SGLang's module of it in a layer; "": the layer
    LEFT_OUT: ClassVar[tuple[str, ...]] = ()  # begin the names of tensors that are not loaded
    DRAFT_REFUSAL: ClassVar[str] = ""  # why actor.draft is not supported
    TAKES_ADAPTERS: ClassVar[bool] = True  # whether models/layers/lora.py knows its layers
    EXPERT_SIZE_KEY: ClassVar[str] = "moe_intermediate_size"  # of config.json: an expert's width
    SHARED_SIZE: ClassVar[str] = "n_shared_experts x moe_intermediate_size"  # of config.json
    CENTERED_NORMS: ClassVar[bool] = False  # RMSNorms multiply by 1 + weight
    ROUTING_REFUSAL: ClassVar[str] = ""  # why experts that engines chose cannot be replayed

    def refusals(self, hf: HfConfig) -> list[str]:
        """Returns what would fail, or be silently wrong, with this config.json: missing keys,
        unsupported options."""
        problems = missing_keys(hf, self.REQUIRED_KEYS)
        if problems:
            return problems
        problems = self.own_refusals(hf)
        experts = hf.get("num_experts") or hf.get("num_local_experts") or hf.get("n_routed_experts")
        if experts and (hf.get("num_experts_per_tok") or 0) > experts:
            problems.append(f"num_experts_per_tok is more than its {experts} experts")
        if scaling := rope_scaling(hf):
            problems += self.ROPE_SCALING_REFUSALS(scaling)
        if not self.PARTIAL_ROTARY and (fraction := rotary_fraction(hf)) != 1.0:
            problems.append(
                f"partial_rotary_factor {fraction} is not supported by this family; it must be 1"
            )
        if hf.get("mlp_bias"):
            problems.append(
                "mlp_bias puts biases on projections that are not loaded; it must be false"
            )
        if hf.get("hidden_act", "silu") != "silu":
            problems.append(f"hidden_act {hf['hidden_act']!r} is not supported; supported: silu")
        if hf.get("use_sliding_window"):
            problems.append(
                "use_sliding_window is not supported: attention here sees every earlier token"
            )
        if hf.get("attention_bias") and not self.LOADS_ATTENTION_BIAS:
            problems.append(
                "attention_bias puts biases on projections that are not loaded; it must be false"
            )
        return problems

    def own_refusals(self, hf: HfConfig) -> list[str]:
        """Returns the problems with a config.json without missing keys that only this family
        has."""
        return []

    def architecture(self, hf: HfConfig) -> Architecture:
        """Reads a config.json that has no refusals."""
        return Architecture(
            family=hf["model_type"],
            hidden_size=hf["hidden_size"],
            num_layers=hf["num_hidden_layers"],
            ffn_size=hf["intermediate_size"],
            vocab_size=hf["vocab_size"],
            max_positions=hf["max_position_embeddings"],
            rms_eps=hf["rms_norm_eps"],
            tied=bool(hf.get("tie_word_embeddings", False)),
            attention=self.attention(hf),
            centered_norms=self.CENTERED_NORMS,
            delta=self.delta(hf),
            experts=self.experts(hf),
            vision=self.vision(hf),
        )

    def attention(self, hf: HfConfig) -> Attention:
        """Reads the attention of a config.json without refusals."""
        return GroupedQuery.read(hf)

    def delta(self, hf: HfConfig) -> GatedDelta | None:
        """Reads the gated delta nets, None if there are none."""
        return None

    def experts(self, hf: HfConfig) -> Experts | None:
        """Reads the experts, None if there are none."""
        return None

    def vision(self, hf: HfConfig) -> Vision | None:
        """Reads the vision tower, None if there is none."""
        return None

    def load_layer(
        self,
        layer: TransformerLayer,
        arch: Architecture,
        hf: Mapping[str, Tensor],
        place: RankPlace,
    ) -> None:
        """Copies this rank's slices of one layer's HF tensors into Megatron's parameters: only
        slices and copies."""
        index = layer.layer_number - 1
        mlp = layer.mlp
        prefix = layer_prefix(index)
        layer.input_layernorm.weight.copy_(hf[prefix + "input_layernorm.weight"])
        layer.pre_mlp_layernorm.weight.copy_(hf[prefix + "post_attention_layernorm.weight"])
        self.load_attention(layer.self_attention, arch, hf, prefix + "self_attn.", place.tensor)
        prefix += self.MLP
        if arch.experts is None or not arch.has_experts(index):
            load_mlp(*mlp_weights(mlp), hf, prefix, place.tensor, self.PROJECTIONS)
            return
        mlp.router.weight.copy_(hf[prefix + "gate.weight"])
        if arch.experts.router_bias:
            mlp.router.expert_bias.copy_(hf[prefix + self.ROUTER_BIAS])
        if arch.experts.shared_ffn_size:
            load_mlp(*mlp_weights(mlp.shared_experts), hf, prefix + self.SHARED_MLP, place.tensor)
        if arch.experts.shared_gate:
            gate = hf[prefix + "shared_expert_gate.weight"]
            mlp.shared_experts.gate_weight.copy_(gate)
        for local, expert in enumerate(mlp.local_expert_indices):
            weights = mlp_weights(mlp.experts, local)
            load_mlp(*weights, hf, f"{prefix}experts.{expert}.", place.expert, self.PROJECTIONS)

    load_attention = staticmethod(load_attention)

    def layer_tensors(self, arch: Architecture, index: int) -> Iterator[TensorSpec]:
        """Yields the HF tensors of layer `index`, counted from 0, in the order in which a random
        model draws them."""
        prefix = layer_prefix(index)
        hidden = arch.hidden_size
        names = self.PROJECTIONS
        yield from self.attention_tensors(arch, prefix + "self_attn.")
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield norm_tensor(arch, f"{prefix}{name}.weight", hidden)
        prefix += self.MLP
        experts = arch.experts
        if experts is None or not arch.has_experts(index):
            yield from mlp_tensors(hidden, arch.ffn_size, prefix, False, names)
            return
        yield TensorSpec(prefix + "gate.weight", (experts.count, hidden), "matrix")
        if experts.router_bias:
            bias = prefix + self.ROUTER_BIAS
            yield TensorSpec(bias, (experts.count,), "bias", dtype="float32", trained=False)
        if experts.shared_ffn_size:
            yield from mlp_tensors(hidden, experts.shared_ffn_size, prefix + self.SHARED_MLP)
        if experts.shared_gate:
            yield TensorSpec(prefix + "shared_expert_gate.weight", (1, hidden), "matrix")
        for expert in range(experts.count):
            yield from mlp_tensors(
                hidden, experts.ffn_size, f"{prefix}experts.{expert}.", True, names
            )

    attention_tensors = staticmethod(attention_tensors)

    def exported_config(self, hf: HfConfig) -> HfConfig:
        """Returns the config.json of what is exported and published, quantisation left out."""
        return hf

    def stored_name(self, name: str) -> str:
        """Returns what checkpoints call a tensor of the text part that other families call
        `name`."""
        return name

    def stored(self, hf: Mapping[str, Tensor], name: str) -> Tensor:
        """Returns the tensor that other families call `name`, or a view of where it lies."""
        return hf[self.stored_name(name)]

    def tiny_options(self, sizes: TinySizes) -> dict[str, object]:
        """Returns the keys of a tiny model's config.json that add to or replace the common ones."""
        return {}
