"""`megagrpo plan`: whether an experiment fits, the bound of its step, and layouts that fit."""

import argparse
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace

from megagrpo.check.rules import placement
from megagrpo.check.rules.subject import Nodes, Subject, broken
from megagrpo.config.actor import ActorConfig
from megagrpo.config.schema import ExperimentConfig
from megagrpo.models.table import parameter_counts
from megagrpo.system.arguments import positive
from megagrpo.system.progress import Progress
from megagrpo.tools.plan.engine_memory import host_peak, shares_nodes
from megagrpo.tools.plan.fitting import served_memory, served_misfits, with_model
from megagrpo.tools.plan.hardware import usable_bytes
from megagrpo.tools.plan.roofline import Plan, plan_step, target_of
from megagrpo.tools.plan.search import best_layouts, changes

PUBLISHED = (2.3, 7.5)  # published seconds over the bound: bench/results/plan_published.md
TIGHT = 0.95  # share of a GPU's memory above which a proposal has no headroom


def add_options(command: argparse.ArgumentParser) -> None:
    """Adds the options of the command line."""
    option = command.add_argument
    option(
        "--lengths", help="response lengths in tokens: the mean, or a file with one number per line"
    )
    nodes = "also search layouts for this many nodes, by their bound"
    option("--search", type=positive, metavar="NODES", help=nodes)
    option("--gpus-per-node", type=positive, help="GPUs per node; default: cluster.gpus_per_node")
    option("--hardware", help="H100, H200, H20, B200; default: cluster.gpu")
    option("--host-memory", type=positive, metavar="GB", help="of a node; default: not judged")


def run(args: argparse.Namespace, config: ExperimentConfig) -> int:
    """Runs the command; returns 1 if the experiment does not fit."""
    with Progress(f"plan {config.name}", stream=sys.stderr) as progress:
        progress.enter("memory and a bound of the step")
        config = with_model(config)
        plan = placed_plan(
            config, args.hardware, args.gpus_per_node, args.lengths, args.host_memory
        )
        lines = report(plan)
        if args.search is not None:
            progress.enter(f"searches layouts of {args.search} nodes")
            lines += ["", *_proposals(best_layouts(config, plan.target, args.search), config)]
    print("\n".join(lines))
    return 1 if plan.problems else 0


def placed_plan(
    config: ExperimentConfig,
    hardware: str | None = None,
    gpus_per_node: int | None = None,
    lengths: str | None = None,
    host_gb: float | None = None,
) -> Plan:
    """Returns the plan with the problems of its ranks' places; for the arguments see `target_of`.
    host_gb: host memory of a node; None: not judged.

    Raises ValueError for an unknown model, and for layouts that do not suit the model or the nodes.
    """
    target = target_of(config, hardware, gpus_per_node, lengths)
    plan = plan_step(config, target)
    placed = broken(placement.before_start(Subject(config, Nodes(target.gpus_per_node))))
    misfits = served_misfits(config, target.lengths, target.hardware)
    needed = host_peak(config, plan.trainers, plan.engine, target.gpus_per_node) / 1e9
    if host_gb is not None and needed > host_gb:
        misfits.append(
            f"host memory of the fullest node: {needed:.1f} GB of {host_gb:g}; docs/scale.md has what "
            "takes less"
        )
    return replace(plan, problems=(*placed, *plan.problems, *misfits))


def report(plan: Plan) -> list[str]:
    """Returns the plan as lines: memory of both sides, the bound of a step, and what does not
    fit."""
    target = plan.target
    actor = plan.config.actor
    rollout = plan.config.rollout
    trainer_nodes = -(-actor.world_size // target.gpus_per_node)
    engine_nodes = -(-plan.config.engine_ranks // target.gpus_per_node)
    shared = shares_nodes(plan.config, target.gpus_per_node)
    where = "the same nodes" if shared else f"{engine_nodes} nodes"
    room = usable_bytes(target.hardware)
    rows = [["trainers", "fullest rank", "GB", f"of {room / 1e9:.1f}", "parts in GB"]]
    for phase, rank in plan.phases.items():
        fullest = f"{rank.rank} ({rank.kind})"
        size = f"{rank.total / 1e9:.1f}"
        rows.append([phase, fullest, size, f"{rank.total / room:.0%}", _parts(rank.parts)])
    train = plan.config.train
    samples = train.num_prompts_per_step * train.group_size / rollout.num_engines
    lengths = target.lengths
    engine = plan.engine
    lines = [
        f"{plan.config.name} on {target.hardware.device_name}, {target.gpus_per_node} a node: "
        f"{parameter_counts(target.arch).total / 1e9:.1f} B parameters",
        f"lengths    {lengths.origin}: mean {lengths.mean:,.0f}; prompts {lengths.prompt:,.0f}",
        f"trainers   {actor.world_size} ranks on {trainer_nodes} nodes ({_layout(actor)}), "
        f"{actor.micro_batch_tokens:,} tokens a micro-batch, recompute {actor.recompute}",
        f"engines    {rollout.num_engines} on {where}, each tp {rollout.tp}, ep {rollout.ep}",
        "",
        *table_lines(rows),
        f"host memory of the fullest trainer node, in GB: {_parts(plan.trainers.host_bytes)} "
        "(--host-memory judges it)",
        f"engine rank {engine.total / 1e9:.1f} of {engine.capacity / 1e9:.1f} GB: "
        f"{_parts(engine.parts)}",
        f"  cache    {engine.cache_tokens:,} tokens an engine; {engine.concurrent} samples of "
        f"these lengths run concurrently in a full engine, of {samples:,.0f} that it gets a step",
        *_served_lines(plan),
        "",
        *_step_lines(plan),
    ]
    if plan.problems:
        nodes = trainer_nodes + (0 if shared else engine_nodes)
        search = f"  --search {nodes} proposes layouts of as many nodes that fit"
        lines += ["", "DOES NOT FIT", *(f"  {problem}" for problem in plan.problems), search]
    return lines


def _served_lines(plan: Plan) -> list[str]:
    models = plan.config.served_models
    return [
        f"{name}: {models[name].num_engines} of tp {models[name].tp}, a rank "
        f"{side.total / 1e9:.1f} of {side.capacity / 1e9:.1f} GB: {_parts(side.parts)}"
        for name, side in served_memory(plan.config, plan.target.lengths, plan.target.hardware)
    ]


def _layout(actor: ActorConfig) -> str:
    sizes = actor.parallel.model_dump(exclude_defaults=True) | {"dp": actor.dp}
    return " ".join(f"{name} {size}" for name, size in sizes.items())


def _parts(parts: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {size / 1e9:.1f}" for name, size in parts.items() if size) or "none"


def _step_lines(plan: Plan) -> list[str]:
    rows = [["phase", "seconds", "share", "largest parts, in seconds"]]
    seconds = plan.seconds
    for phase in (phase for phase in seconds if seconds[phase]):
        largest = sorted(plan.parts[phase].items(), key=lambda part: -part[1])[:4]
        parts = ", ".join(f"{name} {number:.2g}" for name, number in largest if number)
        share = f"{seconds[phase] / plan.synchronous:.0%}"
        rows.append([phase, f"{seconds[phase]:.3g}", share, parts])
    longest = max(seconds, key=lambda phase: seconds[phase])
    limit = max(plan.parts[longest], key=lambda name: plan.parts[longest][name])
    return [
        "A roofline: an upper bound on speed, no forecast",
        *table_lines(rows),
        f"step       {plan.synchronous:.3g} s; {plan.off_policy:.3g} s "
        "if engines sample for the next step meanwhile",
        f"limit      {longest}: {limit}",
        f"others     published steps of 30B to 671B took {PUBLISHED[0]} to {PUBLISHED[1]} times such a "
        "bound (docs/planning.md)",
    ]


def _proposals(plans: Sequence[Plan], before: ExperimentConfig) -> list[str]:
    """Returns the table of a search, and below it the words of `--set` that make each proposal of
    the experiment."""
    rows = [["", "nodes", "step s", *plans[0].seconds, "GPU GB", "cache"]]
    words = []
    tight = False
    for number, plan in enumerate(plans, 1):
        rollout = plan.config.rollout
        nodes = str(plan.config.actor.world_size // plan.target.gpus_per_node)
        own = rollout.num_engines * rollout.tp // plan.target.gpus_per_node
        nodes += " shared" if rollout.colocate else f" + {own}"
        seconds = [f"{value:.3g}" for value in (plan.step, *plan.seconds.values())]
        most = max(rank.total for rank in plan.phases.values())
        cache = f"{plan.engine.cache_tokens:,}"
        room = usable_bytes(plan.target.hardware)
        tight |= most > TIGHT * room
        rows.append([str(number), nodes, *seconds, f"{most / 1e9:.1f} ({most / room:.0%})", cache])
        settings = changes(before, plan.config)
        set_words = " ".join(f"--set {shlex.quote(word)}" for word in settings)
        words.append(f"{number}: {set_words or 'the experiment as it is'}")
    heading = "layouts with the best bound of a step; within 5 % the simplest first:"
    margin = f"above {TIGHT:.0%} of the memory an estimate that is 5 % off is out of memory"
    return [heading, *table_lines(rows), *([margin] if tight else []), *words]


def table_lines(rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns rows of cells as lines with columns of one width."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
