"""Engines with the trainers that they sample for: formats, shared GPUs, versions, routing."""

from collections.abc import Iterator

from megagrpo.check.rules.subject import Subject
from megagrpo.config.fields import Rule
from megagrpo.config.schema import ExperimentConfig
from megagrpo.config.wording import dotted

_CHUNK = 2048  # SGLang's smallest default of chunked_prefill_size, tokens


def as_read(subject: Subject) -> Iterator[Rule]:
    """Yields the rules of the experiment alone."""
    experiment = subject.experiment
    rollout, actor = experiment.rollout, experiment.actor
    algorithm, weights = experiment.algorithm, experiment.weights
    yield Rule(
        rollout.quantization and rollout.dtype == "float32" and actor.device != "cpu",
        "rollout.quantization fp8 with rollout.dtype float32: FP8 layers on GPUs compute in bfloat16",
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
        rollout.draft_tokens and not actor.has_draft,
        "rollout.draft_tokens without actor.draft: engines would have no draft",
        "add actor.draft: {}, or remove rollout.draft_tokens",
    )
    ahead = rollout.max_staleness
    older = f"rollout.max_staleness {ahead} trains on tokens of older weights"
    what = older if ahead else "a cache in fp8_e4m3 rounds"
    for name in filter(None, experiment.engine_sizes):
        yield Rule(
            rollout.colocate,
            f"{dotted(experiment.keys_of(name))}.path under rollout.colocate: the trainers' GPUs "
            "have no room for engines that never sleep",
            "write the url of a server that runs elsewhere",
        )
    yield Rule(
        rollout.colocate and weights.uses_groups,
        f"rollout.colocate with weights.transport {weights.transport}: NCCL takes no two ranks on one GPU",
        "set weights.transport: ipc, or disk",
    )
    yield Rule(
        rollout.colocate and ahead,
        f"rollout.max_staleness {ahead} with rollout.colocate: engines sleep while the actor trains",
        "remove one of them",
    )
    yield Rule(
        rollout.max_staleness == 1 and algorithm.dynamic_sampling,
        "rollout.max_staleness 1 with algorithm.dynamic_sampling: surplus groups are "
        "trained on one step later, which leaves nothing to sample ahead",
        "take 2 or more, or 0",
    )
    yield Rule(
        not algorithm.corrects_staleness
        and (ahead or rollout.sglang.get("kv_cache_dtype") == "fp8_e4m3"),
        f"{what}, which needs a correction",
        "set algorithm.mismatch.weight, such as {name: tis}, or algorithm.mismatch.reject",
    )
    yield Rule(
        rollout.prefix_cache == "by_version" and not ahead,
        "rollout.prefix_cache by_version without max_staleness: no rollout outlives a publish",
        "take flush",
    )
    yield Rule(
        rollout.prefix_cache == "by_version" and rollout.deterministic,
        "rollout.prefix_cache by_version with rollout.deterministic: bits would depend on what caches still hold",
        "take flush",
    )
    # rank 0's waits in Mesh.from_main, in which the other ranks wait for it
    waits = [(f"weights.timeout_s {weights.timeout_s:g}", weights.timeout_s, "updates engines")]
    if rollout.colocate:
        asleep = rollout.sleep_limit_s
        parts = f"rollout.start_timeout_s + rollout.health_timeout_s {asleep:g}"
        waits.append((parts, asleep, "puts engines to sleep, which may be starting"))
    for name, limit_s, does in waits:
        yield Rule(
            limit_s >= actor.deadline_s,
            f"{name} must be below actor.deadline_s {actor.deadline_s:g}: other ranks wait in a "
            f"collective while rank 0 {does}",
            "lower it, or raise the deadline",
        )
    yield from _replayed_experts(experiment)


def _replayed_experts(experiment: ExperimentConfig) -> Iterator[Rule]:
    actor, rollout = experiment.actor, experiment.rollout
    by_engine = actor.routing_replay == "rollout"
    chunk = rollout.sglang.get("chunked_prefill_size", _CHUNK)
    read = (rollout.draft_tokens or 0) + 1  # tokens of a request in one forward of the model
    held = rollout.max_running_requests * read
    yield Rule(
        actor.routing_replay == "old" and experiment.algorithm.old_logprobs == "engine",
        "actor.routing_replay old with algorithm.old_logprobs engine: there is no forward before the "
        "updates that could record experts",
        "set it to rollout, or remove one of them",
    )
    yield Rule(
        actor.routing_replay == "old" and experiment.train.updates_of_step == 1,
        "actor.routing_replay old changes nothing with one update a step: the same weights choose the experts",
        "remove it, raise train.num_updates_per_step or num_epochs_per_step, or set it to rollout",
    )
    yield Rule(
        by_engine and isinstance(chunk, int) and chunk <= 0,
        "actor.routing_replay rollout with rollout.sglang.chunked_prefill_size "
        f"{chunk}: SGLang keeps the experts of one chunk; a longer prompt would end the engine",
        "remove the latter",
    )
    yield Rule(
        by_engine and read > 1 and isinstance(chunk, int) and held > chunk,
        "actor.routing_replay rollout with rollout.draft_tokens: a forward may read "
        f"{held} tokens (max_running_requests x {read}), and SGLang keeps the experts of one chunk",
        f"lower the former, or set rollout.sglang: {{chunked_prefill_size: {held}}}",
    )
    wrong = {
        "enable_two_batch_overlap": "overwrites the experts of a batch's first half",
        "enable_hierarchical_cache": "returns another token's experts from the host",
    }
    for key, does in wrong.items():
        yield Rule(
            by_engine and rollout.sglang.get(key),
            f"actor.routing_replay rollout with SGLang's {key}, which {does}",
            "remove one of them",
        )
