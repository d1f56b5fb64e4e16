"""A clone as a newcomer has it: in a folder called megagrpo, below one with a space in its name, with .venv inside.

No path of the project, and none of torch's below .venv, may be judged or cut by such names: the launch scripts, the
engine, the trainers and the watchdog run there once.
"""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from engine_process import free_ports
from run_megagrpo import GRADERS, metrics, write_experiment

from megagrpo.system.environment import child_environment
from megagrpo.system.processes import spawn, stop_tree

REPOSITORY = Path(__file__).parents[2]
LIMIT_S = 500.0


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Path:
    """The files that git knows or would add, and .venv as a link to the environment of these tests."""
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    found = subprocess.run(listing, cwd=REPOSITORY, capture_output=True, text=True)
    if found.returncode != 0:
        pytest.skip(f"not a git checkout: {found.stderr.strip()}")
    folder = tmp_path_factory.mktemp("clone") / "a folder with a space" / "megagrpo"
    for name in found.stdout.split("\0"):
        source, target = REPOSITORY / name, folder / name
        if source.is_file() and name != ".venv":
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)
    (folder / ".venv").symlink_to(sys.prefix)
    return folder


def environment_of(clone: Path, **variables: str) -> dict[str, str]:
    """The clone's package before any other; torch's files lie below its .venv."""
    env = child_environment(variables, [str(clone), str(clone / "runs")])
    return {name: value for name, value in env.items() if name != "MEGAGRPO_VENV"}


@pytest.mark.slow
def test_the_watchdog_names_our_line_and_not_torchs(clone: Path):
    command = [clone / ".venv" / "bin" / "python", "-m", "pytest", "-q", "tests/dist/test_watchdog.py", "-k", "loader"]
    captured = {"capture_output": True, "text": True, "timeout": LIMIT_S}
    done = subprocess.run(command, cwd=clone, env=environment_of(clone), **captured)
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout[-3000:] + done.stderr[-1000:]


@pytest.mark.slow
def test_a_step_by_the_launch_scripts(clone: Path, experiments: Path):
    """rollout_node.sh and torchrun_node.sh: Ray, an engine, two ranks; all of them run the clone's files."""
    python, runs = clone / ".venv" / "bin" / "python", clone / "runs"
    env = environment_of(clone, NODE_ADDR="127.0.0.1", MASTER_ADDR="127.0.0.1")
    ask = [python, "-c", "import megagrpo, torch; print(megagrpo.__file__, torch.__file__, sep='\\n')"]
    where = subprocess.run(ask, cwd=clone, env=env, capture_output=True, text=True)
    assert [path.startswith(str(clone)) for path in where.stdout.splitlines()] == [True, True], where
    for name in ("model", "data"):
        shutil.copytree(experiments / name, runs / name)
    (runs / "graders_of_tests.py").write_text(GRADERS)
    config = write_experiment(runs / "one step", train={"num_steps": 1}, rollout={"host": "127.0.0.1"})
    logs = {kind: runs / f"{kind}.log" for kind in ("rollout", "torchrun")}
    nodes: list[subprocess.Popen] = []
    for kind, log in logs.items():
        command = ["env", "-C", str(clone), "bash", f"launch/{kind}_node.sh", str(config)]
        nodes.append(spawn(command, env | {"MASTER_PORT": str(free_ports(1)[0])}, log))
    try:
        status = nodes[1].wait(LIMIT_S)
        said = "\n".join(f"== {log}\n{log.read_text(errors='replace')[-3000:]}" for log in logs.values())
        assert status == 0, said
        assert metrics(runs / "one step")[1]["mismatch/logprob_abs_mean"] <= 1e-5
        os.kill(nodes[0].pid, signal.SIGINT)
        nodes[0].wait(120)
    finally:
        for node in nodes:
            stop_tree(node.pid)
            node.wait()
