"""DeepSeek-V3, R1, Kimi-K2, Kimi-K2.5 and Moonlight: multi-head latent attention, experts as in
sigmoid_moe.py."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from megagrpo.models.architecture import Architecture
from megagrpo.models.config_json import HfConfig, text_part
from megagrpo.models.families.sigmoid_moe import SigmoidMoe, tiny_moe_options
from megagrpo.models.family import TinySizes
from megagrpo.models.kinds.latent.describe import LatentAttention
from megagrpo.models.loading import Shard
from megagrpo.models.tensors import TensorSpec

if TYPE_CHECKING:
    from megatron.core.transformer.multi_latent_attention import MLASelfAttention
    from torch import Tensor

_MLA_KEYS = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
YARN_KEYS = (
    "factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
)
_READ_KEYS = {*YARN_KEYS, "type", "rope_type", "rope_theta", "partial_rotary_factor"}


def _yarn_refusals(scaling: HfConfig) -> list[str]:
    """Returns why a rotary scaling is not YaRN with every number given, which Megatron and
    transformers share."""
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind != "yarn":
        return [
            f"rope scaling {kind!r} is not supported by this family; supported: none, or 'yarn'"
        ]
    missing = [key for key in YARN_KEYS if not scaling.get(key)]
    others = sorted(key for key in scaling.keys() - _READ_KEYS if scaling[key] is not None)
    problems = (
        [f"rope scaling 'yarn' lacks {', '.join(missing)}, or has 0 there"] if missing else []
    )
    return problems + (
        [f"rope scaling 'yarn' with {', '.join(others)} is not supported"] if others else []
    )


class DeepseekV3(SigmoidMoe):
    """Latent attention, from which `attention` of the Architecture and the names of its tensors
    differ."""

    HF_CLASS = "DeepseekV3ForCausalLM"
    REQUIRED_KEYS = (*_MLA_KEYS, *SigmoidMoe.REQUIRED_KEYS)
    SIZE_KEYS = SigmoidMoe.SIZE_KEYS | {*_MLA_KEYS}
    ROPE_SCALING_REFUSALS = staticmethod(_yarn_refusals)

    def own_refusals(self, hf: HfConfig) -> list[str]:
        problems = super().own_refusals(hf)
        if not hf.get("rope_interleave", True):
            problems.append(
                "rope_interleave false is not supported: rows of the projections "
                "would have to be permuted"
            )
        if "moe_layer_freq" not in hf:
            problems.append(
                'config.json lacks "moe_layer_freq": 1, which engines read; transformers 5 does '
                "not write it"
            )
        heads = hf["num_attention_heads"]
        kv_heads = hf.get("num_key_value_heads", hf["num_attention_heads"])
        if heads != kv_heads:
            problems.append(
                f"num_key_value_heads {kv_heads} must be num_attention_heads "
                f"{heads} in latent attention"
            )
        return problems

    def attention(self, hf: HfConfig) -> LatentAttention:
        return LatentAttention.read(hf)

    @staticmethod
    def load_attention(
        attention: MLASelfAttention,
        arch: Architecture,
        hf: Mapping[str, Tensor],
        prefix: str,
        shard: Shard,
    ) -> None:
        """Loads down projections whole and up projections by heads, which lie one after the other
        on both sides."""
        assert isinstance(arch.attention, LatentAttention)
        if arch.attention.q_lora_rank is None:
            attention.linear_q_proj.weight.copy_(shard.rows(hf[prefix + "q_proj.weight"]))
        else:
            attention.linear_q_down_proj.weight.copy_(hf[prefix + "q_a_proj.weight"])
            attention.q_layernorm.weight.copy_(hf[prefix + "q_a_layernorm.weight"])
            attention.linear_q_up_proj.weight.copy_(shard.rows(hf[prefix + "q_b_proj.weight"]))
        attention.linear_kv_down_proj.weight.copy_(hf[prefix + "kv_a_proj_with_mqa.weight"])
        attention.kv_layernorm.weight.copy_(hf[prefix + "kv_a_layernorm.weight"])
        attention.linear_kv_up_proj.weight.copy_(shard.rows(hf[prefix + "kv_b_proj.weight"]))
        attention.linear_proj.weight.copy_(shard.columns(hf[prefix + "o_proj.weight"]))

    @staticmethod
    def attention_tensors(arch: Architecture, prefix: str) -> Iterator[TensorSpec]:
        """Yields projections and norms of latent attention."""
        mla = arch.attention
        hidden = arch.hidden_size
        heads = mla.heads
        assert isinstance(mla, LatentAttention)
        queries = heads * (mla.nope_dim + mla.rope_dim)
        if mla.q_lora_rank is None:
            yield TensorSpec(prefix + "q_proj.weight", (queries, hidden), "matrix")
        else:
            yield TensorSpec(prefix + "q_a_proj.weight", (mla.q_lora_rank, hidden), "matrix")
            yield TensorSpec(prefix + "q_a_layernorm.weight", (mla.q_lora_rank,), "norm")
            yield TensorSpec(prefix + "q_b_proj.weight", (queries, mla.q_lora_rank), "matrix")
        yield TensorSpec(
            prefix + "kv_a_proj_with_mqa.weight",
            (mla.kv_lora_rank + mla.rope_dim, hidden),
            "matrix",
        )
        yield TensorSpec(prefix + "kv_a_layernorm.weight", (mla.kv_lora_rank,), "norm")
        yield TensorSpec(
            prefix + "kv_b_proj.weight",
            (heads * (mla.nope_dim + mla.v_dim), mla.kv_lora_rank),
            "matrix",
        )
        yield TensorSpec(prefix + "o_proj.weight", (hidden, heads * mla.v_dim), "matrix")

    def tiny_options(self, sizes: TinySizes) -> dict[str, object]:
        """Kimi-K2 has no groups of experts. Engines require moe_layer_freq, topk_method and
        scoring_func."""
        rope = sizes.head_dim // 2
        return {
            "num_key_value_heads": sizes.num_heads,
            "head_dim": rope,  # as transformers writes it
            "q_lora_rank": sizes.hidden_size // 4,
            "kv_lora_rank": sizes.hidden_size // 2,
            "qk_nope_head_dim": sizes.head_dim,
            "qk_rope_head_dim": rope,
            "v_head_dim": sizes.head_dim,
            "rope_scaling": {
                "type": "yarn",
                "factor": 8.0,
                "original_max_position_embeddings": 256,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
            "moe_layer_freq": 1,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            **tiny_moe_options(sizes, groups=sizes.family == "deepseek_v3"),
        }


class KimiK25(DeepseekV3):
    """The text part of Kimi-K2.5 and 2.6, which is exported, and runs in engines, as the model of
    DeepSeek-V3's architecture that it is."""

    LEFT_OUT = ("vision_tower.", "mm_projector.")

    def exported_config(self, hf: HfConfig) -> HfConfig:
        own = text_part(hf)
        for key in ("auto_map", "vision_config"):
            own.pop(key, None)
        return {**own, "model_type": "deepseek_v3", "architectures": [self.HF_CLASS]}
