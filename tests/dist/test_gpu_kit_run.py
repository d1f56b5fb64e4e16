"""What a bare machine with a GPU has: little but torch, perhaps an older one. The kit, run to its end on a CPU."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from bench.gpu import SECTIONS
from megagrpo.system.environment import child_environment
from tests.dist.workers.launch import POOL
from tests.dist.workers.varlen_signatures import run_rank

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "dist" / "workers" / "bare_machine.py"
NEEDS_A_GPU = {"engine", "decode of a 1.7B", "whole loop"}  # they start SGLang


@pytest.mark.slow
def test_every_section_writes_its_figures(tmp_path):
    command = [sys.executable, str(SCRIPT), "--device", "cpu", "--small", "--out", str(tmp_path), "--commit", "abc"]
    env = child_environment({"PATH": ""})  # neither git nor a compiler
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-5000:]
    report = json.loads((tmp_path / "gpu_cpu.json").read_text())
    sections = {section["section"]: section for section in report["sections"]}
    assert list(sections) == list(SECTIONS) and report["commit"] == "abc"
    assert {name for name, section in sections.items() if section["status"] != "done"} == NEEDS_A_GPU
    table = (tmp_path / "gpu_cpu.md").read_text()
    for name, section in sections.items():
        assert section["figures"], name
        assert f"| {name} |" in table
        for figure in section["figures"]:
            assert figure["value"] is not None or figure["note"], (name, figure)
            assert not isinstance(figure["value"], float) or math.isfinite(figure["value"]), (name, figure)
    libraries = {figure["what"]: figure for figure in sections["head"]["figures"]}
    assert "not here" in libraries["bfloat16: Liger"]["note"]


def test_attention_takes_the_kernel_of_either_release():
    """torch 2.11's has no enable_gqa: it is given every query head's own keys."""
    (found,) = POOL.run(1, run_rank)
    assert found.keys() == {"2.11", "2.13"} and max(found.values()) < 1e-5, found
