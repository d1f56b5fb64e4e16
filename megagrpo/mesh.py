"""Process groups of the loop, and collectives in which one rank acts for others.

A *replica* is the tp x pp x cp ranks that hold one copy of the model and see the same samples; only
its leader talks to services and disk. Data-parallel groups join the ranks with the same coordinates
in their replicas.
"""

import io
import pickle
import traceback
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")
Request = TypeVar("Request", bound=Hashable)
_NOTHING, _VALUE, _ERROR = range(3)  # the result of a rank that acts for others
_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


class RunStopped(RuntimeError):
    """Raised on every rank together; a restart would fail for the same reason."""


class LeaderError(RunStopped):
    """Carries the text of an exception on one rank; raised on every rank."""


@dataclass(frozen=True)
class Mesh:
    """This rank's coordinates and groups among the trainers.

    The world is all trainer ranks; the main rank is global rank 0. Exchanged values are tensors or
    small Python objects.
    """

    rank: int
    world_size: int
    dp_rank: int
    dp_size: int
    dp_group: dist.ProcessGroup | None  # same coordinates in every replica; None in a world of one
    replica_group: dist.ProcessGroup | None  # all ranks of this replica; None in a world of one
    leader: int  # global rank of this replica's leader
    device: torch.device

    @property
    def is_leader(self) -> bool:
        """Returns whether this rank is its replica's leader."""
        return self.rank == self.leader

    @property
    def is_main(self) -> bool:
        """Returns whether this is global rank 0, which also leads its replica."""
        return self.rank == 0

    def share(self, number: int) -> slice:
        """Returns this data-parallel rank's share of a number of things in order."""
        first = self.dp_rank
        return slice(number * first // self.dp_size, number * (first + 1) // self.dp_size)

    def reduce(self, tensor: Tensor, op: str) -> Tensor:
        """Collective over data-parallel ranks. Returns the reduction of a tensor of any shape.

        op: "sum", "max" or "min". The tensor itself is unchanged. Exact for integers.
        """
        out = tensor.clone()
        if self.dp_size > 1:
            dist.all_reduce(out, op=_OPS[op], group=self.dp_group)
        return out

    def gather_dp(self, value: T) -> list[T]:
        """Collective over data-parallel ranks. Returns the value of each of them, in rank order."""
        return _gathered(value, self.dp_size, self.dp_group)

    def gather_world(self, value: T) -> list[T]:
        """Collective. Returns the value of every rank of the world, in rank order."""
        return _gathered(value, self.world_size, None)

    def all_true(self, value: bool) -> bool:
        """Collective. Returns whether every rank of the world passes True."""
        return not self.any_true(not value)

    def any_true(self, value: bool) -> bool:
        """Collective. Returns whether some rank of the world passes True."""
        return self.largest(int(value)) == [1]

    def largest(self, *values: int) -> list[int]:
        """Collective. Returns the largest of each value over the world.

        One all-reduce on the host, because a GPU should not wait for it.
        """
        if self.world_size == 1:
            return list(values)
        largest = torch.tensor(values, dtype=torch.int64)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return largest.tolist()

    def exchange_dp(self, outgoing: list[T]) -> list[T]:
        """Collective over data-parallel ranks. Sends element i to rank i; returns the received
        elements, by rank."""
        if self.dp_size == 1:
            return outgoing
        payloads = [np.frombuffer(pickle.dumps(item), dtype=np.uint8) for item in outgoing]
        sizes = torch.tensor([len(p) for p in payloads], dtype=torch.int64)
        incoming = torch.empty_like(sizes)
        dist.all_to_all_single(incoming, sizes, group=self.dp_group)
        sent = torch.from_numpy(np.concatenate(payloads))
        received = torch.empty(int(incoming.sum()), dtype=torch.uint8)
        dist.all_to_all_single(
            received, sent, incoming.tolist(), sizes.tolist(), group=self.dp_group
        )
        return [pickle.loads(part.numpy().tobytes()) for part in received.split(incoming.tolist())]

    def from_leader(self, make: Callable[[], T], action: str) -> T:
        """Collective. Runs `make` on every replica's leader and broadcasts its result in the
        replica.

        Raises LeaderError on every rank of the world if any leader failed, so that no rank hangs in
        the next collective. action: its name in the message.
        """
        return self._from(self.leader, self.replica_group, make, action)

    def cut_by_leader(self, request: Request, cut: Callable[[Request], T]) -> T:
        """Collective over a replica. Returns the leader's `cut(request)` for this rank's request.

        For large objects of which each rank needs a part. The leader holds one part at a time and
        sends it twice at most: the ranks that need it pass it on, in a tree. `cut` may not raise.
        """
        group = self.replica_group
        if group is None or dist.get_world_size(group) == 1:
            return cut(request)
        requests: list = [None] * dist.get_world_size(group)
        dist.all_gather_object(requests, request, group=group)
        others = dict(zip(dist.get_process_group_ranks(group), requests, strict=True))
        # the leader's own part comes last, which it keeps
        last = others.pop(self.leader)
        for key in sorted(dict.fromkeys(others.values()), key=lambda key: key == last):
            tree = [self.leader, *(rank for rank, other in others.items() if other == key)]
            if self.is_leader:
                mine = cut(key)
                part = io.BytesIO()
                pickle.dump(mine, part)
                self._pass_on(torch.frombuffer(part.getbuffer(), dtype=torch.uint8), tree)
                if key == request:
                    return mine
                del mine, part
            elif key == request:
                return pickle.loads(self._pass_on(None, tree).numpy().data)
        return cut(request)

    def _pass_on(self, data: Tensor | None, tree: list[int]) -> Tensor:
        """Collective over the ranks of a tree. Returns the bytes of its first rank; the children of
        element i are 2 i + 1 and 2 i + 2."""
        group = self.replica_group
        place = tree.index(self.rank)
        if data is None:
            parent, size = tree[(place - 1) // 2], torch.zeros(1, dtype=torch.int64)
            dist.recv(size, parent, group)
            data = torch.empty(int(size), dtype=torch.uint8)
            dist.recv(data, parent, group)
        for child in tree[2 * place + 1 : 2 * place + 3]:
            dist.send(torch.tensor([len(data)]), child, group)
            dist.send(data, child, group)
        return data

    def from_main(self, make: Callable[[], T], action: str) -> T:
        """Collective. Runs `make` on the main rank and broadcasts its result to the world.

        Raises LeaderError on every rank if it failed there. action: its name in the message.
        """
        return self.from_rank(0, make, action)

    def from_rank(self, rank: int, make: Callable[[], T], action: str) -> T:
        """Collective. As from_main, with another rank's `make`."""
        return self._from(rank, dist.group.WORLD, make, action)

    def raise_any(self, error: str) -> None:
        """Collective. Raises LeaderError with every error once, on every rank of the world, if any
        rank passes one that is not empty."""
        if self.any_true(bool(error)):
            raise LeaderError("\n".join(dict.fromkeys(filter(None, self.gather_world(error)))))

    def result_everywhere(self, future: Future[T], action: str) -> T:
        """Collective. Returns the result of this rank's thread. Raises LeaderError on every rank if
        the thread of one failed."""
        error = ""
        if failure := future.exception():
            error = self._failed(action, failure)
        self.raise_any(error)
        return future.result()

    def _failed(self, action: str, failure: BaseException) -> str:
        return f"rank {self.rank}, {action}: {type(failure).__name__}: {failure}"

    def _from(
        self, source: int, group: dist.ProcessGroup | None, make: Callable[[], T], action: str
    ) -> T:
        """Collective. Runs `make` on global rank `source` and broadcasts its result in `group`, to
        which this rank belongs.

        A result that is None on every source is not sent.
        """
        box: list = [None]
        error = ""
        state = _NOTHING
        if self.rank == source:
            try:
                box = [make()]
                if box[0] is not None:
                    state = _VALUE
            except Exception as exc:
                traceback.print_exc()  # into this rank's log; the other ranks get the message
                error = self._failed(action, exc)
                state = _ERROR
        (state,) = self.largest(state)
        if state == _ERROR:
            self.raise_any(error)
        if state == _VALUE and self.world_size > 1:
            dist.broadcast_object_list(box, src=source, group=group, device=torch.device("cpu"))
        return box[0]


def _gathered(value: T, size: int, group: dist.ProcessGroup | None) -> list[T]:
    values = [value] * size
    if size > 1:
        dist.all_gather_object(values, value, group)
    return values


def make_mesh(dp_rank: int, dp_size: int, device: torch.device, deadline_s: float) -> Mesh:
    """Collective. Makes the groups of a world of `dp_size` replicas; this rank belongs to replica
    `dp_rank`.

    Ranks of a replica are ordered by global rank. deadline_s: the longest wait of a collective in
    these groups, in seconds.
    """
    rank = 0
    world = 1
    replicas: list[list[int]] = [[0]]
    replica_group = dp_group = None
    if dist.is_initialized():
        rank = dist.get_rank()
        world = dist.get_world_size()
    if world > 1:
        replica_of: list[int] = [0] * world
        dist.all_gather_object(replica_of, dp_rank)
        replicas = [[r for r in range(world) if replica_of[r] == d] for d in range(dp_size)]
        timeout = timedelta(seconds=deadline_s)
        peers = list(zip(*replicas, strict=True))
        replica_group, _ = dist.new_subgroups_by_enumeration(replicas, timeout)
        dp_group, _ = dist.new_subgroups_by_enumeration(peers, timeout)
    return Mesh(
        rank=rank,
        world_size=world,
        dp_rank=dp_rank,
        dp_size=dp_size,
        dp_group=dp_group,
        replica_group=replica_group,
        leader=replicas[dp_rank][0],
        device=device,
    )
