"""Computes what saving and resuming cost: bytes, host memory, seconds. For `megagrpo check`; loads no torch.

For each parameter that is trained, a checkpoint holds the weight in the model's dtype and Adam's state in float32: two
moments, and the weight itself where the optimiser is distributed or the weights are narrower. Of a model with adapters
it holds these alone; host bytes take them as cut like the weights. bench/checkpoints.py compares the figures of whole
models with measured ones.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from megagrpo.config.layout import rank_coordinates
from megagrpo.config.schema import ActorConfig
from megagrpo.families.architecture import Architecture
from megagrpo.families.table import model_tensors
from megagrpo.families.tensors import TensorSpec, adapter_tensors

# Megatron gathers moment by moment: with the whole state, of 3 float32 a parameter, these many more exist at the peak
# (what was received, its pieces joined, and those of the moment before).
_GATHER_BYTES = 3 * 4


@dataclass(frozen=True)
class CheckpointCost:
    """Sizes in bytes of a save and of a resume; `host` is that of the node which needs most, beside what it trains in.

    A form is reshardable or not; see actor/saving.py.
    """

    file_bytes: float  # of one checkpoint
    read_bytes: float  # of a resume, by all ranks: every file for its checksum, then every tensor once
    save_host_bytes: dict[bool, float]  # by form: reshardable or not
    resume_host_bytes: dict[bool, float]


@dataclass(frozen=True)
class _Held:
    """Counts the parameters of one pipeline stage: those of the dense part, and of all experts."""

    dense: int
    expert: int


def checkpoint_cost(arch: Architecture, actor: ActorConfig, ranks_per_node: int) -> CheckpointCost:
    """Returns the costs of an experiment's checkpoints. ValueError where the layers cannot be cut into stages."""
    width = 2 if actor.dtype == "bfloat16" else 4
    divided = actor.optimizer.distributed
    state = 12 if divided or width == 2 else 8  # bytes a parameter
    stages = _stages(arch, actor)
    tied = arch.tied and actor.parallel.pp > 1 and actor.lora is None
    shared = arch.vocab_size * arch.hidden_size if tied else 0
    parameters = sum(stage.dense + stage.expert for stage in stages)
    # the weights of a tied embedding are written once, its distributed state with both stages that hold it
    files = (parameters - shared) * width + (parameters if divided else parameters - shared) * state
    ranks = [_host_of_a_rank(rank, stages, actor, width, state) for rank in range(actor.world_size)]
    nodes = [ranks[first : first + ranks_per_node] for first in range(0, actor.world_size, ranks_per_node)]
    own, gathered, restored = (max(sum(rank[kind] for rank in node) for node in nodes) for kind in range(3))
    return CheckpointCost(
        file_bytes=files,
        read_bytes=2 * files,
        save_host_bytes={False: own, True: gathered if divided else own},
        resume_host_bytes={False: 0.0, True: restored if divided else 0.0},
    )


def _host_of_a_rank(
    rank: int, stages: list[_Held], actor: ActorConfig, width: int, state: int
) -> tuple[float, float, float]:
    """Returns a rank's host bytes: to save its own parts, to save for any layout, and to load what was saved so."""
    p = actor.parallel
    place = rank_coordinates(rank, actor.world_size, p)
    stage, stage_size = stages[place["pp"]], actor.world_size // p.pp
    own = restored = weights = whole = 0.0
    peak = 0.0  # of a save for any layout: while it gathers one part after the other, or when all is copied for files
    for held, copies, gathers in (
        (stage.dense / p.tp, stage_size // p.tp, place["dp"] == place["cp"] == 0),
        (stage.expert / (p.etp * p.ep), stage_size // (p.etp * p.ep), place["edp"] == 0),
    ):
        own += held / copies * (width + state)
        restored += held * state
        weights += held / copies * width
        laid_out = held / copies * state  # by every rank, for the one that gathers
        peak = max(peak, whole + laid_out + (held * (state + _GATHER_BYTES) if gathers else 0.0))
        whole += held * state if gathers else 0.0
    return own, max(peak, 2 * whole + weights), restored


def _stages(arch: Architecture, actor: ActorConfig) -> list[_Held]:
    """Counts what each pipeline stage holds."""
    p = actor.parallel
    layers = p.stage_layers(arch.num_layers)
    if p.vpp == 1:
        stage_of_layer = [stage for stage, number in enumerate(layers) for _ in range(number)]
    else:  # each stage has one chunk of every round
        stage_of_layer = [
            stage for _ in range(p.vpp) for stage, number in enumerate(layers) for _ in range(number // p.vpp)
        ]
    dense, expert = [0] * p.pp, [0] * p.pp
    tensors = model_tensors(arch)
    if actor.lora is not None:
        tensors = adapter_tensors(tensors, actor.lora.targets, actor.lora.rank)
    for stage, size, is_expert in _sizes(tensors, stage_of_layer):
        (expert if is_expert else dense)[stage] += size
    if arch.tied and p.pp > 1 and actor.lora is None:
        dense[-1] += arch.vocab_size * arch.hidden_size
    return [_Held(*counts) for counts in zip(dense, expert, strict=True)]


def _sizes(tensors: Iterable[TensorSpec], stage_of_layer: list[int]) -> Iterator[tuple[int, int, bool]]:
    """Yields stage, elements, and whether it is an expert's, of every tensor."""
    for spec in tensors:
        words = spec.name.split(".")
        if words[:2] == ["model", "layers"]:
            stage = stage_of_layer[int(words[2])]
        else:
            stage = 0 if words[1] == "embed_tokens" else max(stage_of_layer)
        yield stage, spec.size, spec.expert
