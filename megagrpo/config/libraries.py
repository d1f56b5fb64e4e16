"""Fields of Megatron-Core's and SGLang's configuration classes: which an experiment may set, which
it may not, and why.

A field that is in neither list is untried: no test sets it, so nobody knows whether it is read,
whether a publish holds with it, or what it changes. `+name` passes it on all the same. A pattern such
as tp_comm_* stands for every field that it fits. No library is imported: names and types are judged
by the libraries themselves (check/libraries.py).
"""

from collections.abc import Mapping
from fnmatch import fnmatchcase

from megagrpo.config.actor import ActorConfig
from megagrpo.config.rollout import RolloutConfig
from megagrpo.system.user_function import did_you_mean

_MODEL = """
    num_layers hidden_size num_attention_heads num_query_groups ffn_hidden_size kv_channels layernorm_* normalization
    gated_linear_unit activation_func glu_linear_offset activation_func_clamp_value add_*_linear add_qkv_bias qk_*norm
    attention_output_gate softmax_* window_* no_rope_freq rotary_* mrope_section multi_latent_attention *_lora_rank
    apply_residual_connection_post_layernorm qk_*head_dim v_head_dim rope_type original_max_position_embeddings
    beta_fast beta_slow mscale* num_moe_experts moe_router_topk* moe_ffn_hidden_size moe_latent_size moe_layer_freq
    moe_shared_expert_intermediate_size moe_shared_expert_gate moe_router_num_groups moe_router_group_topk
    moe_router_pre_softmax moe_router_score_function moe_router_enable_expert_bias moe_apply_probs_on_input
    use_fused_weighted_squared_relu mtp_* experimental_attention_variant dsa_indexer_[!lu]* linear_* is_hybrid_model
    mamba_* use_mamba_mem_eff_path het*"""
# our key -> the fields that say the same
_TRANSFORMER_OURS = {
    "model.path": _MODEL,
    "actor.parallel.tp": "tensor_model_parallel_size sequence_parallel",
    "actor.parallel.pp": "pipeline_model_parallel_size",
    "actor.parallel.vpp": "virtual_pipeline_model_parallel_size",
    "actor.parallel.cp": "context_parallel_size",
    "actor.parallel.dynamic_context": "hybrid_context_parallel max_seqlen_per_dp_cp_rank",
    "actor.parallel.ep": "expert_model_parallel_size",
    "actor.parallel.etp": "expert_tensor_parallel_size",
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
    "actor.megatron.moe_flex_dispatcher_backend": "moe_enable_deepep moe_hybridep_pad_*",
}
_ACTOR = "the actor sets it, as Megatron's training loop would"
_FP8 = "digests compare parameters in actor.dtype; fp8 is for products only"
_OUTPUT = "a run writes into its output_dir only"
_SPLIT = "it requires Megatron's own forward and loss, cut into pieces"
_TRANSFORMER_REFUSED = {
    "losses have global denominators: Megatron must only sum": "calculate_per_token_loss",
    _ACTOR: """timers finalize_model_grads_func *grad_scale_func no_sync_func grad_sync_func param_sync_func
        batch_p2p_comm barrier_with_L1_time variable_seq_lengths
        num_microbatches_with_partial_activation_checkpoints""",
    "noise would enter every ratio of new to old probabilities": """
        *_dropout moe_input_jitter_eps moe_router_force_*""",
    "weights come from a Hugging Face folder or a checkpoint": """perform_initialization init_method*
        output_layer_init_method embedding_init_method* init_model_with_meta_device""",
    "engines drop no token: the models would differ": """
        moe_token_drop* moe_expert_capacity_factor moe_expert_rank_capacity_factor moe_paged_stash*
        moe_pad_expert_input_to_capacity""",
    "expert loads and router biases would count the padding": "moe_router_padding_for_*",
    _FP8: "fp8_param fp4*",
    "routers would get parts of a micro-batch, and ranks that exchange tokens different numbers of "
    "parts": "mlp_chunks_for_training",
    "a graph replays one shape; those of micro-batches change": "*cuda_graph* use_te_rng_tracker",
    "its buffers have one shape; those of micro-batches change": "tp_comm_* moe_ncclep_*",
    "updates have different numbers of micro-batches": "microbatch_group_size_per_vp_stage",
    _SPLIT: """overlap_moe_expert_parallel_comm overlap_dispatch_backward_with_experts_wgrad delay_wgrad_compute
        ep_overlap_early_attn_memory_release
        defer_embedding_wgrad_compute wgrad_deferral_limit high_priority_a2a_comm_stream""",
    "its process groups or its transport are not created here": """hierarchical_context_parallel_sizes
        pipeline_model_parallel_comm_backend use_ring_exchange_p2p
        *gtp_weight_remat_size *tensor_parallel_num_weight_shards""",
    # GLM-5 (arXiv 2602.15763) freezes it in reinforcement learning, too
    "the indexer is frozen: a choice of keys has no gradient, and a loss of its own would move it "
    "away from the one that sampled": "dsa_indexer_loss_coeff dsa_indexer_use_sparse_loss",
    "no engine computes so": """
        fp32_residual_connection qk_clip* log_max_attention_logit test_mode *kitchen* quant_recipe
        use_mup mup_* moe_router_quantile_balancing_ema apply_query_key_layer_scaling""",
    "only Megatron's own generation has them": "*inference_* *_for_prefill flash_decode cache_mla_latents",
    "publishing, digests and checkpoints read parameters in place, by their names": """
        cpu_offloading_weights mla_down_proj_fusion *glu_interleave_size moe_single_grouped_*""",
    "only Megatron's own specifications of layers, or its output layer, read it": """
        use_transformer_engine_op_fuser use_grouped_gemm_for_* fused_residual_rmsnorm fp8_output_proj
        attention_softmax_in_fp32 masked_softmax_fusion persist_layer_norm memory_efficient_layer_norm""",
    _OUTPUT: "config_logger_dir",
}
_OPTIMIZER_OURS = {
    "actor.optimizer.lr": "lr decoupled_lr",
    "actor.optimizer.min_lr": "min_lr decoupled_min_lr",
    "actor.optimizer.weight_decay": "weight_decay",
    "actor.optimizer.adam_beta2": "adam_beta2",
    "actor.optimizer.clip_grad": "clip_grad",
    "actor.optimizer.distributed": "use_distributed_optimizer",
    "actor.dtype": "bf16 fp16 params_dtype",
    "actor.ddp.overlap_param_gather": "overlap_param_gather",
}
_OPTIMIZER_REFUSED = {
    "the optimizer is Adam with decoupled weight decay, whose state checkpoints know": """
        optimizer decoupled_weight_decay sgd_* *muon_* lion_* soap_* use_layer_wise_distributed_optimizer""",
    "gradients are not scaled: bfloat16 has float32's range": "*loss_scale* hysteresis",
    _FP8: "fp8_recipe reuse_grad_buf_for_mxfp8_param_ag",
    "Transformer Engine copies them in float32 to step, save and resume: 14 bytes of an "
    "element at the peak, 10 for float32 moments with use_precision_aware_optimizer": "exp_avg_dtype exp_avg_sq_dtype "
    "main_params_dtype",
    "finiteness is checked before any of an update": "overlap_param_gather_with_optimizer_step",
    "an update that is left out would count as one": "grad_norm_skip_threshold",
    "a graph repeats one learning rate": "optimizer_cuda_graph",
    _ACTOR: "barrier_with_L1_time timers",
    _OUTPUT: "config_logger_dir",
}
_DDP_OURS = {
    "actor.optimizer.distributed": "use_distributed_optimizer",
    "actor.optimizer.megatron.main_grads_dtype": "grad_reduce_in_fp32",
}
_DDP_REFUSED = {
    "gradients are sums: losses have global denominators": "average_in_collective gradient_reduce_div_fusion",
    "its process groups are not created here": "num_distributed_optimizer_instances",
    "a rank that fails leaves the others waiting; the actor checks all ranks together": "check_for_*",
    _FP8: "fp*_param_gather reuse_grad_buf_for_mxfp8_param_ag keep_fp8_transpose_cache",
    "publishing and checkpoints read whole parameters, which FSDP shards": """*fsdp*
        data_parallel_sharding_strategy suggested_communication_unit_size outer_dp_sharding_strategy""",
    "Megatron refuses it with expandable_segments, with which trainers are started": """nccl_ub
        disable_symmetric_registration""",
    _SPLIT: "delay_wgrad_compute",
}
# our key, or who decides it -> the fields that say the same
_SERVER_OURS = {
    "model.path": "model_path",
    "model.tokenizer": "tokenizer_path",
    "rollout.load_format": "load_format",
    "rollout.dtype": "dtype",
    "rollout.dtype: logits of bfloat16 engines on GPUs are float32, as the actor's": "enable_fp32_lm_head",
    "weights.transport": "custom_weight_loader",
    "the publish, which counts the actor's updates": "weight_version",
    "rollout.deterministic": "enable_deterministic_inference",
    "rollout.mem_fraction": "mem_fraction_static",
    "rollout.max_running_requests": "max_running_requests max_mamba_cache_size "
    "mamba_full_memory_ratio",
    "rollout.tp": "tp_size",
    "rollout.ep": "ep_size",
    "rollout.nodes_per_engine": "nnodes",
    "rollout.nodes_per_engine, and the service, which places engines": """node_rank dist_init_addr use_ray
        base_gpu_id gpu_id_step""",
    "actor.device and the GPUs that the service sees": "device",
    "seed": "random_seed",
    "rollout.host": "host",
    "the service, which finds free ports for every engine": "port nccl_port",
    "the environment variable MEGAGRPO_API_KEY": "api_key admin_api_key",
    "the service: a request before the first publish is verified would say nothing": "skip_server_warmup warmups",
    "rollout.colocate": "enable_memory_saver",
    "actor.routing_replay: rollout": "enable_return_routed_experts",
    "rollout.draft_tokens": "speculative_algorithm speculative_num_steps "
    "speculative_num_draft_tokens",
    "who samples, and reads whole answers": "incremental_streaming_output",
    "sampling": "preferred_sampling_params sampling_defaults",
}
RANKS = "an engine's ranks are rollout.tp; a publish would not reach the others"
_LOGPROBS = "log-probabilities would be of another distribution than the actor's"
UNEXAMINED = "no test shows that a publish into live parameters holds with it"
_SERVER_REFUSED = {
    "rollout.quantization is the format of engines' weights; fewer bits would not be the published "
    "ones": """quantization*
        modelopt_* quantize_and_serve rl_quant_profile enable_tf32_matmul enable_w4a4_* flashinfer_mxfp4_*
        flashinfer_a2a_dispatch_type deepep_dispatcher_output_dtype enable_quant_* *_fp4_allgather
        prefill_kv_cache_dequant_dtype fp4_gemm_runner_backend""",
    "experts would leave the ranks that a publish planned for": """*eplb* ep_num_redundant_experts
        ep_dispatch_algorithm init_expert_location *elastic_ep* enable_elastic_expert_backup mooncake_ib_device
        enable_waterfill ep_join_* max_ep_size kt_*""",
    RANKS: """dcp_* pp_* attn_cp_size moe_dp_size dwdp_size enable_prefill_cp cp_strategy enable_cp_decode_attn_tp
        enable_dsa_cache_layer_split""",
    "keys and values of older weights would outlive a publish, which empties the caches on GPU and host only": """
        hicache_storage_* hicache_host_memory_mode enable_session_radix_cache radix_cache_backend
        *unified_cache_external* *hisparse* enable_linker_mla_dedup *lmcache* *flexkv*""",
    "weights come from model.path or from the first publish (rollout.load_format)": """revision model_impl
        model_config_parser startup_weight_load_mode remote_instance_* engine_info_bootstrap_port modelexpress_config
        download_dir model_checksum delete_ckpt_after_loading decrypted_* weight_cache_* *_weights_cpu_backup
        checkpoint_engine_wait_weights_before_ready""",
    _LOGPROBS: """json_model_override_args rl_on_policy_target enable_custom_logit_processor forward_hooks
        debug_tensor_dump_input_file allow_auto_truncate enable_strict_thinking mamba_ssm_dtype
        enable_mamba_cache_stochastic_rounding mamba_cache_philox_rounds *int8_mamba_*""",
    "an engine is one server process, spoken to in plain HTTP/1.1": """ssl_* *grpc*
        sidecar* *http2* enable_ssl_refresh fastapi_root_path *tokenizer_worker_num skip_tokenizer_init smg_*""",
    UNEXAMINED: """enable_page_major_kv_layout enable_unified_memory deepep_v2_mode enable_layernorm_sp
        enable_shared_experts_attn_tp shared_experts_tp_size enable_dense_mlp_attn_tp gated_launch_port
        enable_dp_attention_local_control_broadcast mamba_backend *linear_replayssm*
        linear_attn_verify_backend""",
    "rejected requests are sent again at once, without end; set rollout.max_running_requests "
    "instead": "max_queued_requests",
    "it changes NCCL in engines only, and trainers share their communicators": "enable_nccl_nvls enable_symm_mem",
    "rollout.draft_tokens speculates with the model's own layer; a publish reaches no other "
    "draft": "speculative_* _speculative_* uno_lora_path enable_multi_layer_eagle spec_trace_dir",
    "engines receive whole weights, with the actor's adapters added (actor.lora)": "*lora*",
    "router and publish handle only engines that answer whole requests": """decoupled_spec_* disaggregation_*
        num_reserved_decode_tokens enable_pd_role_switch optimistic_prefill_attempts encoder_* language_*
        enable_adaptive_dispatch_to_encoder *pdmux* sm_group_num""",
    "images come with the trainers' requests, as these have read them": """mm_* enable_mm_* *_mm_inputs_*
        *prefix_mm_cache trust_mm_* limit_mm_* enable_multimodal allowed_media_domains media_url_*
        image_processor_backend disable_fast_image_processor""",
    "an indexer's choice is not replayed (docs/experts.md)": "enable_return_indexer_topk",
    "a publish writes into a rank's parameters, which offloading replaces": """cpu_offload_gb offload_*
        ple_offload_backend ple_offload_dir""",
}  # fmt: skip


def _refused(ours: Mapping[str, str], reasons: Mapping[str, str]) -> dict[str, str]:
    """Returns pattern -> what it is instead of the user's: "set by" a key of ours, or refused."""
    said = {f"set by {key}": names for key, names in ours.items()}
    said |= {f"refused: {reason}": names for reason, names in reasons.items()}
    return {pattern: text for text, names in said.items() for pattern in names.split()}


Path = tuple[str, ...]
TRANSFORMER: Path = ("actor", "megatron")
DDP: Path = ("actor", "ddp")
OPTIMIZER: Path = ("actor", "optimizer", "megatron")
SERVER: Path = ("rollout", "sglang")
REFUSED = {  # path of a map in an experiment -> name or pattern -> why
    TRANSFORMER: _refused(_TRANSFORMER_OURS, _TRANSFORMER_REFUSED),
    DDP: _refused(_DDP_OURS, _DDP_REFUSED),
    OPTIMIZER: _refused(_OPTIMIZER_OURS, _OPTIMIZER_REFUSED),
    SERVER: _refused(_SERVER_OURS, _SERVER_REFUSED),
}


# The user's, because tests, plans or measurements of this repository set them.
_TRIED = {
    TRANSFORMER: """
        attention_backend dsa_kernel_backend apply_rope_fusion bias_activation_fusion bias_dropout_fusion
        use_te_activation_func gradient_accumulation_fusion
        recompute_method recompute_modules recompute_num_layers
        fp8 fp8_recipe
        moe_token_dispatcher_type moe_flex_dispatcher_backend moe_router_dtype moe_router_fusion moe_permute_fusion
        moe_shared_expert_overlap
        overlap_p2p_comm overlap_p2p_comm_warmup_flush deallocate_pipeline_outputs""",
    DDP: """
        overlap_grad_reduce overlap_param_gather align_param_gather bucket_size pad_buckets_for_high_nccl_busbw""",
    OPTIMIZER: """
        adam_beta1 adam_eps use_precision_aware_optimizer store_param_remainders main_grads_dtype
        optimizer_cpu_offload optimizer_offload_fraction overlap_cpu_optimizer_d2h_h2d""",
    SERVER: """
        attention_backend sampling_backend moe_runner_backend moe_a2a_backend fp8_gemm_runner_backend bf16_gemm_backend
        kv_cache_dtype page_size max_total_tokens context_length chunked_prefill_size max_prefill_tokens
        prefill_decode_interval schedule_policy schedule_conservativeness stream_interval sleep_on_idle
        disable_radix_cache radix_eviction_policy_config disable_overlap_schedule disable_cuda_graph
        cuda_graph_backend_decode cuda_graph_backend_prefill cuda_graph_bs_decode cuda_graph_bs_prefill
        dp_size enable_dp_attention enable_dp_lm_head moe_dense_tp_size enable_two_batch_overlap
        enable_hierarchical_cache hicache_ratio hicache_size hicache_io_backend hicache_mem_layout
        ple_offload_embedding enable_metrics log_level log_level_http decode_log_interval""",
}
TRIED = {path: frozenset(names.split()) for path, names in _TRIED.items()}
UNTRIED = "+"


def refusal(path: Path, name: str) -> str:
    """Returns why a field is not set there; "" if it is the user's, tried or not."""
    return next((why for pattern, why in REFUSED[path].items() if fnmatchcase(name, pattern)), "")


def name_problem(path: Path, name: str) -> str:
    """Returns what is wrong with a name that an experiment sets there; "" if nothing is."""
    field = name.removeprefix(UNTRIED)
    if why := refusal(path, field):
        return f"is {why}"
    if field in TRIED[path]:
        return "" if name == field else f"is tried: write {field}"
    if name != field:
        return ""
    near = did_you_mean(field, TRIED[path])
    return f"is untried: no test here sets it{near}; '{UNTRIED}{field}' passes it on as it is"


def passed_on(settings: Mapping[str, object]) -> dict[str, object]:
    """Returns what the library gets: names without the mark of an untried field."""
    return {name.removeprefix(UNTRIED): value for name, value in settings.items()}


def given_settings(actor: ActorConfig, rollout: RolloutConfig) -> dict[Path, dict[str, object]]:
    """Returns what an experiment sets of each class."""
    return {
        TRANSFORMER: actor.megatron,
        DDP: actor.ddp,
        OPTIMIZER: actor.optimizer.megatron,
        SERVER: rollout.sglang,
    }
