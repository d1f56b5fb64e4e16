"""Values of Megatron's three configuration classes for an experiment, as plain data. Loads no
torch.

A dtype is written by name, an activation by torch's name, an enumeration by its member; config.py
converts them. Later sources win: the model and the layout, defaults on CUDA, the user's settings.
"""

from dataclasses import dataclass
from typing import Any

from megagrpo.config.actor import ActorConfig, OptimizerConfig
from megagrpo.models.architecture import Architecture
from megagrpo.models.families.deepseek_v3 import YARN_KEYS
from megagrpo.models.kinds.experts.describe import Experts
from megagrpo.models.kinds.gated_delta.describe import GatedDelta
from megagrpo.models.kinds.grouped_query.describe import GroupedQuery
from megagrpo.models.kinds.indexed.describe import LightningIndexer
from megagrpo.models.kinds.latent.describe import LatentAttention

Fields = dict[str, Any]  # of one of Megatron's classes, by its names


@dataclass(frozen=True)
class Kernels:
    """The kernels and device of trainers."""

    cuda: bool
    transformer_engine: bool  # layers are its
    fused_weight_gradient: bool  # Apex's fused_weight_gradient_mlp_cuda is installed
    deterministic: bool = False  # torch's deterministic algorithms are on


def expected_kernels(actor: ActorConfig) -> Kernels:
    """Returns the kernels expected on the experiment's machines: bfloat16 implies CUDA.

    Installed packages there are unknown here; Transformer Engine is assumed.
    """
    cuda = actor.device == "cuda" or (actor.device == "auto" and actor.dtype == "bfloat16")
    engine = actor.transformer_engine is True or (cuda and actor.expects_transformer_engine)
    return Kernels(cuda=cuda, transformer_engine=engine, fused_weight_gradient=False)


def transformer_defaults(arch: Architecture, actor: ActorConfig, kernels: Kernels) -> Fields:
    """Returns the fields of TransformerConfig that the kernels turn on; none on a plain CPU.

    | field | if |
    |---|---|
    | apply_rope_fusion | Transformer Engine, without latent attention (Megatron calls it
    experimental) or vision | | moe_permute_fusion | Transformer Engine and experts; the map that is
    counted stays the same | | moe_router_fusion | likewise, without routing_replay, which the
    kernel would ignore | | gradient_accumulation_fusion | CUDA with Transformer Engine, or with
    Apex's kernel; not with adapters | | bias_activation_fusion | CUDA, unless
    use_te_activation_func is set; the two exclude each other | | bias_dropout_fusion | CUDA |
    | deterministic_mode | CUDA and rollout.deterministic |
    | overlap_p2p_comm | CUDA with virtual stages, the only schedule that has it |
    | deallocate_pipeline_outputs | CUDA with pipeline stages, if messages do not overlap |

    The last two exclude each other: an output is freed when its message was waited for.
    """
    engine = kernels.transformer_engine
    p = actor.parallel
    given = actor.megatron
    others = given.get("deallocate_pipeline_outputs") or given.get("batch_p2p_comm")
    messages = kernels.cuda and p.vpp > 1 and not others
    wanted = {
        "apply_rope_fusion": engine and arch.latent is None and arch.vision is None,
        "moe_permute_fusion": engine and arch.is_moe,
        "moe_router_fusion": engine and arch.is_moe and actor.routing_replay is None,
        "gradient_accumulation_fusion": (
            kernels.cuda and (engine or kernels.fused_weight_gradient) and actor.lora is None
        ),
        "bias_activation_fusion": kernels.cuda and not given.get("use_te_activation_func"),
        "bias_dropout_fusion": kernels.cuda,
        "deterministic_mode": kernels.deterministic,
        "overlap_p2p_comm": messages,
        "deallocate_pipeline_outputs": kernels.cuda
        and p.pp > 1
        and not given.get("overlap_p2p_comm", messages),
    }
    return {name: True for name, on in wanted.items() if on}


def transformer_fields(arch: Architecture, actor: ActorConfig, kernels: Kernels) -> Fields:
    """Returns the fields of TransformerConfig, with latent attention of MLATransformerConfig.

    Sums instead of means, no noise, weights from files; no schedule functions, which the actor
    adds.
    """
    p = actor.parallel
    base = {
        "num_layers": arch.num_layers,
        "hidden_size": arch.hidden_size,
        "num_attention_heads": arch.attention.heads,
        "num_query_groups": arch.attention.kv_heads,
        "kv_channels": arch.attention.head_dim,
        "ffn_hidden_size": arch.ffn_size,
        "layernorm_epsilon": arch.rms_eps,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": "silu",
        "add_bias_linear": False,
        "layernorm_zero_centered_gamma": arch.centered_norms,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "tensor_model_parallel_size": p.tp,
        "sequence_parallel": p.tp > 1,
        "pipeline_model_parallel_size": p.pp,
        "virtual_pipeline_model_parallel_size": p.vpp if p.vpp > 1 else None,
        "num_layers_in_first_pipeline_stage": p.first_stage_layers,
        "num_layers_in_last_pipeline_stage": p.last_stage_layers,
        "context_parallel_size": p.cp,
        "expert_model_parallel_size": p.ep,
        "expert_tensor_parallel_size": p.etp,
        "moe_token_dispatcher_type": "alltoall",
        "params_dtype": actor.dtype,
        "pipeline_dtype": actor.dtype,
        "bf16": actor.dtype == "bfloat16",
        "use_cpu_initialization": not kernels.cuda,
        "perform_initialization": False,  # weights always come from an HF folder or a checkpoint
        # with a loss already divided by its global denominator: Megatron only sums
        "calculate_per_token_loss": True,
        "batch_p2p_comm": False,
        "transformer_impl": "transformer_engine" if kernels.transformer_engine else "local",
    }
    return {
        **base,
        **({} if arch.experts is None else _expert_fields(arch, arch.experts, actor, kernels)),
        **(
            _grouped_fields(arch.attention)
            if isinstance(arch.attention, GroupedQuery)
            else _latent_fields(arch.attention)
        ),
        **({} if arch.delta is None else _linear_fields(arch.delta)),
        **({} if arch.indexer is None else _indexer_fields(arch.indexer, actor, kernels)),
        **_recompute_fields(arch, actor, kernels),
        **transformer_defaults(arch, actor, kernels),
        **actor.megatron,
    }


def ddp_fields(actor: ActorConfig, kernels: Kernels) -> Fields:
    """Returns the fields of DistributedDataParallelConfig; on CUDA communication overlaps with
    computation.

    Not with adapters, whose replicas of experts are summed between the backward and the reduction.
    With virtual stages the schedule starts the gathers of the next chunk: each but the first is one
    bucket, which its forward waits for.
    """
    sharded = actor.optimizer.distributed
    p = actor.parallel
    overlap = kernels.cuda and actor.lora is None and actor.world_size > p.tp * p.pp
    dtype = actor.optimizer.megatron.get("main_grads_dtype", "float32")
    fields = {
        "use_distributed_optimizer": sharded,
        "grad_reduce_in_fp32": dtype == "float32",
        "overlap_grad_reduce": overlap,
        "overlap_param_gather": overlap and sharded,
        "align_param_gather": overlap and sharded and p.vpp > 1,
    }
    return fields | actor.ddp


def optimizer_fields(actor: ActorConfig, kernels: Kernels) -> Fields:
    """Returns the fields of OptimizerConfig."""
    optimizer: OptimizerConfig = actor.optimizer
    on_host = {}
    if optimizer.megatron.get("optimizer_cpu_offload"):
        # all of it, unless a fraction is set; Megatron's own arguments ask for both, its classes
        # for neither
        on_host = {"optimizer_offload_fraction": 1.0, "use_precision_aware_optimizer": True}
    return {
        "optimizer": "adam",
        "lr": optimizer.lr,
        "min_lr": optimizer.min_lr,
        "weight_decay": optimizer.weight_decay,
        "adam_beta2": optimizer.adam_beta2,
        "clip_grad": optimizer.clip_grad,
        "use_distributed_optimizer": optimizer.distributed,
        "bf16": actor.dtype == "bfloat16",
        "params_dtype": actor.dtype,
        "overlap_param_gather": bool(ddp_fields(actor, kernels).get("overlap_param_gather")),
        **on_host,
        **optimizer.megatron,
    }


def _recompute_fields(arch: Architecture, actor: ActorConfig, kernels: Kernels) -> Fields:
    if actor.recompute == "none":
        return {}
    if actor.recompute == "full":
        how: Fields = {"recompute_method": "uniform", "recompute_num_layers": 1}
    else:
        how = {"recompute_modules": _recomputed_modules(arch, actor, kernels)}
    return {"recompute_granularity": actor.recompute, **how}


def _recomputed_modules(arch: Architecture, actor: ActorConfig, kernels: Kernels) -> list[str]:
    """Returns what is cheap to compute again for the memory that it holds; flash attention holds
    next to nothing."""
    engine = kernels.transformer_engine
    delayed = actor.megatron.get("fp8_recipe", "delayed") == "delayed"
    # with delayed scales of FP8 they would be those of another forward, says Megatron
    scaled = engine and not (actor.megatron.get("fp8") and delayed)
    modules = {
        "layernorm": scaled,
        "mla_up_proj": scaled and arch.latent is not None,
        "moe_act": scaled and arch.is_moe,
        "mlp": arch.has_dense_layers,
        "moe": not engine and arch.is_moe,  # one by one they have no activation of their own
        "shared_experts": engine and bool(arch.experts and arch.experts.shared_ffn_size),
    }
    return [name for name, chosen in modules.items() if chosen]


def _grouped_fields(attention: GroupedQuery) -> Fields:
    return {
        "add_qkv_bias": attention.qkv_bias,
        "qk_layernorm": attention.qk_norm,
        "attention_output_gate": attention.output_gate,
    }


def _latent_fields(mla: LatentAttention) -> Fields:
    scaling = mla.rotary.scaling
    yarn = {key: scaling[key] for key in YARN_KEYS if key != "factor"} if scaling else {}
    return {
        "q_lora_rank": mla.q_lora_rank,
        "kv_lora_rank": mla.kv_lora_rank,
        "qk_head_dim": mla.nope_dim,
        "qk_pos_emb_head_dim": mla.rope_dim,
        "v_head_dim": mla.v_dim,
        "rotary_base": mla.rotary.theta,
        "rope_type": "yarn" if scaling else "rope",
        # Megatron's default would scale the softmax without YaRN, too
        "rotary_scaling_factor": scaling["factor"] if scaling else 1.0,
        **yarn,
    }


def _linear_fields(linear: GatedDelta) -> Fields:
    return {
        "linear_attention_freq": [int(layer) for layer in linear.layers],
        "linear_num_key_heads": linear.key_heads,
        "linear_num_value_heads": linear.value_heads,
        "linear_key_head_dim": linear.key_dim,
        "linear_value_head_dim": linear.value_dim,
        "linear_conv_kernel_dim": linear.kernel,
    }


def _indexer_fields(indexer: LightningIndexer, actor: ActorConfig, kernels: Kernels) -> Fields:
    """Returns the fields of sparse attention; without dsa_indexer_loss_coeff its indexer is not
    trained.

    Without kernels Megatron's core would hold float32 scores of every query and key.
    """
    fields: Fields = {
        "experimental_attention_variant": "dsa",
        "dsa_indexer_n_heads": indexer.heads,
        "dsa_indexer_head_dim": indexer.head_dim,
        "dsa_indexer_topk": indexer.topk,
        "dsa_indexer_rope_interleaved": indexer.in_pairs,
        "dsa_indexer_topk_freq": indexer.freq,
        "dsa_indexer_skip_topk_offset": indexer.offset,
        "qk_layernorm": True,  # absorbed attention has norms of latents only if it says so
    }
    if kernels.cuda and kernels.transformer_engine:
        fields["dsa_kernel_backend"] = "tilelang"
    if actor.parallel.cp > 1:  # the only exchange of its keys that Megatron has
        fields["cp_comm_type"] = "allgather"
    return fields


def _expert_fields(
    arch: Architecture, experts: Experts, actor: ActorConfig, kernels: Kernels
) -> Fields:
    fields: Fields = {
        "num_moe_experts": experts.count,
        "moe_router_topk": experts.per_token,
        "moe_ffn_hidden_size": experts.ffn_size,
        "moe_grouped_gemm": kernels.transformer_engine,
        # under plain sums Megatron's would count every token of the batch
        "moe_router_load_balancing_type": "none",
        "moe_router_pre_softmax": not experts.norm_topk,
        "moe_router_dtype": "fp32" if actor.dtype != "float32" else None,
        "moe_shared_expert_intermediate_size": experts.shared_ffn_size or None,
        "moe_shared_expert_gate": experts.shared_gate,
    }
    if experts.dense_layers:
        with_experts = arch.expert_layers
        fields["moe_layer_freq"] = [0] * experts.dense_layers + [1] * with_experts
    if experts.sigmoid:
        fields |= {
            "moe_router_score_function": "sigmoid",
            "moe_router_topk_scaling_factor": experts.scale,
            "moe_router_enable_expert_bias": experts.router_bias,
            # Megatron would move it after every step, though no optimizer holds it
            "moe_router_bias_update_rate": 0.0,
        }
    if experts.groups > 1:
        fields["moe_router_num_groups"] = experts.groups
        fields["moe_router_group_topk"] = experts.top_groups
    return fields
