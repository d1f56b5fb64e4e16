"""One rollout service for the whole test session: a real SGLang engine on a tiny random model."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from run_megagrpo import LONG_RUN, Finished, prepared, run_experiment
from running_service import START_S, running_service
from tiny_model import make_tiny_model

from tests.dist.workers.pool import RankPool
from tests.experiments import experiment


@pytest.fixture(scope="session")
def tiny_model(model_of) -> Path:
    return model_of(make_tiny_model, 0)


@pytest.fixture(scope="session")
def service(tiny_model, tmp_path_factory):
    """Deterministic engine, float32, one rank; shared by tests, which leave it with a ready or stale engine."""
    run_dir = tmp_path_factory.mktemp("service")
    rollout = {"deterministic": True, "start_timeout_s": START_S, "step_timeout_s": 240.0}
    rollout |= {"load_format": "model", "max_restarts": 5}  # without a publish: see RunningService.set_version
    sections = {"model": {"path": str(tiny_model)}, "rollout": rollout, "sampling": {"max_response_tokens": 24}}
    with running_service(experiment(output_dir=str(run_dir), **sections), run_dir) as running:
        yield running


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    """Trainer ranks."""
    pool = RankPool()
    yield pool
    pool.stop()


@pytest.fixture(scope="session")
def experiments(tmp_path_factory) -> Path:
    """The folder with the tiny model and data; experiments of tests lie beside them."""
    return prepared(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="session")
def long_run(experiments) -> tuple[Path, Finished]:
    """(run folder, what the user saw) of ten undisturbed steps, weights by `reshard`, with
    evaluations in between."""
    folder = experiments / "long"
    held_out = {"path": str(experiments / "data" / "eval.jsonl")}
    evaluation = {"data": held_out, "every": 5, "num_samples": 2, "num_as_trained": 2, "temperature": 1.0}
    log = {"tensorboard": True, "dump_steps": [4]}
    return folder, run_experiment(folder, 560, **LONG_RUN, eval=evaluation, log=log)
