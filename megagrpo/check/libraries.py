"""Judges an experiment's settings of Megatron-Core and SGLang by the libraries' own types.

Importing either takes seconds, so that it is done in another process, and only if something is set.
"""

import json
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec

from megagrpo.config.fields import KeyPath
from megagrpo.config.libraries import SERVER, given_settings
from megagrpo.config.schema import ExperimentConfig
from megagrpo.rollout.service.engine_command import (
    ServerPlace,
    engine_environment,
    engine_python_path,
)
from megagrpo.system.environment import child_environment

_PLACE = ServerPlace(0, "127.0.0.1", 30000, "127.0.0.1:30001", cuda=False, num_cores=1)
_LIMIT_S = 600.0


def library_problems(config: ExperimentConfig) -> list[tuple[KeyPath, str]]:
    """Returns (key path, problem) of each setting that its library does not take.

    Of a library that is not installed, as on a login node, it prints that settings are not judged.
    """
    given = given_settings(config.actor, config.rollout)
    of_engines = given.pop(SERVER)
    environment = child_environment(engine_environment(config, _PLACE), engine_python_path(_PLACE))
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
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "megagrpo.check.libraries"],
        input=json.dumps([[path, settings] for path, settings in given.items()]),
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
        env=environment,
    )
    if done.returncode:
        raise ValueError(f"{library} cannot be imported here:\n{done.stderr[-2000:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    return [(tuple(path), problem) for path, problem in found]


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
