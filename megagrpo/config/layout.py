"""Coordinates of each rank, and whether a model can be sharded by a layout."""

from collections.abc import Iterator
from itertools import accumulate

from megagrpo.config.actor import ActorConfig, ParallelConfig
from megagrpo.config.fields import complaints
from megagrpo.models.architecture import Architecture


def layout_problems(arch: Architecture, config: ActorConfig) -> list[str]:
    """Returns every clash of the model with actor.parallel, each with its numbers and the sizes
    that would do.

    Rules between the sizes themselves (world_size, vpp) are the schema's.
    """
    rules = (_sizes, _stages, _routers, _adapters, _vision, _indexers)
    problems = [problem for rule in rules for problem in rule(arch, config)]
    gpu = config.device == "cuda" or (config.device == "auto" and config.dtype == "bfloat16")
    if gpu and (problem := context_problem(config, config.expects_transformer_engine)):
        problems.append(problem)
    return [*problems, *_experts(arch, config)]


def _sizes(arch: Architecture, config: ActorConfig) -> Iterator[str]:
    for cut in arch.cuts(config.parallel):
        if cut.number % cut.ranks:
            may = divisors(cut.number, cut.ranks)
            its = f"the model's {cut.key} = {cut.number}; it may be {may}"
            yield f"actor.parallel.{cut.by} = {cut.ranks} does not divide {its}"


def _stages(arch: Architecture, config: ActorConfig) -> Iterator[str]:
    p = config.parallel
    layers = arch.num_layers
    ends = uneven_ends(layers, p.pp, p.vpp) if p.pp > 1 else None
    uneven = (
        f"actor.parallel.first_stage_layers: {ends[0]} and last_stage_layers: {ends[1]}"
        if ends
        else ""
    )
    if p.first_stage_layers or p.last_stage_layers:
        remedy = f"; set {uneven}" if uneven else ""
        yield from (
            f"actor.parallel: {text}{remedy}" for text in complaints(p.stage_layers, layers)
        )
    elif layers % (chunks := p.pp * p.vpp):
        its = f"the model's num_hidden_layers = {layers}; it may be {divisors(layers, chunks)}"
        remedy = f", or stay {chunks} with {uneven}" if uneven else ""
        yield f"actor.parallel.pp x vpp = {chunks} does not divide {its}{remedy}"


def _routers(arch: Architecture, config: ActorConfig) -> Iterator[str]:
    if config.router_bias_update is not None and not (arch.experts and arch.experts.router_bias):
        yield f"actor.router_bias_update: a {arch.family} model's routers have no bias; remove it"
    for key in ("router_losses", "routing_replay"):
        if getattr(config, key) is not None and not arch.is_moe:
            yield f"actor.{key}: a {arch.family} model has no experts to route to; remove it"
    if config.routing_replay == "rollout" and arch.experts and arch.experts.unreported:
        yield f"actor.routing_replay: {arch.experts.unreported}; take old, or remove it"


def _adapters(arch: Architecture, config: ActorConfig) -> Iterator[str]:
    if config.lora is None:
        return
    p = config.parallel
    of_experts = {"gate_proj", "up_proj", "down_proj"} & set(config.lora.targets)
    if arch.is_moe and of_experts and p.tp % p.etp:
        yield (
            "actor.lora has targets in experts, which needs an actor.parallel.etp that divides "
            f"tp = {p.tp}; {p.etp} does not: the gradient norm would count their adapters twice"
        )
    if arch.latent is None and arch.attention.kv_heads < p.tp:
        yield (
            f"actor.lora: with actor.parallel.tp = {p.tp} ranks share the model's "
            f"{arch.attention.kv_heads} key/value heads, "
            "whose projections adapters cannot be cut like; tp may be "
            f"{divisors(arch.attention.kv_heads, p.tp)}"
        )
    if arch.is_moe and of_experts:
        for name in ("overlap_grad_reduce", "overlap_param_gather"):
            if config.ddp.get(name):
                yield (
                    f"actor.ddp.{name}: with actor.lora, replicas of experts' adapters are summed "
                    "before the ranks' gradients are; remove it, or targets in experts"
                )
    if not arch.takes_adapters:
        yield (
            f"actor.lora is not supported with a {arch.family} model: train all "
            "weights, or another family"
        )


def _vision(arch: Architecture, config: ActorConfig) -> Iterator[str]:
    if arch.vision is None:
        if config.vision is not None:
            yield f"actor.vision: {arch.family} models are text-only; remove it"
        return
    if config.megatron.get("apply_rope_fusion"):
        yield (
            "actor.megatron.apply_rope_fusion: the fused kernel does not know "
            "positions of images; remove it"
        )
    p = config.parallel
    needed = arch.vision.deepstack
    if needed and p.pp > 1 and not complaints(p.stage_layers, arch.num_layers):
        first = p.stage_layers(arch.num_layers)[0] // p.vpp
        if first < needed:
            yield (
                f"actor.parallel: the first stage has {first} layers (of its first virtual one), "
                f"but features of images are added behind the model's first {needed}, where the "
                "tower is; take fewer stages, or raise first_stage_layers"
            )


def _indexers(arch: Architecture, config: ActorConfig) -> Iterator[str]:
    if arch.indexer is not None and config.has_draft:
        yield (
            f"actor.draft is not supported with a {arch.family} model: engines let its draft see "
            "keys that the model chose; remove it"
        )
    if arch.indexer is None or arch.indexer.freq == 1:
        return
    p = config.parallel
    if not config.packing:
        yield "actor.packing false: layers share a choice of keys in packed batches only; remove it"
    if p.vpp > 1:
        yield "actor.parallel.vpp: layers share a choice of keys, which stages do not send; remove it"
    if p.pp > 1 and not complaints(p.stage_layers, arch.num_layers):
        firsts = accumulate(p.stage_layers(arch.num_layers)[:-1])
        wrong = [first for first in firsts if arch.indexer.source(first) != first]
        if wrong:
            yield (
                f"actor.parallel: a stage begins at layer {wrong[0]}, which sees the keys that layer "
                f"{arch.indexer.source(wrong[0])} of the stage before has chosen; let stages begin at "
                f"layers that choose: every {arch.indexer.freq}-th from {arch.indexer.offset - 1} on"
            )


def _experts(arch: Architecture, config: ActorConfig) -> Iterator[str]:
    for key, size in (("ep", config.parallel.ep), ("etp", config.parallel.etp)):
        if size > 1 and not arch.is_moe:
            yield (
                f"actor.parallel.{key} = {size}, but a {arch.family} model has no "
                f"experts; {key} must be 1"
            )


def context_problem(config: ActorConfig, transformer_engine: bool) -> str | None:
    """Returns why GPUs, with or without Transformer Engine's layers, cannot share a sequence; None
    if they can."""
    if config.parallel.cp == 1 or (transformer_engine and config.dtype == "bfloat16"):
        return None
    if config.lora is not None:
        remedy = "with actor.lora, which it does not support, cp must be 1"
    else:
        remedy = "install it and set actor.dtype: bfloat16 (it has none in float32), or set cp: 1"
    return (
        f"actor.parallel.cp = {config.parallel.cp} needs Transformer Engine's attention on a "
        f"GPU: torch's would hold masks as large as the square of the longest sequence; {remedy}"
    )


def rank_coordinates(rank: int, world_size: int, parallel: ParallelConfig) -> dict[str, int]:
    """Returns the coordinates of a trainer rank.

    Megatron's order is tp-cp-ep-dp-pp, fastest first; experts divide the same ranks a second time.
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


def divisors(number: int, near: int) -> str:
    """Returns the divisors of `number` just below and above `near`, as words: "2 or 4"."""
    every = [d for d in range(1, number + 1) if number % d == 0]
    below = [d for d in every if d < near][-1:]
    above = [d for d in every if d > near][:1]
    return " or ".join(map(str, below + above))


def uneven_ends(layers: int, pp: int, vpp: int) -> tuple[int, int] | None:
    """Returns layers of the first and of the last stage with which `pp` stages hold them all; None
    without any.

    The stages between are equal, all divide into `vpp` virtual stages, and the ends, which also
    have the embedding and the head, are smaller than the others where that is possible.
    """
    units, rest = divmod(layers, vpp)
    for middle in (-(-units // pp), units // pp):
        ends = units - middle * (pp - 2)
        if not rest and middle and ends >= 2:
            return vpp * (ends - ends // 2), vpp * (ends // 2)
    return None
