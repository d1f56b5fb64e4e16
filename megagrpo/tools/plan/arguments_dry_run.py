"""Resolves SGLang's server arguments here, or as on an absent GPU: SGLang's own code with a replaced
device query.

SGLang's imports must see no CUDA, because its kernels are not installed on a machine without it; so
a CPU server is resolved first, which imports everything needed. The device stays replaced: run this
in a separate process. Written against sglang 0.5.21.
"""

import functools
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import sglang.srt.model_loader.loader  # noqa: F401  # imported by the resolution
import torch
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import ServerArgs, prepare_server_args
from sglang.srt.utils import common

from megagrpo.config.hardware import Hardware, hardware_called
from megagrpo.rollout.service.engine_command import Settings
from megagrpo.rollout.service.engine_words import engine_words
from megagrpo.system.environment import temporarily
from megagrpo.system.errors import explained

_CUDA_VERSION = "13.0"
_ON_CPU = (
    "--device cpu --attention-backend torch_native --sampling-backend pytorch "
    "--mamba-radix-cache-strategy no_buffer --disable-overlap-schedule"
)


def resolve_servers(
    servers: Sequence[Settings], device: Hardware, gpus: int
) -> Iterator[dict[str, object]]:
    """Yields the settings that SGLang resolves from those of each server on nodes of `gpus` such GPUs.

    Raises ValueError if SGLang rejects the arguments.
    """
    load_plugins()
    # queried on a CPU as well, for models with sparse attention
    _replace_answers({"get_device_capability": device.capability})
    for settings in servers[:1]:
        words = ["--model-path", settings["model_path"], "--load-format", "dummy"]
        prepare_server_args([*words, *_ON_CPU.split()]).resolve_once()
    _replace_device(device, gpus)
    with temporarily("SGLANG_USE_CPU_ENGINE", "0"):
        for settings in servers:
            yield _judged(settings).resolved_dict()


def resolve_here(settings: Settings) -> None:
    """Lets SGLang resolve an engine's settings on this machine's CPU. Raises ValueError if SGLang
    refuses them."""
    with explained("SGLang does not resolve these arguments"):
        load_plugins()
        _judged(settings)


def _judged(settings: Settings) -> ServerArgs:
    server = prepare_server_args(engine_words(settings))
    server.resolve_once()
    server.check_server_args()  # as an engine does at its start
    return server


def _replace_device(device: Hardware, gpus: int) -> None:
    """Makes torch and SGLang see GPUs of this kind."""
    properties = SimpleNamespace(
        name=device.device_name,
        major=device.capability[0],
        minor=device.capability[1],
        total_memory=device.memory_bytes,
        multi_processor_count=device.processors,
    )
    _replace_answers(
        {
            "is_available": True,
            "device_count": gpus,
            "get_device_capability": device.capability,
            "get_device_name": device.device_name,
            "get_device_properties": properties,
            "mem_get_info": (properties.total_memory,) * 2,
        }
    )
    torch.version.cuda = _CUDA_VERSION
    for module in [sys.modules[name] for name in sys.modules if name.startswith("sglang")]:
        for function in list(vars(module).values()):
            # its cache holds answers for the CPU
            if isinstance(function, functools._lru_cache_wrapper):
                function.cache_clear()
    common.get_nvgpu_memory_capacity = lambda: device.memory_mib


def _replace_answers(answers: dict[str, object]) -> None:
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *_, answer=answer, **__: answer)


def _main() -> None:
    """Reads {"servers", "device", "gpus", "output"} as JSON from standard input; writes the settings of
    each server to the file `output`, objects as texts."""
    job = json.load(sys.stdin)
    device = hardware_called(job["device"])
    assert device is not None, "named by its row"
    settings = list(resolve_servers(job["servers"], device, job["gpus"]))
    Path(job["output"]).write_text(json.dumps(settings, default=str))


if __name__ == "__main__":
    _main()
