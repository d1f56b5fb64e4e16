"""Sections of the GPU kit on the device: they come to their end, and their figures keep their bounds."""

from dataclasses import replace
from pathlib import Path

import pytest

from bench.gpu import SECTIONS
from bench.gpu_kit.children import run_section
from bench.gpu_kit.figures import Setting
from tests.hostcuda.build import environment

CI = ("NCCL without its peer", "reshard end")
NOT_HERE = ("engine", "decode of a 1.7B", "whole loop")  # SGLang's kernels
# small sizes leave nothing to save, and the device does not count what a kernel takes inside
ABOUT_MEMORY = ("head", "memory of a step")


def section(name: str):
    return pytest.param(name, id=name, marks=[] if name in CI else pytest.mark.slow)


@pytest.mark.parametrize("name", [section(name) for name in SECTIONS if name not in NOT_HERE])
def test_section(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for variable, value in (environment() | {"LOCAL_RANK": "3"}).items():
        monkeypatch.setenv(variable, value)
    limited = replace(SECTIONS[name], limit_s=400.0)  # this machine is no GPU
    setting = Setting("cuda", small=True, folder=tmp_path)
    if name == "actor":
        assert run_section("truth", SECTIONS["float32 on the CPU"], setting).status == "done"
    outcome = run_section(name, limited, setting)
    assert outcome.status == "done" and outcome.figures, outcome
    above = [figure for figure in outcome.figures if not figure.within]
    assert not above or name in ABOUT_MEMORY, above
