"""What the trainers of an experiment hold and compute, phase by phase, from the model's numbers alone. Loads no torch.

Bytes of one rank are given by part; docs/planning.md states the formula of each.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from megagrpo.config.actor import ActorConfig, ParallelConfig
from megagrpo.families.architecture import Architecture
from megagrpo.families.table import model_tensors
from megagrpo.families.tensors import TensorSpec, adapter_tensors
from megagrpo.planning.checkpoint_cost import checkpoint_cost
from megagrpo.planning.layer_costs import LayerCost, layer_cost
from megagrpo.planning.optimizer_bytes import optimizer_bytes

PHASES = ("load", "rollout", "logprobs", "reference", "update", "publish", "checkpoint", "resume")
_TILE_COLUMNS = 8192  # of algo/logprob.py, which loads torch
_NCCL_BYTES = 400 * 2**20  # of one communicator between GPUs, at NCCL's default buffer sizes and channels: estimated
_FP32 = 4


@dataclass(frozen=True)
class Load:
    """What a rank is given to compute."""

    micro_batch_tokens: int
    longest: int  # tokens of the longest sample: a micro-batch of its own where it exceeds the budget
    expert_imbalance: float = 1.0  # tokens of the fullest expert rank over the mean

    @property
    def tokens(self) -> int:
        """Returns the most tokens of a micro-batch."""
        return max(self.micro_batch_tokens, self.longest)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Returns the sequences of a full micro-batch: as many of the longest as fit, and the rest."""
        whole, rest = divmod(self.tokens, self.longest)
        return (self.longest,) * whole + ((rest,) if rest else ())


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
class StageCost:
    """What one pipeline stage computes and sends, of one rank and one micro-batch of `tokens`."""

    layers: int
    tokens: int  # of the micro-batch, over all context-parallel ranks
    flops: float  # of a forward without attention's scores; a backward is twice as many
    pair_flops: float  # of a forward, for each query and key that it sees: a sequence of n has n^2 / 2 / cp on a rank
    sent: Mapping[str, float]  # bytes in a forward: "tp", "cp", "ep", "pp"; a backward sends as many
    recomputed: float  # forwards that the backward adds: 0 or 1
    gradient_bytes: Mapping[str, float]  # float32 of an update that "dp" and "edp" ranks sum


@dataclass(frozen=True)
class TrainerSide:
    """The trainers' half of a plan."""

    phases: Mapping[str, RankMemory]  # the fullest rank of each of PHASES
    host_bytes: Mapping[str, float]  # of the fullest node, by what they are for
    stages: tuple[StageCost, ...]
    ranks: Mapping[str, tuple[RankMemory, ...]] = field(repr=False)  # by phase, one of every pipeline stage

    @property
    def peak(self) -> tuple[str, RankMemory]:
        """Returns the phase that needs most, and its fullest rank."""
        phase = max(self.phases, key=lambda name: self.phases[name].total)
        return phase, self.phases[phase]


def trainer_side(
    arch: Architecture,
    actor: ActorConfig,
    load: Load,
    *,
    reference: bool = False,
    bucket_mb: float = 512.0,
    ranks_per_node: int = 8,
) -> TrainerSide:
    """Returns memory and work of the trainers. Raises ValueError where the layers cannot be cut into stages.

    reference: whether the loss needs a second model, which is swapped in.
    """
    held = stage_parameters(arch, actor)
    stages = [
        _Stage(arch, actor, load, number, layers, held[number])
        for number, layers in enumerate(actor.parallel.stage_layers(arch.num_layers))
    ]
    ranks = {
        phase: tuple(stage.memory(phase, bucket_mb * 2**20) for stage in stages)
        for phase in PHASES
        if phase != "reference" or reference
    }
    cost = checkpoint_cost(arch, actor, min(ranks_per_node, actor.world_size))
    node = min(ranks_per_node, actor.world_size)
    weights = max(stage.weights for stage in stages)
    host = {
        "reference": weights * node if reference and actor.lora is None else 0.0,
        "optimiser": max(stage.optimiser_on_host() for stage in stages) * node,
        "checkpoint": max(cost.save_host_bytes.values()),
        "resume": max(cost.resume_host_bytes.values()),
    }
    return TrainerSide(
        phases={phase: max(found, key=lambda rank: rank.total) for phase, found in ranks.items()},
        host_bytes=host,
        stages=tuple(stage.cost() for stage in stages),
        ranks=ranks,
    )


def stage_sides(
    arch: Architecture, actor: ActorConfig, load: Load, held: Sequence["Held"]
) -> list[tuple[RankMemory, StageCost]]:
    """Returns of every pipeline stage the memory of its update and its work, for weights that were counted before."""
    layers = actor.parallel.stage_layers(arch.num_layers)
    stages = [_Stage(arch, actor, load, number, layers[number], held[number]) for number in range(actor.parallel.pp)]
    return [(stage.memory("update", 0.0), stage.cost()) for stage in stages]


@dataclass(frozen=True)
class Held:
    """Counts elements on one rank of a pipeline stage."""

    dense: float
    expert: float
    trained_dense: float
    trained_expert: float


def in_flight(parallel: ParallelConfig, stage: int) -> float:
    """Returns how many micro-batches' worth of a stage's activations exist at the peak of Megatron's schedule.

    For as many micro-batches as stages at least, with virtual stages twice as many.
    """
    p = parallel
    if p.vpp == 1:
        return p.pp - stage
    return min((p.pp - stage - 1) * 2 + (p.vpp - 1) * p.pp + 1, 2 * p.pp * p.vpp) / p.vpp


_ROW_PARALLEL = ("o_proj", "down_proj")  # cut along the inputs: their A is, and B is whole; of the others it is B


def stage_parameters(arch: Architecture, actor: ActorConfig) -> list[Held]:
    """Counts what a rank of each pipeline stage holds, and what of it has gradients."""
    p = actor.parallel
    model = list(model_tensors(arch))
    adapters = [] if actor.lora is None else list(adapter_tensors(model, actor.lora.targets, actor.lora.rank))
    stage_of_layer = _stage_of_layer(arch, actor)
    counts = [{"dense": 0.0, "expert": 0.0, "trained_dense": 0.0, "trained_expert": 0.0} for _ in range(p.pp)]
    for spec in [*model, *adapters]:
        trained = spec.trained and (actor.lora is None or ".lora_" in spec.name)
        for stage in _stages_of(spec, arch, p.pp, stage_of_layer):
            size = elements_held(spec, arch, actor)
            kind = "expert" if spec.expert else "dense"
            counts[stage][kind] += size
            if trained:
                counts[stage]["trained_" + kind] += size
    return [Held(**count) for count in counts]


def trained_elements(arch: Architecture, actor: ActorConfig) -> int:
    """Counts what of the whole model has gradients: its parameters, or those of its adapters."""
    tensors = model_tensors(arch)
    if actor.lora is not None:
        tensors = adapter_tensors(tensors, actor.lora.targets, actor.lora.rank)
    return sum(spec.size for spec in tensors if spec.trained)


def _stage_of_layer(arch: Architecture, actor: ActorConfig) -> list[int]:
    p = actor.parallel
    layers = p.stage_layers(arch.num_layers)
    rounds = range(p.vpp)  # each stage has one chunk of every round
    return [stage for _ in rounds for stage, number in enumerate(layers) for _ in range(number // p.vpp)]


def _stages_of(spec: TensorSpec, arch: Architecture, pp: int, stage_of_layer: list[int]) -> list[int]:
    words = spec.name.split(".")
    if words[:2] == ["model", "layers"]:
        return [stage_of_layer[int(words[2])]]
    if words[1] == "embed_tokens":
        return [0, pp - 1] if arch.tied and pp > 1 else [0]
    return [pp - 1]


def elements_held(spec: TensorSpec, arch: Architecture, actor: ActorConfig) -> float:
    """Returns how many elements of a tensor a rank holds that has any of it, on average over experts."""
    p = actor.parallel
    if spec.name in ("model.embed_tokens.weight", "lm_head.weight"):
        return -(-arch.vocab_size // p.tp) * arch.hidden_size
    if spec.whole:
        return spec.size
    cut = p.etp if spec.expert else p.tp
    *_, projection, half, _ = ["", "", *spec.name.split(".")]
    if half in ("lora_A", "lora_B") and (half == "lora_A") != (projection in _ROW_PARALLEL):
        cut = 1
    return spec.size / (cut * (p.ep if spec.expert else 1))


class _Stage:
    """One pipeline stage: the memory of each of its ranks, which are alike, and its work."""

    def __init__(self, arch: Architecture, actor: ActorConfig, load: Load, number: int, layers: int, held: Held):
        self.arch, self.actor, self.load, self.number, self.held = arch, actor, load, number, held
        p = actor.parallel
        self.width = 2 if actor.dtype == "bfloat16" else 4
        self.part = load.tokens / p.cp / p.tp
        self.first, self.last = number == 0, number == p.pp - 1
        stage_of_layer = _stage_of_layer(arch, actor)
        self.layers: list[LayerCost] = [
            layer_cost(arch, actor, load.tokens, arch.is_moe and layer >= arch.dense_layers, load.expert_imbalance)
            for layer, stage in enumerate(stage_of_layer)
            if stage == number
        ]
        assert len(self.layers) == layers
        self.weights = (held.dense + held.expert) * self.width

    def memory(self, phase: str, bucket_bytes: float) -> RankMemory:
        """Returns the bytes of a rank of this stage in one of PHASES."""
        parts = {"parameters": self.weights, **self._training_state(), "NCCL": self._communicators()}
        if phase in ("logprobs", "reference"):
            layer, head = self._forward_only(), self._head(backward=False)
            parts |= {"head": head} if head > layer else {"activations": layer}
        if phase == "reference" and self.actor.lora is None:
            parts["live weights"] = self.weights
        if phase == "update":
            parts |= self._update()
        if phase == "publish":
            parts["staging"] = min(2 * bucket_bytes, self.weights)
            if self.actor.lora is not None:
                parts["weights before merging"] = self.weights
        return RankMemory(self._rank(), self._kind(), {name: size for name, size in parts.items() if size})

    def _training_state(self) -> dict[str, float]:
        held, shards, each = self.held, self._shards(), optimizer_bytes(self.actor)
        return {
            "gradients": (held.trained_dense + held.trained_expert) * each.gradient,
            "optimiser": shards * each.state,
        }

    def optimiser_on_host(self) -> float:
        """Returns the bytes that a rank's optimiser has in host memory."""
        return self._shards() * optimizer_bytes(self.actor).host

    def _shards(self) -> float:
        """Returns the trained elements whose state this rank keeps."""
        p, actor, held = self.actor.parallel, self.actor, self.held
        stage = actor.world_size // p.pp
        copies = (stage // p.tp, stage // (p.etp * p.ep)) if actor.optimizer.distributed else (1, 1)
        return held.trained_dense / copies[0] + held.trained_expert / copies[1]

    def _communicators(self) -> float:
        p, actor = self.actor.parallel, self.actor
        expert_copies = actor.world_size // (p.etp * p.ep * p.pp)
        groups = [actor.world_size, p.tp, p.pp, p.cp, actor.dp, p.ep, p.etp, expert_copies]
        return _NCCL_BYTES * sum(size > 1 for size in groups)

    def _update(self) -> dict[str, float]:
        """Returns the fullest moment of forward and backward: the head's backward, or the largest layer's."""
        hidden = self.arch.hidden_size * self.part * self.width
        if self.actor.recompute == "full":
            kept = hidden * len(self.layers)
            again = max((layer.kept for layer in self.layers), default=0.0)
        else:  # selective counts as none: what it computes again and so does not keep hangs on model and kernels
            kept, again = sum(layer.kept for layer in self.layers), 0.0
        kept = (kept + hidden) * in_flight(
            self.actor.parallel, self.number
        )  # and a message of the pipeline, or the final norm
        layer = again + max((layer.transient for layer in self.layers), default=0.0)
        head = self._head(backward=True)
        return {"activations": kept, "head": head} if head > layer else {"activations": kept + layer}

    def _forward_only(self) -> float:
        return max((layer.kept / 2 + layer.transient for layer in self.layers), default=0.0)

    def _head(self, backward: bool) -> float:
        """Returns the bytes of log-probabilities from hidden states: tiles of logits, and in the backward gradients."""
        if not self.last:
            return 0.0
        arch, p, actor = self.arch, self.actor.parallel, self.actor
        rows = -(-arch.vocab_size // p.tp)
        tile = min(actor.logprob_chunk_tokens, self.load.tokens) * min(rows, _TILE_COLUMNS) * _FP32
        hidden = arch.hidden_size * self.load.tokens / p.cp
        if not backward:
            return 2 * tile + 2 * hidden * self.width
        weight = 0.0 if actor.lora is not None else rows * arch.hidden_size * (_FP32 + self.width)
        return 2 * tile + 2 * hidden * self.width + hidden * (_FP32 + self.width) + weight

    def _rank(self) -> int:
        return self.number * (self.actor.world_size // self.actor.parallel.pp)

    def _kind(self) -> str:
        if self.first and self.last:
            return "only stage"
        return "first stage" if self.first else "last stage" if self.last else "middle stage"

    def cost(self) -> StageCost:
        """Returns the work of a rank of this stage."""
        arch, p, actor = self.arch, self.actor.parallel, self.actor
        sent = {key: sum(layer.sent[key] for layer in self.layers) for key in ("tp", "cp", "ep")}
        sent["pp"] = arch.hidden_size * self.part * self.width * p.vpp if p.pp > 1 and not self.last else 0.0
        head = 2 * arch.hidden_size * -(-arch.vocab_size // p.tp) * self.load.tokens / p.cp if self.last else 0.0
        return StageCost(
            layers=len(self.layers),
            tokens=self.load.tokens,
            flops=sum(layer.flops for layer in self.layers) + head,
            pair_flops=sum(layer.pair_flops for layer in self.layers),
            sent=sent,
            recomputed=float(actor.recompute == "full"),
            gradient_bytes={"dp": self.held.trained_dense * _FP32, "edp": self.held.trained_expert * _FP32},
        )
