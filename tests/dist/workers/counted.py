"""Counts the calls of torch's collectives of integers and objects."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import torch.distributed as dist

CALLS = ("all_reduce", "all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list")


@contextmanager
def counted_calls() -> Iterator[Counter[str]]:
    """Counts those that are made inside."""
    calls: Counter[str] = Counter()

    def counting(call: str, original: Callable) -> Callable:
        def count(*args, **kwargs):
            calls[call] += 1
            return original(*args, **kwargs)

        return count

    with mock.patch.multiple(dist, **{call: counting(call, getattr(dist, call)) for call in CALLS}):
        yield calls
