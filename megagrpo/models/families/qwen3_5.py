"""Qwen3-Next, and the text part of Qwen3.5 and 3.6: gated delta nets, and gated attention in every
fourth layer.

Published files of Qwen3.5 are of vision-language models, whose tower (model.visual.*) is not loaded,
nor are multi-token-prediction layers (mtp.*) of any.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar

from megagrpo.models.architecture import Architecture
from megagrpo.models.config_json import COMMON_SIZE_KEYS, HfConfig, every_scaling_refused
from megagrpo.models.family import Family, TinySizes
from megagrpo.models.kinds.experts.describe import Experts
from megagrpo.models.kinds.gated_delta.describe import GatedDelta
from megagrpo.models.kinds.grouped_query.describe import GroupedQuery
from megagrpo.models.loading import Shard
from megagrpo.models.stored.fused_experts import FusedExperts
from megagrpo.models.tensors import TensorSpec, layer_prefix

if TYPE_CHECKING:
    from megatron.core.transformer.attention import SelfAttention
    from torch import Tensor

    from megagrpo.models.kinds.gated_delta.layer import GatedDeltaNet

_LINEAR_SIZES = (
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
)
_ATTENTION = ("linear_attention", "full_attention")
_INTERVAL = 4  # of transformers' and SGLang's classes, if config.json has none
_ROTARY_FRACTION = 0.25  # likewise


class Qwen35(Family):
    """The dense models."""

    HF_CLASS = "Qwen3_5ForCausalLM"
    REQUIRED_KEYS: ClassVar[tuple[str, ...]] = _LINEAR_SIZES
    SIZE_KEYS = COMMON_SIZE_KEYS | {*_LINEAR_SIZES[:4], "full_attention_interval"}
    ROPE_SCALING_REFUSALS = staticmethod(every_scaling_refused)
    PARTIAL_ROTARY = True
    TAKES_ADAPTERS = False
    ENGINE_ATTENTION = ""
    CENTERED_NORMS = True
    DRAFT_REFUSAL = "its multi-token-prediction layers (mtp.*) are not loaded"
    LEFT_OUT: ClassVar[tuple[str, ...]] = ("model.visual.", "mtp.")
    GROUPED: ClassVar[bool] = False  # of GatedDelta

    def __init__(self, part: str = ""):
        """part: what files of a vision-language model put before the names of the text part."""
        self._part = part

    def own_refusals(self, hf: HfConfig) -> list[str]:
        expected: dict[str, tuple[object, ...]] = {
            "attn_output_gate": (True,),
            "output_gate_type": (None, "silu", "swish"),
            "mlp_only_layers": (None, []),
            "decoder_sparse_step": (1,),
            "norm_topk_prob": (True,),
        }
        problems = [
            f"{key} {hf[key]!r} is not supported; supported: {values[-1]!r}"
            for key, values in expected.items()
            if hf.get(key, values[0]) not in values
        ]
        kinds = [_ATTENTION[not linear] for linear in _are_linear(hf)]
        if hf.get("layer_types") not in (None, kinds):
            problems.append(
                f"layer_types is not full attention in every {_interval(hf)}-th of "
                f"{hf['num_hidden_layers']} layers (full_attention_interval), as engines build them"
            )
        if hf["linear_num_value_heads"] % hf["linear_num_key_heads"]:
            problems.append("linear_num_key_heads must divide linear_num_value_heads")
        attention = self.attention(hf)
        turning = attention.head_dim * attention.rotary.fraction
        if turning % 2:
            problems.append(
                f"partial_rotary_factor turns {turning:g} of a head; rotary turns pairs"
            )
        return problems

    def attention(self, hf: HfConfig) -> GroupedQuery:
        return GroupedQuery.read(hf, _ROTARY_FRACTION, qk_norm=True, output_gate=True)

    def delta(self, hf: HfConfig) -> GatedDelta:
        return GatedDelta.read(hf, _are_linear(hf), self.GROUPED)

    @staticmethod
    def load_attention(
        attention: SelfAttention | GatedDeltaNet,
        arch: Architecture,
        hf: Mapping[str, Tensor],
        prefix: str,
        shard: Shard,
    ) -> None:
        """Loads gated attention, or the gated delta net in its place."""
        mixer = arch.mixer(attention.layer_number - 1)
        if isinstance(mixer, GatedDelta):
            _load_linear(attention, mixer, hf, prefix.replace("self_", "linear_"), shard)
            return
        _load_qkv(attention.linear_qkv.weight, arch, hf, prefix, shard)
        attention.linear_proj.weight.copy_(shard.columns(hf[prefix + "o_proj.weight"]))
        attention.q_layernorm.weight.copy_(hf[prefix + "q_norm.weight"])
        attention.k_layernorm.weight.copy_(hf[prefix + "k_norm.weight"])

    def layer_tensors(self, arch: Architecture, index: int) -> Iterator[TensorSpec]:
        prefix = layer_prefix(index)
        mixer = arch.mixer(index)
        linear = mixer if isinstance(mixer, GatedDelta) else None
        for spec in super().layer_tensors(arch, index):
            if linear is None or not spec.name.startswith(prefix + "self_attn."):
                yield spec
        if linear is not None:
            yield from _linear_tensors(arch.hidden_size, linear, prefix + "linear_attn.")

    def stored_name(self, name: str) -> str:
        return f"model.{self._part}{name[6:]}" if name.startswith("model.") else name

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
    SHARED_MLP = "shared_expert."
    SHARED_SIZE = "shared_expert_intermediate_size"

    def refusals(self, hf: HfConfig) -> list[str]:
        return super().refusals(_with_dense_width(hf))

    def architecture(self, hf: HfConfig) -> Architecture:
        return super().architecture(_with_dense_width(hf))

    def experts(self, hf: HfConfig) -> Experts:
        return Experts(
            count=hf["num_experts"],
            per_token=hf["num_experts_per_tok"],
            ffn_size=hf["moe_intermediate_size"],
            shared_ffn_size=hf["shared_expert_intermediate_size"],
            shared_gate=True,
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


def _with_dense_width(hf: HfConfig) -> HfConfig:
    """Adds what transformers' class does not write where every layer has experts."""
    return {"intermediate_size": hf.get("moe_intermediate_size"), **hf}


def _interval(hf: HfConfig) -> int:
    return hf.get("full_attention_interval") or _INTERVAL


def _are_linear(hf: HfConfig) -> tuple[bool, ...]:
    return tuple((index + 1) % _interval(hf) > 0 for index in range(hf["num_hidden_layers"]))


def _linear_tensors(hidden: int, linear: GatedDelta, prefix: str) -> Iterator[TensorSpec]:
    heads = linear.value_heads
    values = heads * linear.value_dim
    inputs = {"qkv": linear.channels, "z": values, "b": heads, "a": heads}
    if linear.grouped:
        inputs = {"qkvz": linear.channels + values, "ba": 2 * heads}
    for name, rows in inputs.items():
        yield TensorSpec(f"{prefix}in_proj_{name}.weight", (rows, hidden), "matrix")
    yield TensorSpec(prefix + "conv1d.weight", (linear.channels, 1, linear.kernel), "convolution")
    yield TensorSpec(prefix + "A_log", (heads,), "bias", dtype="float32")  # as in engines
    yield TensorSpec(prefix + "dt_bias", (heads,), "bias")
    yield TensorSpec(prefix + "norm.weight", (linear.value_dim,), "norm")
    yield TensorSpec(prefix + "out_proj.weight", (hidden, values), "matrix")


def _load_linear(
    layer: GatedDeltaNet, linear: GatedDelta, hf: Mapping[str, Tensor], prefix: str, shard: Shard
) -> None:
    """Loads a gated delta net, whose rows stand key head by key head; in files mostly kind by
    kind."""
    heads = linear.key_heads
    keys = heads * linear.key_dim

    def by_head(tensor: Tensor) -> Tensor:
        return tensor.view(heads, len(tensor) // heads, *tensor.shape[1:])

    def fill(target: Tensor, parts: list[Tensor]) -> None:
        target = target.view(heads // shard.size, -1, *target.shape[1:])
        start = 0
        for part in map(by_head, parts):
            end = start + part.shape[1]
            target[:, start:end].copy_(shard.rows(part))
            start = end

    def by_kind(mixed: Tensor) -> list[Tensor]:
        return [mixed[:keys], mixed[keys : 2 * keys], mixed[2 * keys :]]

    names = ("qkvz", "ba") if linear.grouped else ("qkv", "z", "b", "a")
    inputs = [hf[f"{prefix}in_proj_{name}.weight"] for name in names]
    fill(layer.in_proj.weight, inputs if linear.grouped else by_kind(inputs[0]) + inputs[1:])
    fill(layer.conv1d, by_kind(hf[prefix + "conv1d.weight"]))
    layer.A_log.copy_(shard.rows(hf[prefix + "A_log"]))
    layer.dt_bias.copy_(shard.rows(hf[prefix + "dt_bias"]))
    layer.norm.copy_(hf[prefix + "norm.weight"])
    layer.out_proj.weight.copy_(shard.columns(hf[prefix + "out_proj.weight"]))


def _load_qkv(
    parameter: Tensor, arch: Architecture, hf: Mapping[str, Tensor], prefix: str, shard: Shard
) -> None:
    """Loads this rank's rows of Megatron's order: for each key/value head [q of its heads, their
    gates, k, v].

    In files a head's gate follows its query. Ranks that share a key/value head cut it anywhere.
    """
    groups, dim = arch.attention.kv_heads, arch.attention.head_dim
    heads = arch.attention.heads // groups
    query = hf[prefix + "q_proj.weight"].view(groups, heads, 2, dim, -1)
    key, value = (hf[f"{prefix}{name}_proj.weight"].view(groups, dim, -1) for name in "kv")
    first = shard.rank * len(parameter)
    start = 0
    for group in range(groups):
        of_heads = [query[group, head, half] for half in (0, 1) for head in range(heads)]
        for source in (*of_heads, key[group], value[group]):
            low, high = max(first, start), min(first + len(parameter), start + dim)
            if low < high:
                parameter[low - first : high - first].copy_(source[low - start : high - start])
            start += dim
