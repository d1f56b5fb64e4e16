"""The order in which a trainer rank joins the groups of several engines and starts batches: the same on all ranks."""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Condition

from megagrpo.weights.wire.clock import Deadline
from megagrpo.weights.wire.group import PeerLost

JOIN = -1  # the number of a turn in which a link's group is joined: before all batches


class SendOrder:
    """Lets the threads of a rank, one per link, start their batches by number and then by link.

    A GPU runs the kernels of all links in the order of their launch if it has one hardware queue
    (CUDA_DEVICE_MAX_CONNECTIONS=1, which Megatron needs). Two ranks with opposite orders would wait for each other. So
    would they if a group over NCCL, which all of its ranks make together, were made in its first batch: that one has
    another number on every rank. All JOIN turns come first, by link.
    """

    def __init__(self, numbers: Sequence[Sequence[int]]):
        """numbers: of this rank's turns, ascending, by link: JOIN, batches. Links are in the order of all ranks."""
        self._left = [deque(of_link) for of_link in numbers]
        self._changed = Condition()

    @contextmanager
    def turn(self, link: int, deadline: Deadline) -> Iterator[None]:
        """The link's next batch starts inside the block. Raises PeerLost if others keep the turn until the deadline."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._first() == link, deadline.left):
                raise PeerLost(f"the link before this one did not start its batch in {deadline.seconds:.0f} s")
        yield
        with self._changed:
            self._left[link].popleft()
            self._changed.notify_all()

    def leave(self, link: int) -> None:
        """The link starts no more batches: it has sent all of them, or it is lost."""
        with self._changed:
            self._left[link].clear()
            self._changed.notify_all()

    def _first(self) -> int:
        return min((numbers[0], link) for link, numbers in enumerate(self._left) if numbers)[1]
