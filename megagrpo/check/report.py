"""The text of `megagrpo check`: layout, batch sizes, memory and formula of an experiment."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from megagrpo.check.checkpoint_cost import checkpoint_cost
from megagrpo.check.engine_memory import (
    assumed_lengths,
    concurrency_report,
    engine_side,
    gpu_phases,
    host_cache_bytes,
    server_of,
)
from megagrpo.check.fitting import fit_problems, with_model
from megagrpo.check.hardware import gigabytes, hardware_of
from megagrpo.check.layer_costs import model_work
from megagrpo.check.loading import LoadingTest, try_loading
from megagrpo.check.problems import is_made, longest_samples, model_description, preflight
from megagrpo.check.settings_report import settings_report
from megagrpo.check.trainer_memory import (
    Load,
    RankMemory,
    TrainerSide,
    links,
    trained_elements,
    trainer_side,
)
from megagrpo.config.layout import layout_problems, rank_coordinates
from megagrpo.config.placement import place, placement_problems
from megagrpo.config.schema import ActorConfig, ExperimentConfig
from megagrpo.data.rows import read_rows
from megagrpo.families.architecture import Architecture
from megagrpo.families.table import (
    ParameterCounts,
    architecture_of,
    left_out,
    model_problems,
    parameter_counts,
)
from megagrpo.rewards.graders.table import SERVICES, machine_problem

_MAX_RANK_ROWS = 32
_DISK_GB_S = 10.0  # of a cluster's file system, all nodes together; 1e9 bytes


def check_command(config: ExperimentConfig, hardware: str | None, everything: bool) -> int:
    """Prints the text of `megagrpo check`; test-loads tokenizer and data, imports torch. Returns
    the exit code.

    hardware: see check/engine_memory.py. everything: see explain.
    """
    trial = try_loading(config)
    problems = known_problems(config, trial)
    at_once = concurrency_report(config, hardware) if problems == trial.problems else []
    print(explain(config, trial, at_once, everything, problems))
    return 1 if problems else 0


def known_problems(config: ExperimentConfig, trial: LoadingTest | None = None) -> list[str]:
    """Returns why the experiment cannot run: values, files, places and memory of ranks, and what
    `trial` met."""
    problems = preflight(config) + fit_problems(config)
    return problems + [
        problem for problem in (trial.problems if trial else ()) if problem not in problems
    ]


def explain(
    config: ExperimentConfig,
    trial: LoadingTest | None = None,
    at_once: Sequence[str] = (),
    everything: bool = True,
    problems: Sequence[str] | None = None,
) -> str:
    """Returns the description of the experiment, ending with `problems`.

    at_once: lines of check/engine_memory.py about the engines. everything: also the ranks, and
    all settings that are passed to Megatron and SGLang. problems: default: the known ones.
    """
    hf, draft = model_description(with_model(config)), config.actor.has_draft
    arch = None if hf is None or model_problems(hf) else architecture_of(hf, draft)
    counts = None if arch is None else parameter_counts(arch)
    steps = _num_steps(config)
    title = (
        f"{config.name}: {'?' if steps is None else steps} steps into {config.output_dir}, "
        f"seed {config.seed}"
    )
    libraries = settings_report(arch, config, everything)
    parts = [
        _model(config, hf, counts),
        [*_layout(config, everything), *_routing(config, arch)],
        _step(config, steps),
        _rollout(config, everything),
        *([at_once] if at_once else []),
        *([libraries] if libraries else []),
        _memory(config, arch, counts),
        [_evaluation(config)],
        _checkpoints(config, arch),
    ]
    problems = known_problems(config, trial) if problems is None else problems
    if trial is not None:
        loaded, not_tried = (
            [f"  {what}" for what in trial.loaded],
            f"  not tried: {', '.join(trial.not_tried)}",
        )
        parts.append(
            [
                "loaded     as the trainers will; graders and tools are imported too",
                *loaded,
                not_tried,
            ]
        )
        parts += (
            [["first row  " + "\n           ".join(trial.first_row)]] if trial.first_row else []
        )
    verdict = (
        [f"PROBLEMS ({len(problems)})", *(f"  {p}" for p in problems)]
        if problems
        else ["no problems found"]
    )
    return "\n\n".join("\n".join(lines) for lines in ([title], *parts, verdict))


def _model(
    config: ExperimentConfig, hf: Mapping[str, object] | None, counts: ParameterCounts | None
) -> list[str]:
    family = None if hf is None else hf.get("model_type")
    exists, to_be_made = Path(config.model.path).exists(), "not there yet: made by megagrpo sft"
    if hf is None or counts is None:
        made = not exists and is_made(config, config.model.path)
        return [
            f"model      {config.model.path} "
            f"({family or (to_be_made if made else 'no config.json there')})"
        ]
    there = "" if exists else f", {to_be_made}"
    active = f", {_count(counts.active)} active" if counts.expert else ""
    algorithm = config.algorithm
    advice = list(algorithm.advice)
    if algorithm.loss.name == "gpg" and config.train.updates_of_step > 1:
        advice.append(
            "loss gpg has no importance ratio: it takes every update of a step for the first"
        )
    reference = "a reference model is kept" if algorithm.uses_reference else "no reference model"
    if algorithm.uses_reference and config.actor.lora is not None:
        reference = "the reference is the model without adapters, no copy"
    return [
        f"model      {config.model.path}: {family}, {_count(counts.total)} "
        f"parameters{active}{there}",
        *(f"  left out {text}" for text in left_out(hf, config.actor.has_draft)),
        f"algorithm  {algorithm.advantage.name} advantages, {algorithm.loss.name} loss, "
        f"{algorithm.aggregation}; {reference}",
        f"  loss     {algorithm.formula}",
        *(f"  ADVICE   {text}" for text in advice),
    ]


def _layout(config: ExperimentConfig, everything: bool) -> list[str]:
    actor, p = config.actor, config.actor.parallel
    edp = actor.world_size // (p.etp * p.ep * p.pp)
    head = [
        f"layout     {actor.world_size} trainer ranks = tp {p.tp} x cp {p.cp} x dp {actor.dp} x pp "
        f"{p.pp}",
        f"experts: etp {p.etp} x ep {p.ep} x dp {edp} x pp {p.pp}",
        "sequence parallel" if p.tp > 1 else "",
        f"{p.vpp} virtual stages a rank" if p.vpp > 1 else "",
        f"{p.first_stage_layers} layers on the first stage" if p.first_stage_layers else "",
        f"{p.last_stage_layers} layers on the last stage" if p.last_stage_layers else "",
    ]
    lines = ["; ".join(filter(None, head))]
    if not everything:
        return lines
    names = ["dp", "pp", *(["cp"] if p.cp > 1 else []), "tp", *(["ep", "edp"] if p.ep > 1 else [])]
    lines.append("  " + "".join(f"{name:>6}" for name in ["rank", *names]))
    for rank in range(min(actor.world_size, _MAX_RANK_ROWS)):
        coordinates = rank_coordinates(rank, actor.world_size, p)
        lines.append(
            "  "
            + "".join(f"{value:>6}" for value in [rank, *(coordinates[name] for name in names)])
        )
    if actor.world_size > _MAX_RANK_ROWS:
        lines.append(f"  ... {actor.world_size - _MAX_RANK_ROWS} more in the same order")
    return lines


def _routing(config: ExperimentConfig, arch: Architecture | None) -> list[str]:
    source = config.actor.routing_replay
    if arch is None or not arch.is_moe:
        return []
    if source is None:
        rounded = "bfloat16" in (config.actor.dtype, config.rollout.dtype)
        advice = (
            "in bfloat16 engine and trainer choose other experts for some tokens (docs/experts.md)"
        )
        return [f"  ADVICE   set actor.routing_replay: rollout: {advice}"] if rounded else []
    k = arch.experts_per_token
    sent, kept = 4 * arch.num_layers * k, (1 if arch.expert_id_type == "uint8" else 2)
    kept *= (arch.num_layers - arch.dense_layers) * k
    if source == "old":
        return [
            f"routing    updates take the experts of the old log-probabilities: {kept:,} bytes a "
            "token of a replica"
        ]
    sizes = (
        f"{-(-4 * sent // 3):,} in an answer, {sent:,} of an engine rank's host memory for "
        "each token of its cache"
    )
    return [
        f"routing    the actor takes the engine's experts: {kept:,} bytes a token of a replica, "
        f"{sizes}"
    ]


def _num_steps(config: ExperimentConfig) -> int | None:
    """Returns the number of steps; None if it depends on a missing data file.

    With train.num_epochs it is an upper bound: prompts are not tokenised here, so none is dropped
    as too long.
    """
    if config.train.num_epochs is None:
        return config.train.steps(0)
    try:
        return config.train.steps(len(read_rows(config.data)))
    except ValueError:  # missing or broken: among the problems
        return None


def _step(config: ExperimentConfig, num_steps: int | None) -> list[str]:
    train, actor = config.train, config.actor
    samples, updates, dp = (
        train.num_prompts_per_step * train.group_size,
        train.num_updates_per_step,
        actor.dp,
    )
    longest = longest_samples(config)["data"]
    max_response = config.sampling.max_response_tokens
    per_rank = math.ceil(samples / updates / dp)
    at_most = math.ceil(per_rank / max(actor.micro_batch_tokens // longest, 1))
    shares = sorted({train.num_prompts_per_step // dp, math.ceil(train.num_prompts_per_step / dp)})
    lines = [
        f"a step     {train.num_prompts_per_step} prompts x {train.group_size} samples = {samples} "
        "samples",
        f"  asked for by {dp} data-parallel leaders, {' or '.join(map(str, shares))} prompts each",
        f"  sample     at most {config.data.max_prompt_tokens} prompt + {max_response} response = "
        f"{longest} tokens",
        f"  tokens     at most {samples * longest:,}, of which {samples * max_response:,} are "
        "trained on",
        f"  updates    {updates} of {train.num_prompts_per_step // updates} prompts = "
        f"{samples // updates} samples",
        f"  micro-batches  {actor.micro_batch_tokens} tokens "
        f"{'packed' if actor.packing else 'padded'}; "
        f"a rank has about {per_rank} samples an update, in at most about {at_most}",
    ]
    if longest > actor.micro_batch_tokens:
        limit = f"micro_batch_tokens ({actor.micro_batch_tokens})"
        lines.append(f"  note: a sample longer than {limit} gets a micro-batch of its own")
    if train.num_epochs_per_step > 1:
        lines.append(
            f"  passes     {train.num_epochs_per_step} over these samples, so "
            f"{train.updates_of_step} updates"
        )
    if train.num_epochs is not None:
        lines.append(
            f"  epochs     {train.num_epochs} passes over the prompts; fewer steps where prompts "
            "are too long"
        )
    if num_steps is None:
        lines.append("the run    its length is known when the prompts are there")
    else:
        total = num_steps * train.updates_of_step
        lines.append(f"the run    {total} optimiser updates, {num_steps * samples:,} samples")
    return lines


def _reward(config: ExperimentConfig) -> list[str]:
    if key := config.sampling.rewarding:
        return [f"  reward     the {key.removeprefix('sampling.')}'s"]
    reward, entries = config.reward, config.reward.entries
    names = (
        " + ".join(f"{e.weight:g} {e.short_name}" for e in entries)
        if reward.graders
        else entries[0].grader
    )
    text = (
        f"  reward     {names} in {reward.workers} processes a leader, {reward.timeout_s:g} s "
        "a "
        "response"
    )
    if reward.group_grader is not None:
        text += f", then {reward.group_grader} over the group"
    lines = [text + (", SHUFFLED over the samples (control experiment)" if reward.shuffle else "")]
    for entry in entries:
        if entry.grader in SERVICES:
            lines.append(
                f"  note: grader {entry.short_name} asks {entry.args['url']}, which was not tried"
            )
        if problem := machine_problem(entry.grader, entry.args):
            lines.append(f"  ADVICE   grader {entry.short_name} does not run here: {problem}")
    return lines


def _rollout(config: ExperimentConfig, everything: bool) -> list[str]:
    r, train = config.rollout, config.train
    at_once = r.num_engines * r.max_running_requests
    samples = train.num_prompts_per_step * train.group_size
    nodes = f" on {r.nodes_per_engine} nodes" if r.nodes_per_engine > 1 else ""
    lines = [
        f"rollout    SGLang engines: {r.num_engines} of tp {r.tp}, ep {r.ep}{nodes} "
        f"= {r.num_engines * r.tp} ranks in all, {r.dtype}"
        + (", deterministic" if r.deterministic else ""),
        f"  {at_once} samples at once, so a step's {samples} come in "
        f"{math.ceil(samples / at_once)} waves at best",
        *_reward(config),
    ]
    if environment := config.sampling.environment:
        seen = "everything before it" if environment.history == "all" else "the last message alone"
        called = (
            f"at most {environment.max_turns} turns, each sees {seen}; {environment.workers} "
            "processes a leader"
        )
        lines.append(f"  environment  {environment.function}, {called}")
    if agent := config.sampling.agent:
        called = (
            f"at most {agent.max_turns} turns and {agent.timeout_s:g} s; {agent.workers} "
            "processes a leader"
        )
        lines.append(f"  agent      {agent.function or ' '.join(agent.command)}, {called}")
    lines.append(
        f"  weights    {config.weights.transport} to every engine after each step, verified by "
        "digest"
    )
    if config.actor.draft is not None:
        trained = "trained in every update" if config.actor.draft.train else "kept as it is"
        lines.append(
            f"  draft      {r.draft_tokens or 'no'} tokens for each forward of an engine's model; "
            f"{trained}"
        )
    if config.weights.timeout_s <= r.start_timeout_s:
        timeouts = (
            f"weights.timeout_s {config.weights.timeout_s:g} is no more than "
            "rollout.start_timeout_s"
        )
        found = (
            f"{r.start_timeout_s:g}: a publish that finds fewer than {r.min_healthy_engines} "
            "engines"
        )
        lines.append(
            f"  ADVICE   {timeouts} {found} may not outwait the start of new ones, and ends the run"
        )
    return [*lines, *_places(config, everything)]


def _places(config: ExperimentConfig, everything: bool) -> list[str]:
    """Returns on which nodes ranks are; everything: also who is on which GPU."""
    if placement_problems(config):
        return []
    found = place(config)
    shared = ", shared by engines" if config.rollout.colocate else ""
    apart = f", {found.rollout_nodes} for engines" if found.rollout_nodes else ""
    lines = [f"  nodes      {found.trainer_nodes} for trainers{shared}{apart}"]
    if not everything:
        return lines
    trainers = {gpu: f"trainer {rank}" for rank, gpu in enumerate(found.trainers)}
    engines = {
        gpu: f"engine {e} rank {r}"
        for e, ranks in enumerate(found.engines)
        for r, gpu in enumerate(ranks)
    }
    gpus = sorted(trainers.keys() | engines.keys())
    rows = [["node", "GPU", "trainer", "engine"]]
    rows += [
        [str(g.node), str(g.number), trainers.get(g, "-"), engines.get(g, "-")]
        for g in gpus[:_MAX_RANK_ROWS]
    ]
    lines += ["    " + "".join(f"{cell:<14}" for cell in row).rstrip() for row in rows]
    return lines + [f"    ... {len(gpus) - _MAX_RANK_ROWS} more in the same order"] * (
        len(gpus) > _MAX_RANK_ROWS
    )


def _memory(
    config: ExperimentConfig, arch: Architecture | None, counts: ParameterCounts | None
) -> list[str]:
    """Returns the bytes on the fullest ranks, by the closed forms of docs/planning.md."""
    if arch is None or counts is None:
        return ["memory     unknown without the model's config.json"]
    if layout_problems(arch, config.actor):
        return ["memory     unknown: the layout does not cut the model"]
    side, r = _trainer_side(config, arch, config.actor), config.rollout
    gpu, longest = hardware_of(config.cluster.gpu), longest_samples(config)["data"]
    engine = engine_side(model_work(arch), server_of(r), assumed_lengths(config), longest, gpu)
    held, phases = side.phases["rollout"].parts, gpu_phases(config, side, engine, arch.hidden_size)
    phase = max(phases, key=lambda name: phases[name].total)
    fullest, on_host = phases[phase], side.host_bytes["optimiser"]
    on_its_host = host_cache_bytes(r, engine)
    return [
        "memory     a trainer rank holds about "
        f"{gigabytes(held['parameters'] + held['gradients'])} of weights and "
        f"gradients + {gigabytes(held.get('optimiser', 0))} of optimiser state"
        + (f", its node {gigabytes(on_host)} more on the host" if on_host else ""),
        f"  at most  {gigabytes(fullest.total)} on a GPU, in {phase}, rank {fullest.rank} "
        f"({fullest.kind}): " + _listed(fullest.parts),
        *_lora(config, arch, side),
        "  an engine rank holds about "
        f"{gigabytes(counts.total / r.tp * (2 if r.dtype == 'bfloat16' else 4))} of "
        "weights, before its cache",
        *(
            [f"  and {gigabytes(on_its_host)} of host memory for its hierarchical cache"]
            if on_its_host
            else []
        ),
        *(_colocated(config, side, phases) if r.colocate else ()),
    ]


def _listed(parts: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {gigabytes(size)}" for name, size in parts.items())


def _colocated(
    config: ExperimentConfig, side: TrainerSide, phases: Mapping[str, RankMemory]
) -> list[str]:
    """Returns the bytes on a GPU of trainer and engine, by phase."""
    r, ranks = config.rollout, config.actor.world_size
    lines = ["  colocated  on the fullest GPU, by phase"]
    for phase in ("rollout", "logprobs", "reference", "update", "publish"):
        if phase in phases:
            total, held = gigabytes(phases[phase].total), _listed(phases[phase].parts)
            lines.append(f"    {phase:<10} {total} ({held})")
    optimiser = side.phases["rollout"].parts.get("optimiser", 0.0)
    lines.append(
        f"    on the host, pinned, while engines are awake: {gigabytes(optimiser)} of optimiser "
        "state a rank"
    )
    engines = r.num_engines
    if engines * r.tp != ranks:
        both = (
            f"{engines} engines of tp {r.tp} are {engines * r.tp} ranks beside {ranks} trainer "
            "ranks"
        )
        lines.append(f"  ADVICE   {both}: GPUs without an engine idle while samples are drawn")
    return lines


def _trainer_side(config: ExperimentConfig, arch: Architecture, actor: ActorConfig) -> TrainerSide:
    load = Load(actor.micro_batch_tokens, longest_samples(config)["data"], links=links(config))
    return trainer_side(
        arch,
        actor,
        load,
        reference=config.algorithm.uses_reference,
        bucket_mb=config.weights.bucket_mb,
        ranks_per_node=config.cluster.gpus_per_node,
    )


def _lora(config: ExperimentConfig, arch: Architecture, side: TrainerSide) -> list[str]:
    """Returns the bytes of gradients and optimiser state that adapters save."""
    lora = config.actor.lora
    if lora is None:
        return []
    all_weights = config.actor.model_copy(update={"lora": None})
    sides = side, _trainer_side(config, arch, all_weights)
    (gradients, whole_gradients), (optimiser, whole_optimiser) = (
        [found.phases["rollout"].parts.get(name, 0) for found in sides]
        for name in ("gradients", "optimiser")
    )
    saved = whole_gradients - gradients + (whole_optimiser - optimiser)
    return [
        f"  lora       rank {lora.rank}, alpha {lora.alpha:g}, {', '.join(lora.targets)}: "
        f"{_count(trained_elements(arch, config.actor))} of "
        f"{_count(trained_elements(arch, all_weights))} "
        "parameters are trained",
        f"  saved      of a trainer rank: gradients {gigabytes(gradients)} + optimiser "
        f"{gigabytes(optimiser)} "
        f"instead of {gigabytes(whole_gradients)} + {gigabytes(whole_optimiser)}: "
        f"{gigabytes(saved)} less",
        "  publish    merges the adapters into the weights and keeps a copy of the targeted ones "
        "meanwhile",
    ]


def _evaluation(config: ExperimentConfig) -> str:
    e = config.eval
    if e is None:
        return "evaluation none"
    how = "greedy" if e.temperature == 0 else f"temperature {e.temperature:g}"
    again = (
        f"; {e.num_as_trained} at temperature {config.sampling.temperature:g}"
        if e.num_as_trained
        else ""
    )
    when = f"first, every {e.every} steps, last"
    return f"evaluation {e.data.name}, {e.num_samples} samples a prompt, {how}{again}: {when}"


def _checkpoints(config: ExperimentConfig, arch: Architecture | None) -> list[str]:
    """Returns when the run is saved and the costs of saving and resuming."""
    c = config.checkpoint
    when = f"every {c.every} steps and" if c.every else "only"
    bound = "" if c.keep_gb is None else f" or fewer in {c.keep_gb:g} GB"
    background = {
        True: ", in the background",
        False: "",
        "auto": ", in the background from two trainer nodes on",
    }
    lines = [
        f"checkpoint {when} at the end, {c.keep} kept{bound}, resume "
        f"{c.resume}{background[c.asynchronous]}"
    ]
    if arch is not None and not layout_problems(arch, config.actor):
        per_node = min(config.actor.world_size, config.cluster.gpus_per_node)
        cost = checkpoint_cost(arch, config.actor, per_node)
        forms = {True: "for any layout", False: "for this layout alone"}
        shown = {
            "last": (False, True) if c.every else (True,),
            "always": (True,),
            "never": (False,),
        }[c.reshardable]
        speed = f"at {_DISK_GB_S:g} GB/s"
        saving, reading = (
            _seconds(size / _DISK_GB_S / 1e9) for size in (cost.file_bytes, cost.read_bytes)
        )
        lines += [
            f"  a save {forms[reshardable]}: {gigabytes(cost.file_bytes)}, {saving} {speed}; "
            f"{gigabytes(cost.save_host_bytes[reshardable])} of host memory on the fullest node "
            f"({per_node} ranks)"
            for reshardable in shown
        ]
        host = (
            f"; {gigabytes(cost.resume_host_bytes[True])} of host memory a node from one for "
            "any layout"
        )
        resumed = (
            f"  a resume: reads {gigabytes(cost.read_bytes)} (checksums, then the state), "
            f"{reading} {speed}"
        )
        lines.append(resumed + (host if True in shown else ""))
    if not c.every:
        lines.append(
            "  ADVICE   checkpoint.every 0: when a rank is lost, the run begins again at its first "
            "step"
        )
    return lines


def _count(number: float) -> str:
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:g}"


def _seconds(number: float) -> str:
    return f"{number:.0f} s" if number >= 10 else f"{number:.2g} s"
