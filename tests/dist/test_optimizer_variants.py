"""Adam of few bits and Adam on the host: what they compute, and that a resumed run goes on bit by bit.

Transformer Engine's optimizer is the stand-in's. Which parameters lie on the GPU is pretended: there is none.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megagrpo.system.environment import child_environment

ROOT = Path(__file__).parents[2]
SAME_ARITHMETIC = 1e-2  # share of bfloat16 weights that may differ
# Two updates after the first difference, each of at most the learning rate in either direction, and one rounding of
# a weight below 1
FURTHEST = 2 * 2 * 1e-3 + 2**-8


@pytest.mark.timeout(300)
def test_kinds_of_adam_train_and_resume(tmp_path):
    script = ROOT / "tests" / "dist" / "workers" / "optimizer_variants.py"
    environment = child_environment({"PYTHONPATH": f"{ROOT / 'tests' / 'stand_ins'}:{ROOT}", "OMP_NUM_THREADS": "1"})
    done = subprocess.run(
        [sys.executable, script, tmp_path], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "found.json").read_text())
    runs = found["runs"]
    assert {name: run["resumed"] for name, run in runs.items()} == dict.fromkeys(runs, True)
    assert runs["aware True"]["kinds"] == ["FusedAdam"]
    assert runs["half on the host True"]["kinds"] == ["HybridDeviceOptimizer"]
    # Float32 states behind other interfaces are the same arithmetic, in another order: float32 weights are a few
    # eps32 = 2^-23 apart, so a share of some eps32 / eps16 = 2^-16 of them, per operation and update, lies across a
    # rounding boundary of bfloat16 (eps16 = 2^-7). That changes later gradients by eps16: 1e-3 of the weights in all, 0
    # on some processors; another formula changes most, states of few bits 7e-2.
    assert runs["aware True"]["share"] < SAME_ARITHMETIC and runs["half on the host True"]["share"] < SAME_ARITHMETIC
    assert runs["few bits True"]["share"] > 0
    for name in ("aware True", "half on the host True", "few bits True"):
        assert runs[name]["from plain"] <= FURTHEST, name
    assert "use_precision_aware_optimizer" in found["refused"]
