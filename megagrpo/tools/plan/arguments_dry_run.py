"""Resolves SGLang's server arguments as on an absent GPU: SGLang's own code with a replaced device
query.

SGLang's imports must see no CUDA, because its kernels are not installed on a machine without it; so
a CPU server is resolved first, which imports everything needed. The device stays replaced: run this
in a separate process. Written against sglang 0.5.21.
"""

import functools
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import sglang.srt.model_loader.loader  # noqa: F401  # imported by the resolution
import torch
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import prepare_server_args
from sglang.srt.utils import common

from megagrpo.rollout.service.engine_words import engine_words
from megagrpo.system.environment import temporarily

_CUDA_VERSION = "13.0"
_ON_CPU = (
    "--device",
    "cpu",
    "--attention-backend",
    "torch_native",
    "--sampling-backend",
    "pytorch",
    "--mamba-radix-cache-strategy",
    "no_buffer",
    "--disable-overlap-schedule",
)
_REPORTED = (
    "tp_size", "ep_size", "dp_size", "enable_dp_attention", "mem_fraction_static", "chunked_prefill_size",
    "enable_fp32_lm_head", "enable_memory_saver", "enable_deterministic_inference",
    "attention_backend", "moe_runner_backend", "moe_a2a_backend", "kv_cache_dtype", "page_size",
    "max_running_requests", "max_total_tokens", "quantization", "dtype", "disable_radix_cache",
)  # fmt: skip


@dataclass(frozen=True)
class Device:
    """The properties of a GPU that SGLang queries."""

    name: str
    memory_mib: int
    capability: tuple[int, int]
    processors: int
    gpus: int  # per node


def resolve_servers(servers: Sequence[list[str]], device: Device) -> Iterator[dict[str, object]]:
    """Yields the settings that SGLang resolves from each command line on such a GPU: memory, cache,
    parallelism.

    Raises ValueError if SGLang rejects the arguments.
    """
    load_plugins()
    # queried on a CPU as well, for models with sparse attention
    _replace_answers({"get_device_capability": device.capability})
    for words in servers[:1]:
        model = words[words.index("--model-path") + 1]
        prepare_server_args(
            ["--model-path", model, "--load-format", "dummy", *_ON_CPU]
        ).resolve_once()
    _replace_device(device)
    with temporarily("SGLANG_USE_CPU_ENGINE", "0"):
        for words in servers:
            server = prepare_server_args(engine_words(words))
            server.resolve_once()
            settings = server.resolved_dict()
            yield {key: settings[key] for key in _REPORTED}


def _replace_device(device: Device) -> None:
    """Makes torch and SGLang see GPUs of this kind."""
    properties = SimpleNamespace(
        name=device.name,
        major=device.capability[0],
        minor=device.capability[1],
        total_memory=device.memory_mib * 2**20,
        multi_processor_count=device.processors,
    )
    _replace_answers(
        {
            "is_available": True,
            "device_count": device.gpus,
            "get_device_capability": device.capability,
            "get_device_name": device.name,
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
    """Reads {"servers", "device", "output"} as JSON from standard input; writes the settings of
    each server to the file `output`."""
    job = json.load(sys.stdin)
    settings = list(resolve_servers(job["servers"], Device(**job["device"])))
    Path(job["output"]).write_text(json.dumps(settings))


if __name__ == "__main__":
    _main()
