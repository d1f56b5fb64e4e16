"""How an engine cuts a model over its ranks, and which cuts SGLang refuses. Loads no torch."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import gcd

from megagrpo.check.rules.subject import Subject, broken
from megagrpo.check.rules.trainer_layout import divisors
from megagrpo.config.actor import ParallelConfig
from megagrpo.config.fields import LibrarySettings, Rule
from megagrpo.config.rollout import RolloutConfig
from megagrpo.models.architecture import Architecture
from megagrpo.models.kinds.clamped.describe import ClampedExperts
from megagrpo.models.kinds.experts.describe import Experts
from megagrpo.models.kinds.gated_delta.describe import GatedDelta
from megagrpo.models.kinds.grouped_query.describe import GroupedQuery
from megagrpo.models.kinds.latent.describe import LatentAttention
from megagrpo.models.stored.quantization import FP8_BLOCK
from megagrpo.models.table import FAMILIES
from megagrpo.models.tensors import Cut
from megagrpo.rollout.service.engine_command import num_states

_CACHE_WIDTHS = {"bfloat16": 2, "bf16": 2, "fp8_e5m2": 1, "fp8_e4m3": 1}  # bytes of a value
_TRIED = (1, 2, 4, 8, 16, 32, 64)  # tp and ep that a refusal may name


@dataclass(frozen=True)
class Server:
    """The settings of an engine that its layout and memory depend on."""

    tp: int
    ep: int
    attention_tp: int  # ranks that share the heads: tp / dp with data-parallel attention
    dense_tp: int  # ranks that share an MLP without experts
    shared_tp: int  # ranks that share the shared experts: 1 behind DeepEP, which has no such sum
    head_tp: int  # ranks that share the output layer
    memory_fraction: float  # of weights and cache together
    running_requests: int  # of one engine
    width: int  # bytes of a value that is not quantized
    cache_width: int  # bytes of a value in the cache
    max_tokens: int | None
    states: int  # of recurrent layers, in one replica of the attention
    fp8: bool = False  # rollout.quantization


def server_of(rollout: RolloutConfig, resolved: LibrarySettings | None = None) -> Server:
    """Returns the settings of an experiment's engines. resolved: the arguments that SGLang resolved
    on a GPU."""
    found = resolved or {
        "tp_size": rollout.tp,
        "mem_fraction_static": rollout.mem_fraction,
        "max_running_requests": rollout.max_running_requests,
        **rollout.sglang,
    }
    tp = found["tp_size"]
    replicas = _replicas(found)
    attention_tp = max(tp // replicas, 1)
    width = 2 if rollout.dtype == "bfloat16" else 4
    return Server(
        tp=tp,
        ep=rollout.ep,
        attention_tp=attention_tp,
        dense_tp=found.get("moe_dense_tp_size") or tp,
        shared_tp=tp if found.get("moe_a2a_backend", "none") == "none" else 1,
        head_tp=attention_tp if found.get("enable_dp_lm_head") else tp,
        memory_fraction=found["mem_fraction_static"],
        running_requests=found["max_running_requests"],
        width=width,
        cache_width=_CACHE_WIDTHS.get(found.get("kv_cache_dtype", "auto"), width),
        max_tokens=found.get("max_total_tokens"),
        states=num_states(rollout, cuda=True) // replicas,
        fp8=rollout.quantization == "fp8",
    )


def _replicas(sglang: LibrarySettings) -> int:
    """Returns the replicas of the attention in an engine."""
    return sglang.get("dp_size") or 1 if sglang.get("enable_dp_attention") else 1


def before_start(subject: Subject) -> Iterator[Rule]:
    """Yields the rules between the model and the ranks of an engine."""
    rollout = subject.experiment.rollout
    arch = subject.arch
    if arch is None:
        return
    cuts = list(_cuts(rollout, arch))
    for rule in cuts:
        if rule.when and not rule.remedy:  # so a layout that fits tries no other sizes
            rule = replace(rule, remedy=_may_be(rollout, arch))
        yield rule
    yield Rule(
        arch.recurrent is not None and rollout.sglang.get("enable_hierarchical_cache"),
        "rollout.sglang.enable_hierarchical_cache with recurrent layers is refused: no test "
        "shows that a publish reaches states on the host",
        "remove it",
    )
    yield Rule(
        rollout.sglang.get("enable_dp_attention") and not FAMILIES[arch.family].SHARES_ATTENTION,
        f"rollout.sglang.enable_dp_attention: SGLang's layers of a {arch.family} model would add up "
        "ranks that have other requests",
        "remove it",
    )
    fp8 = rollout.quantization
    if refusal := FAMILIES[arch.family].FP8_REFUSAL:
        yield Rule(fp8, f"rollout.quantization {fp8}: {refusal}", "remove it")
    elif fp8 and not broken(cuts) and (odd := _odd_parts(arch, server_of(rollout))):
        yield _fp8_cuts(server_of(rollout), odd, _may_be(rollout, arch))


def context_rule(arch: Architecture, sglang: LibrarySettings, model: str) -> Rule:
    """Returns the rule that an engine's context is no longer than a model. model: its name."""
    context = sglang.get("context_length")
    positions = arch.max_positions
    return Rule(
        isinstance(context, int) and context > positions,
        f"rollout.sglang.context_length {context} is more than the {positions} positions of "
        f"{model}: SGLang would not start it",
        "lower it",
    )


def _cuts(rollout: RolloutConfig, arch: Architecture) -> Iterator[Rule]:
    server = server_of(rollout)
    tp = server.attention_tp
    ep = rollout.ep
    whole = f"rollout.tp = {rollout.tp}"
    replicas = _replicas(rollout.sglang)
    if rollout.tp % replicas:
        because = f"rollout.sglang.dp_size = {replicas} does not divide {whole}"
        yield Rule(True, because, f"it may be {divisors(rollout.tp, replicas)}")
        return
    experts = arch.experts
    ranks = ParallelConfig(tp=tp, ep=ep, etp=max(rollout.tp // ep, 1))
    cuts = [cut for kind in arch.kinds if kind is not experts for cut in kind.cuts(ranks)]
    if experts:  # also clamped ones, which trainers do not cut
        cuts += Experts.cuts(experts, ranks.model_copy(update={"tp": server.shared_tp}))
    if arch.has_dense_layers:
        cuts.append(Cut("intermediate_size", arch.ffn_size, "tp", server.dense_tp))
    if tower := arch.vision:
        heads = Cut("vision_config.num_heads", tower.config["num_heads"], "tp", tp)
        cuts += [heads, Cut("vision_config.intermediate_size", tower.ffn_size, "tp", tp)]
    part = f"{whole} / sglang.dp_size {replicas} = {tp}"
    names = {"ep": f"rollout.ep = {ep}", "etp": f"{whole} / ep {ep} = {ranks.etp}"}
    for cut in cuts:
        by = names.get(cut.by, whole if cut.ranks == rollout.tp else part)
        because = f"{by} does not divide the model's {cut.key} = {cut.number}"
        yield Rule(cut.number % cut.ranks, because)
    why = "has experts that SGLang gives to every rank" if experts else "has no experts"
    yield Rule(
        ep > 1 and (not experts or isinstance(experts, ClampedExperts)),
        f"rollout.ep = {ep}, but a {arch.family} model {why}",
        "ep must be 1",
    )


def _may_be(rollout: RolloutConfig, arch: Architecture) -> str:
    """Returns the tp, each with an ep, that SGLang does not refuse, as words."""
    ep = rollout.ep

    def fits(tp: int) -> bool:
        changed = rollout.model_copy(update={"tp": tp, "ep": gcd(ep, tp)})
        odd = rollout.quantization and _odd_parts(arch, server_of(changed))
        return not odd and not broken(_cuts(changed, arch))

    may = " or ".join(str(tp) for tp in _TRIED if fits(tp))
    return f"tp may be {may}{f', with ep gcd({ep}, tp)' * (ep > 1)}" if may else ""


def _fp8_cuts(server: Server, odd: dict[str, float], may: str) -> Rule:
    """Returns the rule that every part of a matrix is a whole number of blocks, which some are not."""
    wholes = {"shared expert": "moe_a2a_backend: deepep"}
    if server.attention_tp < server.tp:
        wholes["MLP"] = "moe_dense_tp_size: 1"
    if wholes.keys() >= odd.keys():
        settings = ", ".join(wholes[name] for name in odd)
        may += f"{' or ' * bool(may)}the same with rollout.sglang: {{{settings}}}"
    return Rule(
        True,
        "rollout.quantization fp8: SGLang cuts matrices into blocks of "
        f"{' x '.join(map(str, FP8_BLOCK))}, and with rollout.tp = {server.tp}, ep = {server.ep} "
        f"parts are left over: {', '.join(f'{name} {size:g}' for name, size in odd.items())}",
        may or "no tp gives whole ones: remove quantization",
    )


def _odd_parts(arch: Architecture, server: Server) -> dict[str, float]:
    """Returns by name the sizes of the parts that SGLang refuses: validate_block_quant_shapes and Fp8MoEMethod of its
    layers/quantization/fp8.py.

    A matrix whose output joins several is always judged, another one only if it is cut over all
    ranks.
    """
    part = server.attention_tp
    whole = part == server.tp > 1
    sizes: dict[str, float] = {}
    attention = arch.attention
    heads = attention.heads / part
    if isinstance(attention, LatentAttention):
        if whole:
            sizes["queries"] = heads * attention.head_dim
            sizes["keys and values"] = heads * (attention.nope_dim + attention.v_dim)
            sizes["attention's output"] = heads * attention.v_dim
    elif isinstance(attention, GroupedQuery):
        sizes["queries"] = heads * attention.head_dim * (1 + attention.output_gate)
        sizes["keys"] = max(attention.kv_heads / part, 1) * attention.head_dim
        if whole and attention.output_gate:
            sizes["attention's output"] = heads * attention.head_dim
    if isinstance(linear := arch.recurrent, GatedDelta):
        sizes["delta net's keys"] = linear.key_heads / part * linear.key_dim
        sizes["delta net's values"] = linear.value_heads / part * linear.value_dim
    experts = arch.experts
    if experts is not None and experts.shared_ffn_size:
        sizes["shared expert"] = experts.shared_ffn_size / server.shared_tp
    if arch.has_dense_layers:
        sizes["MLP"] = arch.ffn_size / server.dense_tp
    if experts is not None:
        sizes["expert"] = experts.ffn_size / (server.tp / server.ep)
    return {name: size for name, size in sizes.items() if size % FP8_BLOCK[0]}
