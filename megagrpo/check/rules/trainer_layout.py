"""Which cuts of a model over the trainers' ranks Megatron or the actor refuses."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import accumulate

from megagrpo.check.rules.subject import Subject
from megagrpo.config.actor import ActorConfig
from megagrpo.config.fields import Rule, complaints
from megagrpo.models.architecture import Architecture
from megagrpo.models.fields import context_rule, expected_kernels
from megagrpo.models.kinds.experts.describe import Experts
from megagrpo.models.kinds.grouped_query.describe import GroupedQuery
from megagrpo.models.kinds.hashed.describe import HashedExperts

_FP8_ROWS = 16  # of a matrix, and columns
# fields that kinds of layers set, and an experiment may set otherwise: kernels, and a type
_CHOICES = {"dsa_kernel_backend", "moe_router_dtype", "moe_router_fusion"}


def before_start(subject: Subject) -> Iterator[Rule]:
    """Yields the rules between the model and `actor`."""
    if subject.arch is not None:
        yield from layout_rules(subject.arch, subject.experiment.actor)


def layout_rules(arch: Architecture, actor: ActorConfig) -> Iterator[Rule]:
    """Yields the rules between a model and a layout; those between the sizes themselves
    (world_size, vpp) are the section's."""
    for rules in (_sizes, _stages, _routers, _adapters, _vision, _sinks, _shared_choices, _fp8):
        yield from rules(arch, actor)
    kernels = expected_kernels(actor)
    yield context_rule(actor, kernels)
    needed = {
        name: value for kind in arch.kinds for name, value in kind.fields(actor, kernels).items()
    }
    for name in actor.megatron.keys() & needed.keys() - _CHOICES:
        yield Rule(
            actor.megatron[name] != needed[name],
            f"actor.megatron.{name}: layers of a {arch.family} model are computed with {needed[name]}",
            "remove it",
        )
    p = actor.parallel
    yield Rule(
        not kernels.cuda and p.etp > 1 and (p.ep > 1 or p.etp > p.tp),
        f"actor.parallel.etp = {p.etp} on a CPU, where gloo gathers no unequal sizes",
        "take ep 1 and an etp of at most tp, or set actor.device: cuda for GPUs",
    )
    for key, size in (("ep", p.ep), ("etp", p.etp)):
        yield Rule(
            size > 1 and not arch.is_moe,
            f"actor.parallel.{key} = {size}, but a {arch.family} model has no experts",
            f"{key} must be 1",
        )


def _sizes(arch: Architecture, actor: ActorConfig) -> Iterator[Rule]:
    for cut in arch.cuts(actor.parallel):
        if cut.number:
            key = f"actor.parallel.{cut.by} = {cut.ranks}"
            yield divides(key, cut.ranks, cut.key, cut.number)


def _stages(arch: Architecture, actor: ActorConfig) -> Iterator[Rule]:
    p = actor.parallel
    layers = arch.num_layers
    chunks = p.pp * p.vpp
    uneven = _uneven_ends(layers, p.pp, p.vpp)
    if p.first_stage_layers or p.last_stage_layers:
        for text in complaints(p.stage_layers, layers):
            yield Rule(True, f"actor.parallel: {text}", f"set {uneven}" * bool(uneven))
        return
    rule = divides(f"actor.parallel.pp x vpp = {chunks}", chunks, "num_hidden_layers", layers)
    instead = f", or stay {chunks} with {uneven}" * bool(uneven)
    yield replace(rule, remedy=rule.remedy + instead)


def _routers(arch: Architecture, actor: ActorConfig) -> Iterator[Rule]:
    yield Rule(
        actor.router_bias_update is not None and not (arch.experts and arch.experts.router_bias),
        f"actor.router_bias_update: a {arch.family} model's routers have no bias",
        "remove it",
    )
    for key in ("router_losses", "routing_replay"):
        yield Rule(
            getattr(actor, key) is not None and not arch.is_moe,
            f"actor.{key}: a {arch.family} model has no experts to route to",
            "remove it",
        )
    fields = "recompute_modules moe_shared_expert_overlap use_te_activation_func fp8"
    given = vars(actor) | actor.megatron
    for key in ("router_losses", "routing_replay", *fields.split()):
        section = "megatron." if key in actor.megatron else ""
        yield Rule(
            given.get(key) and isinstance(arch.experts, HashedExperts),
            f"actor.{section}{key} is not supported with a {arch.family} model: its first routers read the tokens of "
            "the micro-batch under way, other scores are no shares, other activations leave out swiglu_limit, and its "
            "attention has no products in FP8",
            "remove it",
        )
    for key in ("moe_shared_expert_overlap", "use_te_activation_func"):
        yield Rule(
            actor.megatron.get(key) and type(arch.experts) is Experts and arch.experts.limit,
            f"actor.megatron.{key}: that activation leaves out the {arch.family} model's swiglu_limit",
            "remove it",
        )
    if unreported := arch.experts and arch.experts.unreported:
        replayed = actor.routing_replay == "rollout"
        yield Rule(replayed, f"actor.routing_replay: {unreported}", "take old, or remove it")
    overlap = actor.megatron.get("moe_shared_expert_overlap")
    yield Rule(
        overlap and arch.experts and arch.experts.latent_size,
        "actor.megatron.moe_shared_expert_overlap: Megatron refuses it at the first forward of "
        "experts in a latent space",
        "remove it",
    )
    yield Rule(
        overlap
        and arch.experts
        and arch.experts.shared_gate
        and actor.ddp.get("overlap_param_gather", True),
        f"actor.megatron.moe_shared_expert_overlap: Megatron reads the gate of a {arch.family} model's "
        "shared experts outside the forward that waits for its gather",
        "remove it, or set actor.ddp.overlap_param_gather: false",
    )


def _fp8(arch: Architecture, actor: ActorConfig) -> Iterator[Rule]:
    rows = arch.recurrent.rows / actor.parallel.tp if arch.recurrent else 0
    yield Rule(
        actor.megatron.get("fp8") and rows % _FP8_ROWS,
        f"actor.megatron.fp8: with tp = {actor.parallel.tp} a rank has {rows:g} rows of a {arch.family} "
        f"model's recurrent layers, of which products in FP8 want a multiple of {_FP8_ROWS}",
        "take a smaller tp",
    )


def _sinks(arch: Architecture, actor: ActorConfig) -> Iterator[Rule]:
    kernels = expected_kernels(actor)
    sinks = isinstance(arch.attention, GroupedQuery) and arch.attention.sinks and kernels.cuda
    yield Rule(
        sinks and not kernels.transformer_engine,
        f"a {arch.family} model's attention has sinks, of which only Transformer Engine has a kernel: "
        "torch's would hold scores as large as the square of the longest sequence",
        "install it, or set actor.device: cpu",
    )
    yield Rule(
        sinks and actor.parallel.cp > 1,
        f"actor.parallel.cp = {actor.parallel.cp}: sinks and windows are not compared on GPUs that share a sequence",
        "cp must be 1",
    )
    backend = actor.megatron.get("attention_backend")
    yield Rule(
        kernels.transformer_engine and (backend == "local" or (sinks and backend == "flash")),
        f"actor.megatron.attention_backend {backend}: Transformer Engine would find no kernel at the first "
        f"forward of a {arch.family} model",
        "remove it",
    )


def _adapters(arch: Architecture, actor: ActorConfig) -> Iterator[Rule]:
    p, lora = actor.parallel, actor.lora
    kv_heads = arch.attention.kv_heads
    targets = set(lora.targets) if lora is not None else set()
    adapts_experts = arch.is_moe and {"gate_proj", "up_proj", "down_proj"} & targets
    yield Rule(
        adapts_experts and p.tp % p.etp,
        "actor.lora has targets in experts, which needs an actor.parallel.etp that divides "
        f"tp = {p.tp}; {p.etp} does not: the gradient norm would count their adapters twice",
    )
    yield Rule(
        lora is not None and arch.latent is None and kv_heads < p.tp,
        f"actor.lora: with actor.parallel.tp = {p.tp} ranks share the model's "
        f"{kv_heads} key/value heads, whose projections adapters cannot be cut like",
        f"tp may be {divisors(kv_heads, p.tp)}",
    )
    yield Rule(
        adapts_experts and actor.ddp.get("overlap_grad_reduce"),
        "actor.ddp.overlap_grad_reduce: with actor.lora, replicas of experts' adapters are summed "
        "before the ranks' gradients are",
        "remove it, or targets in experts",
    )
    yield Rule(
        lora is not None and actor.ddp.get("overlap_param_gather"),
        "actor.ddp.overlap_param_gather: Megatron gathers in the forward of the module that holds a "
        "parameter, and those of actor.lora have none: the next update of a step would see old adapters",
        "remove it",
    )
    yield Rule(
        lora is not None and not arch.takes_adapters,
        f"actor.lora is not supported with a {arch.family} model: train all weights, or another family",
    )


def _vision(arch: Architecture, actor: ActorConfig) -> Iterator[Rule]:
    tower = arch.vision
    yield Rule(
        tower is None and actor.vision is not None,
        f"actor.vision: {arch.family} models are text-only",
        "remove it",
    )
    yield Rule(
        tower is not None and actor.megatron.get("apply_rope_fusion"),
        "actor.megatron.apply_rope_fusion: the fused kernel does not know positions of images",
        "remove it",
    )
    needed = tower.deepstack if tower is not None else 0
    stages = _stage_layers(arch, actor)
    first = stages[0] // actor.parallel.vpp if len(stages) > 1 else needed
    yield Rule(
        first < needed,
        f"actor.parallel: the first stage has {first} layers (of its first virtual one), but "
        f"features of images are added behind the model's first {needed}, where the tower is",
        "take fewer stages, or raise first_stage_layers",
    )


def _shared_choices(arch: Architecture, actor: ActorConfig) -> Iterator[Rule]:
    """Yields the rules about layers that share a choice of keys."""
    indexer = arch.indexer
    dynamic = actor.parallel.dynamic_context
    yield Rule(
        dynamic and indexer is not None,
        f"actor.parallel.dynamic_context is not supported with a {arch.family} model: Megatron's sparse "
        "attention knows one group of context-parallel ranks",
        "remove it",
    )
    yield Rule(
        dynamic and arch.latent is not None and actor.megatron.get("apply_rope_fusion"),
        "actor.megatron.apply_rope_fusion with actor.parallel.dynamic_context: latent attention that is "
        "computed again would turn by the places of another micro-batch's ranks",
        "remove one of them",
    )
    yield Rule(
        indexer is not None and actor.has_draft,
        f"actor.draft is not supported with a {arch.family} model: engines let its draft see keys that the model chose",
        "remove it",
    )
    if indexer is None:
        return
    share = indexer.freq > 1
    yield Rule(
        share and not actor.packing,
        "actor.packing false: layers share a choice of keys in packed batches only",
        "remove it",
    )
    yield Rule(
        share and actor.parallel.vpp > 1,
        "actor.parallel.vpp: layers share a choice of keys, which stages do not send",
        "remove it",
    )
    firsts = accumulate(_stage_layers(arch, actor)[:-1])
    wrong = next((first for first in firsts if indexer.source(first) != first), 0)
    yield Rule(
        wrong,
        f"actor.parallel: a stage begins at layer {wrong}, which sees the keys that layer "
        f"{indexer.source(wrong)} of the stage before has chosen",
        f"let stages begin at layers that choose: every {indexer.freq}-th from {indexer.offset - 1} on",
    )


def _stage_layers(arch: Architecture, actor: ActorConfig) -> list[int]:
    """Returns the layers of each stage; none if they cannot be cut so."""
    with suppress(ValueError):
        return actor.parallel.stage_layers(arch.num_layers)
    return []


def divides(key: str, by: int, what: str, number: int) -> Rule:
    """Returns the rule that ranks divide a size of the model. key: the setting with its value."""
    because = f"{key} does not divide the model's {what} = {number}"
    return Rule(number % by, because, f"it may be {divisors(number, by)}")


def divisors(number: int, near: int) -> str:
    """Returns the divisors of `number` just below and above `near`, as words: "2 or 4"."""
    ranges = range(near - 1, 0, -1), range(near + 1, number + 1)
    found = [next((d for d in numbers if number % d == 0), None) for numbers in ranges]
    return " or ".join(str(d) for d in found if d)


def _uneven_ends(layers: int, pp: int, vpp: int) -> str:
    """Returns in words the layers of the first and of the last stage with which `pp` stages hold them
    all; "" without any.

    The stages between are equal, all divide into `vpp` virtual stages, and the ends, which also
    have the embedding and the head, are smaller than the others where that is possible.
    """
    units, rest = divmod(layers, vpp)
    for middle in (-(-units // pp), units // pp):
        ends = units - middle * (pp - 2)
        if pp > 1 and not rest and middle and ends >= 2:
            last = vpp * (ends // 2)
            return f"actor.parallel.first_stage_layers: {vpp * ends - last} and last_stage_layers: {last}"
    return ""
