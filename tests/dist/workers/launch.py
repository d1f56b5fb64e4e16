"""Runs workers as ranks of one world, on the session's pools of ranks, and scripts of transformers
in a process of their own."""

import json
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from megagrpo.actor.host import prepare_host
from megagrpo.mesh import make_mesh
from tests.dist.workers.pool import RankPool, run_main

# ended by the fixture in tests/dist/conftest.py
POOL = RankPool()
TRANSFORMER_ENGINE_POOL = RankPool("transformer_engine")
TRANSFORMERS_POOL = RankPool("transformers")
DEVICE_POOL = RankPool("cuda")  # in the place of POOL with --hostcuda
POOLS = (POOL, TRANSFORMER_ENGINE_POOL, TRANSFORMERS_POOL, DEVICE_POOL)


def run_ranks(
    world: int, folder: Path, jobs: list[dict], script: str = "actor_ranks.py", pool: RankPool | None = None
) -> list[dict]:
    """Runs `jobs` one after the other on `world` ranks; returns their results. AssertionError with the log's end."""
    folder.mkdir(parents=True, exist_ok=True)
    for stale in folder.glob("store*"):  # an earlier call's: ranks would meet nobody there
        stale.unlink()
    (folder / "jobs.json").write_text(json.dumps(jobs))
    (pool or POOL).run(world, run_main, f"tests.dist.workers.{Path(script).stem}", folder)
    results = json.loads((folder / "results.json").read_text())
    assert len(results) == len(jobs)
    return results


def run_meshes(world: int, folder: Path, function: Callable, *arguments: object, replicas: int | None = None) -> list:
    """What `function(mesh, *arguments)` returns on each rank of a gloo world of `replicas`; by default one a rank."""
    return POOL.run(world, _on_mesh, world, replicas or world, folder, function, arguments)


def _on_mesh(rank: int, world: int, replicas: int, folder: Path, function: Callable, arguments: tuple) -> object:
    store = dist.FileStore(str(folder / f"store{world}"), world)
    device = prepare_host()
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
    result = function(make_mesh(rank * replicas // world, replicas, device, 60.0), *arguments)
    dist.destroy_process_group()
    return result


def run_transformers(folder: Path, script: str, *names: str) -> None:
    """Runs a script on transformers' models, which the trainer's shims keep out of this process."""
    folder.mkdir(parents=True, exist_ok=True)
    module = f"tests.dist.workers.{Path(script).stem}"
    TRANSFORMERS_POOL.run(1, run_main, module, folder, *names)
