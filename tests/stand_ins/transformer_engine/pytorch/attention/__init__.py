"""Holds the attention and the rotary embedding."""

from . import rope
from .dot_product_attention import DotProductAttention

__all__ = ["DotProductAttention", "rope"]
