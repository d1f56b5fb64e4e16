"""Runs the jobs of jobs.json on this rank, one after the other, each with an actor in a world of its own."""

import json
import os
from collections.abc import Callable
from pathlib import Path

from tests.dist.workers.host import DEVICE  # comes first: it prepares the host for Megatron

# isort: split

from megagrpo.actor.megatron_actor import MegatronActor
from megagrpo.certify.measure import joined
from megagrpo.config.schema import ActorConfig, OptimizerConfig


def answer(folder: Path, of_job: Callable[[dict, Path], dict]) -> None:
    """Writes what `of_job(job, store)` returns for every job: each rank into rankN.json, rank 0 into results.json."""
    jobs = json.loads((folder / "jobs.json").read_text())
    results = []
    for number, job in enumerate(jobs):
        print("job", number, job, flush=True)
        results.append(of_job(job, folder / f"store{number}"))
    rank, text = os.environ["RANK"], json.dumps(results)
    for name in [f"rank{rank}.json", *(["results.json"] if rank == "0" else [])]:
        (folder / name).write_text(text)


def with_actors(
    folder: Path,
    settings: Callable[[dict], tuple[ActorConfig, OptimizerConfig]],
    measure: Callable[[MegatronActor, dict], dict],
) -> None:
    """Answers every job by `measure(actor, job)`; a float becomes the largest of all ranks."""

    def of_job(job: dict, store: Path) -> dict:
        config, optimizer = settings(job)
        with joined(store, config=config, optimizer=optimizer, model_path=job["model"], device=DEVICE) as actor:
            result = measure(actor, job)
            floats = {name: value for name, value in result.items() if isinstance(value, float)}
            everyone = actor.mesh.gather_world(floats)
            return result | {name: max(part[name] for part in everyone) for name in everyone[0]}

    answer(folder, of_job)
