"""Counts the bytes of live tensors while code runs, and the most there were: with memory or without."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class LiveBytes(TorchDispatchMode):
    """Counts storages that operators return inside, from their first use to their end.

    What kernels need inside one operator, and tensors made before, are not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._alive: dict[int, weakref.ref] = {}
        self._labels: list[str] = [""]
        self._by_label: dict[str, int] = {}
        self.at_peak: dict[str, int] = {}  # bytes by label

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tensors_in(out):
            self._note(tensor)
        return out

    def _note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._alive:
            return
        size, label = storage.nbytes(), self._labels[-1]

        def gone(_: object) -> None:
            del self._alive[key]
            self.now -= size
            self._by_label[label] -= size

        self._alive[key] = weakref.ref(storage, gone)
        self.now += size
        self._by_label[label] = self._by_label.get(label, 0) + size
        if self.now > self.peak:
            self.peak, self.at_peak = self.now, dict(self._by_label)

    @contextmanager
    def labelled(self, label: str) -> Iterator[None]:
        """Counts what is made inside under a label."""
        self._labels.append(label)
        try:
            yield
        finally:
            self._labels.pop()

    def restart(self) -> None:
        """Forgets the peak so far."""
        self.peak, self.at_peak = self.now, dict(self._by_label)


def tensors_in(value: object) -> Iterator[Tensor]:
    """Yields the tensors of an operator's arguments or results; torch's own way through trees takes longer."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)


def storage_bytes(tensors: list[Tensor]) -> int:
    """Adds up the memory behind tensors, shared memory once."""
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())
