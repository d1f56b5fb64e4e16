"""Holds the layers."""

from .base import TransformerEngineBaseModule
from .grouped_linear import GroupedLinear
from .layernorm_linear import LayerNormLinear
from .linear import Linear
from .norms import RMSNorm

__all__ = ["GroupedLinear", "LayerNormLinear", "Linear", "RMSNorm", "TransformerEngineBaseModule"]
