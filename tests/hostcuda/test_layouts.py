"""The actor's layouts on the device, by the jobs and bounds of tests/dist/test_actor_layouts.py.

Context parallelism is not among them: on GPUs it needs Transformer Engine.
"""

from pathlib import Path

import pytest

from tests.dist.cases import CI, LAYOUTS
from tests.dist.figures import LayoutFigures
from tests.dist.test_actor_layouts import (
    check,
    jobs_of,
    one_rank,  # noqa: F401  a fixture
    special_jobs,
)

POSSIBLE = [case for case in CI if "cp" not in LAYOUTS[case.layout]]


def test_two_ranks(one_rank: Path, layout_figures: LayoutFigures):  # noqa: F811
    check(one_rank, 2, jobs_of(POSSIBLE, 2, one_rank), layout_figures)


@pytest.mark.slow
def test_four_ranks(one_rank: Path, layout_figures: LayoutFigures):  # noqa: F811
    check(one_rank, 4, jobs_of(POSSIBLE, 4, one_rank), layout_figures)


@pytest.mark.slow
def test_few_samples_distributed_optimizer_and_recompute(
    one_rank: Path, layout_figures: LayoutFigures
):  # noqa: F811
    for model in ("qwen3", "qwen3_moe"):
        check(one_rank, 2, special_jobs(model, one_rank), layout_figures)
