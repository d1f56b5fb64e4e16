"""`megagrpo check`: what a configuration amounts to, and what stands in its way. Starts nothing and loads no torch."""

import json
import math
from pathlib import Path

from megagrpo.config.schema import DataConfig, ExperimentConfig, ParallelConfig
from megagrpo.data.prompts import read_rows
from megagrpo.rewards.graders import load_grader
from megagrpo.rollout.tools import load_tool
from megagrpo.run_folder import RunFolder
from megagrpo.tiny.description import hf_config as tiny_hf_config

_FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")
_MAX_RANK_ROWS = 32


def explain(config: ExperimentConfig) -> str:
    """Layout, one step's sizes, engines, memory and schedules as text, ending with every problem that `preflight` finds."""
    hf = model_description(config)
    title = f"{config.name}: {config.train.num_steps} steps into {config.output_dir}, seed {config.seed}"
    parts = [
        _model(config, hf),
        _layout(config),
        _step(config),
        _rollout(config),
        _memory(config, hf),
        _schedule(config),
    ]
    problems = preflight(config)
    verdict = [f"PROBLEMS ({len(problems)})", *(f"  {p}" for p in problems)] if problems else ["no problems found"]
    return "\n\n".join("\n".join(lines) for lines in ([title], *parts, verdict))


def preflight(config: ExperimentConfig) -> list[str]:
    """Everything that can be known to fail before anything starts: missing files, and a model that the layout cannot cut."""
    problems = _missing_files(config) + _broken_lines(config) + _function_problems(config)
    hf = model_description(config)
    if hf is not None:
        problems += check_against_model(
            config, hf, _largest_token_id(Path(config.model.tokenizer or config.model.path))
        )
    return problems


def model_description(config: ExperimentConfig) -> dict | None:
    """config.json of the model, or of the tiny model that `megagrpo prepare` will make; None when neither is known.

    Raises ValueError for a config.json that is not JSON.
    """
    path = Path(config.model.path) / "config.json"
    if path.is_file():
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except (json.JSONDecodeError, UnicodeDecodeError) as exc:
            raise ValueError(f"{path}: not a model description: {exc}") from exc
    return tiny_hf_config(config.prepare.model) if _is_made(config, config.model.path) else None


def check_against_model(config: ExperimentConfig, hf_config: dict, largest_token_id: int | None = None) -> list[str]:
    """Every clash between the experiment and the model's own config.json, each with its numbers."""
    family = hf_config.get("model_type")
    if family not in _FAMILIES:
        return [f"model.path: model_type {family!r} is not supported; supported: {', '.join(_FAMILIES)}"]
    problems = [
        *_actor_problems(config, hf_config),
        *_engine_problems(config, hf_config),
        *_length_problems(config, hf_config),
    ]
    if largest_token_id is not None and largest_token_id >= hf_config["vocab_size"]:
        problems.append(
            f"model.tokenizer has token id {largest_token_id}, but the model only {hf_config['vocab_size']} embeddings (vocab_size)"
        )
    return problems


def rank_coordinates(rank: int, world_size: int, parallel: ParallelConfig) -> dict[str, int]:
    """Where a trainer rank stands. Megatron's order tp-cp-ep-dp-pp, fastest first; experts divide the same ranks anew."""
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


def parameter_counts(hf: dict) -> tuple[int, int]:
    """(dense, expert) parameters; embeddings and output layer count as dense, tied ones once."""
    hidden, layers, vocab = hf["hidden_size"], hf["num_hidden_layers"], hf["vocab_size"]
    heads, kv_heads = hf["num_attention_heads"], hf.get("num_key_value_heads", hf["num_attention_heads"])
    dim = hf.get("head_dim") or hidden // heads
    per_layer = hidden * dim * (2 * heads + 2 * kv_heads) + 2 * hidden
    if hf["model_type"] == "qwen2":
        per_layer += dim * (heads + 2 * kv_heads)
    if hf["model_type"] in ("qwen3", "qwen3_moe"):
        per_layer += 2 * dim
    num_experts = _num_experts(hf)
    if num_experts:
        per_layer += num_experts * hidden
        expert = layers * num_experts * 3 * hidden * hf["moe_intermediate_size"]
    else:
        per_layer += 3 * hidden * hf["intermediate_size"]
        expert = 0
    embeddings = vocab * hidden * (1 if hf.get("tie_word_embeddings") else 2)
    return layers * per_layer + embeddings + hidden, expert


# ---- problems ------------------------------------------------------------------------------------------------------


def _actor_problems(config: ExperimentConfig, hf: dict) -> list[str]:
    p, experts = config.actor.parallel, _num_experts(hf)
    kv_heads = hf.get("num_key_value_heads", hf["num_attention_heads"])
    rules = [
        ("num_attention_heads", hf["num_attention_heads"], "tp", p.tp),
        ("num_key_value_heads", kv_heads, "tp", p.tp),
    ]
    uneven = p.first_stage_layers or p.last_stage_layers
    if not uneven:
        rules.append(("num_hidden_layers", hf["num_hidden_layers"], "pp x vpp", p.pp * p.vpp))
    if experts:
        rules += [
            ("num_experts", experts, "ep", p.ep),
            ("moe_intermediate_size", hf["moe_intermediate_size"], "etp", p.etp),
        ]
    else:
        rules.append(("intermediate_size", hf["intermediate_size"], "tp", p.tp))
    problems = [
        f"actor.parallel.{key} = {by} does not divide the model's {what} = {number}; it may be {_divisors(number, by)}"
        for what, number, key, by in rules
        if number % by
    ]
    if uneven:
        try:
            p.stage_layers(hf["num_hidden_layers"])
        except ValueError as exc:
            problems.append(f"actor.parallel: {exc}")
    if p.ep > 1 and not experts:
        problems.append(f"actor.parallel.ep = {p.ep}, but a {hf['model_type']} model has no experts; ep must be 1")
    if p.etp > 1 and not experts:
        problems.append(f"actor.parallel.etp = {p.etp}, but a {hf['model_type']} model has no experts; etp must be 1")
    return problems


def _engine_problems(config: ExperimentConfig, hf: dict) -> list[str]:
    tp, ep, experts = config.rollout.tp, config.rollout.ep, _num_experts(hf)
    heads, kv_heads = hf["num_attention_heads"], hf.get("num_key_value_heads", hf["num_attention_heads"])
    problems = []
    if heads % tp:
        problems.append(
            f"rollout.tp = {tp} does not divide the model's num_attention_heads = {heads}; it may be {_divisors(heads, tp)}"
        )
    if kv_heads % tp and tp % kv_heads:
        problems.append(
            f"rollout.tp = {tp} is neither a divisor nor a multiple of the model's num_key_value_heads = {kv_heads}"
        )
    if experts and experts % ep:
        problems.append(
            f"rollout.ep = {ep} does not divide the model's num_experts = {experts}; it may be {_divisors(experts, ep)}"
        )
    if ep > 1 and not experts:
        problems.append(f"rollout.ep = {ep}, but a {hf['model_type']} model has no experts; ep must be 1")
    return problems


def _length_problems(config: ExperimentConfig, hf: dict) -> list[str]:
    problems = []
    cache = config.rollout.max_total_tokens
    for section, length in _longest(config).items():
        if length > hf["max_position_embeddings"]:
            problems.append(
                f"{section}: up to {length} tokens, but the model has {hf['max_position_embeddings']} positions"
            )
        if cache is not None and length > cache:
            problems.append(
                f"{section}: up to {length} tokens, but an engine's cache holds {cache} (rollout.max_total_tokens)"
            )
    return problems


def _missing_files(config: ExperimentConfig) -> list[str]:
    wanted = {"model.path": config.model.path, "data.path": config.data.path}
    if config.model.tokenizer is not None:
        wanted["model.tokenizer"] = config.model.tokenizer
    if config.eval is not None:
        wanted["eval.data.path"] = config.eval.data.path
    if config.sft is not None:
        wanted |= {"sft.model": config.sft.model, "sft.data.path": config.sft.data.path}
    if config.checkpoint.load is not None and not any(RunFolder(Path(config.output_dir)).checkpoints.glob("step_*")):
        wanted["checkpoint.load"] = config.checkpoint.load
    problems = [
        f"{key}: {path} does not exist"
        for key, path in wanted.items()
        if not Path(path).exists() and not _is_made(config, path)
    ]
    if Path(config.model.path).is_dir() and not (Path(config.model.path) / "config.json").is_file():
        problems.append(f"model.path: {config.model.path} holds no config.json, so it is no Hugging Face model folder")
    return problems


def _broken_lines(config: ExperimentConfig) -> list[str]:
    problems = []
    for data in (config.data, config.eval and config.eval.data, config.sft and config.sft.data):
        if data is not None and Path(data.path).exists():
            try:
                rows = read_rows(data)
                for grader in sorted({str(row[data.grader_key]) for _, row in rows} if data.grader_key else ()):
                    load_grader(grader, config.reward.args if grader == config.reward.grader else {})
            except ValueError as exc:
                problems.append(f"{data.path}: {exc}" if data.path not in str(exc) else str(exc))
    return problems


def _function_problems(config: ExperimentConfig) -> list[str]:
    problems = []
    try:
        load_grader(config.reward.grader, config.reward.args)
    except ValueError as exc:
        problems.append(str(exc))
    try:
        if config.sampling.tool is not None:
            load_tool(config.sampling.tool.function)
    except ValueError as exc:
        problems.append(str(exc))
    return problems


def _is_made(config: ExperimentConfig, path: str) -> bool:
    """Whether `megagrpo prepare` or `megagrpo sft` of this very experiment writes `path`."""
    prepare = config.prepare
    if prepare is None:
        return False
    model_made = prepare.model is not None and (
        path == prepare.model.path or (config.sft is not None and path == config.model.path)
    )
    data_made = prepare.dataset is not None and Path(path).parent == Path(prepare.dataset.folder)
    return model_made or (data_made and Path(path).name in ("sft.jsonl", "train.jsonl", "eval.jsonl"))


def _largest_token_id(folder: Path) -> int | None:
    """Of a tokenizer.json; None for tokenizers kept in other files, which load_tokenizer checks when it has loaded them."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    vocab = tokenizer["model"].get("vocab", {})
    ids = list(vocab.values()) if isinstance(vocab, dict) else [len(vocab) - 1]
    return max([*ids, *(token["id"] for token in tokenizer.get("added_tokens", []))])


# ---- description ---------------------------------------------------------------------------------------------------


def _model(config: ExperimentConfig, hf: dict | None) -> list[str]:
    if hf is None:
        return [f"model      {config.model.path} (no config.json there)"]
    dense, expert = parameter_counts(hf)
    there = (
        ""
        if Path(config.model.path).exists()
        else ", not there yet: made by megagrpo prepare" + (" and sft" if config.sft else "")
    )
    active = f", {_count(dense + expert * hf['num_experts_per_tok'] // _num_experts(hf))} active" if expert else ""
    algorithm = config.algorithm
    off_policy = algorithm.loss.name == "gpg" and config.train.num_updates_per_step > 1
    reference = "a reference model is kept" if algorithm.uses_reference else "no reference model"
    return [
        f"model      {config.model.path}: {hf['model_type']}, {_count(dense + expert)} parameters{active}{there}",
        f"algorithm  {algorithm.advantage.name} advantages, {algorithm.loss.name} loss, {algorithm.aggregation}; {reference}",
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
    longest = _longest(config)["data"]
    per_rank = math.ceil(samples / updates / dp)
    at_most = (
        per_rank if longest > actor.micro_batch_tokens else math.ceil(per_rank / (actor.micro_batch_tokens // longest))
    )
    shares = sorted({train.num_prompts_per_step // dp, math.ceil(train.num_prompts_per_step / dp)})
    lines = [
        f"a step     {train.num_prompts_per_step} prompts x {train.group_size} samples = {samples} samples",
        f"  asked for by {dp} data-parallel leaders, {' or '.join(map(str, shares))} prompts each",
        f"  sample     at most {config.data.max_prompt_tokens} prompt + {config.sampling.max_response_tokens} response = {longest} tokens",
        f"  tokens     at most {samples * longest:,}, of which {samples * config.sampling.max_response_tokens:,} are trained on",
        f"  updates    {updates} of {train.num_prompts_per_step // updates} prompts = {samples // updates} samples",
        f"  micro-batches  {actor.micro_batch_tokens} tokens {'packed' if actor.packing else 'padded'}; "
        f"a rank has about {per_rank} samples an update, in at most about {at_most}",
    ]
    if longest > actor.micro_batch_tokens:
        lines.append(
            f"  note: a sample longer than micro_batch_tokens ({actor.micro_batch_tokens}) gets a micro-batch of its own"
        )
    lines.append(f"the run    {train.num_steps * updates} optimiser updates, {train.num_steps * samples:,} samples")
    return lines


def _rollout(config: ExperimentConfig) -> list[str]:
    r, train, tool = config.rollout, config.train, config.sampling.tool
    at_once = r.num_engines * r.max_running_requests
    samples = train.num_prompts_per_step * train.group_size
    nodes = f" on {r.nodes_per_engine} nodes" if r.nodes_per_engine > 1 else ""
    lines = [
        f"rollout    SGLang engines: {r.num_engines} of tp {r.tp}, ep {r.ep}{nodes} = {r.num_engines * r.tp} ranks in all, {r.dtype}"
        + (", deterministic" if r.deterministic else ""),
        f"  {at_once} samples at once, so a step's {samples} come in {math.ceil(samples / at_once)} waves at best",
        f"  reward     {config.reward.grader} in {config.reward.workers} processes a leader, {config.reward.timeout_s:g} s a response"
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
            f"  ADVICE   weights.timeout_s {config.weights.timeout_s:g} is no more than rollout.start_timeout_s {r.start_timeout_s:g}: "
            f"a publish that finds fewer than {r.min_healthy_engines} engines may not outwait the start of new ones, and ends the run"
        )
    for i in range(min(r.num_engines, _MAX_RANK_ROWS) if r.num_engines > 1 or r.tp > 1 else 0):
        lines.append(f"  engine {i}: ranks {i * r.tp}..{(i + 1) * r.tp - 1}")
    return lines


def _memory(config: ExperimentConfig, hf: dict | None) -> list[str]:
    """Weights, gradients and optimiser state alone: activations depend on the kernels."""
    if hf is None:
        return ["memory     unknown without the model's config.json"]
    actor, p = config.actor, config.actor.parallel
    dense, expert = parameter_counts(hf)
    width = 2 if actor.dtype == "bfloat16" else 4
    states = 12 if actor.dtype == "bfloat16" else 8  # two moments, and a float32 copy of narrower weights
    bytes_per_rank, state_bytes = 0.0, 0.0
    for count, ways in ((dense, p.tp * p.pp), (expert, p.etp * p.ep * p.pp)):
        copies = actor.world_size // ways  # data parallel, and context parallel for the dense part
        bytes_per_rank += count / ways * (width + 4)
        state_bytes += count / ways * states / (copies if actor.optimizer.distributed else 1)
    r = config.rollout
    engine = (dense + expert) / r.tp * (2 if r.dtype == "bfloat16" else 4)
    return [
        f"memory     a trainer rank holds about {_bytes(bytes_per_rank)} of weights and gradients"
        f" + {_bytes(state_bytes)} of optimiser state, before activations",
        f"  an engine rank holds about {_bytes(engine)} of weights, before its cache",
    ]


def _schedule(config: ExperimentConfig) -> list[str]:
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


def _longest(config: ExperimentConfig) -> dict[str, int]:
    """Most tokens that one sample of each section may have."""
    response = config.sampling.max_response_tokens

    def total(data: DataConfig, max_response: int) -> int:
        return data.max_prompt_tokens + max_response

    out = {"data": total(config.data, response)}
    if config.eval is not None:
        out["eval.data"] = total(config.eval.data, config.eval.max_response_tokens or response)
    return out


def _num_experts(hf: dict) -> int:
    return hf.get("num_experts") or hf.get("num_local_experts") or 0  # transformers 5 saves the second spelling


def _divisors(number: int, near: int) -> str:
    """The divisors of `number` around `near`."""
    every = [d for d in range(1, number + 1) if number % d == 0]
    below, above = [d for d in every if d < near][-1:], [d for d in every if d > near][:1]
    return " or ".join(map(str, below + above))


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
