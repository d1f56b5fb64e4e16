"""The text of `megagrpo check`: verdict, then layout, batch sizes, memory and formula."""

import argparse
import math
import textwrap
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import yaml

from megagrpo.check.problems import layout_problems, preflight
from megagrpo.check.rules import placement
from megagrpo.check.rules.inputs import is_made
from megagrpo.check.rules.placement import needs_gpus, place
from megagrpo.check.rules.subject import Subject, broken, longest_samples, model_description
from megagrpo.config.libraries import given_settings
from megagrpo.config.load import located
from megagrpo.config.schema import ExperimentConfig
from megagrpo.data.curriculum import describe_curriculum
from megagrpo.data.rows import read_rows
from megagrpo.models.architecture import Architecture
from megagrpo.models.fields import (
    ddp_fields,
    expected_kernels,
    optimizer_fields,
    transformer_fields,
)
from megagrpo.models.kinds.hashed.describe import HashedExperts
from megagrpo.models.table import left_out, parameter_counts
from megagrpo.rewards.graders.functions import machine_problem
from megagrpo.rollout.service.engine_command import ServerPlace, engine_settings
from megagrpo.tools.check.loading import LoadingTest, try_loading
from megagrpo.tools.plan.checkpoint_cost import checkpoint_lines, disk_advice, rank_coordinates
from megagrpo.tools.plan.command import table_lines
from megagrpo.tools.plan.engine_memory import concurrency_report, host_peak
from megagrpo.tools.plan.fitting import (
    StepMemory,
    experiment_memory,
    fit_problems,
    served_memory,
    with_model,
)
from megagrpo.tools.plan.hardware import gigabytes
from megagrpo.tools.plan.libraries import all_library_problems
from megagrpo.tools.plan.trainer_memory import trained_elements

_MORE = "--all: ranks, micro-batches, memory by phase, costs of a save, fields handed to libraries"
_ON_SCREEN = 4  # of what is named without --all: data files, parts of memory
_MAX_ROWS = 32  # of a table of GPUs
_WIDTH = 116
_EXPECTED_TOKENS_S = 50  # of one response among many
_OF_A_START = ("port", "node_rank", "dist_init_addr")  # chosen at each start of an engine


def later_problems(config: ExperimentConfig) -> list[str]:
    """Returns what the checks after reading find in the rest of an experiment with problems."""
    problems: list[str] = []
    for check in (
        preflight,
        fit_problems,
        lambda config: try_loading(config).problems,
        _library_problems,
    ):
        with suppress(Exception):  # it may rely on what is broken
            problems += check(config)
    return problems


def _library_problems(config: ExperimentConfig) -> list[str]:
    refused = all_library_problems(config)
    return [f"{'.'.join(map(str, keys))}: {text}" for keys, text in refused]


def add_options(command: argparse.ArgumentParser) -> None:
    """Adds the options of the command line."""
    every = "also all ranks, and all settings of Megatron and SGLang"
    command.add_argument("--all", action="store_true", help=every)
    kind = "GPU model for which SGLang resolves the engines' arguments, such as H100; takes seconds"
    command.add_argument("--hardware", help=kind)


def run(args: argparse.Namespace, config: ExperimentConfig) -> int:
    """Prints the text of `megagrpo check`; test-loads tokenizer and data, imports torch. Returns
    the exit code."""
    with ThreadPoolExecutor() as pool:  # libraries: seconds, in other processes
        libraries = pool.submit(_library_problems, config)
        trial = try_loading(config)
        problems = [*known_problems(config, trial), *libraries.result()]
    at_once = []
    if set(problems) <= set(trial.problems):
        at_once = concurrency_report(config, args.hardware, args.all)
    problems = located(args.config, args.overrides, problems)
    print(explain(config, trial, at_once, args.all, problems))
    return 2 if problems else 0


def known_problems(config: ExperimentConfig, trial: LoadingTest | None = None) -> list[str]:
    """Returns why the experiment cannot run: values, files, places and memory of ranks, and what
    `trial` met."""
    met = trial.problems if trial else []
    return list(dict.fromkeys([*preflight(config), *fit_problems(config), *met]))


def explain(
    config: ExperimentConfig,
    trial: LoadingTest | None = None,
    at_once: Sequence[str] = (),
    everything: bool = True,
    problems: Sequence[str] | None = None,
) -> str:
    """Returns the description of the experiment, which begins with `problems` and advice.

    at_once: lines of tools/plan/engine_memory.py about the engines. everything: also every GPU, and
    all settings that are passed to Megatron and SGLang. problems: default: the known ones.
    """
    problems = known_problems(config, trial) if problems is None else problems
    described = with_model(config)
    hf = model_description(described)
    arch = Subject.of(config, hf).arch
    cut = None if arch is None or layout_problems(arch, config.actor) else arch
    steps = _num_steps(config)
    verdict = (
        [f"PROBLEMS ({len(problems)})", *(f"  {problem}" for problem in problems)]
        if problems
        else ["no problems found"]
    )
    verdict += [f"ADVICE   {text}" for text in _advice(config, steps, arch, cut, trial)]
    parts = [
        [
            f"{config.name}: {'?' if steps is None else steps} steps into {config.output_dir}, seed {config.seed}"
        ],
        _model(config, hf, arch),
        [*_layout(config, everything), *_routing(config, arch)],
        _step(config, steps, everything),
        _rollout(config),
        at_once,
        settings_report(arch, config, everything),
        _memory(config, cut, everything),
        checkpoint_lines(config, cut, everything),
        _loaded(trial, everything) if trial else [],
    ]
    blocks = ["\n".join(lines) for lines in parts if lines]
    facts = "\n\n".join(blocks) if everything else "\n".join([*blocks, _MORE])
    return "\n".join(verdict) + f"\n\n{facts}"


def _advice(
    config: ExperimentConfig,
    steps: int | None,
    arch: Architecture | None,
    cut: Architecture | None,
    trial: LoadingTest | None,
) -> list[str]:
    """Returns what runs, but is probably not meant. cut: the model, if the layout can cut it."""
    actor, rollout, weights = config.actor, config.rollout, config.weights
    optimizer = actor.optimizer
    updates = (steps or math.inf) * config.train.updates_of_step
    rounded = "bfloat16" in (actor.dtype, rollout.dtype)
    unplayed = (
        arch
        and arch.experts
        and not isinstance(arch.experts, HashedExperts)
        and not arch.experts.unreported
        and actor.routing_replay is None
        and rounded
    )
    ranks = rollout.num_engines * rollout.tp
    used = config.num_gpus
    gpus = config.cluster.gpus_per_node
    longest, limit_s = config.sampling.max_response_tokens, rollout.request_timeout_s
    told = {
        f"{used} of the {gpus} GPUs of a node (cluster.gpus_per_node) are used: `megagrpo plan CONFIG "
        "--search 1` finds a layout for all": needs_gpus(config) and used < gpus,
        "loss gpg has no importance ratio: it takes every update of a step for the first": (
            config.algorithm.loss.name == "gpg" and config.train.updates_of_step > 1
        ),
        "set actor.routing_replay: rollout: in bfloat16 engine and trainer choose other experts for "
        "some tokens (docs/experts.md)": unplayed,
        f"weights.timeout_s {weights.timeout_s:g} is no more than rollout.start_timeout_s "
        f"{rollout.start_timeout_s:g}: a publish that finds fewer than "
        f"{rollout.min_healthy_engines} engines may not outwait the start of new ones, and ends "
        "the run": weights.timeout_s <= rollout.start_timeout_s,
        f"{rollout.num_engines} engines of tp {rollout.tp} are {ranks} ranks beside "
        f"{actor.world_size} trainer ranks: GPUs without an engine idle while samples are "
        "drawn": rollout.colocate and ranks != actor.world_size,
        f"actor.optimizer.min_lr {optimizer.min_lr:g} has no effect with lr_schedule constant": (
            optimizer.min_lr and optimizer.lr_schedule == "constant"
        ),
        f"actor.optimizer.warmup_steps {optimizer.warmup_steps} are not over after the run's "
        f"{updates} updates: lr is never reached": optimizer.warmup_steps >= updates,
        f"rollout.request_timeout_s {limit_s:g}: a response of sampling.max_response_tokens {longest} "
        f"must come at {longest / limit_s:.0f} tokens a second or more, else it is asked for again: "
        "raise it": longest > _EXPECTED_TOKENS_S * limit_s,
        "checkpoint.every 0: when a rank is lost, the run begins again at its first step": (
            not config.checkpoint.every
        ),
    }
    graders = [] if config.sampling.rewarding else config.reward.entries
    not_here = [
        f"grader {entry.short_name} does not run here: {problem}"
        for entry in graders
        if (problem := machine_problem(entry.grader, entry.args))
    ]
    loading = trial.advice if trial else []
    general = [text for text, given in told.items() if given]
    return [*config.algorithm.advice, *general, *not_here, *loading, *disk_advice(config, cut)]


def _model(
    config: ExperimentConfig, hf: dict[str, object] | None, arch: Architecture | None
) -> list[str]:
    algorithm = config.algorithm
    path = config.model.path
    missing = "" if Path(path).exists() else ", not there yet"
    if missing and is_made(config, path):
        missing += ": made by megagrpo sft"
    size = ""
    if arch is not None:
        counts = parameter_counts(arch)
        active = f", {_count(counts.active)} active" if counts.expert else ""
        size = f", {_count(counts.total)} parameters{active}"
    reference = "a reference model is kept" if algorithm.uses_reference else "no reference model"
    if algorithm.uses_reference and config.actor.lora is not None:
        reference = "the reference is the model without adapters, no copy"
    return [
        f"model      {path}: {(hf or {}).get('model_type', 'no config.json')}{size}{missing}",
        *(f"  left out {text}" for text in (left_out(hf, config.actor.has_draft) if hf else ())),
        f"algorithm  {algorithm.advantage.shown_name} advantages, {algorithm.loss.shown_name} loss, "
        f"{algorithm.aggregation}; {reference}",
        f"  loss     {algorithm.formula}",
    ]


def _layout(config: ExperimentConfig, everything: bool) -> list[str]:
    """Returns how ranks are cut and on which nodes they are; everything: also each GPU's ranks."""
    actor = config.actor
    p = actor.parallel
    r = config.rollout
    edp = actor.world_size // (p.etp * p.ep * p.pp)
    head = [
        f"layout     {actor.world_size} trainer ranks = tp {p.tp} x cp {p.cp} x dp {actor.dp} x pp "
        f"{p.pp}",
        f"experts: etp {p.etp} x ep {p.ep} x dp {edp} x pp {p.pp}",
        "sequence parallel" if p.tp > 1 else "",
        f"{p.vpp} virtual stages a rank" if p.vpp > 1 else "",
    ]
    lines = ["; ".join(filter(None, head))]
    if broken(placement.before_start(Subject(config))):
        return lines
    places = place(config)
    shared = ", shared by engines" if r.colocate else ""
    apart = f", {places.rollout_nodes} for engines" if places.rollout_nodes else ""
    lines.append(f"  nodes      {places.trainer_nodes} for trainers{shared}{apart}")
    if not everything:
        return lines
    trainers = {gpu: rank for rank, gpu in enumerate(places.trainers)}
    engines = {
        gpu: f"{name} rank {rank}"
        for name, ranks in zip(places.names, places.engines, strict=True)
        for rank, gpu in enumerate(ranks)
    }
    axes = ("dp", "pp", "cp", "tp", "ep", "edp")
    rows = [["node", "GPU", "engine", "trainer", *axes]]
    for gpu in sorted(trainers.keys() | engines.keys()):
        rank = trainers.get(gpu)
        at = {} if rank is None else rank_coordinates(rank, actor.world_size, p)
        numbers = ["-" if rank is None else str(rank), *(str(at.get(axis, "-")) for axis in axes)]
        rows.append([*map(str, gpu), engines.get(gpu, "-"), *numbers])
    lines += [f"  {line}" for line in table_lines(rows[: _MAX_ROWS + 1])]
    more = len(rows) - 1 - _MAX_ROWS
    return lines + [f"  ... {more} more in the same order"] * (more > 0)


def _routing(config: ExperimentConfig, arch: Architecture | None) -> list[str]:
    source = config.actor.routing_replay
    if arch is None or not arch.is_moe or source is None:
        return []
    k = arch.routed.per_token
    sent = 4 * arch.num_layers * k
    kept = (1 if arch.routed.id_type == "uint8" else 2) * arch.expert_layers * k
    if source == "old":
        return [
            f"routing    updates take the experts of the old log-probabilities: {kept:,} "
            "bytes a token of a replica"
        ]
    return [
        f"routing    the actor takes the engine's experts: {kept:,} bytes a token of a "
        f"replica, {-(-4 * sent // 3):,} in an answer, {sent:,} of an engine rank's host "
        "memory for each token of its cache"
    ]


def _num_steps(config: ExperimentConfig) -> int | None:
    """Returns the number of steps; None if it depends on a missing data file.

    With train.num_epochs it is an upper bound: prompts are not tokenized here, so none is dropped
    as too long.
    """
    if config.train.num_epochs is None:
        return config.train.steps(0)
    with suppress(ValueError):  # missing or broken: among the problems
        return config.train.steps(len(read_rows(config.data)))
    return None


def _step(config: ExperimentConfig, num_steps: int | None, everything: bool) -> list[str]:
    train, actor = config.train, config.actor
    prompts = train.num_prompts_per_step
    updates = train.num_updates_per_step
    samples = prompts * train.group_size
    longest = longest_samples(config)["data"]
    total = train.updates_of_step
    packed = "packed" if actor.packing else "padded"
    run = "its length is known when the prompts are there"
    if num_steps is not None:
        run = f"{num_steps * total} optimizer updates, {num_steps * samples:,} samples"
    head = (
        f"a step     {prompts} prompts x {train.group_size} samples = {samples} samples, at most "
        f"{samples * longest:,} tokens"
    )
    sample = (
        f"  sample     at most {config.data.max_prompt_tokens} prompt + "
        f"{config.sampling.max_response_tokens} response = {longest} tokens"
    )
    curriculum = []
    with suppress(ValueError):  # among the problems
        if config.data.curriculum is not None:
            curriculum = [f"  rows       {describe_curriculum(config.data.curriculum)}"]
    if not everything:
        return [head, *curriculum, sample, f"the run    {run}"]
    return [
        head,
        *curriculum,
        sample,
        f"  updates    {updates} of {prompts // updates} prompts = {samples // updates} samples"
        + (f", {train.num_epochs_per_step} passes: {total} updates" if total > updates else ""),
        f"  micro-batches  {actor.micro_batch_tokens} tokens {packed}, longer samples by themselves",
        f"the run    {run}",
    ]


def _rollout(config: ExperimentConfig) -> list[str]:
    r, sampling, e = config.rollout, config.sampling, config.eval
    lines = [
        f"rollout    SGLang engines: {r.num_engines} of tp {r.tp}, ep {r.ep} on "
        f"{r.nodes_per_engine} node(s), {r.dtype}; {config.weights.transport} after each step",
        f"  reward     {_reward(config)}",
    ]
    for name, model in config.served_models.items():
        where = model.url or f"{model.num_engines} engine(s) of tp {model.tp}, ep {model.ep}"
        lines.append(f"  {name}: {model.path or 'elsewhere'}, {where}")
    if sampling.environment:
        lines.append(f"  environment  {sampling.environment.function}")
    if sampling.agent:
        lines.append(f"  agent      {sampling.agent.function or ' '.join(sampling.agent.command)}")
    if e is not None and config.eval_data is not None:
        how = "greedy" if e.temperature == 0 else f"temperature {e.temperature:g}"
        lines.append(
            f"evaluation {config.eval_data.name}, {e.num_samples} samples a prompt, {how}: "
            f"{'first, ' * e.before_first_step}every {e.every} steps, last"
        )
    return lines


def _reward(config: ExperimentConfig) -> str:
    reward = config.reward
    entries = reward.entries
    if key := config.sampling.rewarding:
        return f"the {key.removeprefix('sampling.')}'s"
    names = " + ".join(f"{e.weight:g} {e.short_name}" for e in entries)
    text = names if reward.graders else entries[0].grader
    text += f", then {reward.group_grader} over the group" if reward.group_grader else ""
    return text + ", SHUFFLED over the samples (control experiment)" * reward.shuffle


def _memory(config: ExperimentConfig, arch: Architecture | None, everything: bool) -> list[str]:
    """Returns the bytes on the fullest ranks, by the closed forms of trainer_memory.py."""
    if arch is None:
        return ["memory     unknown without a config.json that the layout can cut"]
    actor = config.actor
    memory = experiment_memory(config, arch)
    phases = memory.phases
    phase = max(phases, key=lambda name: phases[name].total)
    states = memory.engine.parts.get("recurrent states", 0.0)
    recurrent = f" and {gigabytes(states)} of recurrent states" if states else ""
    where = {"cpu": "in a process"}.get(actor.device, "on a GPU")
    lines = [
        f"memory     at most  {gigabytes(phases[phase].total)} {where}, in {phase}, "
        f"rank {phases[phase].rank} ({phases[phase].kind}): "
        f"{_listed(memory, phase, None if everything else _ON_SCREEN)}",
        f"  an engine rank holds about {gigabytes(memory.engine.resident)} of weights{recurrent}, "
        "before its cache",
    ]
    lines += [
        f"  one of {name} about {gigabytes(side.resident)}" for name, side in served_memory(config)
    ]
    if everything:
        lines += [
            f"    {name:<10} {gigabytes(rank.total)}: {_listed(memory, name, None)}"
            for name, rank in phases.items()
            if name != phase
        ]
    host = host_peak(config, memory.trainers, memory.engine, config.cluster.gpus_per_node)
    lines.append(f"  on the fullest node's host {gigabytes(host)}")
    if actor.lora is not None:
        unadapted = actor.model_copy(update={"lora": None})
        trained, total = (trained_elements(arch, each) for each in (actor, unadapted))
        lines.append(f"  lora       trains {_count(trained)} of {_count(total)} parameters")
    return lines


def _listed(memory: StepMemory, phase: str, most: int | None) -> str:
    """Returns the parts of a phase's memory; most: only the largest, this many."""
    parts = memory.phases[phase].parts.items()
    shown = sorted(parts, key=lambda part: -part[1])[:most] if most else parts
    return ", ".join(f"{name} {gigabytes(size)}" for name, size in shown)


def _loaded(trial: LoadingTest, everything: bool) -> list[str]:
    loaded = trial.loaded if everything else trial.loaded[:_ON_SCREEN]
    more = len(trial.loaded) - len(loaded)
    row = trial.first_row if everything else trial.first_row[:_ON_SCREEN]
    return [
        "loaded     as the trainers will; graders and tools are imported too",
        *(f"  {what}" for what in loaded),
        *([f"  and {more} more"] if more else []),
        f"  not tried: {', '.join(trial.not_tried)}",
        *(["  first row  " + "\n    ".join(row)] if row else []),
    ]


def _count(number: float) -> str:
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:g}"


def settings_report(
    arch: Architecture | None, config: ExperimentConfig, everything: bool
) -> list[str]:
    """Returns the lines of `megagrpo check` about settings of libraries: those that the experiment
    sets, or everything that is handed over.

    No GPU is looked for: with `actor.device` auto, bfloat16 counts as on GPUs.
    """
    settings_by_path = given_settings(config.actor, config.rollout)
    if not everything:
        shown = [
            f"{'.'.join(path)}.{name}: {value}"
            for path, settings in settings_by_path.items()
            for name, value in settings.items()
        ]
        return [f"libraries  {', '.join(shown)}"] if shown else []
    actor = config.actor
    kernels = expected_kernels(actor)
    cuda = needs_gpus(config)
    place = ServerPlace(0, config.rollout.host, cuda=cuda)
    engine = engine_settings(config, place).items()
    handed = (
        {} if arch is None else transformer_fields(arch, actor, kernels),
        ddp_fields(actor, kernels),
        optimizer_fields(actor, kernels),
        {name: value for name, value in engine if name not in _OF_A_START},
    )
    devices = f"trainers {_device(kernels.cuda)}, engines {_device(cuda)}"
    text = yaml.safe_dump(
        {".".join(path): fields for path, fields in zip(settings_by_path, handed, strict=True)},
        sort_keys=False,
        default_flow_style=None,
        width=_WIDTH,
    )
    return [f"libraries  fields handed over, {devices}", *textwrap.indent(text, "  ").splitlines()]


def _device(cuda: bool) -> str:
    return "as on CUDA" if cuda else "as on a CPU"
