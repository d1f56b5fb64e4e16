"""Translates an Architecture and the experiment's actor section into Megatron's TransformerConfig."""

import importlib.util
from typing import Any

import torch
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from megagrpo.actor.host import uses_transformer_engine
from megagrpo.config.schema import ActorConfig
from megagrpo.families.architecture import Architecture, LatentAttention
from megagrpo.layout import layout_problems

_RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}
_YARN = ("original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")


def check_layout(arch: Architecture, config: ActorConfig) -> None:
    """Raises ValueError with every clash when the model cannot be cut as the layout asks."""
    problems = layout_problems(arch, config)
    if problems:
        raise ValueError("the model does not fit the layout:\n  " + "\n  ".join(problems))


def check_transformer_engine(config: ActorConfig) -> None:
    """Raises ValueError when Transformer Engine's layers are asked for where it is not installed."""
    if config.transformer_engine is True and importlib.util.find_spec("transformer_engine") is None:
        raise ValueError(
            "actor.transformer_engine is true, but the package transformer_engine is not installed here "
            "(it needs CUDA): pip install 'megagrpo[gpu]', or set actor.transformer_engine: false for torch's layers"
        )


def transformer_config(arch: Architecture, config: ActorConfig) -> TransformerConfig:
    """Returns Megatron's configuration: no fusions that need Transformer Engine or Apex, sums instead of means."""
    p, dtype = config.parallel, getattr(torch, config.dtype)
    kind = TransformerConfig if arch.mla is None else MLATransformerConfig
    return kind(
        num_layers=arch.num_layers,
        hidden_size=arch.hidden_size,
        num_attention_heads=arch.num_heads,
        num_query_groups=arch.num_kv_heads,
        kv_channels=arch.head_dim,
        ffn_hidden_size=arch.ffn_size,
        layernorm_epsilon=arch.rms_eps,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=arch.qkv_bias,
        qk_layernorm=arch.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=p.tp,
        sequence_parallel=p.tp > 1,
        pipeline_model_parallel_size=p.pp,
        virtual_pipeline_model_parallel_size=p.vpp if p.vpp > 1 else None,
        num_layers_in_first_pipeline_stage=p.first_stage_layers,
        num_layers_in_last_pipeline_stage=p.last_stage_layers,
        context_parallel_size=p.cp,
        expert_model_parallel_size=p.ep,
        expert_tensor_parallel_size=p.etp,
        moe_token_dispatcher_type="alltoall",
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        use_cpu_initialization=not torch.cuda.is_available(),
        perform_initialization=False,  # weights always come from an HF folder or a checkpoint
        calculate_per_token_loss=True,  # with a loss already divided by its global denominator: Megatron only sums
        batch_p2p_comm=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        **(_moe_options(arch, config) if arch.is_moe else {}),
        **_latent_options(arch, arch.mla),
        **_RECOMPUTE[config.recompute],
    )


def _latent_options(arch: Architecture, mla: LatentAttention | None) -> dict[str, Any]:
    if mla is None:
        return {}
    scaling = arch.rope_scaling
    yarn = {key: scaling[key] for key in _YARN} if scaling else {}
    return {
        "q_lora_rank": mla.q_lora_rank,
        "kv_lora_rank": mla.kv_lora_rank,
        "qk_head_dim": mla.nope_dim,
        "qk_pos_emb_head_dim": mla.rope_dim,
        "v_head_dim": mla.v_dim,
        "rotary_base": arch.rope_theta,
        "rope_type": "yarn" if scaling else "rope",
        # Megatron's default would scale the softmax without YaRN, too
        "rotary_scaling_factor": scaling["factor"] if scaling else 1.0,
        **yarn,
    }


def _moe_options(arch: Architecture, config: ActorConfig) -> dict[str, Any]:
    with_experts = arch.num_layers - arch.dense_layers
    return {
        "num_moe_experts": arch.num_experts,
        "moe_router_topk": arch.experts_per_token,
        "moe_ffn_hidden_size": arch.expert_ffn_size,
        "moe_grouped_gemm": uses_transformer_engine(config),
        "moe_router_load_balancing_type": "none",  # under plain sums Megatron's would count every token of the batch
        "moe_router_pre_softmax": not arch.norm_topk_prob,
        "moe_router_dtype": "fp32" if config.dtype != "float32" else None,
        "moe_shared_expert_intermediate_size": arch.shared_ffn_size or None,
        **({"moe_layer_freq": [0] * arch.dense_layers + [1] * with_experts} if arch.dense_layers else {}),
        **(_sigmoid_options(arch) if arch.sigmoid_router else {}),
    }


def _sigmoid_options(arch: Architecture) -> dict[str, Any]:
    groups = {"moe_router_num_groups": arch.router_groups, "moe_router_group_topk": arch.router_top_groups}
    return {
        "moe_router_score_function": "sigmoid",
        "moe_router_topk_scaling_factor": arch.routed_scale,
        "moe_router_enable_expert_bias": arch.router_bias,
        "moe_router_bias_update_rate": 0.0,  # Megatron would move it after every step, though no optimiser holds it
        **(groups if arch.router_groups > 1 else {}),
    }
