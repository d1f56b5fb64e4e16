"""The process group of an engine's ranks and their trainer ranks, on both sides.

One thread per engine makes and drops groups, so they are not in torch.distributed's registry,
which is not thread-safe.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # re-exported from torch._C

from megagrpo.system import environment
from megagrpo.system.errors import translated
from megagrpo.weights.wire.clock import Deadline

_POLL_S = 0.0005


class PeerLost(RuntimeError):
    """A rank of the group has ended or is silent for too long. The group cannot be used any more."""


class GroupLimits(NamedTuple):
    """Limits of a group: seconds for its ranks to meet, and NCCL's thread blocks."""

    join_s: float
    # None: NCCL's default. NCCL connects as many channels, so all ranks need the same number
    max_ctas: int | None = 8


class Send(NamedTuple):
    """A message to `peer`, a rank of the group. values: contiguous [n]."""

    values: Tensor
    peer: int
    tag: int


class Receive(NamedTuple):
    """A message of `peer`, a rank of the group, written into values: contiguous [n]."""

    values: Tensor
    peer: int
    tag: int


class EngineGroup:
    """One rank's end of a group."""

    def __init__(self, name: str, backend: Any, device: torch.device):
        # backend: a ProcessGroupGloo or ProcessGroupNCCL, of which torch's type stubs lack most
        # methods
        self.name = name
        self._backend = backend
        self._device = device

    def set_timeout(self, seconds: float) -> None:
        """Limits every later operation. Until then the shorter limit of the group's store holds.
        Raises PeerLost."""
        with self._started() as backend:
            backend._set_default_timeout(timedelta(seconds=seconds))

    def connect(self) -> None:
        """Collective over NCCL: begins to make the communicator, for which the first batch waits.
        Raises PeerLost.

        It waits only for the first rank. Over gloo, ranks are already connected.
        """
        if self._device.type == "cuda":
            with self._started() as backend:
                backend.eager_connect_single_device(
                    torch.device("cuda", torch.cuda.current_device())
                )

    def broadcast(self, values: Tensor) -> dist.Work:
        """Starts to send `values`, contiguous, from rank 0 of the group to all others. Raises
        PeerLost."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        with self._started() as backend:
            return backend.broadcast([values], options)

    def start(self, messages: Sequence[Send | Receive]) -> list[dist.Work]:
        """Starts a batch's messages. All ranks need the same order of batches. Raises PeerLost if
        they do not meet."""
        if not messages:
            return []
        with self._started() as backend:
            # one launch over the group's communicator, not one for every pair
            if self._device.type == "cuda":
                backend._start_coalescing()
            works = [
                (backend.send if isinstance(message, Send) else backend.recv)(
                    [message.values], message.peer, message.tag
                )
                for message in messages
            ]
            return [backend._end_coalescing()] if self._device.type == "cuda" else works

    def wait(self, works: Sequence[dist.Work], deadline: Deadline) -> None:
        """Waits until the works are done. Raises PeerLost if a peer has ended or is not done by the
        deadline."""
        for work in works:
            # NCCL's wait blocks a stream, but this thread must see the deadline pass.
            while self._device.type == "cuda" and not work.is_completed():
                if deadline.over:
                    raise PeerLost(
                        f"a transfer in group {self.name} took more than {deadline.seconds:.0f} s"
                    )
                time.sleep(_POLL_S)
            with lost_if_cut(f"a transfer in group {self.name} was cut"):
                work.wait(timedelta(seconds=deadline.left))

    def abort(self) -> None:
        """Ends the group, whatever the other ranks do. A wait in it raises, over gloo at its timeout
        at the latest."""
        backend = self._backend
        self._backend = None
        if backend is not None and self._device.type == "cuda":
            backend.abort()
        # Not over gloo: abort closes file descriptors that the destructor closes again, when another
        # connection may have their numbers.

    @contextmanager
    def _started(self) -> Iterator[Any]:
        backend = self._backend
        if backend is None:
            raise PeerLost(f"group {self.name} was ended")
        with lost_if_cut(f"a transfer in group {self.name} did not start"):
            yield backend


def lost_if_cut(problem: str) -> AbstractContextManager[None]:
    """Turns an error of torch's connections inside the block into PeerLost, "problem: reason"."""
    return translated(problem, RuntimeError, raised=PeerLost)


def without_watchdog() -> AbstractContextManager[None]:
    """Lets groups that are made inside have no NCCL watchdog."""
    return environment.temporarily("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")


def join_group(
    store: Store,
    name: str,
    rank: int,
    size: int,
    device: torch.device,
    address: str,
    limits: GroupLimits,
) -> EngineGroup:
    """Collective over the ranks of the group. Makes this rank's end, as SGLang's
    init_custom_process_group does.

    address: of this host, as the other ranks reach it. Over gloo all ranks meet here, over NCCL in
    the first batch. Raises PeerLost if they do not meet. For any thread.
    """
    # torch.distributed's prefixes of a group's keys; both sides have the same torch release
    keys = PrefixStore(f"{device.type}/", PrefixStore(f"{name}/", PrefixStore(name, store)))
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        # The first batch makes the communicator. A non-blocking one raises if ranks do not come
        # within TORCH_NCCL_NONBLOCKING_TIMEOUT, see environment.nccl_variables. A blocking one would
        # wait for ever.
        options.config.blocking = 0
        if limits.max_ctas is not None:
            options.config.max_ctas = limits.max_ctas
        options._timeout = timedelta(seconds=limits.join_s)
        # Read here. Otherwise the watchdog of a trainer or engine ends its process when a peer dies
        # in a transfer. Without the watchdog `wait` raises. Threads share the environment: trainers
        # set the variable around all of them.
        with without_watchdog():
            return EngineGroup(name, dist.ProcessGroupNCCL(keys, rank, size, options), device)
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # missing in torch's type stubs
    options._timeout = timedelta(seconds=limits.join_s)
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    with lost_if_cut(f"the {size} ranks of group {name} did not meet"):
        return EngineGroup(name, dist.ProcessGroupGloo(keys, rank, size, options), device)
