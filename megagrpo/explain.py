"""Describes what a configuration amounts to, for `megagrpo check`. Starts nothing and loads no torch."""

import math
from pathlib import Path

from megagrpo.config.schema import ExperimentConfig, ParallelConfig
from megagrpo.families.table import ParameterCounts, architecture_of, model_problems, parameter_counts
from megagrpo.preflight import longest_samples, model_description, preflight

_MAX_RANK_ROWS = 32


def explain(config: ExperimentConfig) -> str:
    """Returns what the experiment amounts to as text, ending with every problem that `preflight` finds."""
    hf = model_description(config)
    counts = None if hf is None or model_problems(hf) else parameter_counts(architecture_of(hf))
    title = f"{config.name}: {config.train.num_steps} steps into {config.output_dir}, seed {config.seed}"
    parts = [
        _model(config, None if hf is None else hf.get("model_type"), counts),
        _layout(config),
        _step(config),
        _rollout(config),
        _memory(config, counts),
        _events(config),
    ]
    problems = preflight(config)
    verdict = [f"PROBLEMS ({len(problems)})", *(f"  {p}" for p in problems)] if problems else ["no problems found"]
    return "\n\n".join("\n".join(lines) for lines in ([title], *parts, verdict))


def rank_coordinates(rank: int, world_size: int, parallel: ParallelConfig) -> dict[str, int]:
    """Returns where a trainer rank stands.

    Megatron's order is tp-cp-ep-dp-pp, fastest first; experts divide the same ranks anew.
    """
    p = parallel
    stage_size = world_size // p.pp
    pp, within = divmod(rank, stage_size)
    return {
        "dp": within // (p.tp * p.cp),
        "pp": pp,
        "cp": within // p.tp % p.cp,
        "tp": within % p.tp,
        "ep": within // p.etp % p.ep,
        "edp": within // (p.etp * p.ep),
    }


def _model(config: ExperimentConfig, family: str | None, counts: ParameterCounts | None) -> list[str]:
    if counts is None:
        return [f"model      {config.model.path} ({family or 'no config.json there'})"]
    there = (
        ""
        if Path(config.model.path).exists()
        else ", not there yet: made by megagrpo prepare" + (" and sft" if config.sft else "")
    )
    active = f", {_count(counts.active)} active" if counts.expert else ""
    algorithm = config.algorithm
    off_policy = algorithm.loss.name == "gpg" and config.train.num_updates_per_step > 1
    reference = "a reference model is kept" if algorithm.uses_reference else "no reference model"
    return [
        f"model      {config.model.path}: {family}, {_count(counts.total)} parameters{active}{there}",
        f"algorithm  {algorithm.advantage.name} advantages, {algorithm.loss.name} loss, "
        f"{algorithm.aggregation}; {reference}",
        f"  loss     {algorithm.formula}",
        *(f"  ADVICE   {text}" for text in algorithm.advice),
        *(
            ["  ADVICE   loss gpg has no importance ratio: it takes every update of a step for the first"]
            if off_policy
            else []
        ),
    ]


def _layout(config: ExperimentConfig) -> list[str]:
    actor, p = config.actor, config.actor.parallel
    edp = actor.world_size // (p.etp * p.ep * p.pp)
    lines = [
        f"layout     {actor.world_size} trainer ranks = tp {p.tp} x cp {p.cp} x dp {actor.dp} x pp {p.pp}"
        f"; experts: etp {p.etp} x ep {p.ep} x dp {edp} x pp {p.pp}"
        + ("; sequence parallel" if p.tp > 1 else "")
        + (f"; {p.vpp} virtual stages a rank" if p.vpp > 1 else "")
        + (f"; {p.first_stage_layers} layers on the first stage" if p.first_stage_layers else "")
        + (f"; {p.last_stage_layers} layers on the last stage" if p.last_stage_layers else "")
    ]
    names = ["dp", "pp", *(["cp"] if p.cp > 1 else []), "tp", *(["ep", "edp"] if p.ep > 1 else [])]
    lines.append("  " + "".join(f"{name:>6}" for name in ["rank", *names]))
    for rank in range(min(actor.world_size, _MAX_RANK_ROWS)):
        place = rank_coordinates(rank, actor.world_size, p)
        lines.append("  " + "".join(f"{value:>6}" for value in [rank, *(place[name] for name in names)]))
    if actor.world_size > _MAX_RANK_ROWS:
        lines.append(f"  ... {actor.world_size - _MAX_RANK_ROWS} more in the same order")
    return lines


def _step(config: ExperimentConfig) -> list[str]:
    train, actor = config.train, config.actor
    samples, updates, dp = train.num_prompts_per_step * train.group_size, train.num_updates_per_step, actor.dp
    longest = longest_samples(config)["data"]
    max_response = config.sampling.max_response_tokens
    per_rank = math.ceil(samples / updates / dp)
    at_most = (
        per_rank if longest > actor.micro_batch_tokens else math.ceil(per_rank / (actor.micro_batch_tokens // longest))
    )
    shares = sorted({train.num_prompts_per_step // dp, math.ceil(train.num_prompts_per_step / dp)})
    lines = [
        f"a step     {train.num_prompts_per_step} prompts x {train.group_size} samples = {samples} samples",
        f"  asked for by {dp} data-parallel leaders, {' or '.join(map(str, shares))} prompts each",
        f"  sample     at most {config.data.max_prompt_tokens} prompt + {max_response} response = {longest} tokens",
        f"  tokens     at most {samples * longest:,}, of which {samples * max_response:,} are trained on",
        f"  updates    {updates} of {train.num_prompts_per_step // updates} prompts = {samples // updates} samples",
        f"  micro-batches  {actor.micro_batch_tokens} tokens {'packed' if actor.packing else 'padded'}; "
        f"a rank has about {per_rank} samples an update, in at most about {at_most}",
    ]
    if longest > actor.micro_batch_tokens:
        lines.append(
            f"  note: a sample longer than micro_batch_tokens ({actor.micro_batch_tokens}) "
            "gets a micro-batch of its own"
        )
    lines.append(f"the run    {train.num_steps * updates} optimiser updates, {train.num_steps * samples:,} samples")
    return lines


def _rollout(config: ExperimentConfig) -> list[str]:
    r, train, tool = config.rollout, config.train, config.sampling.tool
    at_once = r.num_engines * r.max_running_requests
    samples = train.num_prompts_per_step * train.group_size
    nodes = f" on {r.nodes_per_engine} nodes" if r.nodes_per_engine > 1 else ""
    lines = [
        f"rollout    SGLang engines: {r.num_engines} of tp {r.tp}, ep {r.ep}{nodes} "
        f"= {r.num_engines * r.tp} ranks in all, {r.dtype}" + (", deterministic" if r.deterministic else ""),
        f"  {at_once} samples at once, so a step's {samples} come in {math.ceil(samples / at_once)} waves at best",
        f"  reward     {config.reward.grader} in {config.reward.workers} processes a leader, "
        f"{config.reward.timeout_s:g} s a response"
        + (", SHUFFLED over the samples (control experiment)" if config.reward.shuffle else ""),
        *(
            [f"  tool       {tool.function}, asked at {tool.call_end!r}, at most {tool.max_turns} turns a response"]
            if tool
            else []
        ),
        f"  weights    {config.weights.transport} to every engine after each step, verified by digest",
    ]
    if config.weights.timeout_s <= r.start_timeout_s:
        lines.append(
            f"  ADVICE   weights.timeout_s {config.weights.timeout_s:g} is no more than "
            f"rollout.start_timeout_s {r.start_timeout_s:g}: a publish that finds fewer than {r.min_healthy_engines} "
            "engines may not outwait the start of new ones, and ends the run"
        )
    for i in range(min(r.num_engines, _MAX_RANK_ROWS) if r.num_engines > 1 or r.tp > 1 else 0):
        lines.append(f"  engine {i}: ranks {i * r.tp}..{(i + 1) * r.tp - 1}")
    return lines


def _memory(config: ExperimentConfig, counts: ParameterCounts | None) -> list[str]:
    """Counts weights, gradients and optimiser state alone: activations depend on the kernels."""
    if counts is None:
        return ["memory     unknown without the model's config.json"]
    actor, p = config.actor, config.actor.parallel
    width = 2 if actor.dtype == "bfloat16" else 4
    states = 12 if actor.dtype == "bfloat16" else 8  # two moments, and a float32 copy of narrower weights
    bytes_per_rank, state_bytes = 0.0, 0.0
    for count, ways in ((counts.dense, p.tp * p.pp), (counts.expert, p.etp * p.ep * p.pp)):
        copies = actor.world_size // ways  # data parallel, and context parallel for the dense part
        bytes_per_rank += count / ways * (width + 4)
        state_bytes += count / ways * states / (copies if actor.optimizer.distributed else 1)
    r = config.rollout
    engine = counts.total / r.tp * (2 if r.dtype == "bfloat16" else 4)
    return [
        f"memory     a trainer rank holds about {_bytes(bytes_per_rank)} of weights and gradients"
        f" + {_bytes(state_bytes)} of optimiser state, before activations",
        f"  an engine rank holds about {_bytes(engine)} of weights, before its cache",
    ]


def _events(config: ExperimentConfig) -> list[str]:
    e, c = config.eval, config.checkpoint
    if e is None:
        lines = ["evaluation none"]
    else:
        how = "greedy" if e.temperature == 0 else f"temperature {e.temperature:g}"
        lines = [
            f"evaluation {e.data.path}, {e.num_samples} samples a prompt, {how}: first, every {e.every} steps, last"
        ]
    when = f"every {c.every} steps and" if c.every else "only"
    lines.append(
        f"checkpoint {when} at the end, {c.keep} kept, resume {c.resume}"
        + (", in the background" if c.asynchronous else "")
    )
    if not c.every:
        lines.append("  ADVICE   checkpoint.every 0: when a rank is lost, the run begins again at its first step")
    return lines


def _count(number: float) -> str:
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:g}"


def _bytes(number: float) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number / 1e3:.3g} kB"
