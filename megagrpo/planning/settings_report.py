"""Lists the settings passed to Megatron and SGLang, and their differences from the defaults."""

import textwrap
from collections.abc import Mapping

from megagrpo.actor.megatron.fields import ddp_fields, expected_kernels, optimizer_fields, transformer_fields
from megagrpo.config.actor import ActorConfig
from megagrpo.config.libraries.megatron import MEGATRON_SETTINGS
from megagrpo.config.libraries.sglang import server_fields
from megagrpo.config.schema import ExperimentConfig
from megagrpo.families.architecture import Architecture
from megagrpo.rollout.service.engine_command import ServerPlace, engine_settings

_WIDTH = 116
_OF_A_START = ("port", "node_rank", "dist_init_addr")  # chosen at each start of an engine


def settings_report(arch: Architecture | None, actor: ActorConfig) -> list[str]:
    """Returns the lines of `megagrpo check` about Megatron's settings; those the user set are marked with *."""
    if arch is None:
        return ["megatron   unknown without the model's config.json"]
    kernels = expected_kernels(actor)
    layers = "Transformer Engine" if kernels.transformer_engine else "torch's layers"
    device = f"as on CUDA with {layers}" if kernels.cuda else "as on a CPU"
    lines = [f"megatron   settings {device}; (its own default); * set in this file"]
    handed = (transformer_fields(arch, actor, kernels), ddp_fields(actor, kernels), optimizer_fields(actor, kernels))
    for table, fields in zip(MEGATRON_SETTINGS, handed, strict=True):
        if table.fields:
            defaults = {name: table.fields[name].default for name in fields}
            lines += _compared(table.name, fields, defaults, table.given(actor))
        else:
            lines.append(f"  {table.name}: the package megatron-core is not installed here")
    return lines


def engine_report(config: ExperimentConfig) -> list[str]:
    """Returns the lines of `megagrpo check` about an engine's settings, in the same form.

    No GPU is looked for: with `actor.device` auto, engines of bfloat16 count as on GPUs.
    """
    device, fields = config.actor.device, server_fields()
    cuda = device == "cuda" or (device == "auto" and config.rollout.dtype == "bfloat16")
    given = engine_settings(config, ServerPlace(0, config.rollout.host, 0, "", cuda=cuda, num_cores=1))
    given = {name: value for name, value in given.items() if name not in _OF_A_START}
    lines = [f"sglang     settings {'as on CUDA' if cuda else 'as on a CPU'}; (its own default); * set in this file"]
    if not given.keys() <= fields.keys():
        return [*lines, "  ServerArgs: the package sglang is not installed here, or refuses what is set"]
    defaults = {name: fields[name].default for name in given}
    return lines + _compared("ServerArgs", given, defaults, config.rollout.sglang)


def _compared(
    what: str, fields: Mapping[str, object], defaults: Mapping[str, object], given: Mapping[str, object]
) -> list[str]:
    other, same = [], []
    for name, value in fields.items():
        text = f"{'*' if name in given else ''}{name}"
        if value == defaults[name] and type(value) is type(defaults[name]):
            same.append(text)
        else:
            other.append(f"{text} {_show(value)} ({_show(defaults[name])})")
    return [
        f"  {what}: {len(fields)} fields handed over",
        *_wrapped("    differ  ", other),
        *_wrapped("    equal   ", same),
    ]


def _wrapped(head: str, words: list[str]) -> list[str]:
    indent = " " * len(head)
    text = ", ".join(word.replace(" ", "\N{NO-BREAK SPACE}") for word in words) or "none"
    lines = textwrap.wrap(text, _WIDTH, initial_indent=head, subsequent_indent=indent, break_on_hyphens=False)
    return [line.replace("\N{NO-BREAK SPACE}", " ") for line in lines]


def _show(value: object) -> str:
    if isinstance(value, list) and len(value) > 8:
        return f"[{value[0]}, ..., {value[-1]}]"
    return str(value).lower() if isinstance(value, bool) else str(value)
