"""Run worker scripts as ranks of one world: on the session's pool of ranks, or in processes of their own."""

import json
import socket
import sys
import time
from pathlib import Path

from megagrpo.system import environment
from megagrpo.system.processes import spawn, stop_tree
from tests.dist.workers.pool import RankPool, run_main

WORKERS = Path(__file__).parent
SHIMS = Path(__file__).parents[3] / "megagrpo" / "rollout" / "cpu"
LIMIT_S = 900
# ended by the fixture in tests/dist/conftest.py
POOL = RankPool()
TRANSFORMER_ENGINE_POOL = RankPool(transformer_engine=True)


def run_ranks(
    world: int,
    folder: Path,
    jobs: list[dict],
    script: str = "actor_ranks.py",
    device: str = "cpu",
    pool: RankPool = POOL,
) -> list[dict]:
    """Run `jobs` one after the other on `world` ranks; return one result per job. AssertionError with the log's end."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "jobs.json").write_text(json.dumps(jobs))
    if device == "cpu" and script in (path.name for path in WORKERS.glob("*_ranks.py")):
        pool.run(world, run_main, f"tests.dist.workers.{Path(script).stem}", folder)
    else:
        _launch(world, folder, script, device)
    results = json.loads((folder / "results.json").read_text())
    assert len(results) == len(jobs)
    return results


def _launch(world: int, folder: Path, script: str, device: str) -> None:
    """Processes of their own: for a device that the pool's ranks do not see, and for scripts from elsewhere."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # as torchrun would, less the seconds that its agent takes to import torch
    meeting = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [meeting | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world)]
    _run([WORKERS / script, folder], folder / "ranks.log", [], device, ranks)


def run_transformers(folder: Path, script: str = "hf_reference.py") -> None:
    """Run a script on transformers' models, which the trainer's shims keep out of this process."""
    folder.mkdir(parents=True, exist_ok=True)
    _run([WORKERS / script, folder], folder / "hf.log", [str(SHIMS)], "cpu", [{}])


def run_peft_reference(folder: Path) -> None:
    """For every `*/job.json` below the folder, what adapters_job left there against transformers and PEFT."""
    _run([WORKERS / "peft_reference.py", folder], folder / "peft.log", [str(SHIMS)], "cpu", [{}])


def _run(words: list[Path], log: Path, python_path: list[str], device: str, ranks: list[dict[str, str]]) -> None:
    """One process for each of `ranks`, its environment; the first to fail ends them all."""
    command = [sys.executable, "-W", "ignore", *map(str, words)]
    variables = {"OMP_NUM_THREADS": "1"} | ({"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {})
    paths = [*python_path, str(Path(__file__).parents[3])]
    deadline = time.monotonic() + LIMIT_S
    children = [spawn(command, environment.child_environment(variables | rank, paths), log) for rank in ranks]
    try:
        while any(child.poll() is None for child in children) and not any(child.poll() for child in children):
            assert time.monotonic() < deadline, f"no end after {LIMIT_S} s"
            time.sleep(0.05)
        statuses = [child.poll() for child in children]
    finally:
        for child in children:
            stop_tree(child.pid)
            child.wait()
    assert not any(statuses), f"status {statuses}\n" + "\n".join(log.read_text(errors="replace").splitlines()[-40:])
