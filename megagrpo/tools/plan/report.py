"""A plan as text and as JSON."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict

from megagrpo.check.hardware import usable_bytes
from megagrpo.config.actor import ActorConfig
from megagrpo.families.table import parameter_counts
from megagrpo.tools.plan.roofline import ACCEPTANCE, Plan
from megagrpo.tools.plan.turns import Turns


def report(plan: Plan, hardware_name: str) -> list[str]:
    """Returns the plan as lines: memory of both sides, the bound of a step, and what does not
    fit."""
    config, target, engine = plan.config, plan.target, plan.engine
    actor, rollout, lengths, room = (
        config.actor,
        config.rollout,
        target.lengths,
        usable_bytes(target.hardware),
    )
    nodes = [
        -(-ranks // target.gpus_per_node)
        for ranks in (actor.world_size, rollout.num_engines * rollout.tp)
    ]
    where = "the same nodes" if rollout.colocate else f"{nodes[1]} nodes"
    rows = [["trainers", "fullest rank", "GB", f"of {room / 1e9:.1f}", "parts in GB"]]
    for phase, rank in plan.phases.items():
        share = f"{rank.total / room:.0%}"
        rows.append(
            [
                phase,
                f"{rank.rank} ({rank.kind})",
                f"{rank.total / 1e9:.1f}",
                share,
                _parts(rank.parts),
            ]
        )
    samples = config.train.num_prompts_per_step * config.train.group_size / rollout.num_engines
    billions = parameter_counts(target.arch).total / 1e9
    lines = [
        f"{config.name} on {hardware_name} nodes of {target.gpus_per_node}: {billions:.1f} B "
        "parameters",
        f"lengths    {lengths.origin}: mean {lengths.mean:,.0f}; prompts {lengths.prompt:,.0f}",
        *_turns(target.turns),
        f"trainers   {actor.world_size} ranks on {nodes[0]} nodes ({_layout(actor)}), "
        f"{actor.micro_batch_tokens:,} tokens a micro-batch, recompute {actor.recompute}",
        f"engines    {rollout.num_engines} on {where}, each tp {rollout.tp}, ep {rollout.ep}",
        "",
        *table_lines(rows),
        f"host memory of the fullest trainer node, in GB: {_parts(plan.trainers.host_bytes)}",
        f"engine rank {engine.total / 1e9:.1f} of {engine.capacity / 1e9:.1f} GB: "
        f"{_parts(engine.parts)}",
        f"  cache    {engine.cache_tokens:,} tokens an engine; {engine.concurrent} samples of "
        "these lengths run "
        f"concurrently in a full engine, of {samples:,.0f} that it gets a step",
        "",
        *_step_lines(plan),
    ]
    if plan.problems:
        lines += ["", "DOES NOT FIT", *(f"  {problem}" for problem in plan.problems)]
        lines.append(
            f"  --search {nodes[0] if rollout.colocate else sum(nodes)} proposes layouts of as "
            "many nodes that fit"
        )
    return lines


def _turns(turns: Turns) -> list[str]:
    if not turns.origin:
        return []
    read = (
        f"{turns.said:.0%} of the tokens said to the model, {turns.found:.0%} of what turns "
        "read again in caches"
    )
    return [
        f"turns      {turns.origin}: {turns.count:.1f}, {turns.tool_s:.1f} s between two; {read}"
    ]


def _layout(actor: ActorConfig) -> str:
    names = ("tp", "pp", "vpp", "cp", "ep", "etp", "first_stage_layers", "last_stage_layers")
    values = {name: getattr(actor.parallel, name) for name in names}
    return (
        " ".join(f"{name} {value}" for name, value in values.items() if value not in (None, 1))
        + f" dp {actor.dp}"
    )


def _parts(parts: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {size / 1e9:.1f}" for name, size in parts.items() if size) or "none"


def _step_lines(plan: Plan) -> list[str]:
    efficiency = plan.target.efficiency
    rows = [["phase", "seconds", "share", "of the bound", "largest parts of the bound, in seconds"]]
    for phase, seconds in plan.seconds.items():
        if seconds:
            largest = sorted(plan.parts[phase].items(), key=lambda part: -part[1])[:4]
            parts = ", ".join(f"{name} {number:.2g}" for name, number in largest if number)
            share = f"{efficiency[phase]:.1%} measured" if phase in efficiency else "100%"
            rows.append(
                [phase, f"{seconds:.3g}", f"{seconds / plan.synchronous:.0%}", share, parts]
            )
    return [
        "A roofline: an upper bound on speed, no forecast; phases that a run measured are divided "
        "by what it reached",
        *table_lines(rows),
        f"step       {plan.synchronous:.3g} s; {plan.off_policy:.3g} s if engines sample for the "
        "next step meanwhile",
        f"limit      {plan.limit}",
        *(
            []
            if plan.config.rollout.draft_tokens is None
            else [f"drafts     {ACCEPTANCE:g} of them accepted: assumed"]
        ),
    ]


def as_json(plan: Plan) -> dict[str, object]:
    """Returns all figures of a plan."""
    return {
        "name": plan.config.name,
        "hardware": plan.target.hardware.device_name,
        "actor": plan.config.actor.model_dump(),
        "rollout_config": plan.config.rollout.model_dump(),
        "lengths": {"origin": plan.target.lengths.origin, "mean": plan.target.lengths.mean},
        "turns": asdict(plan.target.turns),
        "trainers": {
            phase: {**asdict(rank), "total": rank.total} for phase, rank in plan.phases.items()
        },
        "host_bytes": dict(plan.trainers.host_bytes),
        "engine": asdict(plan.engine),
        "efficiency": dict(plan.target.efficiency),
        "bound": {phase: dict(parts) for phase, parts in plan.parts.items()},
        "seconds": plan.seconds,
        "step": plan.synchronous,
        "off_policy": plan.off_policy,
        "limit": plan.limit,
        "problems": list(plan.problems),
    }


def table_lines(rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns rows of cells as lines with columns of one width."""
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
