"""Lists the settings handed over to Megatron and SGLang."""

import textwrap
from collections.abc import Mapping

from megagrpo.actor.megatron.fields import (
    ddp_fields,
    expected_kernels,
    optimizer_fields,
    transformer_fields,
)
from megagrpo.config.libraries import given_settings
from megagrpo.config.schema import ExperimentConfig
from megagrpo.families.architecture import Architecture
from megagrpo.rollout.service.engine_command import ServerPlace, engine_settings

_WIDTH = 116
_OF_A_START = ("port", "node_rank", "dist_init_addr")  # chosen at each start of an engine


def settings_report(
    arch: Architecture | None, config: ExperimentConfig, everything: bool
) -> list[str]:
    """Returns the lines of `megagrpo check` about settings of libraries: those that the experiment
    sets, or everything that is handed over, with * where it is the experiment's.

    No GPU is looked for: with `actor.device` auto, bfloat16 counts as on GPUs.
    """
    given = given_settings(config.actor, config.rollout)
    if not everything:
        said = [
            f"{'.'.join(path)}.{name}: {value}"
            for path, settings in given.items()
            for name, value in settings.items()
        ]
        return [f"libraries  {', '.join(said)}"] if said else []
    actor, kernels = config.actor, expected_kernels(config.actor)
    device = config.actor.device
    cuda = device == "cuda" or (device == "auto" and config.rollout.dtype == "bfloat16")
    place = ServerPlace(0, config.rollout.host, 0, "", cuda=cuda, num_cores=1)
    engine = engine_settings(config, place).items()
    handed = (
        {} if arch is None else transformer_fields(arch, actor, kernels),
        ddp_fields(actor, kernels),
        optimizer_fields(actor, kernels),
        {name: value for name, value in engine if name not in _OF_A_START},
    )
    devices = f"trainers {_device(kernels.cuda)}, engines {_device(cuda)}"
    lines = [f"libraries  fields handed over, {devices}; * set in this file"]
    for (path, settings), fields in zip(given.items(), handed, strict=True):
        lines += _wrapped(f"  {'.'.join(path)}: ", fields, settings)
    return lines


def _device(cuda: bool) -> str:
    return "as on CUDA" if cuda else "as on a CPU"


def _wrapped(head: str, fields: Mapping[str, object], given: Mapping[str, object]) -> list[str]:
    words = (f"{'*' * (name in given)}{name} {_show(value)}" for name, value in fields.items())
    text = ", ".join(word.replace(" ", "\N{NO-BREAK SPACE}") for word in words) or "unknown"
    lines = textwrap.wrap(
        text, _WIDTH, initial_indent=head, subsequent_indent="    ", break_on_hyphens=False
    )
    return [line.replace("\N{NO-BREAK SPACE}", " ") for line in lines]


def _show(value: object) -> str:
    if isinstance(value, list) and len(value) > 8:
        return f"[{value[0]}, ..., {value[-1]}]"
    return str(value).lower() if isinstance(value, bool) else str(value)
