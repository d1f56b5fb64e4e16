"""Asks Megatron-Core and SGLang themselves, each in another process, for importing either takes
seconds: about an experiment's settings of theirs, and about an engine's arguments on a GPU."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from megagrpo.check.hardware import Hardware
from megagrpo.check.problems import describe_model
from megagrpo.config.fields import KeyPath, LibrarySettings
from megagrpo.config.libraries import SERVER, given_settings
from megagrpo.config.schema import ExperimentConfig, ModelConfig
from megagrpo.rollout.service.engine_command import (
    ServerPlace,
    engine_command,
    engine_environment,
    engine_python_path,
)
from megagrpo.system.environment import child_environment

_ON_GPU = ServerPlace(0, "127.0.0.1", 30000, "127.0.0.1:30001", cuda=True, num_cores=1)
_ON_CPU = replace(_ON_GPU, cuda=False)
_LIMIT_S = 600.0
_SHOWN = 2000  # characters of a library's output, from its end


def library_problems(config: ExperimentConfig) -> list[tuple[KeyPath, str]]:
    """Returns (key path, problem) of each setting that its library does not take.

    Of a library that is not installed, as on a login node, it prints that settings are not judged.
    """
    given = given_settings(config.actor, config.rollout)
    of_engines = given.pop(SERVER)
    environment = _as_engine(config) if of_engines else None
    return [
        *_judged("megatron", {path: value for path, value in given.items() if value}, None),
        *_judged("sglang", {SERVER: of_engines} if of_engines else {}, environment),
    ]


def _judged(
    library: str,
    given: Mapping[tuple[str, ...], Mapping[str, object]],
    environment: dict[str, str] | None,
) -> list[tuple[KeyPath, str]]:
    if not given:
        return []
    if find_spec(library) is None:
        keys = ", ".join(".".join(path) for path in given)
        print(f"megagrpo: {keys}: not judged, {library} is not installed here", file=sys.stderr)
        return []
    job = list(given.items())
    said = _answer("megagrpo.check.libraries", job, environment, f"{library} cannot be imported")
    return [(tuple(path), problem) for path, problem in json.loads(said.splitlines()[-1])]


def dry_run(config: ExperimentConfig, module: str, job: object, problem: str) -> str:
    """Returns the output of a dry run of the rollout service, in a process as an engine's that sees
    no GPU. job: JSON.

    Raises ValueError if it fails: `problem` and the end of SGLang's output.
    """
    return _answer(f"megagrpo.rollout.service.{module}", job, _as_engine(config), problem)


def _as_engine(config: ExperimentConfig) -> dict[str, str]:
    """Returns the environment of an engine's process that sees no GPU."""
    no_gpu = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return child_environment(
        engine_environment(config, _ON_CPU) | no_gpu, python_path=engine_python_path(_ON_CPU)
    )


def _answer(module: str, job: object, environment: dict[str, str] | None, problem: str) -> str:
    """Returns the standard output of a module that gets a job. Raises ValueError if it fails."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", module],
        input=json.dumps(job),
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
        env=environment,
    )
    if done.returncode:
        said = (done.stdout + done.stderr).strip()[-_SHOWN:]
        raise ValueError(f"{problem} (status {done.returncode}):\n{said}")
    return done.stdout


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
            servers.append(engine_command(here, _ON_GPU)[3:])  # without the program
        device = {
            "name": hardware.device_name,
            "gpus": gpus_per_node,
            "memory_mib": hardware.memory_mib,
            "capability": hardware.capability,
            "processors": hardware.processors,
        }
        resolved = Path(name) / "resolved.json"
        job = {"servers": servers, "device": device, "output": str(resolved)}
        problem = "SGLang does not resolve these arguments"
        dry_run(configs[0], "arguments_dry_run", job, problem)
        return json.loads(resolved.read_text())


def _main() -> None:
    """Reads [path, settings] pairs as JSON from standard input; prints [key path, problem] pairs."""
    problems: list[tuple[list[str], str]] = []
    for path, settings in json.load(sys.stdin):
        if tuple(path) == SERVER:
            from megagrpo.rollout.service.engine_words import server_problems

            found = server_problems(settings)
        else:
            from megagrpo.actor.host import prepare_host

            prepare_host("cpu")
            from megagrpo.actor.megatron.config import megatron_problems

            found = megatron_problems(tuple(path), settings)
        problems += [([*path, name], problem) for name, problem in found]
    print(json.dumps(problems))


if __name__ == "__main__":
    _main()
