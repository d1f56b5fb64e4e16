"""Asks Megatron-Core and SGLang themselves, each in another process, for importing either takes
seconds: about an experiment's settings of theirs, and what they make of all that they are given."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megagrpo.check.problems import describe_model
from megagrpo.check.remembered import Accepted
from megagrpo.check.rules.placement import needs_gpus
from megagrpo.check.rules.subject import model_folder
from megagrpo.check.rules.table import broken_as_read
from megagrpo.config.actor import ActorConfig
from megagrpo.config.fields import KeyPath, LibrarySettings, broken_rules, complaints
from megagrpo.config.hardware import Hardware, hardware_of
from megagrpo.config.libraries import SERVER, given_settings
from megagrpo.config.schema import ExperimentConfig, ModelConfig
from megagrpo.models.fields import expected_kernels
from megagrpo.models.table import architecture_of, exported_config
from megagrpo.rollout.service.engine_command import (
    ServerPlace,
    engine_command,
    engine_environment,
    environment_without_gpu,
)

_ON_GPU = ServerPlace(0, "127.0.0.1", 30000, "127.0.0.1:30001", cuda=True, num_cores=1)
_ON_CPU = replace(_ON_GPU, cuda=False)
_LIMIT_S = 600.0
_SHOWN = 2000  # characters of a library's output, from its end


def library_problems(
    config: ExperimentConfig, everything: bool = False
) -> list[tuple[KeyPath, str]]:
    """Returns (key path, problem) of each setting that its library does not take.

    everything: Megatron's configurations are built, where it computes as here, and SGLang resolves
    the arguments of an engine, here or on the GPU that `cluster.gpu` names. Of a library that is
    not installed, as on a login node, it prints that settings are not judged.
    """
    given = given_settings(config.actor, config.rollout)
    engine_words = given.pop(SERVER)
    broken = [*broken_rules(config), *broken_as_read(config)]
    whole = everything and not broken
    description = _description(config) if whole else None
    experiment = (
        None if description is None else [config.actor.model_dump(mode="json"), description]
    )
    words = _command_here(config) if description is not None else None
    jobs = [
        ("megatron", {path: value for path, value in given.items() if value}, experiment),
        ("sglang", {SERVER: engine_words} if engine_words else {}, words),
    ]
    with ThreadPoolExecutor() as pool:
        on_gpu = pool.submit(_gpu_problems, config if description is not None else None)
        judged = pool.map(lambda job: _judged(config, *job), jobs)
        found = [problem for part in judged for problem in part]
        return found or on_gpu.result()


def _gpu_problems(config: ExperimentConfig | None) -> list[tuple[KeyPath, str]]:
    """Returns why SGLang does not take the arguments of an experiment for GPUs on its kind."""
    if config is None or not needs_gpus(config) or find_spec("sglang") is None:
        return []
    gpu = hardware_of(config.cluster.gpu), config.cluster.gpus_per_node
    seen = exported_config(describe_model(config), config.actor.has_draft)
    accepted = Accepted([engine_command(config, _ON_GPU)[3:], seen, str(gpu)])
    if accepted:
        return []
    _tell("sglang", f"what it makes of an engine on {config.cluster.gpu}")
    if said := complaints(resolve_all, [config], gpu):
        return [(SERVER, f"on {config.cluster.gpu} {text}") for text in said]
    accepted.remember()
    return []


def _tell(library: str, question: str) -> None:
    """Says why a command takes seconds; in one piece, as both libraries are asked at once."""
    text = "what it accepts is remembered until something changes"
    sys.stderr.write(f"megagrpo: asking {library} {question}; {text}\n")


def _description(config: ExperimentConfig) -> dict[str, object] | None:
    """Returns the model's config.json; None if it is not there, or the layout cannot cut it."""
    with suppress(ValueError):
        return describe_model(config)
    return None


def _command_here(config: ExperimentConfig) -> list[str] | None:
    """Returns the command line of an engine on this machine's CPU; None if it would be on a GPU."""
    if needs_gpus(config) or (config.actor.device == "auto" and Path("/dev/nvidiactl").exists()):
        return None
    folder = model_folder(config)
    here = config.model_copy(update={"model": config.model.model_copy(update={"path": folder})})
    return engine_command(here, _ON_CPU)[3:]  # without the program


def _judged(
    config: ExperimentConfig,
    library: str,
    given: Mapping[tuple[str, ...], Mapping[str, object]],
    whole: object,
) -> list[tuple[KeyPath, str]]:
    """whole: what the library is given in all, see _main; None: only `given` is judged."""
    if not given and whole is None:
        return []
    if find_spec(library) is None:
        keys = ", ".join(".".join(path) for path in given) or library
        print(f"megagrpo: {keys}: not judged, {library} is not installed here", file=sys.stderr)
        return []
    environment = _as_engine(config) if library == "sglang" else None
    job = [library, list(given.items()), whole]
    accepted = Accepted(job, [config.model.path])
    if accepted:
        return []
    _tell(library, "about this experiment")
    said = _answer("megagrpo.check.libraries", job, environment, f"{library} cannot be imported")
    found = [(tuple(path), problem) for path, problem in json.loads(said.splitlines()[-1])]
    if not found:
        accepted.remember()
    return found


def _as_engine(config: ExperimentConfig) -> dict[str, str]:
    """Returns the environment of an engine's process that sees no GPU."""
    return environment_without_gpu() | engine_environment(config, _ON_CPU)


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
            seen = exported_config(describe_model(config), config.actor.has_draft)
            (model / "config.json").write_text(json.dumps(seen))
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
        environment = _as_engine(configs[0])
        _answer("megagrpo.rollout.service.arguments_dry_run", job, environment, problem)
        return json.loads(resolved.read_text())


def _main() -> None:
    """Reads [library, [path, settings] pairs, whole] as JSON from standard input; prints [key path,
    problem] pairs. whole: the actor's settings and the model's description, or the command line of an engine."""
    library, given, whole = json.load(sys.stdin)
    judge = {"megatron": _megatron_problems, "sglang": _sglang_problems}[library]
    print(json.dumps([*judge(given, whole)]))


_Given = list[tuple[list[str], dict[str, object]]]


def _megatron_problems(given: _Given, whole: list[Any] | None) -> Iterator[tuple[list[str], str]]:
    from megagrpo.actor.host import prepare_host

    prepare_host("cpu")
    from megagrpo.actor.megatron_config import build_problems, megatron_problems

    found = [
        ([*path, name], problem)
        for path, settings in given
        for name, problem in megatron_problems(tuple(path), settings)
    ]
    yield from found
    if whole is not None and not found:
        actor = ActorConfig.model_validate(whole[0])
        arch = architecture_of(whole[1], actor.has_draft)
        if not expected_kernels(actor).cuda:
            yield from ((["actor"], text) for text in build_problems(arch, actor))


def _sglang_problems(given: _Given, whole: list[str] | None) -> Iterator[tuple[list[str], str]]:
    from megagrpo.rollout.service.engine_words import resolve_here, server_problems

    found = [
        ([*path, name], problem)
        for path, settings in given
        for name, problem in server_problems(settings)
    ]
    yield from found
    if whole is not None and not found:
        yield from (([*SERVER], text) for text in complaints(resolve_here, whole))


if __name__ == "__main__":
    _main()
