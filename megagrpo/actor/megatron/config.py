"""Builds Megatron's three configuration objects from what fields.py says, and checks what they need here."""

import importlib.util
import re
from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.tensor_parallel import layers
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from megagrpo.actor.host import uses_transformer_engine
from megagrpo.actor.megatron.fields import Kernels, ddp_fields, optimizer_fields, transformer_fields
from megagrpo.config.layout import context_problem, layout_problems
from megagrpo.config.libraries.megatron import DDP_SETTINGS, OPTIMIZER_SETTINGS, TRANSFORMER_SETTINGS, SettingsTable
from megagrpo.config.libraries.source import refusal_of
from megagrpo.config.schema import ActorConfig
from megagrpo.families.architecture import Architecture

_APEX_KERNEL = "fused_weight_gradient_mlp_cuda"


def check_layout(arch: Architecture, config: ActorConfig) -> None:
    """Raises ValueError with every clash when the model cannot be cut as the layout asks."""
    problems = layout_problems(arch, config)
    if problems:
        raise ValueError("the model does not fit the layout:\n  " + "\n  ".join(problems))


def check_packages(config: ActorConfig) -> None:
    """Raises ValueError when a package that the settings need is not installed where ranks start."""
    settings = config.megatron
    if settings.get("moe_token_dispatcher_type") == "flex" and importlib.util.find_spec("deep_ep") is None:
        raise ValueError(
            "actor.megatron.moe_token_dispatcher_type is flex, but DeepEP (the package deep_ep) is not installed here: "
            "build it as its own pages say, or leave alltoall, which is enough where actor.parallel.ep stays in a node"
        )


def check_transformer_engine(config: ActorConfig) -> None:
    """Raises ValueError when Transformer Engine's layers are asked for, or needed, where it is not installed."""
    if config.transformer_engine is True and importlib.util.find_spec("transformer_engine") is None:
        raise ValueError(
            "actor.transformer_engine is true, but the package transformer_engine is not installed here "
            "(it needs CUDA): pip install 'megagrpo[gpu]', or set actor.transformer_engine: false for torch's layers"
        )
    kernels = kernels_here(config)
    if kernels.cuda and (problem := context_problem(config, kernels.transformer_engine)):
        raise ValueError(problem)


def kernels_here(config: ActorConfig) -> Kernels:
    """Returns what this process computes with."""
    return Kernels(
        cuda=torch.cuda.is_available() and config.device != "cpu",
        transformer_engine=uses_transformer_engine(config),
        fused_weight_gradient=importlib.util.find_spec(_APEX_KERNEL) is not None,
    )


def transformer_config(arch: Architecture, config: ActorConfig, kernels: Kernels | None = None) -> TransformerConfig:
    """Returns Megatron's configuration of the model. Raises ValueError for what Megatron refuses."""
    kernels = kernels or kernels_here(config)
    kind = TransformerConfig if arch.mla is None else MLATransformerConfig
    built = _built(kind, transformer_fields(arch, config, kernels), TRANSFORMER_SETTINGS, config)
    if built.gradient_accumulation_fusion:
        if not (kernels.transformer_engine or kernels.fused_weight_gradient):
            raise ValueError(
                "actor.megatron.gradient_accumulation_fusion needs Transformer Engine's layers "
                f"(actor.transformer_engine) or Apex's extension {_APEX_KERNEL}, and neither is here"
            )
        # Megatron's output layer asks for Apex's kernel. It is never called: our head reads its weight.
        layers._grad_accum_fusion_available = True
    return built


def ddp_config(config: ActorConfig, kernels: Kernels | None = None) -> DistributedDataParallelConfig:
    """Returns Megatron's configuration of gradient buffers. Raises ValueError for what Megatron refuses."""
    fields = ddp_fields(config, kernels or kernels_here(config))
    return _built(DistributedDataParallelConfig, fields, DDP_SETTINGS, config)


def optimizer_config(config: ActorConfig, kernels: Kernels | None = None) -> MegatronOptimizerConfig:
    """Returns Megatron's configuration of the optimiser. Raises ValueError for what Megatron refuses."""
    fields = optimizer_fields(config, kernels or kernels_here(config))
    return _built(MegatronOptimizerConfig, fields, OPTIMIZER_SETTINGS, config)


def _built(kind: Any, fields: Mapping[str, Any], table: SettingsTable, config: ActorConfig) -> Any:
    try:
        return kind(**{name: _as_object(name, value) for name, value in fields.items()})
    except (ValueError, AssertionError, RuntimeError, ImportError) as exc:
        named = [name for name in table.fields if re.search(rf"\b{name}\b", str(exc))]
        refused = {name: refusal_of(name, table.refused) for name in named}
        ours = {name: refusal.instead for name, refusal in refused.items() if refusal and refusal.instead}
        where = ".".join(table.path)
        given = ", ".join(f"{where}.{key}: {value}" for key, value in table.given(config).items())
        names = "".join(f"; {name} is {key} here" for name, key in ours.items())
        raise ValueError(
            f"Megatron's {kind.__name__} refuses these settings: {exc}{names}"
            + (f". Set here: {given}" if given else f". Nothing is set in {where}")
        ) from exc


def _as_object(name: str, value: Any) -> Any:
    """Returns the object that a plain value stands for."""
    if name.endswith("dtype") and name != "moe_router_dtype" and value is not None:
        return torch.uint8 if value == "fp8" else getattr(torch, value)
    if name == "activation_func":
        return getattr(torch.nn.functional, value)
    if name == "attention_backend":
        return AttnBackend[value]
    return list(value) if isinstance(value, list) else value  # Megatron changes some in place
