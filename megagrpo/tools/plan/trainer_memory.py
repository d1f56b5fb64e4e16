"""Memory and work of the trainers, phase by phase, from config.json only: closed forms. Loads no
torch.

Bytes of one rank are given by part.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, reduce

from megagrpo.config.actor import ActorConfig, ParallelConfig
from megagrpo.config.schema import ExperimentConfig
from megagrpo.models.architecture import Architecture
from megagrpo.models.costs import LayerCost, Share, mlp_cost
from megagrpo.models.stored.quantization import FP8_BLOCK
from megagrpo.models.table import tensor_groups
from megagrpo.models.tensors import TensorSpec
from megagrpo.tools.plan.checkpoint_cost import checkpoint_cost, stage_of_layer, stages_of
from megagrpo.tools.plan.work import optimizer_bytes

PHASES = ("load", "rollout", "logprobs", "reference", "update", "publish", "checkpoint", "resume")
_TILE_COLUMNS = 8192  # of algo/logprob.py, which loads torch
# of one communicator between GPUs, at NCCL's default buffer sizes and channels: estimated
_NCCL_BYTES = 400 * 2**20
_FP32 = 4
_FP8_COPIES = 2  # bytes: Transformer Engine keeps a weight and its transpose


@dataclass(frozen=True)
class Load:
    """The work of a rank."""

    tokens: int  # of the largest micro-batch
    expert_imbalance: float = 1.0  # tokens of the fullest expert rank over the mean
    links: int = 0  # process groups with engines
    colocate: bool = False  # the optimizer's state is on the host while engines sample
    # of a step, whose hidden states the last stage keeps on the host for the exact KL
    reference_positions: float = 0.0
    quantized: bool = False  # a publish is in FP8
    exports: bool = False  # after a checkpoint an HF folder is written


def layer_cost(
    arch: Architecture, actor: ActorConfig, tokens: float, layer: int, imbalance: float
) -> LayerCost:
    """Returns the cost of layer `layer`, counted from 0, of a micro-batch of `tokens`.

    imbalance: tokens that the fullest expert rank gets, over the mean.
    """
    p = actor.parallel
    width = 2 if actor.dtype == "bfloat16" else 4
    at = Share(arch.hidden_size, p, tokens / p.cp, tokens / p.cp / p.tp, width)
    mixer = arch.mixer(layer)
    parts = [] if mixer is None else [mixer.cost(at)]
    if arch.experts is not None and arch.has_experts(layer):
        parts.append(arch.experts.cost(at, imbalance))
    elif arch.has_mlp(layer):
        parts.append(mlp_cost(at, arch.ffn_size, arch.gated))
    if arch.streams is not None:
        parts.append(arch.streams.cost(at))
    # input and output of the norm before each
    kept = 2 * len(parts) * arch.hidden_size * at.part * at.width
    between = LayerCost(kept=kept, transient=0.0, flops=0.0, sent={})
    return reduce(LayerCost.then, parts).then(between)


def links(config: ExperimentConfig) -> int:
    """Returns the groups with engines that a trainer rank joins at most:
    weights/transports/reshard_plan.py. Experts may have fewer holders than other tensors."""
    engines = config.rollout.num_engines
    if config.weights.main_sends:
        return 2 * engines
    p = config.actor.parallel
    holders = min(config.actor.dp, config.actor.world_size // (p.etp * p.ep * p.pp))
    return min(engines, -(-engines // holders) + 1) if config.weights.uses_groups else 0


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank by part."""

    rank: int
    kind: str  # "only stage", "first stage", "middle stage", "last stage"
    parts: Mapping[str, float]

    @property
    def total(self) -> float:
        """Returns the sum of the parts."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class TrainerSide:
    """The trainers' half of a plan."""

    phases: Mapping[str, RankMemory]  # the fullest rank of each of PHASES
    host_bytes: Mapping[str, float]  # of the fullest node, by what they are for
    stages: "list[Stage]"


def trainer_side(
    arch: Architecture,
    actor: ActorConfig,
    load: Load,
    *,
    reference: bool = False,
    bucket_mb: float = 512.0,
    ranks_per_node: int = 8,
    sent_bytes: float = 0.0,
) -> TrainerSide:
    """Returns memory and work of the trainers. Raises ValueError if the layers cannot be cut into
    stages.

    reference: whether the loss needs a second model, which is swapped in. sent_bytes: that all
    ranks keep of the last publish (weights.delta).
    """
    stages = trainer_stages(arch, actor, load)
    phases = [phase for phase in PHASES if phase != "reference" or reference]
    ranks = {
        phase: [stage.memory(phase, bucket_mb * 2**20) for stage in stages] for phase in phases
    }
    node = min(ranks_per_node, actor.world_size)
    cost = checkpoint_cost(arch, actor, node)
    p = actor.parallel
    # of a rank; each of tp has all of them
    positions = load.reference_positions / (actor.dp * p.cp)
    second_model = reference and actor.lora is None
    shards = max(stage.shards for stage in stages)
    host = {
        "reference": max(stage.weights for stage in stages) * node if second_model else 0.0,
        "optimizer": shards * optimizer_bytes(actor).host * node,
        "update state": shards * optimizer_bytes(actor).state * node if load.colocate else 0.0,
        "checkpoint": max(cost.save_host_bytes.values()),
        "resume": cost.resume_host_bytes,
        "reference's hidden states": positions
        * arch.hidden_size
        * stages[-1].width
        * min(node, actor.world_size // p.pp),
        "sent last": sent_bytes * node / actor.world_size,
    }
    return TrainerSide(
        phases={phase: max(found, key=lambda rank: rank.total) for phase, found in ranks.items()},
        host_bytes=host,
        stages=stages,
    )


def trainer_stages(arch: Architecture, actor: ActorConfig, load: Load) -> list["Stage"]:
    """Returns every pipeline stage."""
    elements = stage_parameters(arch, actor)
    return [Stage(arch, actor, load, number, each) for number, each in enumerate(elements)]


@dataclass(frozen=True)
class StageElements:
    """Counts elements on one rank of a pipeline stage."""

    dense: float
    expert: float
    trained_dense: float
    trained_expert: float
    linear: float  # of linear layers and experts, which engines may keep in FP8


def in_flight(parallel: ParallelConfig, stage: int) -> float:
    """Returns how many micro-batches' worth of a stage's activations exist at the peak of
    Megatron's schedule.

    For as many micro-batches as stages at least, with virtual stages twice as many.
    """
    p = parallel
    if p.vpp == 1:
        return p.pp - stage
    return min((p.pp - stage - 1) * 2 + (p.vpp - 1) * p.pp + 1, 2 * p.pp * p.vpp) / p.vpp


_ROW_PARALLEL = (
    "o_proj",
    "down_proj",
)  # cut along the inputs: their A is, and B is whole; of the others it is B


def stage_parameters(arch: Architecture, actor: ActorConfig) -> list[StageElements]:
    """Counts the elements of a rank of each pipeline stage: all, those with gradients, those of
    linear layers."""
    layers = stage_of_layer(arch, actor.parallel)
    kinds = ("dense", "expert", "trained_dense", "trained_expert", "linear")
    counts = [dict.fromkeys(kinds, 0.0) for _ in range(max(layers) + 1)]
    for spec, number in tensor_groups(arch, actor.adapters).items():
        trained = _is_trained(spec, arch, actor)
        size = number * elements_held(spec, arch, actor)
        kind = "expert" if spec.expert else "dense"
        for stage in stages_of(spec, arch, layers):
            counts[stage][kind] += size
            counts[stage]["trained_" + kind] += size * trained
            counts[stage]["linear"] += size * spec.in_fp8
    return [StageElements(**count) for count in counts]


def trained_elements(arch: Architecture, actor: ActorConfig) -> int:
    """Counts the elements of the whole model that have gradients: of its parameters, or of its
    adapters."""
    groups = tensor_groups(arch, actor.adapters).items()
    return sum(number * spec.size for spec, number in groups if _is_trained(spec, arch, actor))


def _is_trained(spec: TensorSpec, arch: Architecture, actor: ActorConfig) -> bool:
    part = arch.vision is None or arch.vision.trains(spec.name, actor.trained_vision)
    return spec.trained and part and (actor.lora is None or spec.is_adapter)


def elements_held(spec: TensorSpec, arch: Architecture, actor: ActorConfig) -> float:
    """Returns the elements of a tensor on a rank that holds a part of it, on average over
    experts."""
    p = actor.parallel
    if spec.name in ("model.embed_tokens.weight", "lm_head.weight"):
        return -(-arch.vocab_size // p.tp) * arch.hidden_size
    if spec.whole or (arch.vision is not None and arch.vision.owns(spec.name)):
        return spec.size
    cut = p.etp if spec.expert else p.tp
    *_, projection, half, _ = ["", "", *spec.name.split(".")]
    if half in ("lora_A", "lora_B") and (half == "lora_A") != (projection in _ROW_PARALLEL):
        cut = 1
    return spec.size / (cut * (p.ep if spec.expert else 1))


class Stage:
    """One pipeline stage: the memory of each of its ranks, which are alike, and its work."""

    def __init__(
        self,
        arch: Architecture,
        actor: ActorConfig,
        load: Load,
        number: int,
        elements: StageElements,
    ):
        self.arch = arch
        self.actor = actor
        self.load = load
        self.number = number
        self.elements = elements
        p = actor.parallel
        self.width = 2 if actor.dtype == "bfloat16" else 4
        self.part = load.tokens / p.cp / p.tp
        self.last = number == p.pp - 1
        self.vocabulary = -(-arch.vocab_size // p.tp) * arch.hidden_size  # weights of a head
        self.layers: list[LayerCost] = [
            layer_cost(arch, actor, load.tokens, layer, load.expert_imbalance)
            for layer, stage in enumerate(stage_of_layer(arch, p))
            if stage == number
        ]
        self.weights = (elements.dense + elements.expert) * self.width
        self.message = arch.hidden_size * arch.num_streams * self.part * self.width  # to a stage

    def memory(self, phase: str, bucket_bytes: float) -> RankMemory:
        """Returns the bytes of a rank of this stage in one of PHASES."""
        elements = self.elements
        each = optimizer_bytes(self.actor)
        parts = {
            "parameters": self.weights,
            "gradients": (elements.trained_dense + elements.trained_expert) * each.gradient,
            "optimizer": self.shards * each.state,
            "NCCL": self._communicators(),
        }
        if phase not in ("load", "resume"):  # kept from the first forward and the first update on
            fp8 = bool(self.actor.megatron.get("fp8"))
            parts["weights in FP8"] = elements.linear * _FP8_COPIES * fp8
            copied = self.actor.trains_draft and not self.arch.tied and self.last and self.number
            parts["draft's embedding"] = self.vocabulary * self.width * bool(copied)
        if phase in ("logprobs", "reference"):
            layer = max(layer.kept / 2 + layer.transient for layer in self.layers)
            head = self._head(backward=False)
            parts |= {"head": head} if head > layer else {"activations": layer}
        if phase == "reference" and self.actor.lora is None:
            parts["live weights"] = self.weights
        if phase == "update":
            parts |= self._update()
        if phase == "publish" and self.load.quantized:
            # maxima and scales are those of the whole model
            blocks = sum(n * s.size for s, n in tensor_groups(self.arch, None).items() if s.in_fp8)
            parts["copy in FP8"] = elements.linear + 2 * _FP32 * blocks / math.prod(FP8_BLOCK)
        if phase == "publish" or (phase == "checkpoint" and self.load.exports):
            parts["staging"] = min(2 * bucket_bytes, self.weights)
            if self.actor.lora is not None:
                parts["weights before merging"] = self.weights
        first_rank = self.number * (self.actor.world_size // self.actor.parallel.pp)
        kind = ("middle", "first", "last", "only")[(self.number == 0) + 2 * self.last]
        present = {name: size for name, size in parts.items() if size}
        return RankMemory(first_rank, f"{kind} stage", present)

    @property
    def shards(self) -> float:
        """Returns the trained elements whose state a rank keeps."""
        p = self.actor.parallel
        elements = self.elements
        if not self.actor.optimizer.distributed:
            return elements.trained_dense + elements.trained_expert
        cuts = elements.trained_dense * p.tp + elements.trained_expert * p.etp * p.ep
        return cuts / (self.actor.world_size // p.pp)

    def _communicators(self) -> float:
        p = self.actor.parallel
        world = self.actor.world_size
        copies = self.actor.dp, world // (p.etp * p.ep * p.pp)
        groups = [world, p.tp, p.pp, *p.context_sizes, p.ep, p.etp, *copies]
        on_gpus = self.actor.device != "cpu"
        return _NCCL_BYTES * (sum(size > 1 for size in groups) + self.load.links) * on_gpus

    def _update(self) -> dict[str, float]:
        """Returns the fullest moment of forward and backward: the head's backward, or the largest
        layer's."""
        kept = sum(layer.kept for layer in self.layers)
        layer = max(layer.transient for layer in self.layers)
        if self.actor.recompute == "full":
            kept = self.message * len(self.layers)
            layer += max(layer.kept for layer in self.layers)
        # selective counts as none: its savings depend on model and kernels
        # and a message of the pipeline, or the final norm
        kept = (kept + self.message) * in_flight(self.actor.parallel, self.number)
        head = self._head(backward=True)
        return (
            {"activations": kept, "head": head} if head > layer else {"activations": kept + layer}
        )

    def _head(self, backward: bool) -> float:
        """Returns the bytes of log-probabilities from hidden states: tiles of logits, and in the
        backward gradients."""
        if not self.last:
            return 0.0
        hidden_size = self.arch.hidden_size
        columns = min(self.vocabulary // hidden_size, _TILE_COLUMNS)
        tile = min(self.actor.logprob_chunk_tokens, self.load.tokens) * columns * _FP32
        hidden = hidden_size * self.load.tokens / self.actor.parallel.cp
        head = 2 * tile + 2 * hidden * self.width
        if not backward:
            return head
        weight = self.vocabulary * (self.actor.lora is None)
        return head + (hidden + weight) * (_FP32 + self.width)

    @cached_property
    def cost(self) -> LayerCost:
        """Returns the work and traffic of a rank for one micro-batch of `load.tokens`, also to the
        next stage: "pp"."""
        p = self.actor.parallel
        head = 2 * self.vocabulary * self.load.tokens / p.cp
        behind = LayerCost(
            kept=0.0,
            transient=0.0,
            flops=head * self.last,
            sent={"pp": self.message * p.vpp * (not self.last)},
        )
        return reduce(LayerCost.then, self.layers, behind)

    @property
    def gradient_bytes(self) -> dict[str, float]:
        """Returns the float32 bytes of an update that "dp" and "edp" ranks sum."""
        elements = self.elements
        return {"dp": elements.trained_dense * _FP32, "edp": elements.trained_expert * _FP32}
