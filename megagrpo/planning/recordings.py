"""Copy lists of trainer ranks and engine ranks, recorded without weights."""

import json
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from megagrpo.check.problems import check_against_model, model_description
from megagrpo.config.layout import rank_coordinates
from megagrpo.config.load import dump_config
from megagrpo.config.schema import ActorConfig, ExperimentConfig, ModelConfig, ParallelConfig
from megagrpo.families.table import exported_config
from megagrpo.planning.hardware import Hardware
from megagrpo.planning.record_process import hf_specs
from megagrpo.rollout.service.engine_command import (
    ServerPlace,
    engine_command,
    engine_environment,
    engine_python_path,
)
from megagrpo.system.environment import child_environment
from megagrpo.system.processes import spawn, stop_tree
from megagrpo.weights.copies.record import Copy, Specs

_LIMIT_S = 1800.0
_POLL_S = 0.1
_LOG_LINES = 30
_NO_GPU = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
# SGLang's ranks would meet in shared memory, and wait for each other there.
_ALONE = {"SGLANG_USE_MESSAGE_QUEUE_BROADCASTER": "false"}


@dataclass(frozen=True)
class Recordings:
    """What both sides copy from the HF tensors. Ranks that are replicas of one another share one list."""

    trainers: list[list[Copy]]  # by trainer rank
    distinct: int  # trainer ranks that were recorded; the others are replicas of these
    engine: list[list[Copy]]  # by rank of one engine; all engines are alike
    specs: Specs
    seconds: float = 0.0  # that recording took, of all experiments recorded with it
    server: dict[str, Any] | None = None  # the engine's arguments as SGLang resolves them on a GPU, where asked for


def record_both_sides(config: ExperimentConfig) -> Recordings:
    """Records one experiment, see record_all."""
    return record_all([config])[0]


def record_all(configs: Sequence[ExperimentConfig], gpu: tuple[Hardware, int] | None = None) -> list[Recordings]:
    """Records the distinct trainer ranks and the ranks of one engine of each, both sides in a process of its own.

    gpu: on which SGLang resolves the engine's arguments, too, and how many of them a node has. Of the models only
    config.json is read. Raises ValueError for a model that the layouts cannot cut, and with the end of its output when
    one of the processes fails.
    """
    start = time.monotonic()
    descriptions = [describe_model(config) for config in configs]
    with tempfile.TemporaryDirectory(prefix="megagrpo-plan-") as name:
        folders = [Path(name) / str(number) for number in range(len(configs))]
        for folder, config, description in zip(folders, configs, descriptions, strict=True):
            _write_jobs(folder, config, description)
            if gpu is not None:
                _write_server_job(folder, config, *gpu)
        _run_children(Path(name), folders, configs[0], ("trainers", "engine"))
        found = [_recorded(folder, config) for folder, config in zip(folders, configs, strict=True)]
    return [replace(recorded, seconds=time.monotonic() - start) for recorded in found]


def resolve_all(configs: Sequence[ExperimentConfig], gpu: tuple[Hardware, int]) -> list[dict[str, Any]]:
    """Returns the engines' arguments as SGLang resolves them on `hardware`: a kind of GPU and its number per node.

    Raises ValueError with the end of SGLang's output if it rejects them.
    """
    with tempfile.TemporaryDirectory(prefix="megagrpo-plan-") as name:
        folders = [Path(name) / str(number) for number in range(len(configs))]
        for folder, config in zip(folders, configs, strict=True):
            (folder / "model").mkdir(parents=True)
            (folder / "model" / "config.json").write_text(json.dumps(describe_model(config)))
            _write_server_job(folder, config, *gpu)
        _run_children(Path(name), folders, configs[0], ("engine",))
        return [_read(folder, "server") for folder in folders]


def describe_model(config: ExperimentConfig) -> dict[str, Any]:
    """Returns the model's config.json, which the layouts can cut. Raises ValueError with every problem."""
    description = model_description(config)
    if description is None:
        raise ValueError(f"model.path: {config.model.path} holds no config.json; no other file of the model is needed")
    problems = check_against_model(config, description)
    if problems:
        raise ValueError("the experiment does not fit its model:\n  " + "\n  ".join(problems))
    return description


def _recorded(folder: Path, config: ExperimentConfig) -> Recordings:
    representatives = representative_ranks(config.actor)
    found = dict(zip(sorted(set(representatives)), _read(folder, "trainers"), strict=True))
    for rank, (place, _) in found.items():
        expected = _place(rank, config.actor.world_size, config.actor.parallel)
        assert place == expected, f"rank {rank}: Megatron says {place}, this program {expected}"
    server = folder / "server.pickle"
    return Recordings(
        trainers=[found[rank][1] for rank in representatives],
        distinct=len(found),
        engine=_read(folder, "engine"),
        specs=hf_specs(folder / "model", getattr(torch, config.rollout.dtype)),
        server=_read(folder, "server") if server.exists() else None,
    )


def representative_ranks(actor: ActorConfig) -> list[int]:
    """Returns by trainer rank the first rank that holds the same: one is enough to record of all replicas."""
    first: dict[tuple, int] = {}
    places = [tuple(_place(rank, actor.world_size, actor.parallel).items()) for rank in range(actor.world_size)]
    return [first.setdefault(place, rank) for rank, place in enumerate(places)]


def _place(rank: int, world_size: int, parallel: ParallelConfig) -> dict[str, int]:
    """Returns what a rank's weights depend on: not on its place among data-parallel and context-parallel ranks."""
    found = rank_coordinates(rank, world_size, parallel)
    within = rank % (world_size // parallel.pp)
    return {"tp": found["tp"], "pp": found["pp"], "ep": found["ep"], "etp": within % parallel.etp}


def _write_jobs(folder: Path, config: ExperimentConfig, description: dict[str, Any]) -> None:
    model = folder / "model"
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps(exported_config(description)))
    # One node has all of an engine's ranks here: which node a rank is on does not change what it copies.
    rollout = config.rollout.model_copy(update={"nodes_per_engine": 1})
    here = config.model_copy(update={"model": ModelConfig(path=str(model)), "rollout": rollout})
    dump_config(here, folder / "config.yaml")
    (folder / "ranks.json").write_text(json.dumps(sorted(set(representative_ranks(config.actor)))))
    words = engine_command(here, _engine_place())
    first = next(number for number, word in enumerate(words) if word.startswith("--"))
    (folder / "arguments.json").write_text(json.dumps(words[first:]))


def _write_server_job(folder: Path, config: ExperimentConfig, hardware: Hardware, gpus_per_node: int) -> None:
    here = config.model_copy(update={"model": ModelConfig(path=str(folder / "model"))})
    words = engine_command(here, _engine_place(cuda=True))
    first = next(number for number, word in enumerate(words) if word.startswith("--"))
    device = {
        "name": hardware.device_name,
        "memory_mib": hardware.memory_mib,
        "capability": hardware.capability,
        "processors": hardware.processors,
        "gpus": gpus_per_node,
    }
    (folder / "server.json").write_text(json.dumps({"arguments": words[first:], "device": device}))


def _engine_place(cuda: bool = False) -> ServerPlace:
    return ServerPlace(0, "127.0.0.1", 30000, "127.0.0.1:30001", cuda=cuda, num_cores=1)


def _run_children(folder: Path, jobs: Sequence[Path], config: ExperimentConfig, sides: Sequence[str]) -> None:
    place = _engine_place()
    environments = {
        "trainers": child_environment(_NO_GPU),
        "engine": child_environment(
            engine_environment(config, place) | _NO_GPU | _ALONE, python_path=engine_python_path(place)
        ),
    }
    children: dict[str, subprocess.Popen] = {}
    deadline = time.monotonic() + _LIMIT_S
    try:
        for side in sides:
            command = [sys.executable, "-m", "megagrpo.planning.record_process", side, *map(str, jobs)]
            children[side] = spawn(command, environments[side], log=folder / f"{side}.log")
        while any(child.poll() is None for child in children.values()):
            _raise_failed(folder, children)
            if time.monotonic() > deadline:
                raise ValueError(f"recording has not ended after {_LIMIT_S:.0f} s")
            time.sleep(_POLL_S)
        _raise_failed(folder, children)
    finally:
        for child in children.values():
            stop_tree(child.pid)
            child.wait()


def _raise_failed(folder: Path, children: dict[str, subprocess.Popen]) -> None:
    for side, child in children.items():
        if child.poll():
            lines = (folder / f"{side}.log").read_text(errors="replace").splitlines()[-_LOG_LINES:]
            raise ValueError(f"the {side} cannot be recorded (status {child.poll()}):\n" + "\n".join(lines))


def _read(folder: Path, side: str) -> Any:
    return pickle.loads((folder / f"{side}.pickle").read_bytes())
