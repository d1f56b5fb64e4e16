"""How an engine cuts a model over its ranks, and which cuts SGLang refuses. Loads no torch."""

from collections.abc import Iterator
from dataclasses import dataclass

from megagrpo.check.rules.subject import Subject, broken
from megagrpo.check.rules.trainer_layout import divides, divisors
from megagrpo.config.fields import LibrarySettings, Rule
from megagrpo.config.rollout import RolloutConfig
from megagrpo.models.architecture import Architecture
from megagrpo.models.kinds.clamped.describe import ClampedExperts
from megagrpo.models.kinds.compressed.describe import CompressedAttention
from megagrpo.models.kinds.gated_delta.describe import GatedDelta
from megagrpo.models.kinds.grouped_query.describe import GroupedQuery
from megagrpo.models.kinds.latent.describe import LatentAttention
from megagrpo.models.stored.quantization import FP8_BLOCK
from megagrpo.models.table import FAMILIES
from megagrpo.rollout.service.engine_command import num_states

_CACHE_WIDTHS = {"bfloat16": 2, "bf16": 2, "fp8_e5m2": 1, "fp8_e4m3": 1}  # bytes of a value
_TRIED = (1, 2, 4, 8, 16, 32, 64)  # tp that a refusal may name


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
    replicas = found.get("dp_size") or 1 if found.get("enable_dp_attention") else 1
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


def before_start(subject: Subject) -> Iterator[Rule]:
    """Yields the rules between the model and the ranks of an engine."""
    rollout = subject.experiment.rollout
    arch = subject.arch
    if arch is None:
        return
    cuts = list(_cuts(rollout, arch))
    yield from cuts
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
        yield _fp8_cuts(rollout, arch, odd)


def _cuts(rollout: RolloutConfig, arch: Architecture) -> Iterator[Rule]:
    tp = server_of(rollout).attention_tp
    ep = rollout.ep
    replicas = rollout.sglang.get("dp_size") or 1
    shared = rollout.sglang.get("enable_dp_attention")
    if shared and rollout.tp % replicas:
        yield Rule(
            True,
            f"rollout.sglang.dp_size = {replicas} does not divide rollout.tp = {rollout.tp}",
            f"it may be {divisors(rollout.tp, replicas)}",
        )
        return
    cut = f"tp = {rollout.tp} / sglang.dp_size {replicas} = {tp}" if shared else f"tp = {tp}"
    kv_heads = arch.attention.kv_heads
    num_experts = arch.experts.count if arch.experts is not None else 0
    recurrent = arch.recurrent
    attention = arch.attention
    groups = attention.groups if isinstance(attention, CompressedAttention) else 0
    for key, by, what, number in (
        (cut, tp, "num_attention_heads", attention.heads),
        (cut, tp, "o_groups", groups),
        (f"ep = {ep}", ep, "num_experts", num_experts),
        (cut, tp, recurrent.CUT_KEY if recurrent else "", recurrent.cut if recurrent else 0),
    ):
        if number:
            yield divides(f"rollout.{key}", by, what, number)
    yield Rule(
        arch.latent is None and kv_heads % tp and tp % kv_heads,
        f"rollout.tp = {tp} is neither a divisor nor a multiple of the model's "
        f"num_key_value_heads = {kv_heads}",
    )
    yield Rule(
        ep > 1 and isinstance(arch.experts, ClampedExperts),
        f"rollout.ep = {ep}: SGLang gives every rank all of a {arch.family} model's experts",
        "ep must be 1",
    )
    yield Rule(
        ep > 1 and not num_experts,
        f"rollout.ep = {ep}, but a {arch.family} model has no experts",
        "ep must be 1",
    )


def _fp8_cuts(rollout: RolloutConfig, arch: Architecture, odd: dict[str, float]) -> Rule:
    """Returns the rule that every part of a matrix is a whole number of blocks, which some are not."""
    server = server_of(rollout)

    def fits(tp: int) -> bool:
        ep = server.ep if tp % server.ep == 0 else tp
        changed = rollout.model_copy(update={"tp": tp, "ep": ep})
        return not broken(_cuts(changed, arch)) and not _odd_parts(arch, server_of(changed))

    may = [str(tp) for tp in _TRIED if fits(tp)]
    wholes = {"shared expert": "moe_a2a_backend: deepep"}
    if server.attention_tp < server.tp:
        wholes["MLP"] = "moe_dense_tp_size: 1"
    if wholes.keys() >= odd.keys():
        settings = ", ".join(wholes[name] for name in odd)
        may.append(f"the same with rollout.sglang: {{{settings}}}")
    return Rule(
        True,
        "rollout.quantization fp8: SGLang cuts matrices into blocks of "
        f"{' x '.join(map(str, FP8_BLOCK))}, and with rollout.tp = {server.tp}, ep = {server.ep} "
        f"parts are left over: {', '.join(f'{name} {size:g}' for name, size in odd.items())}",
        f"tp may be {' or '.join(may)}" if may else "no tp gives whole ones: remove quantization",
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
