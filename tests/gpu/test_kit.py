"""Every section of the GPU kit runs to its end on one GPU, and no figure is above its bound."""

import pytest

from bench.gpu import SECTIONS
from bench.gpu_kit.children import run_section
from bench.gpu_kit.figures import Setting
from bench.gpu_kit.report import above_bounds


@pytest.fixture(scope="module")
def setting(tmp_path_factory) -> Setting:
    """One scratch folder for all sections: some leave files for later ones."""
    return Setting("cuda", small=False, folder=tmp_path_factory.mktemp("kit"))


@pytest.mark.parametrize("name", SECTIONS)
def test_section(name, setting):
    outcome = run_section(name, SECTIONS[name], setting)
    if outcome.status == "unavailable":
        pytest.skip(outcome.reason)
    assert outcome.status == "done", "\n".join([outcome.reason, *outcome.last_lines])
    assert not above_bounds([outcome])
