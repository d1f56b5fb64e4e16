"""Builds Megatron's three configuration objects from the values of fields.py, and checks required
packages."""

import importlib.util
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar, get_type_hints

import torch
from megatron.core.activations import squared_relu
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from pydantic import ConfigDict, TypeAdapter

from megagrpo.actor.host import slow_attention, uses_transformer_engine
from megagrpo.config.fields import complaints
from megagrpo.config.libraries import DDP, OPTIMIZER, TRANSFORMER, UNTRIED, refusal
from megagrpo.config.schema import ActorConfig
from megagrpo.models import internals_0_19
from megagrpo.models.architecture import Architecture
from megagrpo.models.fields import (
    Kernels,
    context_rule,
    ddp_fields,
    optimizer_fields,
    transformer_fields,
)
from megagrpo.system.user_function import did_you_mean

C = TypeVar("C")
_APEX_KERNEL = "fused_weight_gradient_mlp_cuda"
_INSTALLED_AS = {
    "fla": "flash-linear-attention",
    "mamba_ssm": "mamba-ssm --no-build-isolation",
    "causal_conv1d": "causal-conv1d --no-build-isolation",
}
_ANY_CLASS = ConfigDict(arbitrary_types_allowed=True)


def checked_kernels(arch: Architecture, config: ActorConfig) -> Kernels:
    """Returns what this process computes with, resolved once for an actor.

    The model fits the layout (check/rules). Raises ValueError if a package that the settings need
    is missing.
    """
    if config.transformer_engine is True and importlib.util.find_spec("transformer_engine") is None:
        raise ValueError(
            "actor.transformer_engine is true, but the package transformer_engine is not "
            f"installed here (it needs CUDA): bash launch/build_te.sh {sys.prefix}, or set "
            "actor.transformer_engine: false for torch's layers"
        )
    kernels = kernels_here(config)
    if (rule := context_rule(config, kernels)).when:
        raise ValueError(rule.text)
    for package in arch.recurrent.PACKAGES if kernels.cuda and arch.recurrent else ():
        if importlib.util.find_spec(package) is None:
            raise ValueError(
                f"a {arch.family} model's recurrent layers need the package {package} on a GPU, "
                f"which is not installed here: pip install {_INSTALLED_AS[package]}"
            )
    if (
        config.megatron.get("moe_token_dispatcher_type") == "flex"
        and importlib.util.find_spec("deep_ep") is None
    ):
        raise ValueError(
            "actor.megatron.moe_token_dispatcher_type is flex, but DeepEP (the package deep_ep) "
            "is not installed here: build it as its own pages say, or keep alltoall, which is "
            "enough if actor.parallel.ep stays in a node"
        )
    if (
        kernels.cuda
        and kernels.transformer_engine
        and (doubt := slow_attention(config.packing, kernels.deterministic))
    ):
        warnings.warn(doubt, stacklevel=2)
    return kernels


def kernels_here(config: ActorConfig) -> Kernels:
    """Returns what this process computes with."""
    return Kernels(
        cuda=torch.cuda.is_available() and config.device != "cpu",
        transformer_engine=uses_transformer_engine(config),
        fused_weight_gradient=importlib.util.find_spec(_APEX_KERNEL) is not None,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )


def megatron_configs(
    arch: Architecture, config: ActorConfig, kernels: Kernels
) -> tuple[TransformerConfig, DistributedDataParallelConfig, MegatronOptimizerConfig]:
    """Returns Megatron's configuration of model, gradient buffers and optimizer. Raises ValueError
    if Megatron does."""
    return (
        transformer_config(arch, config, kernels),
        _built(DistributedDataParallelConfig, ddp_fields(config, kernels), DDP),
        _built(MegatronOptimizerConfig, optimizer_fields(config, kernels), OPTIMIZER),
    )


def transformer_config(
    arch: Architecture, config: ActorConfig, kernels: Kernels
) -> TransformerConfig:
    """Returns Megatron's configuration of the model. Raises ValueError if Megatron refuses the
    settings."""
    cls = TransformerConfig if arch.latent is None else MLATransformerConfig
    built = _built(cls, transformer_fields(arch, config, kernels), TRANSFORMER)
    if built.gradient_accumulation_fusion:
        if not (kernels.transformer_engine or kernels.fused_weight_gradient):
            raise ValueError(
                "actor.megatron.gradient_accumulation_fusion needs Transformer "
                "Engine's layers (actor.transformer_engine) or Apex's extension "
                f"{_APEX_KERNEL}, and neither is here"
            )
        internals_0_19.admit_fused_weight_gradient()
    return built


def _built(cls: type[C], fields: Mapping[str, object], path: tuple[str, ...]) -> C:
    try:
        build: Callable[..., C] = cls
        return build(**{name: _as_object(name, value) for name, value in fields.items()})
    except (TypeError, ValueError, AssertionError, RuntimeError, ImportError) as exc:
        ours = "".join(
            f"; {name} is {why}"
            for name in fields
            if re.search(rf"\b{name}\b", str(exc)) and (why := refusal(path, name))
        )
        # an assertion may have no text, and a comparison with nothing one that says nothing
        line = traceback.extract_tb(exc.__traceback__)[-1].line
        said = str(exc) if str(exc) and not isinstance(exc, TypeError) else f"{exc} in `{line}`"
        raise ValueError(
            f"Megatron's {cls.__name__} refuses these settings: {said.strip()}{ours}; what is not set by "
            f"another key may be set in {'.'.join(path)}"
        ) from exc


def megatron_problems(
    path: tuple[str, ...], settings: Mapping[str, object]
) -> Iterator[tuple[str, str]]:
    """Yields (field, problem) of each setting that Megatron's class does not have or whose value
    has another type."""
    cls = _CLASSES[path]
    declared = get_type_hints(cls)
    for name, value in settings.items():
        field = name.removeprefix(UNTRIED)
        if field not in declared:
            yield (
                name,
                f"Megatron's {cls.__name__} has no such field{did_you_mean(field, declared)}",
            )
            continue
        kind: TypeAdapter[object] = TypeAdapter(declared[field], config=_ANY_CLASS)
        for text in complaints(_judge, kind, field, value):
            told = text.partition("\n")[2].partition(" [type=")[0].strip() or text
            yield name, f"Megatron's {cls.__name__} declares it as {declared[field]}: {told}"


def _judge(kind: TypeAdapter[object], name: str, value: object) -> None:
    kind.validate_python(_as_object(name, value), strict=True)


_CLASSES: dict[tuple[str, ...], type] = {
    TRANSFORMER: MLATransformerConfig,
    DDP: DistributedDataParallelConfig,
    OPTIMIZER: MegatronOptimizerConfig,
}


def _as_object(name: str, value: object) -> object:
    """Returns the object that a plain value stands for."""
    if name.endswith("dtype") and name != "moe_router_dtype" and value is not None:
        dtype = torch.uint8 if value == "fp8" else getattr(torch, str(value), None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{value} is no dtype of torch, such as bfloat16")
        return dtype
    if name == "activation_func" and value == "squared_relu":
        return squared_relu
    if name == "activation_func":
        return getattr(torch.nn.functional, str(value))
    if name == "attention_backend":
        if value not in AttnBackend.__members__:
            raise ValueError(f"{value} is none of {', '.join(AttnBackend.__members__)}")
        return AttnBackend[str(value)]
    return list(value) if isinstance(value, list) else value  # Megatron changes some in place
