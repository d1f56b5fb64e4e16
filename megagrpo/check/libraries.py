"""Asks Megatron-Core and SGLang themselves about an experiment's settings of theirs, each in another
process, because importing either takes seconds."""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec

from megagrpo.check.remembered import Accepted
from megagrpo.config.fields import KeyPath
from megagrpo.config.libraries import SERVER, given_settings, name_problem
from megagrpo.config.schema import ExperimentConfig
from megagrpo.rollout.service.engine_command import (
    ServerPlace,
    engine_environment,
    environment_without_gpu,
)
from megagrpo.system.errors import translated

ON_CPU = ServerPlace(0, "127.0.0.1", 30000, "127.0.0.1:30001")
_LIMIT_S = 600.0
_SHOWN = 2000  # characters of a library's output, from its end
Given = Sequence[tuple[Sequence[str], Mapping[str, object]]]  # paths of sections, and settings
Problems = list[tuple[KeyPath, str]]


def library_problems(config: ExperimentConfig) -> Problems:
    """Returns (key path, problem) of each setting that its library does not take.

    Of a library that is not installed, as on a login node, it prints that settings are not judged.
    """
    return ask_libraries(config, "megagrpo.check.libraries", {})


def ask_libraries(config: ExperimentConfig, module: str, wholes: Mapping[str, object]) -> Problems:
    """Returns the problems that a module finds for each library in another process.

    module: its main reads [library, [path, settings] pairs, whole] as JSON, and prints
    [key path, problem] pairs. wholes: by library, what else the module judges.
    """
    given = {  # the other names are refused
        path: {name: value for name, value in settings.items() if not name_problem(path, name)}
        for path, settings in given_settings(config.actor, config.rollout).items()
    }
    engine_words = given.pop(SERVER)
    settings: dict[str, Mapping[tuple[str, ...], Mapping[str, object]]] = {
        "megatron": {path: value for path, value in given.items() if value},
        "sglang": {SERVER: engine_words} if engine_words else {},
    }
    with ThreadPoolExecutor() as pool:
        judged = pool.map(
            lambda library: _judged(
                config, module, library, settings[library], wholes.get(library)
            ),
            settings,
        )
        return [problem for part in judged for problem in part]


def _judged(
    config: ExperimentConfig,
    module: str,
    library: str,
    given: Mapping[tuple[str, ...], Mapping[str, object]],
    whole: object,
) -> Problems:
    if not given and whole is None:
        return []
    if find_spec(library) is None:
        keys = ", ".join(".".join(path) for path in given) or library
        print(f"megagrpo: {keys}: not judged, {library} is not installed here", file=sys.stderr)
        return []
    environment = as_engine(config) if library == "sglang" else None
    job = [library, list(given.items()), whole]
    accepted = Accepted([job, config.model.path])
    if accepted:
        return []
    announce(library, "about this experiment")
    said = answer_of(module, job, environment, f"{library} cannot be imported")
    found = [(tuple(path), problem) for path, problem in json.loads(said.splitlines()[-1])]
    if not found:
        accepted.remember()
    return found


def announce(library: str, question: str) -> None:
    """Says why a command takes seconds; in one piece, as both libraries are asked at once."""
    text = "what it accepts is remembered until something changes"
    sys.stderr.write(f"megagrpo: asking {library} {question}; {text}\n")


def as_engine(config: ExperimentConfig) -> dict[str, str]:
    """Returns the environment of an engine's process that sees no GPU."""
    return environment_without_gpu() | engine_environment(config, ON_CPU)


def answer_of(module: str, job: object, environment: dict[str, str] | None, problem: str) -> str:
    """Returns the standard output of a module that gets a job. Raises ValueError if it fails."""
    with translated(problem, subprocess.TimeoutExpired):
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


def setting_problems(library: str, given: Given) -> list[tuple[list[str], str]]:
    """Returns [key path, problem] of each setting that the library, which it imports, does not
    take."""
    if library == "megatron":
        from megagrpo.actor.host import prepare_host

        prepare_host("cpu")
        from megagrpo.actor.megatron_config import megatron_problems

        found = [megatron_problems(tuple(path), settings) for path, settings in given]
    else:
        from megagrpo.rollout.service.engine_words import server_problems

        found = [server_problems(settings) for _, settings in given]
    return [
        ([*path, name], problem)
        for (path, _), problems in zip(given, found, strict=True)
        for name, problem in problems
    ]


if __name__ == "__main__":
    library, given, _ = json.load(sys.stdin)
    print(json.dumps(setting_problems(library, given)))
