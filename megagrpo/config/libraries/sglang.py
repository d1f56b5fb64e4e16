"""What `rollout.sglang` and `rollout.extra_args` may say: every field of ServerArgs is allowed, ours, or refused.

A field that none of the tables names, as a later SGLang may have, is refused until somebody decides about it.
"""

from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from typing import Any

from megagrpo.config.libraries.sglang_fields import ServerField, server_fields
from megagrpo.config.rollout import RolloutConfig
from megagrpo.system.environment import WEIGHT_LOADER

_PORTS = "the service, which finds free ports for every engine"
_PLACE = "rollout.nodes_per_engine, and the service, which places engines"
OURS = {
    "model_path": "model.path",
    "tokenizer_path": "model.tokenizer",
    "load_format": "rollout.load_format",
    "dtype": "rollout.dtype",
    "enable_fp32_lm_head": "rollout.dtype: logits of bfloat16 engines on GPUs are float32, as the actor's",
    "custom_weight_loader": "weights.transport",
    "weight_version": "the publish, which counts the actor's updates",
    "enable_deterministic_inference": "rollout.deterministic",
    "mem_fraction_static": "rollout.mem_fraction",
    "max_running_requests": "rollout.max_running_requests",
    "max_total_tokens": "rollout.max_total_tokens",
    "tp_size": "rollout.tp",
    "ep_size": "rollout.ep",
    "nnodes": "rollout.nodes_per_engine",
    "node_rank": _PLACE,
    "dist_init_addr": _PLACE,
    "use_ray": _PLACE,
    "base_gpu_id": _PLACE,
    "gpu_id_step": _PLACE,
    "device": "actor.device and the GPUs that the service sees",
    "random_seed": "seed",
    "host": "rollout.host",
    "port": _PORTS,
    "nccl_port": _PORTS,
    "api_key": "the environment variable MEGAGRPO_API_KEY",
    "admin_api_key": "the environment variable MEGAGRPO_API_KEY",
    "skip_server_warmup": "the service: a request before the first publish is verified would say nothing",
    "warmups": "the service: a request before the first publish is verified would say nothing",
    "enable_memory_saver": "rollout.colocate",
    "enable_return_routed_experts": "actor.routing_replay: rollout",
    "incremental_streaming_output": "rollout.streaming",
    "preferred_sampling_params": "sampling",
    "sampling_defaults": "sampling",
}

# Whole classes of fields.
REFUSED_GROUPS = {
    "Spec": "a draft model would keep its first weights: a publish reaches the model alone",
    "Lora": "engines get whole weights, with the actor's adapters added (actor.lora)",
    "Disagg": "an engine answers whole requests; the router and a publish know no other kind",
    "Mm": "models of text alone are trained",
    "ExecDllm": "diffusion models are not trained",
    "ExecMamba": "models with recurrent layers are not trained",
    "ExecOffload": "a publish writes into the parameters of a rank, which offloading replaces",
}
_QUANTISED = "engines sample from the weights that the actor has, in rollout.dtype; with fewer bits they would not"
_MOVED = "experts would leave the ranks for which the publish has planned their slices"
_RANKS = "an engine's ranks are rollout.tp; SGLang would have others, which the publish does not reach"
_ELSEWHERE = "keys and values of older weights would outlive a publish outside the cache that it flushes"
_OTHER_MODEL = "it is for models that are not trained here"
_OTHER_DEVICE = "it is for hardware other than NVIDIA's"
_LOADING = "weights come from model.path or from the first publish (rollout.load_format)"
_OTHER_LOGPROBS = "log-probabilities would be of another distribution than the actor's"
_HTTP = "trainers, router and supervisor talk plain HTTP/1.1 to the one server process of an engine"
_CHAT = "it is about requests of text, chat or speech; requests here are token ids"
_FUNCTION = "its value is a function of Python, which a file of settings cannot hold"
_UNEXAMINED = "whether a publish into live parameters holds with it was not examined"
_NCCL = "it changes the engine's NCCL environment alone, and trainers meet engines in one communicator"
_INTERNAL = "it is SGLang's own record of what was given"
_DEPRECATED = "it is deprecated; cuda_graph_backend_decode, cuda_graph_backend_prefill and "
_DEPRECATED += "flashinfer_allreduce_fusion_backend say the same"
REFUSED = {
    _QUANTISED: """quantization quantization_param_path modelopt_quant modelopt_checkpoint_restore_path
        modelopt_checkpoint_save_path modelopt_export_path quantize_and_serve rl_quant_profile enable_tf32_matmul
        enable_w4a4_mxfp4_megamoe flashinfer_mxfp4_moe_precision flashinfer_a2a_dispatch_type
        deepep_dispatcher_output_dtype enable_quant_communications disable_flashinfer_cutlass_moe_fp4_allgather
        prefill_kv_cache_dequant_dtype fp8_gemm_runner_backend fp4_gemm_runner_backend""",
    _MOVED: """ep_num_redundant_experts ep_dispatch_algorithm init_expert_location enable_eplb eplb_algorithm
        eplb_rebalance_num_iterations eplb_rebalance_layers_per_chunk eplb_min_rebalancing_utilization_threshold
        elastic_ep_backend enable_elastic_expert_backup mooncake_ib_device enable_waterfill ep_join_mode
        elastic_ep_scale_timeout ep_join_rank_offset elastic_ep_initial_size max_ep_size kt_weight_path kt_method
        kt_cpuinfer kt_threadpool_count kt_num_gpu_experts kt_max_deferred_experts_per_token""",
    _RANKS: """dcp_size pp_size pp_max_micro_batch_size pp_async_batch_depth attn_cp_size moe_dp_size dwdp_size
        dcp_comm_backend dcp_replicate_q_proj enable_prefill_cp cp_strategy enable_dsa_cache_layer_split
        enable_cp_decode_attn_tp""",
    _ELSEWHERE: """enable_session_radix_cache radix_cache_backend enable_hierarchical_cache hicache_host_memory_mode
        hicache_ratio hicache_size hicache_host_memory_fraction hicache_write_policy hicache_io_backend
        hicache_mem_layout hicache_storage_backend hicache_storage_prefetch_policy
        hicache_storage_backend_extra_config hicache_storage_prefetch_retry_poll_interval
        hicache_storage_prefetch_retry_max_attempts enable_unified_cache_external_linker
        unified_cache_external_linker_backend enable_linker_mla_dedup enable_hisparse hisparse_config enable_lmcache
        lmcache_config_file enable_flexkv flexkv_config_file""",
    _OTHER_MODEL: """is_embedding dsa_prefill_backend dsv4_prefill_backend dsa_decode_backend dsv4_attn_backend
        dsa_paged_mqa_logits_backend dsa_topk_backend enable_precise_embedding_interpolation
        enable_deepseek_v4_fp4_indexer enable_scattered_sconv swa_full_tokens_ratio swa_prefix_tails
        disable_hybrid_swa_memory max_mamba_cache_size mamba_full_memory_ratio prefill_only_disable_kv_cache
        enable_return_indexer_topk enable_encoder_swa_bounded_replay enable_decoder_swa_bounded_replay enable_mis
        asr_max_buffer_seconds asr_max_concurrent_sessions""",
    _OTHER_DEVICE: """fuseep_mode enable_aiter_allreduce_fusion disable_aiter_allreduce_fusion_in_prefill
        disable_aiter_allreduce_fusion_in_decode mlx_enable_sampling c128_page_size msprobe_dump_config""",
    _LOADING: """revision model_impl model_config_parser startup_weight_load_mode
        remote_instance_weight_loader_seed_instance_ip remote_instance_weight_loader_seed_instance_service_port
        remote_instance_weight_loader_send_weights_group_ports remote_instance_weight_loader_backend
        remote_instance_weight_loader_start_seed_via_transfer_engine engine_info_bootstrap_port modelexpress_config
        download_dir model_checksum delete_ckpt_after_loading decrypted_config_file decrypted_draft_config_file
        checkpoint_engine_wait_weights_before_ready weight_cache_mode weight_cache_socket weight_cache_timeout
        enable_weights_cpu_backup enable_draft_weights_cpu_backup""",
    _OTHER_LOGPROBS: """json_model_override_args rl_on_policy_target enable_custom_logit_processor
        debug_tensor_dump_input_file forward_hooks allow_auto_truncate enable_strict_thinking""",
    _HTTP: """fastapi_root_path smg_grpc_mode grpc_mode grpc_port grpc_response_timeout_secs grpc_worker_threads sidecar
        sidecar_args enable_http2 http2_max_concurrent_streams http2_initial_connection_window_size ssl_keyfile
        ssl_certfile ssl_ca_certs ssl_keyfile_password enable_ssl_refresh tokenizer_worker_num detokenizer_worker_num
        skip_tokenizer_init smg_http_sidecar_port""",
    _CHAT: """chat_template trust_request_chat_template hf_chat_template_name completion_template reasoning_parser
        default_chat_template_kwargs strip_thinking_cache tool_call_parser tool_server file_storage_path
        enable_response_store enable_streaming_session stream_response_default_include_usage
        constrained_json_whitespace_pattern constrained_json_disable_any_whitespace
        constrained_json_max_whitespace_cnt grammar_backend served_model_name""",
    _FUNCTION: "custom_sigquit_handler stat_loggers",
    _UNEXAMINED: """enable_page_major_kv_layout enable_unified_memory deepep_v2_mode enable_layernorm_sp
        enable_shared_experts_attn_tp shared_experts_tp_size enable_dense_mlp_attn_tp gated_launch_port""",
    _NCCL: "enable_nccl_nvls enable_symm_mem",
    _INTERNAL: "_radix_eviction_policy_explicitly_set _swa_full_tokens_ratio_explicitly_set",
    _DEPRECATED: "disable_cuda_graph enable_flashinfer_allreduce_fusion enforce_disable_flashinfer_allreduce_fusion",
}

_ALLOWED = """
    model_loader_extra_config trust_remote_code context_length kv_cache_dtype weight_loader_disable_mmap
    weight_loader_prefetch_checkpoints weight_loader_prefetch_num_threads weight_loader_drop_cache_after_load
    tokenizer_mode tokenizer_backend
    enable_two_batch_overlap enable_single_batch_overlap tbo_token_distribution_threshold
    enable_fused_moe_sum_all_reduce moe_a2a_backend moe_runner_backend deepep_mode deepep_config
    expert_distribution_recorder_mode expert_distribution_recorder_buffer_size expert_balancedness_report_mode
    disable_shared_experts_fusion enforce_shared_experts_fusion
    disable_custom_all_reduce enable_mscclpp enable_torch_symm_mem pre_warm_nccl boundary_reduction
    flashinfer_allreduce_fusion_backend enable_layerwise_nvtx_marker
    cuda_graph_config cuda_graph_backend_decode cuda_graph_backend_prefill cuda_graph_max_bs_decode
    cuda_graph_max_bs_prefill cuda_graph_max_seq_len_prefill cuda_graph_bs_decode cuda_graph_bs_prefill
    cuda_graph_prefill_max_context cuda_graph_tc_compiler disable_prefill_cuda_graph disable_decode_cuda_graph
    disable_cuda_graph_padding enable_profile_cuda_graph enable_cudagraph_gc debug_cuda_graph
    enable_torch_compile enable_torch_compile_debug_mode torch_compile_max_bs
    attention_backend decode_attention_backend prefill_attention_backend enable_lean_attention sampling_backend
    bf16_gemm_backend disable_flashinfer_autotune flashinfer_autotune_skip_ops triton_attention_reduce_in_fp32
    triton_attention_num_kv_splits triton_attention_split_tile_size flashinfer_mla_disable_ragged
    enable_fused_qk_norm_rope
    log_level log_level_http log_requests log_requests_level log_requests_format log_requests_target
    uvicorn_access_log_exclude_prefixes crash_dump_folder show_time_cost enable_metrics enable_mfu_metrics
    enable_metrics_for_all_schedulers load_snapshot_publish_interval tokenizer_metrics_custom_labels_header
    tokenizer_metrics_allowed_custom_labels extra_metric_labels bucket_time_to_first_token bucket_inter_token_latency
    bucket_e2e_request_latency prompt_tokens_buckets generation_tokens_buckets gc_warning_threshold_secs
    decode_log_interval enable_request_time_stats_logging kv_events_config load_publish_endpoint
    enable_forward_pass_metrics forward_pass_metrics_worker_id forward_pass_metrics_ipc_name enable_trace
    trace_modules otlp_traces_endpoint otlp_service_name export_metrics_to_file export_metrics_to_file_dir kv_canary
    kv_canary_real_data kv_canary_sweep_interval debug_tensor_dump_output_folder debug_tensor_dump_layers
    watchdog_timeout soft_watchdog_timeout sleep_on_idle numa_node gc_threshold
    dist_timeout dp_size load_balance_method enable_dp_attention enable_dp_attention_local_control_broadcast
    enable_dp_lm_head enable_tp_lm_head_all_to_all enable_attn_tp_input_scattered disable_attn_tp_gather
    enable_p2p_check moe_dense_tp_size
    radix_eviction_policy radix_eviction_policy_config disable_radix_cache
    max_queued_requests chunked_prefill_size prefill_decode_interval enable_dynamic_chunking max_prefill_tokens
    prefill_max_requests schedule_policy enable_priority_scheduling disable_priority_preemption default_priority_value
    abort_on_priority_when_disabled schedule_low_priority_values_first priority_scheduling_preemption_threshold
    retraction_policy schedule_conservativeness page_size disable_chunked_prefix_cache disable_overlap_schedule
    num_continuous_decode_steps scheduler_recv_interval enable_mixed_chunk enable_prefill_delayer
    prefill_delayer_max_delay_passes prefill_delayer_token_usage_low_watermark prefill_delayer_forward_passes_buckets
    prefill_delayer_wait_seconds_buckets prefill_delayer_queue_min_ratio prefill_delayer_max_delay_ms
    min_free_slots_delay
    enable_return_hidden_states return_hidden_states_mode sampling_mask_max_tokens
    disable_outlines_disk_cache
    enable_cache_report return_input_ids return_output_ids stream_interval batch_notify_size
    enable_dynamic_batch_tokenizer dynamic_batch_tokenizer_batch_size dynamic_batch_tokenizer_batch_timeout
    enable_tokenizer_batch_encode disable_tokenizer_batch_decode
"""
ALLOWED = frozenset(_ALLOWED.split())

# Of allowed fields, the values that keep what a publish relies on.
_VALUES: dict[str, tuple[tuple[str, ...], str]] = {
    "kv_cache_dtype": (("auto", "bf16", "bfloat16"), "with fewer bits a value " + _OTHER_LOGPROBS),
    "moe_runner_backend": (
        ("triton", "deep_gemm", "flashinfer_cutlass"),
        "others order the experts' weights anew after loading, as flashinfer_trtllm does, which SGLang also takes for "
        "auto on Blackwell, or need quantised ones: digests would stop the run",
    ),
    "moe_a2a_backend": (("none", "deepep"), _UNEXAMINED),
}
_REASONS = {name: reason for reason, names in REFUSED.items() for name in names.split()}


def refusal(field: ServerField) -> str:
    """Returns why users cannot set a field, with the key to use instead where there is one; "" for an allowed field."""
    if field.name in OURS:
        return f"is set by {OURS[field.name]}"
    reason = _REASONS.get(field.name) or REFUSED_GROUPS.get(field.group)
    if reason is None and field.name not in ALLOWED:
        reason = "this SGLang has it and the one that was examined had not"
    return f"is refused: {reason}" if reason else ""


def engine_setting_problems(rollout: RolloutConfig) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yields (keys, problem) for everything that is wrong with `rollout.sglang` and `rollout.extra_args`."""
    fields = server_fields() if rollout.sglang or rollout.extra_args else {}
    if rollout.sglang and not fields:
        yield ("rollout", "sglang"), "SGLang is not installed here, so its settings cannot be checked"
        return
    for name, problem in _map_problems(rollout.sglang, fields):
        yield ("rollout", "sglang", name), problem
    for problem in _word_problems(rollout.extra_args, fields):
        yield ("rollout", "extra_args"), problem
    if rollout.sglang.get("dp_size", 1) != 1 and not rollout.sglang.get("enable_dp_attention"):
        yield ("rollout", "sglang", "dp_size"), f"is refused without enable_dp_attention: {_RANKS}; raise num_engines"


def _map_problems(given: dict[str, Any], fields: dict[str, ServerField]) -> Iterator[tuple[str, str]]:
    for name, value in given.items():
        if name not in fields:
            near = get_close_matches(name, ALLOWED | set(OURS), n=1) or get_close_matches(name, fields, n=1)
            yield name, "SGLang's ServerArgs has no such field" + (f"; did you mean {near[0]!r}?" if near else "")
        elif problem := refusal(fields[name]) or fields[name].problem(value) or _value_problem(name, value):
            yield name, problem


def _value_problem(name: str, value: object) -> str:
    right, reason = _VALUES.get(name, ((), ""))
    return f"{value} is refused: {reason}; it may be {', '.join(right)}" if right and value not in right else ""


def _word_problems(words: Sequence[str], fields: dict[str, ServerField]) -> Iterator[str]:
    by_option = {option: field for field in fields.values() for option in field.options}
    for number, word in enumerate(words):
        name, _, value = word.partition("=")
        if not name.startswith("--"):
            continue
        # argparse takes a beginning for the whole where only one option begins so.
        near = [by_option[name]] if name in by_option else [by_option[o] for o in by_option if o.startswith(name)]
        field = near[0] if len({entry.name for entry in near}) == 1 else None
        value = value or (words[number + 1] if number + 1 < len(words) else "")
        if name == "--config":
            yield "--config is refused: a file of settings is not read here; name them one by one"
        elif field is None or (field.name == "custom_weight_loader" and WEIGHT_LOADER in words):  # one beside ours
            continue
        elif problem := refusal(field) or _value_problem(field.name, value):
            yield f"{name} {problem}"


def engine_setting_words(given: dict[str, Any]) -> list[str]:
    """Returns the words of the command line for `rollout.sglang`, which has no problems."""
    fields = server_fields()
    return [word for name, value in given.items() for word in fields[name].words(value)]
