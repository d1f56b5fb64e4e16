"""Asks Megatron-Core and SGLang what they make of all that an experiment gives them, each in another
process, because importing either takes seconds."""

import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megagrpo.check.libraries import (
    ON_CPU,
    Problems,
    announce,
    answer_of,
    as_engine,
    ask_libraries,
    setting_problems,
)
from megagrpo.check.problems import describe_model
from megagrpo.check.remembered import Accepted
from megagrpo.check.rules.placement import needs_gpus
from megagrpo.check.rules.subject import model_folder
from megagrpo.check.rules.table import broken_as_read
from megagrpo.config.actor import ActorConfig
from megagrpo.config.fields import LibrarySettings, broken_rules, complaints
from megagrpo.config.hardware import Hardware
from megagrpo.config.libraries import SERVER
from megagrpo.config.schema import ExperimentConfig, ModelConfig
from megagrpo.models.architecture import Architecture
from megagrpo.models.fields import expected_kernels
from megagrpo.models.table import architecture_of, exported_config
from megagrpo.rollout.service.engine_command import Settings, engine_settings
from megagrpo.tools.plan.hardware import hardware_of

_ON_GPU = replace(ON_CPU, cuda=True)


def all_library_problems(config: ExperimentConfig) -> Problems:
    """Returns the problems of library_problems. Without any, and if the experiment breaks no rule,
    Megatron's configurations are built, where it computes as here, and SGLang resolves the arguments
    of an engine, here or on the GPU that `cluster.gpu` names.
    """
    broken = [*broken_rules(config), *broken_as_read(config)]
    description: dict[str, object] | None = None
    if not broken:
        with suppress(ValueError):  # it is not there, or the layout cannot cut it
            description = describe_model(config)
    wholes: dict[str, object] = {}
    if description is not None:
        wholes["megatron"] = [config.actor.model_dump(mode="json"), description]
        wholes["sglang"] = _settings_here(config)
    with ThreadPoolExecutor() as pool:
        on_gpu = pool.submit(_gpu_problems, config if description is not None else None)
        return ask_libraries(config, "megagrpo.tools.plan.libraries", wholes) or on_gpu.result()


def _gpu_problems(config: ExperimentConfig | None) -> Problems:
    """Returns why SGLang does not take the arguments of an experiment for GPUs on its kind."""
    if config is None or not needs_gpus(config) or find_spec("sglang") is None:
        return []
    gpu = hardware_of(config.cluster.gpu), config.cluster.gpus_per_node
    seen = exported_config(describe_model(config), config.actor.has_draft)
    accepted = Accepted([engine_settings(config, _ON_GPU), seen, str(gpu)])
    if accepted:
        return []
    announce("sglang", f"what it makes of an engine on {config.cluster.gpu}")
    if said := complaints(resolve_all, [config], gpu):
        return [(SERVER, f"on {config.cluster.gpu} {text}") for text in said]
    accepted.remember()
    return []


def _settings_here(config: ExperimentConfig) -> list[Settings] | None:
    """Returns the settings of an engine on this machine's CPU; None if it would be on a GPU."""
    if needs_gpus(config) or (config.actor.device == "auto" and Path("/dev/nvidiactl").exists()):
        return None
    folder = model_folder(config)
    here = config.model_copy(update={"model": config.model.model_copy(update={"path": folder})})
    return [engine_settings(here, ON_CPU)]


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
            servers.append(engine_settings(here, _ON_GPU))
        resolved = Path(name) / "resolved.json"
        device = {"device": hardware.device_name, "gpus": gpus_per_node}
        job = {"servers": servers, **device, "output": str(resolved)}
        problem = "SGLang does not resolve these arguments"
        environment = as_engine(configs[0])
        answer_of("megagrpo.tools.plan.arguments_dry_run", job, environment, problem)
        return json.loads(resolved.read_text())


def build_problems(arch: Architecture, actor: ActorConfig) -> list[str]:
    """Returns why Megatron's three configurations cannot be built in this process; [] if they
    can."""
    from megagrpo.actor.megatron_config import checked_kernels, megatron_configs

    return complaints(lambda: megatron_configs(arch, actor, checked_kernels(arch, actor)))


def _build_problems(whole: list[Any]) -> Iterator[tuple[list[str], str]]:
    """whole: the actor's settings and the model's description."""
    actor = ActorConfig.model_validate(whole[0])
    arch = architecture_of(whole[1], actor.has_draft)
    if not expected_kernels(actor).cuda:
        yield from ((["actor"], text) for text in build_problems(arch, actor))


def _resolve_problems(whole: list[Settings]) -> Iterator[tuple[list[str], str]]:
    """whole: the settings of an engine."""
    from megagrpo.tools.plan.arguments_dry_run import resolve_here

    yield from (([*SERVER], text) for text in complaints(resolve_here, *whole))


def main() -> None:
    """See ask_libraries. Judges all that a library gets only if it takes each setting."""
    library, given, whole = json.load(sys.stdin)
    problems = setting_problems(library, given)
    if whole is not None and not problems:
        judge = {"megatron": _build_problems, "sglang": _resolve_problems}[library]
        problems = [*judge(whole)]
    print(json.dumps(problems))


if __name__ == "__main__":
    main()
