"""Hands batches of a plan from a trainer rank to the colocated engine rank through shared memory.

The memory has two halves. One is filled while the engine copies from the other. Keys in the store
of trainer rank 0 give the order:

    trainer:  handle -> offered/0 -> offered/1 -> (taken/0) offered/2 -> ... -> (closed) frees the
    memory
    engine:   (handle) -> (offered/0) taken/0 -> (offered/1) taken/1 -> ...  -> closed
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

import torch
from torch import Tensor
from torch.distributed import DistStoreError

from megagrpo.weights.wire.clock import Deadline
from megagrpo.weights.wire.engine_group import PeerLost, lost_if_cut
from megagrpo.weights.wire.mailbox import Mailbox
from megagrpo.weights.wire.moving import unpack
from megagrpo.weights.wire.shared_buffer import SharedBuffer, open_shared
from megagrpo.weights.wire.transfer_messages import Batches, Message

_HALVES = 2
_ALIGNED = 16  # bytes: any dtype may begin there
_LOOK_S = 0.5  # between two checks whether the other side was given up
_STORE_GONE = "the store of trainer rank 0 is gone"


class Handover:
    """The trainer's end of one transfer to one engine rank.

    batches: of the engine rank, by number. cut: returns why the engine rank was given up, "" if it
    was not. `lost`: why the engine rank takes no more batches, "" while it does. It is no error,
    because the transfer to the others goes on.
    """

    def __init__(
        self,
        store: Mailbox,
        key: str,
        batches: Mapping[int, list[Message]],
        device: torch.device,
        deadline: Deadline,
        patience_s: float,
        cut: Callable[[], str],
    ):
        self._store = store
        self._key = key
        self._batches = batches
        self._device = device
        self._wait_for = lambda word: _wait_for(
            store, f"{key}/{word}", deadline.part(patience_s), cut
        )
        self._index = {number: index for index, number in enumerate(batches)}
        self._half = _half_bytes(list(batches.values()))
        self.lost = ""
        self.num_bytes = _HALVES * self._half
        self._buffer = SharedBuffer(self.num_bytes, device)
        store.set(f"{key}/handle", self._buffer.handle)

    def start(self, number: int) -> list[tuple[Message, Tensor]]:
        """Returns the messages of a batch, each with memory [n], when the engine no longer reads
        it."""
        if number not in self._index:
            return []
        index = self._index[number]
        if index >= _HALVES:
            self._expect(f"taken/{index - _HALVES}")
        return list(
            _parts(self._batches[number], self._buffer.values, index % _HALVES * self._half)
        )

    def offer(self, number: int) -> None:
        """Makes the engine rank copy a batch with complete values."""
        if number in self._index:
            _finish(self._device)
            if not self.lost:
                self._store.set(f"{self._key}/offered/{self._index[number]}")

    def close(self) -> None:
        """Waits until the engine rank has closed its end, and frees the memory."""
        self._expect("closed")
        self._buffer.close(closed_there=not self.lost)
        words = [
            f"{word}/{index}" for index in range(len(self._index)) for word in ("offered", "taken")
        ]
        with self._noting_loss(), lost_if_cut(_STORE_GONE):
            for word in ("handle", "closed", *words):
                self._store.delete(f"{self._key}/{word}")

    def _expect(self, word: str) -> None:
        if not self.lost:
            with self._noting_loss():
                self._wait_for(word)

    @contextmanager
    def _noting_loss(self) -> Iterator[None]:
        try:
            yield
        except PeerLost as exc:
            self.lost = self.lost or str(exc)


def take_batches(
    store: Mailbox,
    key: str,
    batches: Batches,
    parameters: Mapping[str, Tensor],
    device: torch.device,
    deadline: Deadline,
) -> None:
    """The engine's end: fills the parameters. Raises PeerLost at the deadline, or ValueError if the
    two processes cannot share memory."""
    _wait_for(store, f"{key}/handle", deadline)
    half = _half_bytes(batches)
    with open_shared(store.get(f"{key}/handle"), device) as memory:
        for index, batch in enumerate(batches):
            _wait_for(store, f"{key}/offered/{index}", deadline)
            for message, values in _parts(batch, memory, index % _HALVES * half):
                unpack(message, values, parameters)
            _finish(device)
            store.set(f"{key}/taken/{index}")
            del values
        del memory
    store.set(f"{key}/closed")


def _wait_for(
    store: Mailbox, key: str, limit: Deadline, cut: Callable[[], str] = lambda: ""
) -> None:
    """Waits until the store has the key. Raises PeerLost."""
    while True:
        with lost_if_cut(_STORE_GONE), suppress(DistStoreError):
            store.wait(key, min(_LOOK_S, limit.left))
            return
        if reason := cut():
            raise PeerLost(reason)
        if limit.over:
            raise PeerLost(f"waited {limit.seconds:.0f} s for {key}")


def _half_bytes(batches: Sequence[list[Message]]) -> int:
    return max(
        (sum(_aligned(message.num_bytes) for message in batch) for batch in batches),
        default=_ALIGNED,
    )


def _parts(batch: list[Message], memory: Tensor, offset: int) -> Iterator[tuple[Message, Tensor]]:
    for message in batch:
        yield message, memory[offset : offset + message.num_bytes].view(message.dtype)
        offset += _aligned(message.num_bytes)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNED) * _ALIGNED


def _finish(device: torch.device) -> None:
    """Waits until the other process can see the copies too."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
