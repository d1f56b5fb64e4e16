"""Who computes with whom: the process groups that the loop needs, and how a leader speaks for its replica.

A *replica* is the tp x pp x cp ranks that hold one copy of the model and see the same samples; its leader alone talks to
the outside. Data-parallel groups join the ranks with the same place in their replicas.
"""

import pickle
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")
_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


class RunStopped(RuntimeError):
    """Raised on every rank together, for a reason that the same ranks started again would meet again."""


class LeaderError(RunStopped):
    """An exception on one rank, raised on every rank with its text."""


@dataclass(frozen=True)
class Mesh:
    rank: int
    world_size: int
    dp_rank: int
    dp_size: int
    dp_group: dist.ProcessGroup | None  # same place in every replica
    replica_group: dist.ProcessGroup | None  # all ranks of this replica
    leader: int  # global rank of this replica's leader
    device: torch.device

    @property
    def is_leader(self) -> bool:
        return self.rank == self.leader

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def reduce(self, tensor: Tensor, op: str) -> Tensor:
        """All-reduce over data-parallel ranks, `op` "sum", "max" or "min"; returns a new tensor. Exact for integers."""
        out = tensor.clone()
        if self.dp_size > 1:
            dist.all_reduce(out, op=_OPS[op], group=self.dp_group)
        return out

    def gather_dp(self, value: T) -> list[T]:
        """The value of every data-parallel rank, in rank order. Small Python objects only."""
        values: list = [value] * self.dp_size
        if self.dp_size > 1:
            dist.all_gather_object(values, value, group=self.dp_group)
        return values

    def gather_world(self, value: T) -> list[T]:
        """The value of every rank, in rank order. Small Python objects only. Collective over the world."""
        values: list = [value] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(values, value)
        return values

    def all_true(self, value: bool) -> bool:
        """Whether every rank passes True. Collective over the world."""
        return all(self.gather_world(value))

    def gather_main(self, value: T) -> list[T]:
        """On the main rank the value of every data-parallel rank, in rank order; elsewhere an empty list."""
        if self.dp_size == 1:
            return [value] if self.is_main else []
        first = dist.get_global_rank(self.dp_group, 0)
        values: list | None = [None] * self.dp_size if self.rank == first else None
        dist.gather_object(value, values, dst=first, group=self.dp_group)
        return values if self.is_main else []

    def exchange_dp(self, outgoing: list[T]) -> list[T]:
        """Give the i-th element to data-parallel rank i; returns what each rank gave to this one, in rank order."""
        if self.dp_size == 1:
            return outgoing
        payloads = [np.frombuffer(pickle.dumps(item), dtype=np.uint8) for item in outgoing]
        sizes = torch.tensor([len(p) for p in payloads], dtype=torch.int64)
        incoming = torch.empty_like(sizes)
        dist.all_to_all_single(incoming, sizes, group=self.dp_group)
        sent = torch.from_numpy(np.concatenate(payloads))
        received = torch.empty(int(incoming.sum()), dtype=torch.uint8)
        dist.all_to_all_single(received, sent, incoming.tolist(), sizes.tolist(), group=self.dp_group)
        return [pickle.loads(part.numpy().tobytes()) for part in received.split(incoming.tolist())]

    def from_leader(self, make: Callable[[], T], what: str) -> T:
        """Run `make` on every replica's leader and give its result to the whole replica.

        Raises LeaderError on every rank of the world when any leader failed, so nobody waits in the next collective.
        """
        value, error = None, ""
        if self.is_leader:
            try:
                value = make()
            except Exception as exc:
                traceback.print_exc()  # for this rank's log; the others need the reason
                error = f"rank {self.rank}, {what}: {type(exc).__name__}: {exc}"
        self.raise_any(error)
        if self.replica_group is None:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=self.leader, group=self.replica_group, device=torch.device("cpu"))
        return box[0]

    def from_main(self, make: Callable[[], T], what: str) -> T:
        """Runs `make` on rank 0 and gives its result to every rank. Collective over the world.

        Raises LeaderError on every rank when it failed there; `what` says in its message what was being done.
        """
        value, error = None, ""
        if self.is_main:
            try:
                value = make()
            except Exception as exc:
                traceback.print_exc()  # for rank 0's log; the others need the reason
                error = f"rank 0, {what}: {type(exc).__name__}: {exc}"
        self.raise_any(error)
        if self.world_size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        return box[0]

    def raise_any(self, error: str) -> None:
        """Collective over the world: raise LeaderError everywhere if any rank passes a non-empty text."""
        found = list(dict.fromkeys(text for text in self.gather_world(error) if text))  # what all found is said once
        if found:
            raise LeaderError("\n".join(found))


def make_mesh(dp_rank: int, dp_size: int, device: torch.device, deadline_s: float) -> Mesh:
    """Collective over the world. `dp_rank`: which replica this rank belongs to; ranks of a replica are ordered by global rank."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    if world == 1:
        return Mesh(0, 1, 0, 1, None, None, 0, device)
    places: list = [None] * world
    dist.all_gather_object(places, dp_rank)
    replicas = [[r for r in range(world) if places[r] == d] for d in range(dp_size)]
    timeout = timedelta(seconds=deadline_s)
    replica_group = dp_group = None
    for members in replicas:
        group = dist.new_group(members, timeout=timeout)
        replica_group = group if rank in members else replica_group
    for members in zip(*replicas, strict=True):
        group = dist.new_group(list(members), timeout=timeout)
        dp_group = group if rank in members else dp_group
    return Mesh(rank, world, dp_rank, dp_size, dp_group, replica_group, replicas[dp_rank][0], device)
