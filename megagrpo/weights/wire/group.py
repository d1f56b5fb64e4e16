"""The process group of an engine's ranks and their trainer ranks, on both sides.

Groups are made and dropped in one thread per engine and stay out of torch.distributed's registry,
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
    """A rank of the group is gone, or silent for too long. The group is of no use any more."""


class GroupLimits(NamedTuple):
    """How a group is made: seconds for its ranks to meet, and NCCL's thread blocks."""

    join_s: float
    # None: NCCL's own number; it connects as many channels, so all ranks need the same
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
        """Bounds every later operation; the group was made under the shorter limit of its store."""
        self._backend._set_default_timeout(timedelta(seconds=seconds))

    def connect(self) -> None:
        """Collective over NCCL: begins to make the communicator, which the first batch waits for.
        Raises PeerLost.

        Only the first rank is waited for. Over gloo, ranks are connected already.
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
        """Starts a batch's messages; batches in the same order on all ranks. Raises PeerLost if
        they do not meet."""
        if not messages:
            return []
        with self._started() as backend:
            # one launch over the group's own communicator, not one for every pair
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
        """Waits until the works are done. Raises PeerLost if a peer is gone, or is not done by the
        deadline."""
        for work in works:
            # NCCL's own wait blocks a stream and not this thread, which must see the deadline pass.
            while self._device.type == "cuda" and not work.is_completed():
                if deadline.over:
                    raise PeerLost(
                        f"a transfer in group {self.name} took more than {deadline.seconds:.0f} s"
                    )
                time.sleep(_POLL_S)
            with lost_if_cut(f"a transfer in group {self.name} was cut"):
                work.wait(timedelta(seconds=deadline.left))

    def abort(self) -> None:
        """Ends the group, whatever state the others are in. A wait in it raises, over gloo at its
        timeout at last."""
        backend = self._backend
        self._backend = None
        if backend is not None and self._device.type == "cuda":
            backend.abort()
        # Over gloo without its abort, which closes file descriptors that its destructor then closes
        # once more, when another connection may have got their numbers.

    @contextmanager
    def _started(self) -> Iterator[Any]:
        backend = self._backend
        if backend is None:
            raise PeerLost(f"group {self.name} was ended")
        with lost_if_cut(f"a transfer in group {self.name} did not start"):
            yield backend


def lost_if_cut(what: str) -> AbstractContextManager[None]:
    """Turns an error of torch's connections inside into PeerLost, which begins with `what`."""
    return translated(what, RuntimeError, raised=PeerLost)


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
    the first batch. Raises PeerLost if they do not.
    """
    # The prefixes that torch.distributed puts before a group's keys, in the same torch release on
    # both sides.
    keys = PrefixStore(f"{device.type}/", PrefixStore(f"{name}/", PrefixStore(name, store)))
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        # The communicator is made in the first batch. Non-blocking, it raises if ranks do not come
        # within TORCH_NCCL_NONBLOCKING_TIMEOUT, see environment.nccl_variables; else it would
        # wait for ever.
        options.config.blocking = 0
        if limits.max_ctas is not None:
            options.config.max_ctas = limits.max_ctas
        options._timeout = timedelta(seconds=limits.join_s)
        # Read here: else the watchdog of a rank, also of an engine's, ends its process when a peer
        # dies in a transfer. Without it `wait` raises. Trainers join in threads, which share the
        # environment: they set it around all.
        with environment.temporarily("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0"):
            return EngineGroup(name, dist.ProcessGroupNCCL(keys, rank, size, options), device)
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # missing in torch's type stubs
    options._timeout = timedelta(seconds=limits.join_s)
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    with lost_if_cut(f"the {size} ranks of group {name} did not meet"):
        return EngineGroup(name, dist.ProcessGroupGloo(keys, rank, size, options), device)
