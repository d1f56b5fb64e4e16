"""Fields of SGLang's ServerArgs that `rollout.sglang` may not set, with the reason.

All other fields are the user's. A pattern such as hicache_* stands for every field that it fits.
"""

import json
from collections.abc import Iterator, Mapping

from megagrpo.config.fields import LibrarySettings
from megagrpo.config.libraries.source import (
    LibraryField,
    read_fields,
    refusal_of,
    refusals,
    set_elsewhere,
)
from megagrpo.config.rollout import RolloutConfig
from megagrpo.system.user_function import did_you_mean

# our key, or who decides it -> the fields that say the same
_OURS = {
    "model.path": "model_path",
    "model.tokenizer": "tokenizer_path",
    "rollout.load_format": "load_format",
    "rollout.dtype": "dtype",
    "rollout.dtype: logits of bfloat16 engines on GPUs are float32, as the actor's": "enable_fp32_lm_head",
    "weights.transport": "custom_weight_loader",
    "the publish, which counts the actor's updates": "weight_version",
    "rollout.deterministic": "enable_deterministic_inference",
    "rollout.mem_fraction": "mem_fraction_static",
    "rollout.max_running_requests": "max_running_requests",
    "rollout.max_total_tokens": "max_total_tokens",
    "rollout.tp": "tp_size",
    "rollout.ep": "ep_size",
    "rollout.nodes_per_engine": "nnodes",
    "rollout.nodes_per_engine, and the service, which places engines": (
        "node_rank dist_init_addr use_ray base_gpu_id gpu_id_step"
    ),
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
# Classes whose fields are refused, all of them.
_GROUPS = refusals(
    {
        "rollout.draft_tokens speculates with the model's own layer; a publish reaches no other "
        "draft": "Spec",
        "engines receive whole weights, with the actor's adapters added (actor.lora)": "Lora",
        "an engine answers whole requests; router and publish handle no other kind": "Disagg",
        "images come with the trainers' requests, as these have read them": "Mm",
        "diffusion models are not trained": "ExecDllm",
        "models with recurrent layers are not trained": "ExecMamba",
        "a publish writes into the parameters of a rank, which offloading replaces": "ExecOffload",
    }
)
_RANKS = "an engine's ranks are rollout.tp; a publish would not reach the others"
_LOGPROBS = "log-probabilities would be of another distribution than the actor's"
_UNEXAMINED = "no test shows that a publish into live parameters holds with it"
SERVER_REFUSED = set_elsewhere(_OURS) | refusals({
    "rollout.quantization says in which format engines keep weights; with fewer bits they would "
    "not be the published "
    "ones": """quantization*
        modelopt_* quantize_and_serve rl_quant_profile enable_tf32_matmul enable_w4a4_* flashinfer_mxfp4_*
        flashinfer_a2a_dispatch_type deepep_dispatcher_output_dtype enable_quant_* *_fp4_allgather
        prefill_kv_cache_dequant_dtype fp4_gemm_runner_backend""",
    "experts would leave the ranks for which the publish has planned their slices": """*eplb* ep_num_redundant_experts
        ep_dispatch_algorithm init_expert_location *elastic_ep* enable_elastic_expert_backup mooncake_ib_device
        enable_waterfill ep_join_* max_ep_size kt_*""",
    _RANKS: """dcp_* pp_* attn_cp_size moe_dp_size dwdp_size enable_prefill_cp cp_strategy enable_cp_decode_attn_tp
        enable_dsa_cache_layer_split""",
    "keys and values of older weights would outlive a publish, which empties the caches on GPU and "
    "host only": """
        hicache_storage_* hicache_host_memory_mode enable_session_radix_cache radix_cache_backend
        *unified_cache_external* *hisparse* enable_linker_mla_dedup *lmcache* *flexkv*""",
    "weights come from model.path or from the first publish (rollout.load_format)": """revision model_impl
        model_config_parser startup_weight_load_mode remote_instance_* engine_info_bootstrap_port modelexpress_config
        download_dir model_checksum delete_ckpt_after_loading decrypted_* weight_cache_* *_weights_cpu_backup
        checkpoint_engine_wait_weights_before_ready""",
    _LOGPROBS: """json_model_override_args rl_on_policy_target enable_custom_logit_processor forward_hooks
        debug_tensor_dump_input_file allow_auto_truncate enable_strict_thinking""",
    "trainers, router and supervisor speak plain HTTP/1.1 to the one server process of an engine": """ssl_* *grpc*
        sidecar* *http2* enable_ssl_refresh fastapi_root_path *tokenizer_worker_num skip_tokenizer_init smg_*""",
    _UNEXAMINED: """enable_page_major_kv_layout enable_unified_memory deepep_v2_mode enable_layernorm_sp
        enable_shared_experts_attn_tp shared_experts_tp_size enable_dense_mlp_attn_tp gated_launch_port
        enable_dp_attention_local_control_broadcast""",
    "its value is a Python function": "custom_sigquit_handler stat_loggers",
    "it changes the engine's NCCL environment only, and trainers meet engines in one communicator": (
        "enable_nccl_nvls enable_symm_mem"
    ),
})  # fmt: skip
# Of fields that may be set, the values that keep the promises of a publish.
_VALUES: dict[str, tuple[tuple[str, ...], str]] = {
    "kv_cache_dtype": (("auto", "bf16", "bfloat16", "fp8_e4m3"), _UNEXAMINED),
    "moe_runner_backend": (
        ("triton", "deep_gemm", "flashinfer_cutlass"),
        "others reorder the experts' weights after loading, as flashinfer_trtllm does, which "
        "SGLang also takes for "
        "auto on Blackwell, or need quantised ones: digests would stop the run",
    ),
    "fp8_gemm_runner_backend": (
        ("auto", "deep_gemm", "triton"),
        "others reorder values or scales after loading: digests would stop the run",
    ),
    "moe_a2a_backend": (("none", "deepep"), _UNEXAMINED),
}
# Declared without an option, and given one in ServerArgs.add_cli_args.
_OPTION_ELSEWHERE = (
    "sampling_backend",
    "reasoning_parser",
    "tool_call_parser",
    "kv_canary_real_data",
)


def server_fields() -> Mapping[str, LibraryField]:
    """Returns name -> field of the installed ServerArgs; {} without SGLang. Written against sglang
    0.5.21."""
    return read_fields("sglang", ("srt/arg_groups/choices.py", "srt/arg_groups/fields/*.py"))


def server_options(field: LibraryField) -> list[str]:
    """Returns the field's options on SGLang's command line, the one that we write first."""
    if field.options.get("no_cli") and field.name not in _OPTION_ELSEWHERE:
        return []
    own, aliases = field.options.get("cli_name"), field.options.get("aliases")
    name = own if isinstance(own, str) else "--" + field.name.replace("_", "-")
    return [name, *(aliases if isinstance(aliases, list) else [])]


def engine_refusal(field: LibraryField) -> str:
    """Returns why users cannot set a field, and the key to set instead, if there is one; "" for
    their own fields."""
    refusal = refusal_of(field.name, SERVER_REFUSED) or _GROUPS.get(field.group)
    if refusal is None:
        return ""
    return f"is set by {refusal.instead}" if refusal.instead else f"is refused: {refusal.reason}"


def engine_setting_problems(rollout: RolloutConfig) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yields (key path, problem) for everything that is wrong with `rollout.sglang`."""
    fields = server_fields() if rollout.sglang else {}
    if rollout.sglang and not fields:
        yield (
            ("rollout", "sglang"),
            "SGLang is not installed here, so its settings cannot be checked",
        )
        return
    for name, value in rollout.sglang.items():
        if problem := _problem(name, value, fields):
            yield ("rollout", "sglang", name), problem
    if rollout.sglang.get("dp_size", 1) != 1 and not rollout.sglang.get("enable_dp_attention"):
        yield (
            ("rollout", "sglang", "dp_size"),
            f"is refused without enable_dp_attention: {_RANKS}; raise num_engines",
        )
    if rollout.sglang.get("enable_hierarchical_cache"):
        where, sizes = (
            ("rollout", "sglang", "enable_hierarchical_cache"),
            ("hicache_size", "hicache_ratio"),
        )
        if not any(map(rollout.sglang.get, sizes)):
            why = (
                "SGLang would take 80 % of the node's free memory, and trainers and checkpoints "
                "need some"
            )
            yield (
                where,
                "needs hicache_size, GB of host memory for each engine rank, or hicache_ratio: "
                f"{why}",
            )
        if rollout.draft_tokens:
            yield where, f"is refused with rollout.draft_tokens: {_UNEXAMINED}"
        if rollout.max_staleness:
            why = (
                "paused with requests, SGLang ends no copies to the host, and its flush asserts "
                "that there are none"
            )
            yield (
                where,
                f"is refused with rollout.max_staleness: {why}",
            )


def engine_setting_words(given: LibrarySettings) -> list[str]:
    """Returns the words of the command line for `rollout.sglang`, which has no problems."""
    fields = server_fields()
    return [word for name, value in given.items() for word in _words(fields[name], value)]


def _problem(name: str, value: object, fields: Mapping[str, LibraryField]) -> str:
    if name not in fields:
        return f"SGLang's ServerArgs has no such field{did_you_mean(name, fields)}"
    field = fields[name]
    if problem := engine_refusal(field) or _value_problem(name, value):
        return problem
    if not server_options(field):
        return "has no option on SGLang's command line"
    choices = field.options.get("choices")
    if isinstance(choices, list):
        right, expected = value in choices, f"one of {', '.join(map(str, choices))}"
    elif _as_json(field) and not field.declared.removeprefix("Optional[").startswith(
        ("int", "List", "Dict")
    ):
        right, expected = isinstance(value, dict), "a map"  # of a class of SGLang's own
    else:
        right, expected = (
            value is not None and field.accepts(value),
            field.expected,
        )  # no word says null
    return "" if right else f"should be {expected}, as SGLang declares it ({field.location})"


def _value_problem(name: str, value: object) -> str:
    right, reason = _VALUES.get(name, ((), ""))
    return (
        f"{value} is refused: {reason}; it may be {', '.join(right)}"
        if right and value not in right
        else ""
    )


def _words(field: LibraryField, value: object) -> list[str]:
    option = server_options(field)[0]
    if "bool" in field.declared:
        negated = [f"--no-{option.removeprefix('--')}"] if "action" in field.options else []
        return [option] if value else negated
    if _as_json(field):
        return [option, json.dumps(value)]
    return [option, *map(str, value if isinstance(value, list) else [value])]


def _as_json(field: LibraryField) -> bool:
    """Returns whether SGLang reads the option's value as one word of JSON."""
    parser = str(field.options.get("type_parser", ""))
    return "json" in parser or "config" in parser
