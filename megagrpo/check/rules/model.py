"""The model with what engines load of it and how long samples are."""

from collections.abc import Iterator

from megagrpo.check.rules.engine_layout import context_rule, server_of
from megagrpo.check.rules.placement import needs_gpus
from megagrpo.check.rules.subject import SPARED, Subject, longest_samples
from megagrpo.config.fields import Rule
from megagrpo.config.schema import ExperimentConfig
from megagrpo.models.architecture import Architecture
from megagrpo.models.fields import expected_kernels
from megagrpo.models.kinds.compressed.describe import CompressedAttention
from megagrpo.models.kinds.hyper_connections.describe import HyperConnections
from megagrpo.models.kinds.indexed.describe import LightningIndexer
from megagrpo.models.kinds.mamba2.describe import Mamba2
from megagrpo.models.table import model_problems, model_tensors, stored_otherwise


def before_start(subject: Subject) -> Iterator[Rule]:
    """Yields why no family reads the model; if one does, the rules between it and engines, data
    and tokenizer."""
    config, arch, description = subject.experiment, subject.arch, subject.description
    if description is None:
        return
    for text in model_problems(description, config.actor.has_draft):
        yield Rule(True, f"model.path: {text}")
    if arch is None:
        return
    rollout = config.rollout
    experts = rollout.dtype == "float32" and not rollout.deterministic
    yield Rule(
        rollout.ep > 1 and experts and needs_gpus(config),
        f"rollout.ep = {rollout.ep} with rollout.dtype float32 on GPUs: torch's experts, the only "
        "ones in float32, do not skip those of other ranks",
        "set ep 1 or bfloat16",
    )
    yield Rule(
        isinstance(arch.recurrent, Mamba2) and not config.weights.past_loader,
        f"weights.transport: {config.weights.transport} with Mamba-2 layers: SGLang's loader computes their decays, "
        "which this transport does not verify",
        "take reshard or ipc",
    )
    yield Rule(
        arch.streams is not None and not needs_gpus(config),
        f"model.path: engines of a {arch.family} model need GPUs: {(arch.streams or HyperConnections).ON_GPUS}",
        "set actor.dtype: bfloat16, which means GPUs; megagrpo certify compares trainers without them",
    )
    apart = rollout.load_format == "model" and rollout.sglang.get("ple_offload_embedding")
    yield Rule(
        arch.ngrams is not None and not apart,
        f"rollout: engines of a {arch.family} model read its table of n-grams from its files, since no publish has "
        "it, and keep it on the host, where it outlives their sleep",
        "set rollout.load_format: model and rollout.sglang: {ple_offload_embedding: true}",
    )
    yield Rule(
        isinstance(arch.attention, CompressedAttention) and not config.algorithm.corrects_staleness,
        f"model.path: SGLang's cache of a {arch.family} model is in FP8, which rounds and needs a correction",
        "set algorithm.mismatch.weight, such as {name: tis}, or algorithm.mismatch.reject",
    )
    yield Rule(
        arch.experts
        and arch.experts.limit
        and rollout.sglang.get("moe_runner_backend") == "flashinfer_cutlass",
        f"rollout.sglang.moe_runner_backend flashinfer_cutlass with a {arch.family} model: SGLang computes its experts "
        "without their biases, and a sleep loses the bounds of their activation",
        "take triton",
    )
    ranks = server_of(rollout).attention_tp
    yield Rule(
        ranks > 1
        and isinstance(arch.attention, CompressedAttention)
        and not config.weights.past_loader,
        f"weights.transport: {config.weights.transport} with rollout.tp = {rollout.tp}: each of {ranks} ranks of a "
        f"{arch.family} model's attention keeps its sinks (attn_sink) as of its first request, and this transport "
        "does not reach these copies",
        "take reshard or ipc, or set tp: 1, or rollout.sglang.enable_dp_attention with dp_size = tp",
    )
    yield Rule(
        config.actor.optimizer.megatron.get("optimizer_cpu_offload")
        and any(spec.trained and spec.dtype for spec in model_tensors(arch)),
        f"actor.optimizer.megatron.optimizer_cpu_offload: a {arch.family} model trains some parameters in float32, "
        "with which Megatron's optimizer on the host does not start",
        "take use_precision_aware_optimizer: true instead",
    )
    if stored := stored_otherwise(description):
        yield Rule(
            rollout.load_format != "dummy",
            f"rollout.load_format = {rollout.load_format}, but the model is stored {stored}: "
            "engines run it in bfloat16, as it is trained, and do not read its files",
            "use dummy, the first publish fills them",
        )
    yield from _lengths(config, arch)
    size = arch.vocab_size
    largest = subject.largest_token_id
    stop = max(config.sampling.stop_token_ids, default=0)
    yield Rule(
        stop >= size,
        f"sampling.stop_token_ids: {stop} is no token of the model, which has {size} (vocab_size)",
    )
    yield Rule(
        config.scoring[2] > size,
        f"algorithm.distillation.top_k {config.scoring[2]} is more than the {size} tokens of the model (vocab_size)",
        "lower it",
    )
    yield Rule(
        largest is not None and largest >= size,
        f"model.tokenizer has token id {largest}, but the model only {size} embeddings (vocab_size)",
    )


def _lengths(config: ExperimentConfig, arch: Architecture) -> Iterator[Rule]:
    spared = SPARED * config.sampling.several_turns  # a later turn's request reads nearly all
    if config.rollout.draft_tokens:  # compute_num_reserved_tokens of SGLang's managers/utils.py
        spared += config.rollout.draft_tokens + 1
    yield context_rule(arch, config.rollout.sglang, "the model")
    for section, length in longest_samples(config).items():
        # a first request reads the prompt
        spare = max(spared, SPARED - (length - config.data.max_prompt_tokens))
        kept = f" ({spare} are SGLang's)" * bool(spare)
        length += spare
        samples = f"{section}: up to {length} tokens{kept}, but"
        yield Rule(
            length > arch.max_positions, f"{samples} the model has {arch.max_positions} positions"
        )
        for key, what in (("max_total_tokens", "cache holds"), ("context_length", "context is")):
            limit = config.rollout.sglang.get(key)
            yield Rule(
                isinstance(limit, int) and length > limit,
                f"{samples} an engine's {what} {limit} (rollout.sglang.{key})",
            )
    if arch.indexer is not None:
        yield from _sparse(config, arch.indexer)


def _sparse(config: ExperimentConfig, indexer: LightningIndexer) -> Iterator[Rule]:
    """Yields why sparse attention cannot be computed there: of samples longer than topk some keys
    are left out."""
    kernels = expected_kernels(config.actor)
    topk = indexer.topk
    longest = max(longest_samples(config).values())
    sparse = f"samples of up to {longest} tokens are sparse (the model's index_topk is {topk})"
    yield Rule(
        kernels.cuda and config.rollout.dtype == "float32",
        "rollout.dtype float32: SGLang's sparse attention on GPUs is of bfloat16",
        "set that",
    )
    yield Rule(
        config.rollout.load_format == "model" and not needs_gpus(config),
        "rollout.load_format = model, but without a GPU engines start from another description of "
        "a model with sparse attention, without its files",
        "use dummy, the first publish fills them",
    )
    yield Rule(
        longest > topk and not kernels.cuda,
        f"data: {sparse}, which engines on a CPU cannot compute: let max_prompt_tokens and "
        f"max_response_tokens be at most {topk} together, or run on GPUs (actor.dtype: bfloat16)",
    )
    yield Rule(
        longest > topk
        and indexer.pool == 1
        and kernels.transformer_engine
        and config.actor.megatron.get("dsa_kernel_backend") == "none",
        f"actor.megatron.dsa_kernel_backend none: {sparse}, and Megatron would hold float32 "
        "scores of every query and key",
        "remove it, or set cudnn",
    )
