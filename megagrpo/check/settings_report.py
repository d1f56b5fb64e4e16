"""Lists the settings handed over to Megatron and SGLang."""

import textwrap

import yaml

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
    sets, or everything that is handed over.

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
    actor = config.actor
    kernels = expected_kernels(config.actor)
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
    text = yaml.safe_dump(
        {".".join(path): fields for path, fields in zip(given, handed, strict=True)},
        sort_keys=False,
        default_flow_style=None,
        width=_WIDTH,
    )
    return [f"libraries  fields handed over, {devices}", *textwrap.indent(text, "  ").splitlines()]


def _device(cuda: bool) -> str:
    return "as on CUDA" if cuda else "as on a CPU"
