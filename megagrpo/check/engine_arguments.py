"""The arguments of engines as SGLang itself resolves them on a GPU that this machine lacks."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from megagrpo.check.hardware import Hardware
from megagrpo.check.problems import describe_model
from megagrpo.config.fields import LibrarySettings
from megagrpo.config.schema import ExperimentConfig, ModelConfig
from megagrpo.rollout.service.engine_command import (
    ServerPlace,
    engine_command,
    engine_environment,
    engine_python_path,
)
from megagrpo.system.environment import child_environment

_LIMIT_S = 600.0
_ON_GPU = ServerPlace(0, "127.0.0.1", 30000, "127.0.0.1:30001", cuda=True, num_cores=1)
_ON_CPU = ServerPlace(0, "127.0.0.1", 30000, "127.0.0.1:30001", cuda=False, num_cores=1)
_SHOWN = 2000  # characters of SGLang's output, from its end


def engine_arguments(config: ExperimentConfig, place: ServerPlace) -> list[str]:
    """Returns an engine's command line without the program."""
    return engine_command(config, place)[3:]


def resolve_all(
    configs: Sequence[ExperimentConfig], gpu: tuple[Hardware, int]
) -> list[LibrarySettings]:
    """Returns the engines' arguments as SGLang resolves them on `gpu`: a kind of GPU and its number
    per node.

    Raises ValueError with the end of SGLang's output if it rejects them.
    """
    hardware, gpus_per_node = gpu
    with tempfile.TemporaryDirectory(prefix="megagrpo-check-") as name:
        servers = []
        for number, config in enumerate(configs):
            model = Path(name) / str(number)
            model.mkdir()
            (model / "config.json").write_text(json.dumps(describe_model(config)))
            here = config.model_copy(update={"model": ModelConfig(path=str(model))})
            servers.append(engine_arguments(here, _ON_GPU))
        device: dict[str, object] = {"name": hardware.device_name, "gpus": gpus_per_node}
        for key in ("memory_mib", "capability", "processors"):
            device[key] = getattr(hardware, key)
        resolved = Path(name) / "resolved.json"
        job = {"servers": servers, "device": device, "output": str(resolved)}
        dry_run(configs[0], "arguments_dry_run", job)
        return json.loads(resolved.read_text())


def dry_run(config: ExperimentConfig, module: str, job: object) -> str:
    """Returns the output of a dry run of the rollout service, in a process as an engine's that sees no
    GPU. job: JSON.

    Raises ValueError with the end of SGLang's output if it fails.
    """
    no_gpu = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", f"megagrpo.rollout.service.{module}"],
        input=json.dumps(job),
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
        env=child_environment(
            engine_environment(config, _ON_CPU) | no_gpu, python_path=engine_python_path(_ON_CPU)
        ),
    )
    if done.returncode:
        said = (done.stdout + done.stderr).strip()[-_SHOWN:]
        raise ValueError(
            f"SGLang does not resolve these arguments (status {done.returncode}):\n{said}"
        )
    return done.stdout
