"""The whole loop on the device: trainers and an engine of SGLang, weights by reshard over the played NCCL."""

from pathlib import Path

import pytest
from run_megagrpo import assert_agrees, metrics, prepared, run_experiment

from megagrpo.system.run_folder import RunFolder
from tests.hostcuda.build import environment

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]
SETTINGS = {  # of an engine without CUDA's kernels, whose cache fits the host
    "sampling_backend": "pytorch",
    "cuda_graph_backend_decode": "disabled",
    "cuda_graph_backend_prefill": "disabled",
    "max_total_tokens": 20_000,
}
STEPS = 3


def test_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = prepared(tmp_path) / "run"
    for variable, value in environment().items():
        monkeypatch.setenv(variable, value)
    sections = {
        "train": {"num_steps": STEPS},
        "actor": {"device": "cuda"},
        "rollout": {"sglang": SETTINGS, "start_timeout_s": 900, "step_timeout_s": 600},
    }
    run_experiment(folder, 2000, **sections)
    assert_agrees(folder)
    steps = metrics(folder)
    assert max(steps) == STEPS
    for step in range(1, STEPS + 1):
        assert steps[step]["publish/verify"] > 0, "digests of what the engine holds"
        assert steps[step]["publish/wire_bytes"] == steps[step]["publish/bytes"] > 0
    (log,) = RunFolder(folder).path.glob("logs/engine-*.log")
    assert "'device': 'cuda'" in log.read_text(errors="replace")
