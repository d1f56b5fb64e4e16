"""What every process of a run is given beside the user's own environment, against the table in docs/evidence/gpu.md."""

import os
import pwd
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megagrpo.cluster import machine, nodes, supervise
from megagrpo.config.schema import ExperimentConfig
from megagrpo.rollout.service import node as engine_node
from megagrpo.rollout.service.engine_command import ServerPlace
from megagrpo.rollout.service.node import EngineNode
from megagrpo.system import environment, worker_process
from megagrpo.system.run_folder import RunFolder
from tests import experiments

pytestmark = [
    pytest.mark.verifies(
        "runs", "each process has the environment of [the table](gpu.md#environment-of-every-process)"
    ),
    pytest.mark.usefixtures("handlers_of_pytest"),  # its launches leave all signals ignored
]

DOCS = Path(__file__).parents[2] / "docs" / "evidence" / "gpu.md"
HEADING = "## Environment of every process"
KINDS = {
    "CPU": {"rollout": {}},
    "one machine": {"rollout": {"dtype": "bfloat16"}},
    "several machines": {"rollout": {"dtype": "bfloat16", "tp": 2, "nodes_per_engine": 2, "host": "0.0.0.0"}},
    "colocated": {"rollout": {"dtype": "bfloat16", "colocate": True}, "weights": {"transport": "ipc"}},
}
# Of the process that starts the others, and so of all; what is not named in the table is not touched.
USERS = ("PATH",)
ALLOCATOR = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
VARYING = {
    environment.API_KEY: "<key>", "MEGAGRPO_STOP_FILE": "<file>", "TMPDIR": "<folder>", "RAY_AUTH_TOKEN": "<token>",
    "CUDA_VISIBLE_DEVICES": "<GPUs>", "GLOO_SOCKET_IFNAME": "<interface>", "NCCL_SOCKET_IFNAME": "=<interface>",
    "SGLANG_HOST_IP": "<address>",
}  # fmt: skip


class Recorder:
    """Takes the place of `spawn`: notes the environment by name and runs nothing."""

    def __init__(self):
        self.found: dict[str, dict[str, str]] = {}

    def note(self, name: str, env: dict[str, str]) -> None:
        base = environment.child_environment()
        self.found[name] = {k: v for k, v in env.items() if k != "PYTHONPATH" and base.get(k) != v}

    def spawn(self, words, env, *_, **__):
        text = " ".join(words)
        ray = f"{sys.executable} -m ray.scripts.scripts start"  # bin/ray names the folder of its installation
        names = {" serve ": "service", " train ": "trainer ranks", ray: "Ray"}
        self.note(next((name for part, name in names.items() if part in text), "engine"), env)
        return subprocess.Popen(["sleep", "60"] if " serve " in text else ["true"])  # the launcher ends it


def experiment(kind: str, folder: Path) -> ExperimentConfig:
    actor = {"world_size": 2, "parallel": {"tp": 2}}
    return experiments.experiment(output_dir=str(folder), actor=actor, **KINDS[kind])


def environments(kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, str]]:
    """Process -> the variables that this program sets for it."""
    for name in os.environ.keys() - {*USERS}:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(folder))
    if kind == "colocated":  # as many users have it
        monkeypatch.setenv(*next(iter(ALLOCATOR.items())))
    recorder, config = Recorder(), experiment(kind, folder)
    for module in (supervise, engine_node):
        monkeypatch.setattr(module, "spawn", recorder.spawn)
    cuda, gpus = kind != "CPU", [] if kind == "CPU" else ["0", "1", "2", "3"]
    monkeypatch.setattr(machine, "visible_gpus", lambda: gpus)
    monkeypatch.setattr(machine, "refuse_what_cannot_run", lambda *_: None)
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda pid: set(range(64)))
    if kind == "several machines":
        place = nodes.Node(0, 2, "127.0.0.1", "127.0.0.1", 29500)
        nodes.train_node(config, [], place)
        with supervise.Launch(RunFolder(folder), "serve", end=[signal.SIGINT]) as launch:
            ray = nodes._ray_environment(nodes.Node(0, 1, "127.0.0.1", "127.0.0.1", 29500))
            launch.spawn(nodes._ray_command(config, place, folder), folder / "log", ray)
            launch.start(["serve", "t.yaml"], "service", ray)
    else:
        machine.run(config)
    with monkeypatch.context() as inside:
        for name, value in recorder.found["Ray" if "Ray" in recorder.found else "service"].items():
            inside.setenv(name, value)
        # The machine of an engine knows a loopback alone here: the interface's name stands for another one.
        server = EngineNode(config, ServerPlace(0, cuda=cuda), cores_share=1, api_key="key")
        server.place = replace(server.place, bind_host="127.0.0.1", num_cores=2)
        server.start(20001, "127.0.0.1:20002", str(folder / "log"))

    class Started(Exception):
        pass

    def popen(*_, env, **__):
        recorder.note("grader workers", env)
        raise Started

    with monkeypatch.context() as inside:
        for name, value in recorder.found["trainer ranks"].items():
            inside.setenv(name, value)
        inside.setattr(worker_process.subprocess, "Popen", popen)
        with pytest.raises(Started):
            worker_process.WorkerProcess(["a.module"])
    return recorder.found


def told(found: dict[str, str]) -> str:
    """Returns a cell of the table."""
    return (
        " ".join(sorted(f"`{name}={VARYING.get(name, value) if value else ''}`" for name, value in found.items()))
        or "nothing"
    )


def table() -> dict[tuple[str, str], str]:
    """(process, kind) -> the variables of its rows in docs/evidence/gpu.md, in order."""
    text = DOCS.read_text().split(HEADING)[1].split("\n## ")[0]
    rows = [re.split(r"\s*\|\s*", line.strip("| \n")) for line in text.splitlines() if line.startswith("|")]
    found: dict[tuple[str, str], list[str]] = {}
    for processes, kinds, variables in rows[2:]:
        for process in processes.split(", "):
            for kind in KINDS if kinds == "all" else kinds.split(", "):
                found.setdefault((process, kind), []).extend(variables.split())
    return {key: " ".join(sorted(variables)) for key, variables in found.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_the_table_says_what_every_process_is_given(kind, tmp_path, monkeypatch):
    found = {name: told(variables) for name, variables in environments(kind, tmp_path, monkeypatch).items()}
    said = {name: cell for (name, of_kind), cell in table().items() if of_kind == kind}
    print(*(f"| {name} | {kind} | {cell} |" for name, cell in found.items()), sep="\n")
    assert found == said


def test_both_sides_of_a_communicator_agree(tmp_path, monkeypatch):
    for kind in KINDS:
        found = environments(kind, tmp_path, monkeypatch)
        ours, theirs = found["trainer ranks"], found["service"] | found["engine"]
        for name in ("NCCL_CUMEM_ENABLE", "NCCL_NVLS_ENABLE", "TORCH_NCCL_NONBLOCKING_TIMEOUT", "NCCL_SOCKET_IFNAME"):
            assert ours[name] == theirs[name], (kind, name)


def test_what_the_user_sets_stays(monkeypatch):
    given = {"NCCL_NVLS_ENABLE": "1", "PYTORCH_ALLOC_CONF": "max_split_size_mb:64", "CUDA_DEVICE_MAX_CONNECTIONS": "32"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    found = environment.trainer_rank_variables(cut=True, beside_engines=False, deterministic=False)
    assert found == {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}
    assert environment.nccl_variables(60)["NCCL_NVLS_ENABLE"] == "1"
    assert environment.without_expandable_segments() == {}


def test_a_run_that_is_to_repeat(monkeypatch):
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True,max_split_size_mb:64")
    found = environment.trainer_rank_variables(cut=False, beside_engines=True, deterministic=True)
    assert found == {
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False,max_split_size_mb:64",
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    }


def test_a_user_without_a_home_has_no_token_of_ray(monkeypatch, tmp_path):
    """As in a container that runs with any uid, for which there is no line in /etc/passwd."""
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: {}[uid])
    alone = nodes.Node(0, 1, "127.0.0.1", "127.0.0.1", 29500)
    assert len(nodes._ray_environment(alone)["RAY_AUTH_TOKEN"]) == 64
    with pytest.raises(ValueError, match="set RAY_AUTH_TOKEN to one long random text on all rollout nodes"):
        nodes._ray_environment(replace(alone, number=2))
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("of the user")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert "RAY_AUTH_TOKEN" not in nodes._ray_environment(alone)
