"""Shared by the tests of several ranks: the pool of ranks, models with transformers' logits and gradients, figures."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.dist.cases import MODELS
from tests.dist.figures import LayoutFigures
from tests.dist.workers import launch
from tests.dist.workers.launch import POOLS, run_transformers


@pytest.fixture(scope="session", autouse=True)
def ranks(request: pytest.FixtureRequest) -> Iterator[None]:
    """The pools of ranks live as long as the session."""
    if request.config.getoption("--hostcuda"):
        launch.POOL = launch.DEVICE_POOL
    yield
    for pool in POOLS:
        pool.stop()


@pytest.fixture(scope="session")
def hf_models(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("hf_models")
    run_transformers(folder, "hf_reference.py", *MODELS)
    return folder


@pytest.fixture(scope="module")
def layout_figures(request: pytest.FixtureRequest) -> Iterator[LayoutFigures]:
    figures = LayoutFigures()
    yield figures
    if request.config.getoption("--figures"):
        name = request.module.__name__.rpartition(".")[2]
        figures.write({"test_actor_layouts": "layouts", "test_actor_families": "layouts_families"}[name])
