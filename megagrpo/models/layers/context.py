"""The ranks that share a sequence: the context-parallel group, or a part of it where
actor.parallel.dynamic_context lets each micro-batch take 1, 2, 4 ... of its ranks.

A part is made of neighbors in the group, so that small ones stay inside a node.
"""

import copy
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.transformer.attention import Attention

from megagrpo.config.actor import ParallelConfig

# this rank's part of each size below the whole group's; {}: every micro-batch takes all ranks
_parts: dict[int, dist.ProcessGroup] = {}


def make_context_groups(layout: ParallelConfig, deadline: timedelta) -> None:
    """Collective. Makes the parts of all context-parallel groups once, after Megatron's groups."""
    _parts.clear()
    if not layout.dynamic_context:
        return
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, dist.get_process_group_ranks(mpu.get_context_parallel_group()))
    groups = sorted({tuple(ranks) for ranks in everyone})
    for size in layout.context_sizes[:-1]:
        parts = [list(g[i : i + size]) for g in groups for i in range(0, len(g), size)]
        _parts[size], _ = dist.new_subgroups_by_enumeration(parts, deadline)


def context_group(size: int) -> dist.ProcessGroup:
    """Returns the `size` ranks that share sequences with this one."""
    return _parts.get(size) or mpu.get_context_parallel_group()


def changing_group(size: int) -> dist.ProcessGroup | None:
    """Returns the same for Megatron's packed sequences; None if no micro-batch has another."""
    return context_group(size) if _parts else None


def follow_context(chunk: torch.nn.Module) -> None:
    """Lets Megatron's attention, which knows one group, take that of the packed sequences it gets,
    also when a forward is computed again."""

    def take(module: Attention, _: tuple, given: dict) -> None:
        module.pg_collection.cp = given["packed_seq_params"].cp_group

    for module in chunk.modules():
        if isinstance(module, Attention):
            module.pg_collection = copy.copy(module.pg_collection)
            module.register_forward_pre_hook(take, with_kwargs=True)
