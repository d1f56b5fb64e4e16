"""Says of every field of Megatron's three configuration classes whether an experiment may set it, and if not, why.

A test holds these tables against the installed classes: a field that a new version brings is in none of them.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megagrpo.config.actor import ActorConfig
from megagrpo.config.libraries.source import (
    Library,
    LibraryField,
    LibraryMissing,
    Refusal,
    library_fields,
    setting_problems,
)

_TRANSFORMER_FILES = (
    "core/model_parallel_config.py",
    "core/transformer/enums.py",
    "core/transformer/transformer_config.py",
)
TRANSFORMER = Library("megatron", _TRANSFORMER_FILES, "TransformerConfig")
LATENT_TRANSFORMER = Library("megatron", _TRANSFORMER_FILES, "MLATransformerConfig")
OPTIMIZER = Library("megatron", ("core/optimizer/optimizer_config.py",), "OptimizerConfig")
DDP = Library("megatron", ("core/distributed/distributed_data_parallel_config.py",), "DistributedDataParallelConfig")


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_FROM_MODEL = _names("""
    num_layers hidden_size num_attention_heads num_query_groups ffn_hidden_size kv_channels layernorm_epsilon
    layernorm_zero_centered_gamma normalization gated_linear_unit activation_func glu_linear_offset
    activation_func_clamp_value add_bias_linear add_qkv_bias qk_layernorm qk_l2_norm attention_output_gate softmax_scale
    softmax_type window_size window_attn_skip_freq no_rope_freq rotary_interleaved mrope_section
    apply_residual_connection_post_layernorm multi_latent_attention q_lora_rank kv_lora_rank qk_head_dim
    qk_pos_emb_head_dim v_head_dim rope_type rotary_base rotary_percent rotary_scaling_factor
    original_max_position_embeddings beta_fast beta_slow mscale mscale_all_dim num_moe_experts moe_router_topk
    moe_ffn_hidden_size moe_shared_expert_intermediate_size moe_shared_expert_gate moe_layer_freq moe_latent_size
    moe_router_num_groups moe_router_group_topk moe_router_pre_softmax moe_router_topk_scaling_factor
    moe_router_score_function moe_router_enable_expert_bias moe_router_topk_limited_devices moe_apply_probs_on_input
    use_fused_weighted_squared_relu mtp_num_layers mtp_loss_scaling_factor mtp_standalone
    experimental_attention_variant dsa_indexer_n_heads dsa_indexer_head_dim dsa_indexer_topk dsa_indexer_loss_coeff
    dsa_indexer_use_sparse_loss linear_attention_freq linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim
    linear_num_key_heads linear_num_value_heads is_hybrid_model mamba_state_dim mamba_head_dim mamba_num_groups
    mamba_num_heads use_mamba_mem_eff_path heterogeneous_block_specs hetereogenous_dist_checkpoint
""")
# ours -> the field that says the same
_TRANSFORMER_OURS = {
    "actor.parallel.tp": _names("tensor_model_parallel_size sequence_parallel"),
    "actor.parallel.pp": _names("pipeline_model_parallel_size"),
    "actor.parallel.vpp": _names("virtual_pipeline_model_parallel_size"),
    "actor.parallel.cp": _names("context_parallel_size"),
    "actor.parallel.ep": _names("expert_model_parallel_size"),
    "actor.parallel.etp": _names("expert_tensor_parallel_size moe_extended_tp"),
    "actor.parallel.first_stage_layers": _names("num_layers_in_first_pipeline_stage"),
    "actor.parallel.last_stage_layers": _names("num_layers_in_last_pipeline_stage"),
    "actor.parallel.first_stage_layers or last_stage_layers": _names("""
        pipeline_model_parallel_layout account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split"""),
    "actor.dtype": _names("params_dtype pipeline_dtype bf16 fp16 enable_autocast autocast_dtype"),
    "actor.device": _names("use_cpu_initialization"),
    "actor.recompute": _names("recompute_granularity"),
    "actor.recompute: selective, with recompute_modules: [moe]": _names("moe_layer_recompute"),
    "actor.transformer_engine": _names("transformer_impl moe_grouped_gemm"),
    "actor.router_losses.balance": _names("moe_aux_loss_coeff moe_router_load_balancing_type moe_per_layer_logging"),
    "actor.router_losses.z": _names("moe_z_loss_coeff"),
    "actor.router_bias_update": _names("moe_router_bias_update_rate"),
    "actor.routing_replay": _names("moe_enable_routing_replay"),
    "actor.logprob_chunk_tokens": _names("cross_entropy_loss_fusion cross_entropy_fusion_impl"),
    "actor.megatron.moe_token_dispatcher_type: flex and moe_flex_dispatcher_backend: deepep": _names(
        "moe_enable_deepep"
    ),
}
_TRANSFORMER_REFUSED = {
    "losses are divided by global denominators, so that Megatron must only sum": _names("calculate_per_token_loss"),
    "the actor sets it itself, as Megatron's training loop would": _names("""
        timers finalize_model_grads_func grad_scale_func no_sync_func grad_sync_func param_sync_func
        barrier_with_L1_time variable_seq_lengths num_microbatches_with_partial_activation_checkpoints"""),
    "random noise in a forward would be in every ratio of new to old probabilities": _names(
        "hidden_dropout attention_dropout moe_input_jitter_eps moe_router_force_load_balancing"
    ),
    "weights always come from a Hugging Face folder or a checkpoint": _names("""
        perform_initialization init_method output_layer_init_method init_method_std embedding_init_method
        embedding_init_method_std init_model_with_meta_device"""),
    "engines drop no token, so that the probabilities of the two would be of different models": _names("""
        moe_token_dropping moe_expert_capacity_factor moe_pad_expert_input_to_capacity moe_token_drop_policy"""),
    "expert loads and router biases count every routed token, and these would be tokens of nobody": _names(
        "moe_router_padding_for_quantization moe_router_padding_for_fp8"
    ),
    "digests compare parameters in actor.dtype with the engines'; fp8 is for products, not for parameters": _names(
        "fp8_param fp4 fp4_recipe fp4_param fp4_quantizer_factory"
    ),
    "a graph replays one shape, and the shape of micro-batches changes from step to step": _names("""
        enable_cuda_graph external_cuda_graph cuda_graph_impl cuda_graph_scope cuda_graph_use_single_mempool
        cuda_graph_retain_backward_graph cuda_graph_warmup_steps use_te_rng_tracker"""),
    "the buffers of this overlap have one shape, and the shape of micro-batches changes from step to step": _names("""
        tp_comm_overlap tp_comm_bulk_wgrad tp_comm_bulk_dgrad tp_comm_overlap_ag tp_comm_overlap_rs
        tp_comm_overlap_rs_dgrad tp_comm_split_ag tp_comm_atomic_ag tp_comm_split_rs tp_comm_atomic_rs
        tp_comm_overlap_disable_qkv tp_comm_overlap_disable_fc1 tp_comm_bootstrap_backend"""),
    "it needs Megatron's own forward and loss, cut into pieces; here the head and the losses are others": _names("""
        overlap_moe_expert_parallel_comm delay_wgrad_compute ep_overlap_early_attn_memory_release
        defer_embedding_wgrad_compute wgrad_deferral_limit"""),
    "its process groups or its transport are not made here": _names("""
        hierarchical_context_parallel_sizes max_seqlen_per_dp_cp_rank hybrid_context_parallel
        pipeline_model_parallel_comm_backend use_ring_exchange_p2p"""),
    "it is for inference": _names("""
        flash_decode inference_rng_tracker inference_sampling_seed use_inference_optimized_layers
        inference_fuse_tp_communication mlp_chunks_for_prefill cache_mla_latents symmetric_ar_type
        batch_invariant_mode"""),
    "attention and norms here do not read it": _names("""
        masked_softmax_fusion attention_softmax_in_fp32 apply_query_key_layer_scaling persist_layer_norm
        memory_efficient_layer_norm"""),
    "it changes what is computed in a way that no engine computes": _names("""
        fp32_residual_connection qk_clip qk_clip_alpha qk_clip_threshold log_max_attention_logit test_mode"""),
    "it needs a package or objects that no experiment file can give": _names("""
        use_kitchen use_kitchen_attention kitchen_attention_backend quant_recipe moe_use_legacy_grouped_gemm
        _cpu_offloading_context"""),
    "parameters stay where publishing, digests and checkpoints read them": _names("cpu_offloading_weights"),
    "what a run writes goes into its output_dir": _names("config_logger_dir"),
}
_TRANSFORMER_ALLOWED = _names("""
    deterministic_mode gradient_accumulation_fusion async_tensor_model_parallel_allreduce overlap_p2p_comm
    batch_p2p_comm batch_p2p_sync deallocate_pipeline_outputs overlap_p2p_comm_warmup_flush
    microbatch_group_size_per_vp_stage cpu_offloading cpu_offloading_num_layers cpu_offloading_activations
    cpu_offloading_double_buffering attention_backend disable_bf16_reduced_precision_matmul bias_activation_fusion
    bias_dropout_fusion apply_rope_fusion fused_single_qkv_rope use_te_activation_func activation_func_fp8_input_store
    recompute_method recompute_num_layers distribute_saved_activations recompute_modules fp8 fp8_recipe
    fp8_quantizer_factory fp8_margin fp8_interval fp8_amax_history_len fp8_amax_compute_algo fp8_wgrad
    fp8_dot_product_attention fp8_multi_head_attention tp_only_amax_red first_last_layers_bf16
    num_layers_at_start_in_bf16 num_layers_at_end_in_bf16 moe_shared_expert_overlap moe_router_dtype
    moe_token_dispatcher_type moe_flex_dispatcher_backend moe_permute_fusion moe_router_fusion moe_deepep_num_sms
    moe_hybridep_num_sms cp_comm_type clone_scatter_output_in_embedding disable_parameter_transpose_cache
    fine_grained_activation_offloading offload_modules min_offloaded_tensor_size
""")

_OPTIMIZER_OURS = {
    "actor.optimizer.lr": _names("lr decoupled_lr"),
    "actor.optimizer.min_lr": _names("min_lr decoupled_min_lr"),
    "actor.optimizer.weight_decay": _names("weight_decay"),
    "actor.optimizer.adam_beta1": _names("adam_beta1"),
    "actor.optimizer.adam_beta2": _names("adam_beta2"),
    "actor.optimizer.adam_eps": _names("adam_eps"),
    "actor.optimizer.clip_grad": _names("clip_grad"),
    "actor.optimizer.distributed": _names("use_distributed_optimizer"),
    "actor.dtype": _names("bf16 fp16 params_dtype"),
    "actor.ddp.overlap_param_gather": _names("overlap_param_gather"),
}
_OPTIMIZER_REFUSED = {
    "the optimizer is Adam with decoupled weight decay, of which checkpoints know the state": _names("""
        optimizer decoupled_weight_decay sgd_momentum muon_momentum muon_split_qkv muon_use_nesterov muon_scale_mode
        muon_fp32_matmul_prec muon_num_ns_steps muon_tp_mode muon_extra_scale_factor"""),
    "gradients are not scaled: bfloat16 has float32's range, and losses are divided by global denominators": _names(
        "loss_scale initial_loss_scale min_loss_scale loss_scale_window hysteresis"
    ),
    "digests compare parameters in actor.dtype with the engines'; fp8 is for products, not for parameters": _names(
        "fp8_recipe reuse_grad_buf_for_mxfp8_param_ag"
    ),
    "an update is taken back when its gradient is not finite, for which the whole step must come after": _names(
        "overlap_param_gather_with_optimizer_step"
    ),
    "no metric shows it": _names("log_num_zeros_in_grad"),
    "the actor sets it itself, as Megatron's training loop would": _names("barrier_with_L1_time timers"),
    "what a run writes goes into its output_dir": _names("config_logger_dir"),
}
_OPTIMIZER_ALLOWED = _names("""
    apply_wd_to_qk_layernorm use_precision_aware_optimizer store_param_remainders main_grads_dtype main_params_dtype
    exp_avg_dtype exp_avg_sq_dtype optimizer_cpu_offload optimizer_offload_fraction use_torch_optimizer_for_cpu_offload
    overlap_cpu_optimizer_d2h_h2d pin_cpu_grads pin_cpu_params
""")

_DDP_OURS = {
    "actor.optimizer.distributed": _names("use_distributed_optimizer"),
    "actor.optimizer.megatron.main_grads_dtype": _names("grad_reduce_in_fp32"),
}
_DDP_REFUSED = {
    "gradients are sums: losses are divided by global denominators already": _names(
        "average_in_collective gradient_reduce_div_fusion"
    ),
    "its process groups are not made here": _names("num_distributed_optimizer_instances"),
    "a rank that fails alone leaves the others waiting; what is not finite is found for all ranks at once": _names(
        "check_for_nan_in_grad check_for_large_grads"
    ),
    "digests compare parameters in actor.dtype with the engines'; fp8 is for products, not for parameters": _names(
        "fp8_param_gather reuse_grad_buf_for_mxfp8_param_ag keep_fp8_transpose_cache"
    ),
    "publishing and checkpoints read whole parameters, which FSDP cuts": _names("""
        use_megatron_fsdp use_custom_fsdp data_parallel_sharding_strategy suggested_communication_unit_size
        preserve_fp32_weights fsdp_double_buffer outer_dp_sharding_strategy fsdp_manual_registration"""),
    "Megatron refuses it with expandable_segments, which trainers are started with": _names(
        "nccl_ub disable_symmetric_registration"
    ),
    "it needs Megatron's own forward and loss, cut into pieces; here the head and the losses are others": _names(
        "delay_wgrad_compute"
    ),
}
_DDP_ALLOWED = _names("""
    overlap_grad_reduce overlap_param_gather align_param_gather bucket_size pad_buckets_for_high_nccl_busbw
    reduce_scatter_with_fp32_accumulation
""")


def _refusals(
    ours: Mapping[str, tuple[str, ...]], refused: Mapping[str, tuple[str, ...]], from_model: tuple[str, ...] = ()
) -> dict[str, Refusal]:
    table = {name: Refusal("this file says it elsewhere", key) for key, names in ours.items() for name in names}
    table |= {name: Refusal(reason) for reason, names in refused.items() for name in names}
    model = Refusal("the model's config.json says it", "model.path")
    return table | dict.fromkeys(from_model, model)


@dataclass(frozen=True)
class SettingsTable:
    """Says which fields of one class an experiment may set, in which map, and why not the others."""

    path: tuple[str, ...]  # of the map in an experiment
    library: Library
    allowed: tuple[str, ...]
    refused: Mapping[str, Refusal]

    @property
    def fields(self) -> dict[str, LibraryField]:
        """The fields of the installed class. Raises LibraryMissing."""
        return library_fields(self.library)

    def given(self, actor: ActorConfig) -> dict[str, Any]:
        """Returns the experiment's map."""
        return {
            ("actor", "megatron"): actor.megatron,
            ("actor", "ddp"): actor.ddp,
            ("actor", "optimizer", "megatron"): actor.optimizer.megatron,
        }[self.path]


# MLATransformerConfig has TransformerConfig's fields; its own are all of the model
TRANSFORMER_SETTINGS = SettingsTable(
    ("actor", "megatron"),
    LATENT_TRANSFORMER,
    _TRANSFORMER_ALLOWED,
    _refusals(_TRANSFORMER_OURS, _TRANSFORMER_REFUSED, _FROM_MODEL),
)
DDP_SETTINGS = SettingsTable(("actor", "ddp"), DDP, _DDP_ALLOWED, _refusals(_DDP_OURS, _DDP_REFUSED))
OPTIMIZER_SETTINGS = SettingsTable(
    ("actor", "optimizer", "megatron"), OPTIMIZER, _OPTIMIZER_ALLOWED, _refusals(_OPTIMIZER_OURS, _OPTIMIZER_REFUSED)
)
MEGATRON_SETTINGS = (TRANSFORMER_SETTINGS, DDP_SETTINGS, OPTIMIZER_SETTINGS)


def megatron_setting_problems(actor: ActorConfig) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yields the key path of each setting that Megatron would not take, or that is refused here, and why."""
    wrong = list(_wrong_alone(actor))
    yield from wrong or (((*table.path, key), problem) for table, key, problem in _wrong_together(actor))


def _wrong_alone(actor: ActorConfig) -> Iterator[tuple[tuple[str, ...], str]]:
    for table in MEGATRON_SETTINGS:
        given = table.given(actor)
        if not given:
            continue
        try:
            fields = table.fields
        except LibraryMissing as exc:
            yield table.path, f"cannot be checked: {exc}"
            continue
        what = f"Megatron's {table.library.name.replace('MLA', '')}"
        for key, problem in setting_problems(fields, table.refused, given, what).items():
            yield (*table.path, key), problem


_RECOMPUTE_OF = {"recompute_modules": "selective", "recompute_method": "full", "recompute_num_layers": "full"}
# Megatron's checkpoint of these names what Transformer Engine defines, in fp8 or not
_RECOMPUTED_BY_ENGINE = {"layernorm", "moe_act", "mla_up_proj"}


def _wrong_together(actor: ActorConfig) -> Iterator[tuple[SettingsTable, str, str]]:
    """Yields settings that other keys of the experiment make impossible or meaningless."""
    model, ddp, optimizer = actor.megatron, actor.ddp, actor.optimizer.megatron
    for key, kind in _RECOMPUTE_OF.items():
        if key in model and actor.recompute != kind:
            yield TRANSFORMER_SETTINGS, key, f"it is read with actor.recompute {kind} alone, which is {actor.recompute}"
    if not actor.expects_transformer_engine:
        engine = _RECOMPUTED_BY_ENGINE.intersection(model.get("recompute_modules") or ())
        if engine:
            text = f"{', '.join(sorted(engine))}: only with Transformer Engine's layers (actor.transformer_engine)"
            yield TRANSFORMER_SETTINGS, "recompute_modules", text
        for key in ("fp8", "moe_permute_fusion", "moe_router_fusion", "apply_rope_fusion", "use_te_activation_func"):
            if model.get(key):
                yield TRANSFORMER_SETTINGS, key, "it needs Transformer Engine's layers (actor.transformer_engine)"
    if model.get("moe_token_dispatcher_type") == "flex" and model.get("moe_shared_expert_overlap"):
        yield TRANSFORMER_SETTINGS, "moe_shared_expert_overlap", "it works with the alltoall dispatcher alone"
    yield from _wrong_with_stages(actor)
    if actor.lora is not None:
        for key in ("overlap_grad_reduce", "overlap_param_gather"):
            if ddp.get(key):
                yield DDP_SETTINGS, key, "with lora, replicas of experts are summed before the ranks' gradients are"
    if ddp.get("overlap_param_gather") and not actor.optimizer.distributed:
        yield DDP_SETTINGS, "overlap_param_gather", "it gathers what actor.optimizer.distributed: true sharded"
    if ddp.get("overlap_param_gather") and ddp.get("overlap_grad_reduce") is False:
        yield DDP_SETTINGS, "overlap_param_gather", "it needs actor.ddp.overlap_grad_reduce: true"
    for key in ("use_precision_aware_optimizer", "optimizer_cpu_offload"):
        if optimizer.get(key) and not actor.optimizer.distributed:
            yield OPTIMIZER_SETTINGS, key, "it needs actor.optimizer.distributed: true"
        if optimizer.get(key) and actor.dtype != "bfloat16":
            text = "it keeps float32 copies of bfloat16 weights; with actor.dtype float32 there are none"
            yield OPTIMIZER_SETTINGS, key, text
    aware = optimizer.get("use_precision_aware_optimizer") or optimizer.get("optimizer_cpu_offload")
    for key in ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"):
        if optimizer.get(key, "float32") != "float32" and not aware:
            text = "other types than float32 need actor.optimizer.megatron.use_precision_aware_optimizer: true"
            yield OPTIMIZER_SETTINGS, key, text


def _wrong_with_stages(actor: ActorConfig) -> Iterator[tuple[SettingsTable, str, str]]:
    """Yields what Megatron's schedules do not do, or do wrongly without a word."""
    model, p = actor.megatron, actor.parallel
    virtual = "the schedule of virtual stages alone (actor.parallel.vpp of 2 or more)"
    if p.vpp == 1 and model.get("overlap_p2p_comm"):
        yield TRANSFORMER_SETTINGS, "overlap_p2p_comm", f"messages overlap in {virtual}"
    if p.vpp == 1 and actor.ddp.get("align_param_gather"):
        yield DDP_SETTINGS, "align_param_gather", f"{virtual} starts the gathers; in others each would be waited for"
    if model.get("overlap_p2p_comm") and model.get("deallocate_pipeline_outputs"):
        text = "with overlap_p2p_comm Megatron-Core 0.16.1 frees an output that it is still sending"
        yield TRANSFORMER_SETTINGS, "deallocate_pipeline_outputs", text
    if model.get("overlap_p2p_comm") and model.get("batch_p2p_comm"):
        yield TRANSFORMER_SETTINGS, "batch_p2p_comm", "with overlap_p2p_comm messages are sent one by one"
    elif model.get("batch_p2p_comm") and p.vpp > 1 and p.pp == 2:
        text = "of two stages, each is before and after the other, and a batch mixes up what is for which"
        yield TRANSFORMER_SETTINGS, "batch_p2p_comm", text


def refusal_rows() -> list[str]:
    """Returns the rows of docs/evidence/gpu.md's table: why fields are not set in an experiment, and which they are."""
    reasons: dict[str, list[str]] = {}
    for table in MEGATRON_SETTINGS:
        for name, refusal in table.refused.items():
            text = f"set `{refusal.instead}`" if refusal.instead.startswith("actor.") else refusal.reason
            names = reasons.setdefault(text, [])
            names += [name] if name not in names else []
    return [
        f"| {reason} | {', '.join(f'`{name}`' for name in names[:8])}{f', {len(names) - 8} more' * (len(names) > 8)} |"
        for reason, names in reasons.items()
    ]
