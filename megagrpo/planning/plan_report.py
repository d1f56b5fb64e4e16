"""What `megagrpo plan` prints: memory of both sides, the step's seconds, what limits, and what would fit."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict

from megagrpo.planning.hardware import EFFICIENCY
from megagrpo.planning.publish_bytes import table_lines
from megagrpo.planning.search import changes
from megagrpo.planning.step_time import Plan, usable_bytes

_SMALL = 0.02  # share of a phase below which a part is not named


def report(plan: Plan, remedy: Sequence[str], hardware_name: str) -> list[str]:
    """Returns the plan as lines. remedy: the nearest change that fits, as words of `--set`."""
    problems = []
    if plan.problems:
        problems = ["", "DOES NOT FIT", *(f"  {problem}" for problem in plan.problems)]
        nearest = " ".join(f"--set {word}" for word in remedy)
        problems.append(f"  nearest change that fits: {nearest}" if remedy else "  no single change makes it fit")
    return [
        *_head(plan, hardware_name),
        "",
        *_trainer_memory(plan),
        "",
        *_engine_memory(plan),
        "",
        *(_step(plan) if not plan.engine.problems else ["step       not planned: engines cannot sample"]),
        *problems,
    ]


def _head(plan: Plan, hardware_name: str) -> list[str]:
    config, target = plan.config, plan.target
    actor, rollout, work = config.actor, config.rollout, target.work
    p, gpus = actor.parallel, target.gpus_per_node
    names = ("tp", "pp", "vpp", "cp", "ep", "etp", "first_stage_layers", "last_stage_layers")
    layout = " ".join(f"{key} {getattr(p, key)}" for key in names if getattr(p, key) not in (None, 1))
    active = sum(layer.dense + layer.expert * work.share for layer in work.layers) + work.head
    lengths = target.lengths
    trainer_nodes, engine_nodes = -(-actor.world_size // gpus), -(-rollout.num_engines * rollout.tp // gpus)
    return [
        f"{config.name} on {hardware_name} nodes of {gpus}: {work.total / 1e9:.1f} B parameters, "
        f"{active / 1e9:.1f} B active",
        f"lengths    {lengths.origin}: mean {lengths.mean:,.0f}, p50 {lengths.percentile(0.5):,.0f}, "
        f"p99 {lengths.percentile(0.99):,.0f}; prompts {lengths.prompt:,.0f}",
        f"trainers   {actor.world_size} ranks on {trainer_nodes} nodes ({layout or 'one rank each'}, dp {actor.dp}), "
        f"{actor.micro_batch_tokens:,} tokens a micro-batch, recompute {actor.recompute}",
        f"engines    {rollout.num_engines} on {engine_nodes} nodes, each tp {rollout.tp}, ep {rollout.ep} "
        f"over {rollout.nodes_per_engine} node(s)",
    ]


def _trainer_memory(plan: Plan) -> list[str]:
    room = usable_bytes(plan.target)
    rows = [["trainers", "fullest rank", "GB", f"of {room / 1e9:.1f}", "parts in GB"]]
    for phase, rank in plan.trainers.phases.items():
        rows.append(
            [
                phase,
                f"{rank.rank} ({rank.kind})",
                f"{rank.total / 1e9:.1f}",
                f"{rank.total / room:.0%}",
                _parts(rank.parts),
            ]
        )
    host = {name: size for name, size in plan.trainers.host_bytes.items() if size}
    return [*table_lines(rows), f"host memory of the fullest trainer node, in GB: {_parts(host)}"]


def _parts(parts: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {size / 1e9:.1f}" for name, size in parts.items()) or "none"


def _engine_memory(plan: Plan) -> list[str]:
    engine, server = plan.engine, plan.engine.server
    how = (
        f"as SGLang resolves its arguments: attention by {server.backend}" if server.resolved else "from the experiment"
    )
    samples = plan.config.train.num_prompts_per_step * plan.config.train.group_size / plan.config.rollout.num_engines
    staged = min(2 * plan.config.weights.bucket_mb * 2**20, engine.weights)
    return [
        f"engine rank {engine.total / 1e9:.1f} of {engine.capacity / 1e9:.1f} GB: {_parts(engine.parts)}",
        f"  settings {how}, memory fraction {server.memory_fraction:g}, prefill {server.prefill_tokens:,} tokens, "
        f"at most {server.running_requests} requests",
        f"  phases   load and rollout as above; a publish stages at most {staged / 1e9:.1f} GB where activations lie, "
        "which are idle then",
        f"  cache    {engine.cache_tokens:,} tokens an engine; {engine.at_once} samples of these lengths run at once "
        f"in a full engine, of {samples:,.0f} that it gets a step",
    ]


def _step(plan: Plan) -> list[str]:
    rollout, train = plan.rollout, plan.train
    inner = {"rollout": rollout.parts, "update": train.parts}
    rows = [["step", "seconds", "share", "of which"]]
    for phase, seconds in plan.seconds.items():
        if seconds:
            parts = _shares(inner[phase]) if phase in inner else plan.publish_limit if phase == "publish" else ""
            rows.append([phase, _seconds(seconds), f"{seconds / plan.step:.0%}", parts])
    rows.append(["together", _seconds(plan.step), "", ""])
    ranks = plan.config.actor.world_size
    used = train.model_flops / ranks / plan.seconds["update"] / (plan.target.hardware.bf16_tflops * 1e12)
    return [
        *table_lines(rows),
        f"rollout    {rollout.at_once:.0f} samples in a decode step on average, {rollout.tokens_per_s:,.0f} tokens/s "
        f"an engine; half of the samples after {rollout.half_done / rollout.seconds:.0%} of it, the last tenth takes "
        f"{rollout.tail_seconds / rollout.seconds:.0%}; {rollout.retracted} put back for want of cache",
        f"update     {train.micro_batches} micro-batches, {train.filled:.0%} full; pipeline bubble {train.bubble:.0%}; "
        f"the mean rank waits {train.waiting:.1%} for the slowest; {used:.0%} of the peak without recomputation",
        f"idle       {plan.idle:.0%} of all GPUs' time, one side waiting for the other; one step off-policy a step "
        f"would take {_seconds(plan.asynchronous)} s, {plan.step / plan.asynchronous:.2f} times as many",
        f"limit      {plan.limit}",
    ]


def _shares(parts: Mapping[str, float]) -> str:
    whole = sum(parts.values())
    named = {name: seconds for name, seconds in parts.items() if seconds > _SMALL * whole}
    return ", ".join(
        f"{name} {_seconds(seconds)}" for name, seconds in sorted(named.items(), key=lambda pair: -pair[1])
    )


def _seconds(seconds: float) -> str:
    return f"{seconds:.0f}" if seconds >= 10 else f"{seconds:.2g}"


def proposals(plans: Sequence[Plan], nodes: int) -> list[str]:
    """Returns what a search found as a table, and each proposal's words of `--set` below."""
    rows = [
        [
            "",
            "nodes",
            "step s",
            "rollout",
            "logprobs",
            "update",
            "publish",
            "trainer GB",
            "engine cache",
            "bubble",
            "off-policy s",
        ]
    ]
    for number, plan in enumerate(plans, 1):
        gpus, seconds = plan.target.gpus_per_node, plan.seconds
        trainers = -(-plan.config.actor.world_size // gpus)
        rows.append(
            [
                str(number), f"{trainers} + {nodes - trainers}", _seconds(plan.step), _seconds(seconds["rollout"]),
                _seconds(seconds["logprobs"] + seconds["reference"]), _seconds(seconds["update"]),
                _seconds(seconds["publish"]), f"{plan.trainers.peak[1].total / 1e9:.1f}",
                f"{plan.engine.cache_tokens:,}", f"{plan.train.bubble:.0%}", _seconds(plan.asynchronous),
            ]
        )  # fmt: skip
    return [f"best layouts of {nodes} nodes by predicted step:", *table_lines(rows)]


def proposal_words(plans: Sequence[Plan], before: Plan) -> list[str]:
    """Returns the words of `--set` that make each proposal of the experiment."""
    lines = []
    for number, plan in enumerate(plans, 1):
        words = changes(before.config, plan.config)
        lines.append(f"{number}: " + (" ".join(f"--set {word}" for word in words) or "the experiment as it is"))
    return lines


def as_json(plan: Plan) -> dict:
    """Returns all figures of a plan, and the efficiencies that they rest on with their sources."""
    return {
        "name": plan.config.name,
        "hardware": plan.target.hardware.device_name,
        "gpus_per_node": plan.target.gpus_per_node,
        "actor": plan.config.actor.model_dump(),
        "rollout_config": plan.config.rollout.model_dump(),
        "lengths": {"origin": plan.target.lengths.origin, "mean": plan.target.lengths.mean},
        "trainers": {phase: {**asdict(rank), "total": rank.total} for phase, rank in plan.trainers.phases.items()},
        "host_bytes": dict(plan.trainers.host_bytes),
        "engine": asdict(plan.engine),
        "rollout": asdict(plan.rollout),
        "train": asdict(plan.train),
        "seconds": dict(plan.seconds),
        "step": plan.step,
        "asynchronous": plan.asynchronous,
        "limit": plan.limit,
        "problems": list(plan.problems),
        "efficiency": {name: asdict(measured) for name, measured in EFFICIENCY.items()},
    }
