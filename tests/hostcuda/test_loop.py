"""The whole loop on the device: trainers and an engine of SGLang, weights by reshard over the played NCCL."""

from pathlib import Path

import pytest

from tests.hostcuda.build import environment

from run_megagrpo import assert_agrees, metrics, prepared, run_experiment

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]
# of a float32 engine whose kernels are not CUDA's, and whose cache fits the host
ENGINE = {
    "sampling_backend": "pytorch",
    "cuda_graph_backend_decode": "disabled",
    "cuda_graph_backend_prefill": "disabled",
    "max_total_tokens": 20_000,
}
PATIENCE = {"start_timeout_s": 900, "step_timeout_s": 600}


def test_three_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = prepared(tmp_path) / "run"
    for variable, value in environment().items():
        monkeypatch.setenv(variable, value)
    sections = {
        "train": {"num_steps": 3},
        "actor": {"device": "cuda"},
        "rollout": {"sglang": ENGINE, **PATIENCE},
    }
    run_experiment(folder, 2000, **sections)
    steps = metrics(folder)
    assert sorted(steps)[-1] == 3
    assert_agrees(folder)
