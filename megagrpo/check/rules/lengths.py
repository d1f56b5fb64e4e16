"""Lengths of samples and ids of tokens, with what the model and its engines hold."""

from collections.abc import Iterator

from megagrpo.check.rules.subject import Subject
from megagrpo.config.fields import Rule
from megagrpo.config.schema import ExperimentConfig
from megagrpo.models.fields import expected_kernels


def longest_samples(config: ExperimentConfig) -> dict[str, int]:
    """Returns the most tokens that one sample of each data section may have."""
    response = config.sampling.max_response_tokens
    out = {"data": config.data.max_prompt_tokens + response}
    if config.eval is not None:
        of_eval = config.eval.max_response_tokens or response
        out["eval.data"] = config.data.max_prompt_tokens + of_eval
    return out


def length_rules(subject: Subject) -> Iterator[Rule]:
    """Yields the rules about positions of the model and caches of engines."""
    config, arch = subject.experiment, subject.arch
    if arch is None:
        return
    what = {"max_total_tokens": "cache holds", "context_length": "context is"}
    for section, length in longest_samples(config).items():
        samples = f"{section}: up to {length} tokens, but"
        yield Rule(
            length > arch.max_positions,
            f"{samples} the model has {arch.max_positions} positions",
        )
        for key, limit in ((key, config.rollout.sglang.get(key)) for key in what):
            yield Rule(
                isinstance(limit, int) and length > limit,
                f"{samples} an engine's {what[key]} {limit} (rollout.sglang.{key})",
            )


def sparse_rules(subject: Subject) -> Iterator[Rule]:
    """Yields why sparse attention cannot be computed there: of samples longer than index_topk some
    keys are left out."""
    config, arch = subject.experiment, subject.arch
    if arch is None or arch.indexer is None:
        return
    topk = arch.indexer.topk
    kernels = expected_kernels(config.actor)
    longest = max(longest_samples(config).values())
    sparse = f"samples of up to {longest} tokens are sparse (the model's index_topk is {topk})"
    yield Rule(
        kernels.cuda and config.rollout.dtype == "float32",
        "rollout.dtype float32: SGLang's sparse attention on GPUs is of bfloat16",
        "set that",
    )
    yield Rule(
        config.rollout.load_format == "model" and not kernels.cuda,
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
        longest > topk and kernels.cuda and not kernels.transformer_engine,
        f"actor.transformer_engine: {sparse}, and torch's layers would hold masks as large as "
        "the square of that",
        "remove it, or set it to true",
    )
    yield Rule(
        longest > topk
        and kernels.transformer_engine
        and config.actor.megatron.get("dsa_kernel_backend") == "none",
        f"actor.megatron.dsa_kernel_backend none: {sparse}, and Megatron would hold float32 "
        "scores of every query and key",
        "remove it, or set cudnn",
    )


def token_rules(subject: Subject) -> list[Rule]:
    """Rules about the model's vocabulary."""
    if subject.arch is None:
        return []
    size = subject.arch.vocab_size
    stop = max(subject.experiment.sampling.stop_token_ids, default=0)
    largest = subject.largest_token_id
    return [
        Rule(
            stop >= size,
            f"sampling.stop_token_ids: {stop} is no token of the model, which has {size} "
            "(vocab_size)",
        ),
        Rule(
            largest is not None and largest >= size,
            f"model.tokenizer has token id {largest}, but the model only {size} embeddings "
            "(vocab_size)",
        ),
    ]
