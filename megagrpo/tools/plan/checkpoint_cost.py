"""Bytes and host memory of saving and resuming, for `megagrpo check`. Loads no torch.

For each trained parameter a checkpoint holds the weight in the model's dtype and Adam's state in
float32: two moments, and the weight itself if the optimizer is distributed or the weights are
narrower. Under LoRA it holds only the adapters; host bytes count them as cut like the weights.
bench/checkpoints.py compares whole models with measured figures.
"""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from megagrpo.checkpoint.folder import finished_checkpoints
from megagrpo.config.schema import ActorConfig, ExperimentConfig, ParallelConfig
from megagrpo.models.architecture import Architecture
from megagrpo.models.table import parameter_counts, tensor_groups
from megagrpo.models.tensors import TensorSpec
from megagrpo.tools.plan.hardware import gigabytes

# Megatron gathers moment by moment: at the peak these bytes exist in addition to the whole state of
# 3 float32 a parameter (received pieces, their concatenation, and those of the moment before).
_GATHER_BYTES = 3 * 4
_DISK_GB_S = 10.0  # of a cluster's file system, all nodes together; 1e9 bytes


@dataclass(frozen=True)
class CheckpointCost:
    """Bytes of a save and of a resume; `host`: of the fullest node, in addition to training. See
    actor/saving.py."""

    file_bytes: float  # of one checkpoint
    save_host_bytes: dict[bool, float]  # by form: reshardable or not
    resume_host_bytes: float  # from a reshardable one; from another none

    @property
    def read_bytes(self) -> float:
        """Returns the bytes that all ranks read in a resume: every file for its checksum, then
        every tensor once."""
        return 2 * self.file_bytes


def checkpoint_cost(arch: Architecture, actor: ActorConfig, ranks_per_node: int) -> CheckpointCost:
    """Returns the costs of an experiment's checkpoints. Raises ValueError if the layers cannot be
    cut into stages."""
    width = 2 if actor.dtype == "bfloat16" else 4
    divided = actor.optimizer.distributed
    state = 12 if divided or width == 2 else 8  # bytes a parameter
    stages = _stages(arch, actor)
    tied = arch.tied and actor.parallel.pp > 1 and actor.lora is None
    shared = arch.vocab_size * arch.hidden_size if tied else 0
    parameters = sum(dense + expert for dense, expert in stages)
    # the weights of a tied embedding are written once, its distributed state by both of its stages
    files = (parameters - shared) * width + (parameters if divided else parameters - shared) * state
    ranks = [_host_of_a_rank(rank, stages, actor, width, state) for rank in range(actor.world_size)]
    firsts = range(0, actor.world_size, ranks_per_node)
    own, gathered, restored = (
        max(sum(kind[first : first + ranks_per_node]) for first in firsts)
        for kind in zip(*ranks, strict=True)
    )
    if not divided:
        gathered, restored = own, 0.0
    return CheckpointCost(files, {False: own, True: gathered}, restored)


def _host_of_a_rank(
    rank: int, stages: list[tuple[int, int]], actor: ActorConfig, width: int, state: int
) -> tuple[float, float, float]:
    """Returns a rank's host bytes: to save its own parts, to save for any layout, to load a save
    for any layout."""
    p = actor.parallel
    at = rank_coordinates(rank, actor.world_size, p)
    (dense, expert) = stages[at["pp"]]
    stage_size = actor.world_size // p.pp
    own = restored = weights = whole = 0.0
    # of a save for any layout: while it gathers one part after the other, or when all is copied for
    # files
    peak = 0.0
    for held, copies, gathers in (
        (dense / p.tp, stage_size // p.tp, at["dp"] == at["cp"] == 0),
        (expert / (p.etp * p.ep), stage_size // (p.etp * p.ep), at["edp"] == 0),
    ):
        own += held / copies * (width + state)
        restored += held * state
        weights += held / copies * width
        laid_out = held / copies * state  # by every rank, for the one that gathers
        peak = max(peak, whole + laid_out + (held * (state + _GATHER_BYTES) if gathers else 0.0))
        whole += held * state if gathers else 0.0
    return own, max(peak, 2 * whole + weights), restored


def _stages(arch: Architecture, actor: ActorConfig) -> list[tuple[int, int]]:
    """Counts the parameters of each pipeline stage: dense ones, and those of all experts."""
    layers = stage_of_layer(arch, actor.parallel)
    counts = [[0, 0] for _ in range(actor.parallel.pp)]
    for spec, number in tensor_groups(arch, actor.adapters).items():
        if spec.is_adapter == (actor.lora is not None):
            for stage in stages_of(spec, arch, layers):
                counts[stage][spec.expert] += number * spec.size
    return [(dense, expert) for dense, expert in counts]


def stage_of_layer(arch: Architecture, parallel: ParallelConfig) -> list[int]:
    """Returns the pipeline stage of every layer, and of a draft's; each stage has one chunk of
    every virtual round."""
    layers = parallel.stage_layers(arch.num_layers)
    rounds = range(parallel.vpp)
    found = [
        stage
        for _ in rounds
        for stage, number in enumerate(layers)
        for _ in range(number // parallel.vpp)
    ]
    return found + [parallel.pp - 1] * arch.draft


def stages_of(spec: TensorSpec, arch: Architecture, layers: list[int]) -> list[int]:
    """Returns the stages that have a tensor: a tied embedding is on the first and the last. layers:
    stage of each."""
    if arch.vision is not None and arch.vision.owns(spec.name):
        return [0]
    words = spec.name.split(".")
    if words[:2] == ["model", "layers"]:
        return [layers[int(words[2])]]
    first = 0
    last = max(layers)
    if words[1] == "embed_tokens":
        return [first, last] if arch.tied and last else [first]
    return [last]


def checkpoint_lines(
    config: ExperimentConfig, arch: Architecture | None, everything: bool
) -> list[str]:
    """Returns when the run is saved and the costs of saving and resuming."""
    c = config.checkpoint
    when = f"every {c.every} steps and" if c.every else "only"
    lines = [f"checkpoint {when} at the end, {c.keep} kept, resume {c.resume}"]
    if c.dir is not None:
        lines.append(f"  in         {c.dir}")
    if arch is None:
        return lines
    per_node, cost = _per_node(config, arch)
    most = gigabytes(_kept_bytes(config, arch, cost) * (c.keep + 1))
    lines.append(f"  on disk    up to {most}, while one is written")
    if not everything:
        return lines
    forms = {True: "for any layout", False: "for this layout alone"}
    last = (False, True) if c.every else (True,)
    shown = {"last": last, "always": (True,), "never": (False,)}[c.reshardable]
    lines += [
        f"  a save {forms[reshardable]}: {gigabytes(cost.file_bytes)}, "
        f"{_disk_seconds(cost.file_bytes)}; {gigabytes(cost.save_host_bytes[reshardable])} of host "
        f"memory on the fullest node ({per_node} ranks)"
        for reshardable in shown
    ]
    lines.append(
        f"  a resume: reads {gigabytes(cost.read_bytes)} (checksums, then the state), "
        f"{_disk_seconds(cost.read_bytes)}; {gigabytes(cost.resume_host_bytes)} of host "
        "memory a node from one for any layout"
    )
    return lines


def _per_node(config: ExperimentConfig, arch: Architecture) -> tuple[int, CheckpointCost]:
    """Returns how many trainer ranks the fullest node has, and what a checkpoint then costs."""
    ranks = min(config.actor.world_size, config.cluster.gpus_per_node)
    return ranks, checkpoint_cost(arch, config.actor, ranks)


def _kept_bytes(config: ExperimentConfig, arch: Architecture, cost: CheckpointCost) -> float:
    """Returns the bytes of a checkpoint and of its Hugging Face folder, adapters merged."""
    width = 2 if config.actor.dtype == "bfloat16" else 4
    exported = parameter_counts(arch).total * width * (config.checkpoint.hf_every > 0)
    return cost.file_bytes + exported


def disk_advice(config: ExperimentConfig, arch: Architecture | None) -> list[str]:
    """Returns that the disk has no room for the checkpoints, as it is seen from here."""
    if arch is None:
        return []
    place = Path(config.checkpoint.dir or config.output_dir).absolute()
    folder = next(folder for folder in (place, *place.parents) if os.path.exists(folder))
    if not os.access(folder, os.W_OK):
        return [f"{folder} cannot be written by this user, who may not be the run's"]
    free = shutil.disk_usage(folder).free
    _, cost = _per_node(config, arch)
    # by an earlier start
    saved = len(finished_checkpoints(config.run_folder.checkpoints)) if folder == place else 0
    wanted = _kept_bytes(config, arch, cost) * max(config.checkpoint.keep + 1 - saved, 1)
    if wanted <= free:
        return []
    return [
        f"checkpoints take up to {gigabytes(wanted)}, and {gigabytes(free)} are free at {folder} on "
        "this machine: checkpoint.keep takes fewer, checkpoint.dir names another disk"
    ]


def _disk_seconds(size: float) -> str:
    seconds = size / _DISK_GB_S / 1e9
    return f"{seconds:{'.0f' if seconds >= 10 else '.2g'}} s at {_DISK_GB_S:g} GB/s"


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
