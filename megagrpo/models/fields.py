"""Values of Megatron's configuration classes for an experiment, as plain data. Loads no torch.

A dtype is written by name, an activation by torch's name, an enumeration by its member;
actor/megatron_config.py converts them. Later sources win: the model and the layout, defaults on
CUDA, the user's settings.
"""

from dataclasses import dataclass
from typing import Any

from megagrpo.config.actor import ActorConfig, OptimizerConfig
from megagrpo.config.fields import Rule
from megagrpo.config.libraries import passed_on
from megagrpo.models.architecture import Architecture

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


def context_rule(actor: ActorConfig, kernels: Kernels) -> Rule:
    """Returns the rule that GPUs with these kernels can share a sequence."""
    remedy = "install it and set actor.dtype: bfloat16 (it has none in float32), or set cp: 1"
    if actor.lora is not None:
        remedy = "with actor.lora, which it does not support, cp must be 1"
    has_kernel = kernels.transformer_engine and actor.dtype == "bfloat16"
    return Rule(
        kernels.cuda and actor.parallel.cp > 1 and not has_kernel,
        f"actor.parallel.cp = {actor.parallel.cp} needs Transformer Engine's attention on a "
        "GPU: torch's would hold masks as large as the square of the longest sequence",
        remedy,
    )


def transformer_defaults(arch: Architecture, actor: ActorConfig, kernels: Kernels) -> Fields:
    """Returns the fields of TransformerConfig that the kernels turn on; none on a plain CPU.

    - apply_rope_fusion: Transformer Engine, without latent attention (Megatron calls it
      experimental) or vision
    - moe_permute_fusion: Transformer Engine and experts; the map that is counted stays the same
    - moe_router_fusion: likewise, without routing_replay, which the kernel would ignore
    - gradient_accumulation_fusion: CUDA with Transformer Engine, or with Apex's kernel; not with
      adapters
    - bias_activation_fusion: CUDA with gated MLPs, unless use_te_activation_func is set, which
      excludes it
    - bias_dropout_fusion: CUDA
    - deterministic_mode: CUDA and rollout.deterministic
    - overlap_p2p_comm: CUDA with virtual stages, the only schedule that has it
    - deallocate_pipeline_outputs: CUDA with pipeline stages, if messages do not overlap

    The last two exclude each other: an output is freed when its message was waited for.
    """
    engine = kernels.transformer_engine
    p = actor.parallel
    given = actor.megatron
    messages = kernels.cuda and p.vpp > 1 and not given.get("deallocate_pipeline_outputs")
    wanted = {
        "apply_rope_fusion": engine and arch.plain_rotary,
        "moe_permute_fusion": engine and arch.is_moe,
        "moe_router_fusion": engine and arch.is_moe and actor.routing_replay is None,
        "gradient_accumulation_fusion": (
            kernels.cuda and (engine or kernels.fused_weight_gradient) and actor.lora is None
        ),
        "bias_activation_fusion": (
            kernels.cuda and arch.gated and not given.get("use_te_activation_func")
        ),
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
    own: Fields = {}
    for kind in arch.kinds:
        own |= kind.fields(actor, kernels)
    if arch.experts is not None and arch.experts.dense_layers:
        own["moe_layer_freq"] = [int(arch.has_experts(index)) for index in range(arch.num_layers)]
    base = {
        "num_layers": arch.num_layers,
        "hidden_size": arch.hidden_size,
        "ffn_hidden_size": arch.ffn_size,
        "layernorm_epsilon": arch.rms_eps,
        "normalization": "RMSNorm",
        "gated_linear_unit": arch.gated,
        "activation_func": "silu" if arch.gated else "squared_relu",
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
        # ranks have different numbers of tokens; only HybridEP reads it
        "moe_hybridep_pad_uneven_dispatch_inputs": True,
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
        **transformer_defaults(arch, actor, kernels),
        **own,
        **_recompute_fields(arch, actor, kernels),
        **passed_on(actor.megatron),
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
    return fields | passed_on(actor.ddp)


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
        **passed_on(optimizer.megatron),
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
    modules = ["layernorm"] * scaled
    modules += [name for kind in arch.kinds for name in kind.recomputed(engine, scaled)]
    modules += ["mlp"] * arch.has_dense_layers
    # Megatron keeps what overlaps with an exchange
    overlaps = actor.megatron.get("moe_shared_expert_overlap")
    return [name for name in modules if name != "shared_experts" or not overlaps]
