"""The actor's layouts on the device, by the jobs and bounds of tests/dist/test_actor_layouts.py.

CI runs one case of each layout of two ranks, --full those of tests/dist by its option --hostcuda.
"""

from pathlib import Path

import pytest

from tests.dist.cases import CI, LayoutCase
from tests.dist.figures import LayoutFigures
from tests.dist.test_actor_layouts import check, jobs_of, one_rank_jobs

pytestmark = pytest.mark.verifies(
    "actor",
    "layouts, publishes, waits on a pretended CUDA device: CUDA's rules, CPU kernels",
    "hostcuda/test_*.py",
    see="[list](pretended-device.md)",
)


def one_of_each_layout() -> list[LayoutCase]:
    """The last case of each layout, so that models, batches and kinds of recompute change."""
    by_layout = {case.layout: case for case in CI if case.world == 2}
    packed = [case for case in CI if case.layout == "CP2" and case.batch == "packed"]
    return list((by_layout | {"CP2": packed[0]}).values())


def test_two_ranks(hf_models: Path, layout_figures: LayoutFigures):
    cases = one_of_each_layout()
    needed = {case.model for case in cases}
    references = {key: job for key, job in one_rank_jobs(hf_models, needed).items() if key[2] == "reference"}
    check(hf_models, 1, references, layout_figures)
    check(hf_models, 2, jobs_of(cases, 2, hf_models), layout_figures)
