"""Copy lists of trainer ranks and engine ranks, recorded without weights."""

import json
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from megagrpo.check.engine_arguments import engine_arguments
from megagrpo.check.problems import describe_model
from megagrpo.config.layout import rank_coordinates
from megagrpo.config.load import dump_config
from megagrpo.config.schema import ActorConfig, ExperimentConfig, ModelConfig
from megagrpo.families.quantization import fp8_config
from megagrpo.families.table import exported_config
from megagrpo.rollout.service.engine_command import (
    ServerPlace,
    engine_environment,
    engine_python_path,
)
from megagrpo.system.environment import child_environment
from megagrpo.system.processes import last_lines, spawn, stop_tree
from megagrpo.system.progress import Progress
from megagrpo.tools.plan.record_process import engine_specs, fp8_names
from megagrpo.weights.copies.record import Copy, Specs
from megagrpo.weights.quantised import quantised_copies

_LIMIT_S = 1800.0
_POLL_S = 0.1
_ENGINE_PLACE = ServerPlace(0, "127.0.0.1", 30000, "127.0.0.1:30001", cuda=False, num_cores=1)
_NO_GPU = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
# SGLang's ranks would meet in shared memory, and wait for each other there.
_ALONE = {"SGLANG_USE_MESSAGE_QUEUE_BROADCASTER": "false"}


@dataclass(frozen=True)
class Recordings:
    """The copies of both sides from the published HF tensors. Ranks that are replicas of one
    another share one list."""

    trainers: list[list[Copy]]  # by trainer rank
    distinct: int  # trainer ranks that were recorded; the others are replicas of these
    engine: list[list[Copy]]  # by rank of one engine; all engines are alike
    specs: Specs
    seconds: float = 0.0  # that recording took, of all experiments recorded with it


def record_all(configs: Sequence[ExperimentConfig]) -> list[Recordings]:
    """Records the distinct trainer ranks and the ranks of one engine of each, both sides in a
    process of its own.

    Of the models only config.json is read. Raises ValueError for a model that the layouts cannot
    cut, and with the end of its output when one of the processes fails.
    """
    start = time.monotonic()
    descriptions = [describe_model(config) for config in configs]
    with tempfile.TemporaryDirectory(prefix="megagrpo-plan-") as name:
        folders = [Path(name) / str(number) for number in range(len(configs))]
        for folder, config, description in zip(folders, configs, descriptions, strict=True):
            _write_jobs(folder, config, description)
        with Progress(f"plan {configs[0].name}", stream=sys.stderr) as progress:
            progress.enter("records what trainer ranks and engine ranks copy, without weights")
            _run_children(Path(name), folders, configs[0])
        found = [_recorded(folder, config) for folder, config in zip(folders, configs, strict=True)]
    return [replace(recorded, seconds=time.monotonic() - start) for recorded in found]


def _recorded(folder: Path, config: ExperimentConfig) -> Recordings:
    representatives = representative_ranks(config.actor)
    found = dict(
        zip(
            sorted(set(representatives)),
            pickle.loads((folder / "trainers.pickle").read_bytes()),
            strict=True,
        )
    )
    for rank, (coordinates, _) in found.items():
        expected = _coordinates(rank, config.actor)
        assert coordinates == expected, (
            f"rank {rank}: {coordinates} in Megatron, {expected} in this program"
        )
    model = folder / "model"
    specs, quantised = engine_specs(model, config), fp8_names(model, config)
    copies = {
        rank: quantised_copies(of_rank, specs, quantised) for rank, (_, of_rank) in found.items()
    }
    return Recordings(
        trainers=[copies[rank] for rank in representatives],
        distinct=len(found),
        engine=pickle.loads((folder / "engine.pickle").read_bytes()),
        specs=specs,
    )


def representative_ranks(actor: ActorConfig) -> list[int]:
    """Returns by trainer rank the first rank that holds the same: one is enough to record of all
    replicas."""
    first: dict[tuple, int] = {}
    coordinates = [tuple(_coordinates(rank, actor).items()) for rank in range(actor.world_size)]
    return [first.setdefault(found, rank) for rank, found in enumerate(coordinates)]


def _coordinates(rank: int, actor: ActorConfig) -> dict[str, int]:
    """Returns the coordinates that a rank's weights depend on: neither data-parallel nor
    context-parallel ones."""
    found = rank_coordinates(rank, actor.world_size, actor.parallel)
    within = rank % (actor.world_size // actor.parallel.pp)
    return {
        "tp": found["tp"],
        "pp": found["pp"],
        "ep": found["ep"],
        "etp": within % actor.parallel.etp,
    }


def _write_jobs(folder: Path, config: ExperimentConfig, description: Mapping[str, object]) -> None:
    model = folder / "model"
    model.mkdir(parents=True)
    seen = exported_config(
        description, config.actor.has_draft
    )  # by engines; trainers do not look at its quantisation
    (model / "config.json").write_text(
        json.dumps(fp8_config(seen) if config.rollout.quantization else seen)
    )
    # all of an engine's ranks on one node: a rank's copies do not depend on its node
    rollout = config.rollout.model_copy(update={"nodes_per_engine": 1})
    here = config.model_copy(update={"model": ModelConfig(path=str(model)), "rollout": rollout})
    dump_config(here, folder / "config.yaml")
    (folder / "ranks.json").write_text(json.dumps(sorted(set(representative_ranks(config.actor)))))
    (folder / "arguments.json").write_text(json.dumps(engine_arguments(here, _ENGINE_PLACE)))


def _run_children(folder: Path, jobs: Sequence[Path], config: ExperimentConfig) -> None:
    of_engine = engine_environment(config, _ENGINE_PLACE) | _NO_GPU | _ALONE
    environments = {
        "trainers": child_environment(_NO_GPU),
        "engine": child_environment(of_engine, python_path=engine_python_path(_ENGINE_PLACE)),
    }
    deadline = time.monotonic() + _LIMIT_S
    with ExitStack() as stack:
        children = {}
        for side in environments:
            command = [
                sys.executable,
                "-m",
                "megagrpo.tools.plan.record_process",
                side,
                *map(str, jobs),
            ]
            children[side] = spawn(command, environments[side], log=folder / f"{side}.log")
            stack.callback(_stop, children[side])
        while sum(_is_running(child, folder / f"{side}.log") for side, child in children.items()):
            if time.monotonic() > deadline:
                raise ValueError(f"recording has not ended after {_LIMIT_S:.0f} s")
            time.sleep(_POLL_S)


def _is_running(child: subprocess.Popen, log: Path) -> bool:
    """Returns whether the process is running. Raises ValueError with the end of its output if it
    has failed."""
    if child.poll():
        raise ValueError(
            f"the {log.stem} cannot be recorded (status {child.returncode}):\n{last_lines(log)}"
        )
    return child.returncode is None


def _stop(child: subprocess.Popen) -> None:
    stop_tree(child.pid)
    child.wait()
