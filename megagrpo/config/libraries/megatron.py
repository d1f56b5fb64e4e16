"""Fields of Megatron-Core's configuration classes that an experiment may not set, with the reason.

All other fields are the user's. A pattern such as tp_comm_* stands for every field that it fits.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import reduce

from megagrpo.config.actor import ActorConfig
from megagrpo.config.fields import LibrarySettings
from megagrpo.config.libraries.source import (
    LibraryField,
    Refusal,
    read_fields,
    refusal_of,
    refusals,
    set_elsewhere,
)
from megagrpo.system.user_function import did_you_mean

_MODEL = """
    num_layers hidden_size num_attention_heads num_query_groups ffn_hidden_size kv_channels layernorm_* normalization
    gated_linear_unit activation_func glu_linear_offset activation_func_clamp_value add_*_linear add_qkv_bias qk_*norm
    attention_output_gate softmax_* window_* no_rope_freq rotary_* mrope_section multi_latent_attention *_lora_rank
    apply_residual_connection_post_layernorm qk_*head_dim v_head_dim rope_type original_max_position_embeddings
    beta_fast beta_slow mscale* num_moe_experts moe_router_topk* moe_ffn_hidden_size moe_latent_size moe_layer_freq
    moe_shared_expert_intermediate_size moe_shared_expert_gate moe_router_num_groups moe_router_group_topk
    moe_router_pre_softmax moe_router_score_function moe_router_enable_expert_bias moe_apply_probs_on_input
    use_fused_weighted_squared_relu mtp_* experimental_attention_variant dsa_* linear_* is_hybrid_model mamba_*
    use_mamba_mem_eff_path het*"""
# our key -> the fields that say the same
_TRANSFORMER_OURS = {
    "model.path": _MODEL,
    "actor.parallel.tp": "tensor_model_parallel_size sequence_parallel",
    "actor.parallel.pp": "pipeline_model_parallel_size",
    "actor.parallel.vpp": "virtual_pipeline_model_parallel_size",
    "actor.parallel.cp": "context_parallel_size",
    "actor.parallel.ep": "expert_model_parallel_size",
    "actor.parallel.etp": "expert_tensor_parallel_size moe_extended_tp",
    "actor.parallel.first_stage_layers": "num_layers_in_first_pipeline_stage "
    "pipeline_model_parallel_layout",
    "actor.parallel.last_stage_layers": "num_layers_in_last_pipeline_stage "
    "account_for_*_in_pipeline_split",
    "actor.dtype": "params_dtype pipeline_dtype bf16 fp16 enable_autocast autocast_dtype",
    "actor.device": "use_cpu_initialization",
    "actor.recompute": "recompute_granularity moe_layer_recompute",
    "actor.transformer_engine": "transformer_impl moe_grouped_gemm",
    "actor.router_losses.balance": "moe_aux_loss_coeff moe_router_load_balancing_type "
    "moe_per_layer_logging",
    "actor.router_losses.z": "moe_z_loss_coeff",
    "actor.router_bias_update": "moe_router_bias_update_rate",
    "actor.routing_replay": "moe_enable_routing_replay",
    "actor.logprob_chunk_tokens": "cross_entropy_*",
    "actor.megatron.moe_flex_dispatcher_backend": "moe_enable_deepep",
}
_ACTOR = "the actor sets it, as Megatron's training loop would"
_FP8 = (
    "digests compare parameters in actor.dtype with the engines'; fp8 is for products, not for "
    "parameters"
)
_OUTPUT = "everything that a run writes goes into its output_dir"
_SPLIT = (
    "it requires Megatron's own forward and loss, cut into pieces; the head and the losses "
    "here are others"
)
_TRANSFORMER_REFUSED = {
    "losses are divided by global denominators, so that Megatron must only sum": "calculate_per_token_loss",
    _ACTOR: """timers finalize_model_grads_func grad_scale_func no_sync_func grad_sync_func param_sync_func
        barrier_with_L1_time variable_seq_lengths num_microbatches_with_partial_activation_checkpoints""",
    "random noise in a forward would enter every ratio of new to old probabilities": """
        *_dropout moe_input_jitter_eps moe_router_force_load_balancing""",
    "weights always come from a Hugging Face folder or a checkpoint": """perform_initialization init_method*
        output_layer_init_method embedding_init_method* init_model_with_meta_device""",
    "engines drop no token: the two sides would compute probabilities of different models": """
        moe_token_drop* moe_expert_capacity_factor moe_pad_expert_input_to_capacity""",
    "expert loads and router biases count every routed token, and would count the padding": (
        "moe_router_padding_for_*"
    ),
    _FP8: "fp8_param fp4*",
    "a graph replays one shape, and the shape of micro-batches changes from step to step": (
        "*cuda_graph* use_te_rng_tracker"
    ),
    "the buffers of this overlap have one shape, and the shape of micro-batches changes from step "
    "to step": "tp_comm_*",
    _SPLIT: """overlap_moe_expert_parallel_comm delay_wgrad_compute ep_overlap_early_attn_memory_release
        defer_embedding_wgrad_compute wgrad_deferral_limit""",
    "its process groups or its transport are not created here": """hierarchical_context_parallel_sizes
        max_seqlen_per_dp_cp_rank hybrid_context_parallel pipeline_model_parallel_comm_backend use_ring_exchange_p2p""",
    "it changes what is computed in a way that no engine computes": """
        fp32_residual_connection qk_clip* log_max_attention_logit test_mode *kitchen* quant_recipe""",
    "parameters stay where publishing, digests and checkpoints read them": "cpu_offloading_weights",
    _OUTPUT: "config_logger_dir",
}
_OPTIMIZER_OURS = {
    "actor.optimizer.lr": "lr decoupled_lr",
    "actor.optimizer.min_lr": "min_lr decoupled_min_lr",
    "actor.optimizer.weight_decay": "weight_decay",
    "actor.optimizer.adam_beta1": "adam_beta1",
    "actor.optimizer.adam_beta2": "adam_beta2",
    "actor.optimizer.adam_eps": "adam_eps",
    "actor.optimizer.clip_grad": "clip_grad",
    "actor.optimizer.distributed": "use_distributed_optimizer",
    "actor.dtype": "bf16 fp16 params_dtype",
    "actor.ddp.overlap_param_gather": "overlap_param_gather",
}
_OPTIMIZER_REFUSED = {
    "the optimizer is Adam with decoupled weight decay, whose state checkpoints know": """
        optimizer decoupled_weight_decay sgd_* muon_*""",
    "gradients are not scaled: bfloat16 has float32's range, and losses are divided by global "
    "denominators": ("*loss_scale* hysteresis"),
    _FP8: "fp8_recipe reuse_grad_buf_for_mxfp8_param_ag",
    "Transformer Engine copies all of them in float32 to step, save and resume, 14 bytes of an "
    "element at the peak; "
    "float32 moments with use_precision_aware_optimizer take 10": "exp_avg_dtype exp_avg_sq_dtype "
    "main_params_dtype",
    "an update with a non-finite gradient is undone, which requires the whole step to come after "
    "the check": ("overlap_param_gather_with_optimizer_step"),
    _ACTOR: "barrier_with_L1_time timers",
    _OUTPUT: "config_logger_dir",
}
_DDP_OURS = {
    "actor.optimizer.distributed": "use_distributed_optimizer",
    "actor.optimizer.megatron.main_grads_dtype": "grad_reduce_in_fp32",
}
_DDP_REFUSED = {
    "gradients are sums: losses are divided by global denominators already": (
        "average_in_collective gradient_reduce_div_fusion"
    ),
    "its process groups are not created here": "num_distributed_optimizer_instances",
    "a rank that fails by itself leaves the others waiting; the actor checks finiteness on all "
    "ranks together": ("check_for_*"),
    _FP8: "fp8_param_gather reuse_grad_buf_for_mxfp8_param_ag keep_fp8_transpose_cache",
    "publishing and checkpoints read whole parameters, which FSDP shards": """*fsdp* preserve_fp32_weights
        data_parallel_sharding_strategy suggested_communication_unit_size outer_dp_sharding_strategy""",
    "Megatron refuses it with expandable_segments, with which trainers are started": (
        "nccl_ub disable_symmetric_registration"
    ),
    _SPLIT: "delay_wgrad_compute",
}


@dataclass(frozen=True)
class SettingsTable:
    """One of Megatron's configuration classes, the map in an experiment that sets its fields, and
    those refused."""

    path: tuple[str, ...]  # of the map
    name: str
    files: tuple[str, ...]
    bases: tuple[str, ...]  # classes whose fields it inherits
    refused: Mapping[str, Refusal]  # name or pattern -> why

    @property
    def fields(self) -> Mapping[str, LibraryField]:
        """The fields of the installed class; {} without Megatron."""
        return read_fields("megatron", self.files, (*self.bases, self.name))

    def given(self, actor: ActorConfig) -> LibrarySettings:
        """Returns the experiment's map."""
        return reduce(getattr, self.path[1:], actor)  # type: ignore[arg-type]


TRANSFORMER_SETTINGS = SettingsTable(
    ("actor", "megatron"),
    "TransformerConfig",
    (
        "core/model_parallel_config.py",
        "core/transformer/enums.py",
        "core/transformer/transformer_config.py",
    ),
    ("ModelParallelConfig", "MLATransformerConfig"),
    set_elsewhere(_TRANSFORMER_OURS) | refusals(_TRANSFORMER_REFUSED),
)
DDP_SETTINGS = SettingsTable(
    ("actor", "ddp"),
    "DistributedDataParallelConfig",
    ("core/distributed/distributed_data_parallel_config.py",),
    (),
    set_elsewhere(_DDP_OURS) | refusals(_DDP_REFUSED),
)
OPTIMIZER_SETTINGS = SettingsTable(
    ("actor", "optimizer", "megatron"),
    "OptimizerConfig",
    ("core/optimizer/optimizer_config.py",),
    (),
    set_elsewhere(_OPTIMIZER_OURS) | refusals(_OPTIMIZER_REFUSED),
)
MEGATRON_SETTINGS = (TRANSFORMER_SETTINGS, DDP_SETTINGS, OPTIMIZER_SETTINGS)


def megatron_setting_problems(actor: ActorConfig) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yields (key path, problem) of each setting that Megatron does not know or that is refused
    here."""
    wrong = [
        ((*table.path, key), problem)
        for table in MEGATRON_SETTINGS
        for key, value in table.given(actor).items()
        if (problem := _problem(table, key, value))
    ]
    together = (
        *_wrong_with_kernels(actor),
        *_wrong_with_stages(actor),
        *_wrong_with_optimizer(actor),
    )
    yield from wrong or ((("actor", *key.split(".")), problem) for key, problem in together)


def _problem(table: SettingsTable, key: str, value: object) -> str:
    fields, refusal = table.fields, refusal_of(key, table.refused)
    if refusal is not None:
        return f"{refusal.reason}{f'; set {refusal.instead}' if refusal.instead else ''}"
    if not fields:
        return "the package megatron-core is not installed here, so it cannot be checked"
    if key not in fields:
        known = [name for name in fields if refusal_of(name, table.refused) is None]
        return f"Megatron's {table.name} has no such field{did_you_mean(key, known)}"
    field = fields[key]
    return (
        ""
        if field.accepts(value)
        else f"should be {field.expected}, as Megatron declares it ({field.location})"
    )


_RECOMPUTE_OF = {
    "recompute_modules": "selective",
    "recompute_method": "full",
    "recompute_num_layers": "full",
}
# Megatron's checkpoint of these names what Transformer Engine defines, in fp8 or not
_RECOMPUTED_BY_ENGINE = {"layernorm", "moe_act", "mla_up_proj"}


def _wrong_with_kernels(actor: ActorConfig) -> Iterator[tuple[str, str]]:
    """Yields (key, problem) of settings that actor.recompute or the layers' implementation
    contradicts."""
    model = actor.megatron
    for key, kind in _RECOMPUTE_OF.items():
        if key in model and actor.recompute != kind:
            yield (
                f"megatron.{key}",
                f"it is read with actor.recompute {kind} only, which is {actor.recompute}",
            )
    if not actor.expects_transformer_engine:
        if engine := _RECOMPUTED_BY_ENGINE.intersection(model.get("recompute_modules") or ()):
            only = "only with Transformer Engine's layers (actor.transformer_engine)"
            yield "megatron.recompute_modules", f"{', '.join(sorted(engine))}: {only}"
        for key in (
            "fp8",
            "moe_permute_fusion",
            "moe_router_fusion",
            "apply_rope_fusion",
            "use_te_activation_func",
        ):
            if model.get(key):
                yield (
                    f"megatron.{key}",
                    "it needs Transformer Engine's layers (actor.transformer_engine)",
                )
    if model.get("fp8") and model.get("fp8_recipe", "delayed") == "delayed":
        text = (
            "it takes scales from earlier passes, also from those without a backward, and "
            "recomputes with others"
        )
        yield (
            "megatron.fp8",
            f"fp8_recipe delayed, the default, is refused: {text}; take tensorwise or blockwise",
        )
    if model.get("moe_token_dispatcher_type") == "flex" and model.get("moe_shared_expert_overlap"):
        yield "megatron.moe_shared_expert_overlap", "it works with the alltoall dispatcher only"


def _wrong_with_stages(actor: ActorConfig) -> Iterator[tuple[str, str]]:
    """Yields what Megatron's schedules do not do, or do wrongly without a word."""
    model, p = actor.megatron, actor.parallel
    virtual = "the schedule of virtual stages (actor.parallel.vpp of 2 or more)"
    if p.vpp == 1 and model.get("overlap_p2p_comm"):
        yield "megatron.overlap_p2p_comm", f"messages overlap only in {virtual}"
    if p.vpp == 1 and actor.ddp.get("align_param_gather"):
        yield (
            "ddp.align_param_gather",
            f"only {virtual} starts the gathers; in others each would be waited for",
        )
    if model.get("overlap_p2p_comm") and model.get("deallocate_pipeline_outputs"):
        text = "with overlap_p2p_comm Megatron-Core 0.16.1 frees an output that it is still sending"
        yield "megatron.deallocate_pipeline_outputs", text
    if model.get("overlap_p2p_comm") and model.get("batch_p2p_comm"):
        yield "megatron.batch_p2p_comm", "with overlap_p2p_comm messages are sent one by one"
    elif model.get("batch_p2p_comm") and p.vpp > 1 and p.pp == 2:
        text = (
            "of two stages, each is before and after the other, and a batch mixes up what is "
            "for which"
        )
        yield "megatron.batch_p2p_comm", text


def _wrong_with_optimizer(actor: ActorConfig) -> Iterator[tuple[str, str]]:
    """Yields settings of gradients and of the optimizer's state that actor.optimizer, lora or dtype
    contradicts."""
    ddp, optimizer, sharded = actor.ddp, actor.optimizer.megatron, actor.optimizer.distributed
    for key in ("overlap_grad_reduce", "overlap_param_gather"):
        if actor.lora is not None and ddp.get(key):
            yield (
                f"ddp.{key}",
                "with lora, replicas of experts are summed before the ranks' gradients are",
            )
    if ddp.get("overlap_param_gather") and not sharded:
        yield (
            "ddp.overlap_param_gather",
            "it gathers what actor.optimizer.distributed: true sharded",
        )
    if ddp.get("overlap_param_gather") and ddp.get("overlap_grad_reduce") is False:
        yield "ddp.overlap_param_gather", "it needs actor.ddp.overlap_grad_reduce: true"
    for key in ("use_precision_aware_optimizer", "optimizer_cpu_offload"):
        if optimizer.get(key) and not sharded:
            yield f"optimizer.megatron.{key}", "it needs actor.optimizer.distributed: true"
        if optimizer.get(key) and actor.dtype != "bfloat16":
            text = (
                "it keeps float32 copies of bfloat16 weights; with actor.dtype float32 there "
                "are none"
            )
            yield f"optimizer.megatron.{key}", text
    aware = optimizer.get("use_precision_aware_optimizer") or optimizer.get("optimizer_cpu_offload")
    if optimizer.get("main_grads_dtype", "float32") != "float32" and not aware:
        text = (
            "other types than float32 need "
            "actor.optimizer.megatron.use_precision_aware_optimizer: true"
        )
        yield "optimizer.megatron.main_grads_dtype", text
