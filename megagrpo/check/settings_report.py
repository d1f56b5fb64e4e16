"""Lists the settings passed to Megatron and SGLang, and their differences from the defaults."""

import textwrap
from collections.abc import Mapping, Sequence

from megagrpo.actor.megatron.fields import (
    ddp_fields,
    expected_kernels,
    optimizer_fields,
    transformer_fields,
)
from megagrpo.config.actor import ActorConfig
from megagrpo.config.libraries.megatron import MEGATRON_SETTINGS
from megagrpo.config.libraries.sglang import server_fields
from megagrpo.config.schema import ExperimentConfig
from megagrpo.families.architecture import Architecture
from megagrpo.rollout.service.engine_command import ServerPlace, engine_settings

_WIDTH = 116
_OF_A_START = ("port", "node_rank", "dist_init_addr")  # chosen at each start of an engine


def settings_report(arch: Architecture | None, actor: ActorConfig, everything: bool) -> list[str]:
    """Returns the lines of `megagrpo check` about Megatron's settings; those the user set are
    marked with *.

    everything: by name; else one line with their number and those that the user set.
    """
    if arch is None:
        return ["megatron   unknown without the model's config.json"]
    kernels = expected_kernels(actor)
    layers = "Transformer Engine" if kernels.transformer_engine else "torch's layers"
    device = f"as on CUDA with {layers}" if kernels.cuda else "as on a CPU"
    handed = (
        transformer_fields(arch, actor, kernels),
        ddp_fields(actor, kernels),
        optimizer_fields(actor, kernels),
    )
    if not all(table.fields for table in MEGATRON_SETTINGS):
        return ["megatron   the package megatron-core is not installed here"]
    compared = [
        _Compared(
            table.name,
            fields,
            {name: table.fields[name].default for name in fields},
            table.given(actor),
        )
        for table, fields in zip(MEGATRON_SETTINGS, handed, strict=True)
    ]
    return _lines("megatron", device, compared, everything)


def engine_report(config: ExperimentConfig, everything: bool) -> list[str]:
    """Returns the lines of `megagrpo check` about an engine's settings, in the same form.

    No GPU is looked for: with `actor.device` auto, engines of bfloat16 count as on GPUs.
    """
    device, fields = config.actor.device, server_fields()
    cuda = device == "cuda" or (device == "auto" and config.rollout.dtype == "bfloat16")
    given = engine_settings(
        config, ServerPlace(0, config.rollout.host, 0, "", cuda=cuda, num_cores=1)
    )
    given = {name: value for name, value in given.items() if name not in _OF_A_START}
    if not given.keys() <= fields.keys():
        return ["sglang     the package sglang is not installed here, or refuses what is set"]
    compared = _Compared(
        "ServerArgs", given, {name: fields[name].default for name in given}, config.rollout.sglang
    )
    return _lines("sglang", "as on CUDA" if cuda else "as on a CPU", [compared], everything)


class _Compared:
    """The fields of one class of a library that are handed over, against its defaults."""

    def __init__(
        self,
        name: str,
        fields: Mapping[str, object],
        defaults: Mapping[str, object],
        given: Mapping[str, object],
    ):
        self.name, self.number = name, len(fields)
        self.other: list[str] = []
        self.same: list[str] = []
        for field, value in fields.items():
            text = f"{'*' if field in given else ''}{field}"
            if value == defaults[field] and type(value) is type(defaults[field]):
                self.same.append(text)
            else:
                self.other.append(f"{text} {_show(value)} ({_show(defaults[field])})")


def _lines(library: str, device: str, compared: Sequence[_Compared], everything: bool) -> list[str]:
    if not everything:
        number, differ = (
            sum(each)
            for each in zip(*((one.number, len(one.other)) for one in compared), strict=True)
        )
        starred = [
            text for one in compared for text in [*one.other, *one.same] if text.startswith("*")
        ]
        set_here = f"set in this file: {', '.join(starred)}" if starred else "none set in this file"
        return [
            f"{library:<10} {number} settings {device}, {differ} of them not its defaults (--all); "
            f"{set_here}"
        ]
    lines = [f"{library:<10} settings {device}; (its own default); * set in this file"]
    for one in compared:
        lines.append(f"  {one.name}: {one.number} fields handed over")
        lines += [*_wrapped("    differ  ", one.other), *_wrapped("    equal   ", one.same)]
    return lines


def _wrapped(head: str, words: list[str]) -> list[str]:
    indent = " " * len(head)
    text = ", ".join(word.replace(" ", "\N{NO-BREAK SPACE}") for word in words) or "none"
    lines = textwrap.wrap(
        text, _WIDTH, initial_indent=head, subsequent_indent=indent, break_on_hyphens=False
    )
    return [line.replace("\N{NO-BREAK SPACE}", " ") for line in lines]


def _show(value: object) -> str:
    if isinstance(value, list) and len(value) > 8:
        return f"[{value[0]}, ..., {value[-1]}]"
    return str(value).lower() if isinstance(value, bool) else str(value)
