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
    # float32 states behind other interfaces are the same arithmetic, in another order at most
    assert runs["aware True"]["from plain"] == 0
    assert runs["half on the host True"]["from plain"] < 1e-3
    assert 0 < runs["few bits True"]["from plain"] < 4e-3, "two updates of 1e-3 and one more, rounded"
    assert "use_precision_aware_optimizer" in found["refused"]
