"""Engines with the trainers that they sample for: routing, versions, shared GPUs, formats."""

from collections.abc import Iterator

from megagrpo.check.rules.subject import Subject
from megagrpo.config.fields import Rule
from megagrpo.models.table import stored_otherwise

_CHUNK = 2048  # SGLang's smallest default of chunked_prefill_size, tokens


def replay_rules(subject: Subject) -> list[Rule]:
    """Rules about experts that are replayed."""
    experiment = subject.experiment
    actor = experiment.actor
    rollout = experiment.rollout
    by_engine = actor.routing_replay == "rollout"
    chunk = rollout.sglang.get("chunked_prefill_size")
    unchunked = by_engine and isinstance(chunk, int) and chunk <= 0
    read = (rollout.draft_tokens or 0) + 1  # tokens of a request in one forward of the model
    held = rollout.max_running_requests * read
    halves = rollout.sglang.get("enable_two_batch_overlap")
    return [
        Rule(
            actor.routing_replay == "old" and experiment.train.updates_of_step == 1,
            "actor.routing_replay old changes nothing with one update a step: the same "
            "weights choose the experts",
            "remove it, raise train.num_updates_per_step or num_epochs_per_step, or "
            "set it to rollout",
        ),
        Rule(
            unchunked,
            "actor.routing_replay rollout with rollout.sglang.chunked_prefill_size "
            f"{chunk}: SGLang keeps the experts of one chunk; a longer prompt would end the engine",
            "remove the latter",
        ),
        Rule(
            by_engine and read > 1 and (held > (chunk or _CHUNK)),
            "actor.routing_replay rollout with rollout.draft_tokens: a forward may read "
            f"{held} tokens (max_running_requests x {read}), and SGLang keeps the experts of "
            "one chunk",
            f"lower the former, or set rollout.sglang: {{chunked_prefill_size: {held}}}",
        ),
        Rule(
            by_engine and halves,
            "actor.routing_replay rollout with SGLang's enable_two_batch_overlap, "
            "which overwrites the experts of a batch's first half",
            "remove one of them",
        ),
        Rule(
            by_engine and rollout.sglang.get("enable_hierarchical_cache"),
            "actor.routing_replay rollout with SGLang's enable_hierarchical_cache: from the "
            "host it returns another token's experts",
            "remove one of them",
        ),
    ]


def format_rules(subject: Subject) -> Iterator[Rule]:
    """Yields the rules about the engines' formats of weights."""
    experiment = subject.experiment
    actor, rollout = experiment.actor, experiment.rollout
    yield Rule(
        rollout.quantization and rollout.dtype == "float32" and (actor.device != "cpu"),
        "rollout.quantization fp8 with rollout.dtype float32: FP8 layers on GPUs "
        "compute in bfloat16",
        "set rollout.dtype: bfloat16, or actor.device: cpu",
    )
    yield Rule(
        rollout.quantization
        and experiment.cluster.gpu == "B200"
        and actor.device != "cpu"
        and rollout.sglang.get("fp8_gemm_runner_backend", "auto") != "triton",
        "rollout.quantization fp8 with cluster.gpu B200: there SGLang's DeepGEMM rounds "
        "scales after loading, which no publish writes",
        "set rollout.sglang: {fp8_gemm_runner_backend: triton}",
    )
    yield Rule(
        rollout.draft_tokens and (not actor.has_draft),
        "rollout.draft_tokens without actor.draft: engines would have no draft",
        "add actor.draft: {}, or remove rollout.draft_tokens",
    )


def version_rules(subject: Subject) -> list[Rule]:
    """Rules about the time between a sample and its update, and about GPUs that are shared."""
    experiment = subject.experiment
    rollout, actor = experiment.rollout, experiment.actor
    algorithm, weights = experiment.algorithm, experiment.weights
    ahead = rollout.max_staleness
    corrected = algorithm.mismatch.weight or algorithm.mismatch.reject
    what = (
        f"rollout.max_staleness {ahead} trains on tokens of older weights"
        if ahead
        else "a cache in fp8_e4m3 rounds"
    )
    return [
        Rule(
            rollout.colocate and weights.uses_groups,
            f"rollout.colocate with weights.transport {weights.transport}: NCCL takes "
            "no two ranks on one GPU",
            "set weights.transport: ipc, or disk",
        ),
        Rule(
            rollout.colocate and ahead,
            f"rollout.max_staleness {ahead} with rollout.colocate: engines sleep while the actor trains",
            "remove one of them",
        ),
        Rule(
            rollout.max_staleness == 1 and algorithm.dynamic_sampling,
            "rollout.max_staleness 1 with algorithm.dynamic_sampling: surplus groups are "
            "trained on one step later, which leaves nothing to sample ahead",
            "take 2 or more, or 0",
        ),
        Rule(
            not corrected and (ahead or rollout.sglang.get("kv_cache_dtype") == "fp8_e4m3"),
            f"{what}, which needs a correction",
            "set algorithm.mismatch.weight, such as {name: tis}, or algorithm.mismatch.reject",
        ),
        Rule(
            rollout.prefix_cache == "by_version" and (not ahead),
            "rollout.prefix_cache by_version without max_staleness: no rollout outlives a publish",
            "take flush",
        ),
        Rule(
            rollout.prefix_cache == "by_version" and rollout.deterministic,
            "rollout.prefix_cache by_version with rollout.deterministic: bits would "
            "depend on what caches still hold",
            "take flush",
        ),
        Rule(
            weights.timeout_s >= actor.deadline_s,
            f"weights.timeout_s {weights.timeout_s:g} must be below actor.deadline_s "
            f"{actor.deadline_s:g}: other ranks wait in a collective while rank 0 updates engines",
            "lower it, or raise the deadline",
        ),
    ]


def loading_rules(subject: Subject) -> Iterator[Rule]:
    """Yields the rules between the model and how engines load and compute it."""
    rollout, device = subject.experiment.rollout, subject.experiment.actor.device
    if subject.arch is None or subject.description is None:
        return
    experts = rollout.dtype == "float32" and not rollout.deterministic
    yield Rule(
        rollout.ep > 1 and experts and device == "cuda",
        f"rollout.ep = {rollout.ep} with rollout.dtype float32 on GPUs: torch's experts, the only "
        "ones in float32, do not skip those of other ranks",
        "set ep 1 or bfloat16",
    )
    if stored := stored_otherwise(subject.description):
        yield Rule(
            rollout.load_format != "dummy",
            f"rollout.load_format = {rollout.load_format}, but the model is stored {stored}: "
            "engines run it in bfloat16, as it is trained, and do not read its files",
            "use dummy, the first publish fills them",
        )
