"""Replaces torch_memory_saver without CUDA: memory stays allocated, the order of calls is checked.

The real one gives the memory behind a tag back to the GPU and keeps its addresses. With this one an engine on a CPU is
asked the same things in the same order, by SGLang's own endpoints, and whoever pauses what is paused is found out.
"""

from collections.abc import Iterator
from contextlib import contextmanager


class ResidentMemory:
    """Knows which tags are paused. Raises RuntimeError for a second pause, and for a resume of what is not paused."""

    enabled = True
    hook_mode = "none"

    def __init__(self):
        self._paused: set[str] = set()

    @contextmanager
    def region(self, tag: str = "default", enable_cpu_backup: bool = False) -> Iterator[None]:
        """Would mark what is allocated inside as releasable under a tag."""
        yield

    @contextmanager
    def cuda_graph(self, *args, **kwargs) -> Iterator[None]:
        """Would capture a graph whose memory can be released."""
        yield

    @contextmanager
    def disable(self) -> Iterator[None]:
        """Would leave out what is allocated inside."""
        yield

    def pause(self, tag: str | None = None) -> None:
        """Would release the memory of a tag."""
        if tag in self._paused:
            raise RuntimeError(f"{tag} is paused already")
        self._paused.add(str(tag))

    def resume(self, tag: str | None = None) -> None:
        """Would take memory for a tag again."""
        if tag not in self._paused:
            raise RuntimeError(f"{tag} is not paused")
        self._paused.discard(str(tag))


torch_memory_saver = ResidentMemory()


@contextmanager
def configure_subprocess() -> Iterator[None]:
    """Would have a child process load the allocator."""
    yield
