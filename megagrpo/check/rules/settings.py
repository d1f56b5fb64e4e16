"""Settings of Megatron-Core and SGLang: which an experiment may not set, alone or with others."""

from collections.abc import Iterator

from megagrpo.check.rules.subject import Subject
from megagrpo.config.actor import ActorConfig
from megagrpo.config.fields import Rule, named
from megagrpo.config.libraries import (
    DDP,
    OPTIMIZER,
    RANKS,
    SERVER,
    TRANSFORMER,
    UNEXAMINED,
    Path,
    given_settings,
    name_problem,
)
from megagrpo.config.rollout import RolloutConfig

# Of fields that may be set, the values that keep the promises of a publish.
VALUES: dict[str, tuple[tuple[str, ...], str]] = {
    "kv_cache_dtype": (("auto", "bf16", "bfloat16", "fp8_e4m3"), UNEXAMINED),
    "moe_runner_backend": (
        ("triton", "deep_gemm", "flashinfer_cutlass"),
        "others reorder the experts' weights after loading, as flashinfer_trtllm does, "
        "which SGLang also takes for auto on Blackwell, or need quantized ones: digests would stop the run",
    ),
    "fp8_gemm_runner_backend": (
        ("auto", "deep_gemm", "triton"),
        "others reorder values or scales after loading: digests would stop the run",
    ),
    "moe_a2a_backend": (("none", "deepep"), UNEXAMINED),
}


# The same, numbers: the smallest with which an engine starts and samples. Rules and plans calculate
# with them.
_AT_LEAST = {
    "page_size": 1,
    "context_length": 1,
    "max_total_tokens": 1,
    "max_prefill_tokens": 1,
    "dp_size": 1,
    "moe_dense_tp_size": 1,
    "hicache_size": 0,
    "hicache_ratio": 0.0,  # the others are whole numbers
    "chunked_prefill_size": -1,
    "stream_interval": 1,
    "decode_log_interval": 1,
}
# a field that is set, what must not be so, and why
_Together = dict[Path, list[tuple[str, object, str]]]
# fields, and the setting without which nothing reads them
_READ_WITH: dict[Path, dict[str, str]] = {
    TRANSFORMER: {
        "recompute_modules": "actor.recompute selective",
        "recompute_method": "actor.recompute full",
        "recompute_num_layers": "actor.recompute full",
        "fp8_recipe": "fp8",
        "moe_flex_dispatcher_backend": "moe_token_dispatcher_type flex",
    },
    OPTIMIZER: {
        "optimizer_offload_fraction": "optimizer_cpu_offload",
        "overlap_cpu_optimizer_d2h_h2d": "optimizer_cpu_offload",
    },
}
# Megatron's checkpoint of these names what Transformer Engine defines, in fp8 or not
_RECOMPUTED_BY_ENGINE = ("layernorm", "mla_up_proj", "moe_act")
_OF_ENGINE = (
    "attention_backend",
    "fp8",
    "moe_permute_fusion",
    "moe_router_fusion",
    "apply_rope_fusion",
    "use_te_activation_func",
)


def as_read(subject: Subject) -> Iterator[Rule]:
    """Yields the rules about settings of libraries, each with the key of the setting."""
    actor, rollout = subject.experiment.actor, subject.experiment.rollout
    given = given_settings(actor, rollout)
    for path, settings in given.items():
        for name in settings:
            if problem := name_problem(path, name):
                yield Rule(True, problem, key=(*path, name))
    for name, (right, why) in VALUES.items():
        value = rollout.sglang.get(name, right[0])
        because = f"{value} is refused: {why}"
        yield Rule(value not in right, because, f"it may be {', '.join(right)}", (*SERVER, name))
    for name, least in _AT_LEAST.items():
        value = rollout.sglang.get(name)
        fits = isinstance(value, int | type(least)) and value >= least
        yield Rule(
            value is not None and not fits,
            f"must be at least {least:g}, and a {'whole ' * isinstance(least, int)}number",
            key=(*SERVER, name),
        )
    for path, fields in _READ_WITH.items():
        said = {"actor.recompute": actor.recompute, **given[path]}
        for name, other in fields.items():
            key, _, value = other.partition(" ")
            unread = not said.get(key) or value not in ("", said[key])
            yield Rule(said.get(name) and unread, f"is read with {other} only", key=(*path, name))
    for path, together in (_trainer_settings(actor) | _engine_settings(rollout)).items():
        for name, wrong, because in together:
            yield Rule(given[path].get(name) and wrong, because, key=(*path, name))


def _trainer_settings(actor: ActorConfig) -> _Together:
    model = actor.megatron
    p = actor.parallel
    sharded = actor.optimizer.distributed
    own_layers = not actor.expects_transformer_engine
    dispatcher = model.get("moe_token_dispatcher_type", "alltoall")
    engine = "needs Transformer Engine's layers (actor.transformer_engine)"
    modules = str(model.get("recompute_modules"))
    engine_modules = [name for name in _RECOMPUTED_BY_ENGINE if name in modules]
    virtual = "the schedule of virtual stages (actor.parallel.vpp of 2 or more)"
    optimizer = actor.optimizer.megatron
    host = ("use_precision_aware_optimizer", "optimizer_cpu_offload")
    share = optimizer.get("optimizer_offload_fraction")
    host_settings = {
        "needs actor.optimizer.distributed: true": not sharded,
        "keeps float32 copies of bfloat16 weights; with actor.dtype float32 there are none": (
            actor.dtype != "bfloat16"
        ),
        "needs Transformer Engine's Adam, which Megatron takes with its layers only "
        "(actor.transformer_engine)": own_layers,
    }
    return {
        TRANSFORMER: [
            (
                "recompute_modules",
                own_layers and engine_modules,
                f"{named(engine_modules)} {engine}",
            ),
            *((name, own_layers, engine) for name in _OF_ENGINE),
            (
                "fp8",
                model.get("fp8_recipe", "delayed") == "delayed",
                "fp8_recipe delayed, the default, is refused: it takes scales from earlier "
                "passes, also from those without a backward, and recomputes with others; take tensorwise or blockwise",
            ),
            (
                "moe_shared_expert_overlap",
                dispatcher != "alltoall",
                "works with the alltoall dispatcher only",
            ),
            (
                "moe_token_dispatcher_type",
                dispatcher == "allgather" and p.tp % (p.ep * p.etp),
                "allgather needs equal numbers of tokens on all ranks that share experts, and only "
                "those of actor.parallel.tp have them; take alltoall",
            ),
            (
                "moe_flex_dispatcher_backend",
                "ncclep" in model.values(),
                "ncclep has buffers of the first micro-batch's size, and others are larger; take deepep or hybridep",
            ),
            *(
                (f"overlap_p2p_comm{which}", p.vpp == 1, f"messages overlap only in {virtual}")
                for which in ("", "_warmup_flush")
            ),
            (
                "deallocate_pipeline_outputs",
                model.get("overlap_p2p_comm"),
                "with overlap_p2p_comm each message would be waited for before its output is freed",
            ),
        ],
        DDP: [
            (
                "align_param_gather",
                p.vpp == 1,
                f"only {virtual} starts the gathers; in others each would be waited for",
            ),
            (
                "overlap_param_gather",
                not sharded,
                "gathers what actor.optimizer.distributed: true sharded",
            ),
            (
                "overlap_param_gather",
                actor.ddp.get("overlap_grad_reduce") is False,
                "needs actor.ddp.overlap_grad_reduce: true",
            ),
        ],
        OPTIMIZER: [
            *((name, wrong, because) for because, wrong in host_settings.items() for name in host),
            (
                "main_grads_dtype",
                optimizer.get("main_grads_dtype") != "float32"
                and not any(map(optimizer.get, host)),
                "other types than float32 need use_precision_aware_optimizer: true",
            ),
            (
                "optimizer_offload_fraction",
                not isinstance(share, int | float) or not 0 <= share <= 1,
                "must be a number between 0 and 1",
            ),
        ],
    }


def _engine_settings(rollout: RolloutConfig) -> _Together:
    given = rollout.sglang
    cache = "enable_hierarchical_cache"
    return {
        SERVER: [
            (
                "dp_size",
                given.get("dp_size") != 1 and not given.get("enable_dp_attention"),
                f"is refused without enable_dp_attention: {RANKS}; raise num_engines",
            ),
            (
                "moe_a2a_backend",
                given.get("moe_a2a_backend") == "deepep"
                and not rollout.quantization
                and given.get("moe_runner_backend") != "deep_gemm",
                "deepep with experts in bfloat16 ends in SGLang's first prefill, unless "
                "moe_runner_backend is deep_gemm, which no GPU has run here: say that, or quantization fp8",
            ),
            (
                cache,
                not (given.get("hicache_size") or given.get("hicache_ratio")),
                "needs hicache_size, GB of host memory for each engine rank, or hicache_ratio: "
                "SGLang would take 80 % of the node's free memory, and trainers and checkpoints need some",
            ),
            (cache, rollout.draft_tokens, f"is refused with rollout.draft_tokens: {UNEXAMINED}"),
            (
                cache,
                rollout.max_staleness,
                "is refused with rollout.max_staleness: paused with requests, SGLang ends no "
                "copies to the host, and its flush asserts that there are none",
            ),
        ]
    }
