"""Replaces torch_memory_saver without CUDA: memory stays allocated, the order of calls is checked.

The real package returns a tag's memory to the GPU and keeps its addresses. With this one an engine
on a CPU receives the same calls in the same order, by SGLang's own endpoints, and a second pause of
the same tag raises.
"""

from collections.abc import Iterator
from contextlib import contextmanager


class ResidentMemory:
    """The set of paused tags. Raises RuntimeError for a pause of a paused tag and a resume of any
    other."""

    enabled = True
    hook_mode = "none"

    def __init__(self):
        self._paused: set[str] = set()

    @contextmanager
    def region(self, *args, **kwargs) -> Iterator[None]:
        """Would mark allocations inside as releasable under a tag, capture a graph whose memory can
        be released, or exclude allocations inside."""
        yield

    cuda_graph = disable = region

    def pause(self, tag: str | None = None) -> None:
        """Would release the memory of a tag."""
        if tag in self._paused:
            raise RuntimeError(f"{tag} is paused already")
        self._paused.add(str(tag))

    def resume(self, tag: str | None = None) -> None:
        """Would allocate the memory of a tag again."""
        if tag not in self._paused:
            raise RuntimeError(f"{tag} is not paused")
        self._paused.discard(str(tag))


torch_memory_saver = ResidentMemory()


@contextmanager
def configure_subprocess() -> Iterator[None]:
    """Would load the allocator in child processes."""
    yield
