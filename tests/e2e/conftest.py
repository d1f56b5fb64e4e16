"""One rollout service for the whole test session: a real SGLang engine on a tiny random model."""

from pathlib import Path

import psutil
import pytest
from running_service import START_S, RunningService, start_service, wait_for_url
from tiny_model import make_tiny_model

from megagrpo.config import ExperimentConfig
from megagrpo.processes import is_live, stop_tree
from megagrpo.rollout.client import ServiceControl


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def service(tiny_model, tmp_path_factory):
    """Deterministic engine, float32, one rank; shared by tests, which leave it with a ready or stale engine."""
    run_dir = tmp_path_factory.mktemp("service")
    config = ExperimentConfig.model_validate(
        {
            "name": "e2e",
            "output_dir": str(run_dir),
            "model": {"path": str(tiny_model)},
            "data": {"path": "unused.jsonl"},
            "sampling": {"max_response_tokens": 24},
            "rollout": {"deterministic": True, "start_timeout_s": START_S, "step_timeout_s": 240.0, "max_restarts": 5},
        }
    )
    process = start_service(config, run_dir)
    try:
        yield RunningService(config, run_dir, process, ServiceControl(wait_for_url(process, run_dir)))
    finally:
        tree = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        process.terminate()
        try:
            assert process.wait(60) == 0
            assert not [p for p in tree if is_live(p)], "the service left processes behind"
            assert not (run_dir / "service.json").exists()
        finally:
            stop_tree(process.pid)
