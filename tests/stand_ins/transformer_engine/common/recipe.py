"""Names the low-precision recipes that Megatron refers to; none can be used here."""

from enum import Enum


class Format(Enum):
    """Names the formats of 8 bits."""

    E4M3 = "E4M3"
    HYBRID = "HYBRID"
    E5M2 = "E5M2"


class Recipe:
    """Refuses to be made: this package computes in the tensors' own types."""

    def __init__(self, *args, **kwargs):
        raise NotImplementedError("the stand-in for Transformer Engine has no fp8")


class DelayedScaling(Recipe):
    """Stands for scales of earlier steps."""


class Float8CurrentScaling(Recipe):
    """Stands for one scale a tensor."""


class MXFP8BlockScaling(Recipe):
    """Stands for one scale for 32 values."""


class Float8BlockScaling(Recipe):
    """Stands for one scale a block."""


class NVFP4BlockScaling(Recipe):
    """Stands for 4 bits."""
