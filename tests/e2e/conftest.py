"""One rollout service for the whole test session: a real SGLang engine on a tiny random model."""

from pathlib import Path

import pytest
from run_megagrpo import LONG_RUN, Finished, make_inputs, megagrpo, write_experiment
from running_service import START_S, RunningService, start_service, wait_for_service
from tiny_model import make_tiny_model

from megagrpo.config.schema import ExperimentConfig
from megagrpo.system.processes import stop_tree


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def service(tiny_model, tmp_path_factory):
    """Deterministic engine, float32, one rank; shared by tests, which leave it with a ready or stale engine."""
    run_dir = tmp_path_factory.mktemp("service")
    rollout = {"deterministic": True, "streaming": True, "start_timeout_s": START_S, "step_timeout_s": 240.0}
    rollout |= {"load_format": "model", "max_restarts": 5}  # without a publish: see RunningService.set_version
    sections = {"model": {"path": str(tiny_model)}, "data": {"path": "unused.jsonl"}, "rollout": rollout}
    sections |= {"name": "e2e", "output_dir": str(run_dir), "sampling": {"max_response_tokens": 24}}
    config = ExperimentConfig.model_validate(sections)
    process = start_service(config, run_dir)
    running = None
    try:
        running = RunningService(config, run_dir, process, wait_for_service(process, run_dir))
        yield running
    finally:
        running.stop() if running else stop_tree(process.pid)


@pytest.fixture(scope="session")
def experiments(tmp_path_factory) -> Path:
    """The folder with the tiny model and data; experiments of tests lie beside them."""
    folder = tmp_path_factory.mktemp("runs")
    make_inputs(write_experiment(folder / "prepared"))
    return folder


@pytest.fixture(scope="session")
def long_run(experiments) -> tuple[Path, Finished]:
    """(run folder, what the user saw) of ten undisturbed steps, weights by `reshard`, with evaluations in between."""
    folder = experiments / "long"
    held_out = {"path": str(experiments / "data" / "eval.jsonl"), "max_prompt_tokens": 8}
    evaluation = {"data": held_out, "every": 5, "num_samples": 2, "num_as_trained": 2, "temperature": 1.0}
    log = {"tensorboard": True, "dump_steps": [4]}
    config = write_experiment(folder, **LONG_RUN, eval=evaluation, log=log)
    return folder, megagrpo("run", config, timeout_s=560)
