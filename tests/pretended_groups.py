"""Process groups of torch's fake backend, for modules that make groups of ranks that do not exist."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist


@contextmanager
def only_fake_groups() -> Iterator[None]:
    """Makes every new group a fake one: gloo would wait for ranks that do not exist."""
    original = dist.new_group

    # torch's order of parameters; a fake group never waits, so it needs no timeout and no options
    def new_group(ranks=None, timeout=None, backend=None, pg_options=None, **options):
        return original(ranks, backend="fake", **options)

    dist.new_group = new_group
    try:
        yield
    finally:
        dist.new_group = original
