"""Start a worker script as ranks of one world: many checks share a launch, because a launch costs seconds."""

import json
import subprocess
import sys
from pathlib import Path

from megagrpo import environment
from megagrpo.processes import spawn, stop_tree

WORKERS = Path(__file__).parent
SHIMS = Path(__file__).parents[3] / "megagrpo" / "rollout" / "cpu"
LIMIT_S = 900


def run_ranks(world: int, folder: Path, jobs: list[dict], script: str = "actor_ranks.py", device: str = "cpu") -> list[dict]:
    """Run `jobs` one after the other on `world` ranks; returns one result per job. AssertionError with the log's end."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "jobs.json").write_text(json.dumps(jobs))
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
    _run([sys.executable, "-W", "ignore", *torchrun, str(WORKERS / script), str(folder)], folder / "ranks.log", [], device)
    results = json.loads((folder / "results.json").read_text())
    assert len(results) == len(jobs)
    return results


def run_hf_reference(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    _run([sys.executable, "-W", "ignore", str(WORKERS / "hf_reference.py"), str(folder)], folder / "hf.log", [str(SHIMS)], "cpu")


def _run(command: list[str], log: Path, python_path: list[str], device: str) -> None:
    root = str(Path(__file__).parents[3])
    variables = {"OMP_NUM_THREADS": "1"} | ({"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {})
    child = spawn(command, environment.child_environment(variables, [*python_path, root]), log)
    try:
        status = child.wait(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        status = f"none after {LIMIT_S} s"
    finally:
        stop_tree(child.pid)
        child.wait()
    assert status == 0, f"status {status}\n" + "\n".join(log.read_text(errors="replace").splitlines()[-40:])
