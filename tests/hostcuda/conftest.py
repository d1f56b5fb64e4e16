"""Runs the ranks of tests/dist on the device: their pool is one of another kind."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.dist.conftest import hf_models, layout_figures  # noqa: F401  fixtures
from tests.dist.workers import launch
from tests.dist.workers.launch import DEVICE_POOL


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips this folder beside another build, before any fixture."""
    if torch.version.cuda is None:
        return
    reason = "the pretended device is for a build of torch without CUDA"
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="package", autouse=True)
def on_device() -> Iterator[None]:
    """Gives ranks the device inside this folder, and ends them."""
    before = launch.POOL
    launch.POOL = DEVICE_POOL
    yield
    launch.POOL = before
    for pool in launch.POOLS:
        pool.stop()
