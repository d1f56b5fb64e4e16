"""Runs the ranks of tests/dist on the device: their pool is one of another kind."""

from collections.abc import Iterator

import pytest

from tests.dist.conftest import hf_models, layout_figures  # noqa: F401  fixtures
from tests.dist.workers import launch
from tests.dist.workers.launch import DEVICE_POOL


@pytest.fixture(scope="package", autouse=True)
def on_device() -> Iterator[None]:
    """Gives ranks the device inside this folder, and ends them."""
    before = launch.POOL
    launch.POOL = DEVICE_POOL
    yield
    launch.POOL = before
    for pool in launch.POOLS:
        pool.stop()
