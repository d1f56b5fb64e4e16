"""Holds the layers, the attention and the optimizers."""

from . import attention, distributed, fp8, module, ops, optimizers, permutation, router, tensor
from .attention import DotProductAttention
from .distributed import CudaRNGStatesTracker, checkpoint
from .fp8 import fp8_autocast, fp8_model_init
from .module import GroupedLinear, LayerNormLinear, Linear, RMSNorm

__all__ = [
    "CudaRNGStatesTracker", "DotProductAttention", "GroupedLinear", "LayerNormLinear", "Linear", "RMSNorm", "attention",
    "checkpoint", "distributed", "fp8", "fp8_autocast", "fp8_model_init", "module", "ops", "optimizers", "permutation",
    "router", "tensor",
]  # fmt: skip
