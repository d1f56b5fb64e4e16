"""Runs workers as ranks of one world, on the session's pool of ranks, and transformers in a process
of its own."""

import json
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from megagrpo.mesh import make_mesh
from megagrpo.system import environment
from tests.dist.workers.pool import RankPool, run_main

WORKERS = Path(__file__).parent
SHIMS = Path(__file__).parents[3] / "megagrpo" / "cpu" / "engine"
LIMIT_S = 900
POOL = RankPool()  # ended by the fixture in tests/dist/conftest.py
TRANSFORMER_ENGINE_POOL = RankPool(transformer_engine=True)


def run_ranks(
    world: int,
    folder: Path,
    jobs: list[dict],
    script: str = "actor_ranks.py",
    pool: RankPool = POOL,
) -> list[dict]:
    """Runs `jobs` one after the other on `world` ranks; returns their results. AssertionError with
    the log's end."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "jobs.json").write_text(json.dumps(jobs))
    pool.run(world, run_main, f"tests.dist.workers.{Path(script).stem}", folder)
    results = json.loads((folder / "results.json").read_text())
    assert len(results) == len(jobs)
    return results


def run_meshes(
    world: int, folder: Path, function: Callable, *arguments: object, replicas: int | None = None
) -> list:
    """What `function(mesh, *arguments)` returns on each rank of a gloo world of `replicas`; by
    default one a rank."""
    return POOL.run(world, _on_mesh, world, replicas or world, folder, function, arguments)


def _on_mesh(
    rank: int, world: int, replicas: int, folder: Path, function: Callable, arguments: tuple
) -> object:
    store = dist.FileStore(str(folder / f"store{world}"), world)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60)
    )
    result = function(
        make_mesh(rank * replicas // world, replicas, torch.device("cpu"), 60.0), *arguments
    )
    dist.destroy_process_group()
    return result


def run_transformers(folder: Path, script: str, *names: str) -> None:
    """Runs a script on transformers' models, which the trainer's shims keep out of this process."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-W", "ignore", str(WORKERS / script), str(folder), *names]
    variables = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    env = environment.child_environment(variables, [str(SHIMS), str(WORKERS.parents[2])])
    done = subprocess.run(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=LIMIT_S
    )
    log = done.stdout.decode(errors="replace")
    assert done.returncode == 0, f"status {done.returncode}\n" + "\n".join(log.splitlines()[-40:])
