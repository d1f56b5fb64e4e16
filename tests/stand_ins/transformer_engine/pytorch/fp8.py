"""Has the names by which Megatron asks whether fp8 is on; it never is."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class FP8GlobalStateManager:
    """Answers that nothing is quantized."""

    IS_FIRST_FP8_MODULE = False

    @classmethod
    def is_fp8_enabled(cls) -> bool:
        """Returns False."""
        return False

    @classmethod
    def is_fp8_calibration(cls) -> bool:
        """Returns False."""
        return False

    @classmethod
    def with_fp8_parameters(cls) -> bool:
        """Returns False."""
        return False

    @classmethod
    def reset(cls) -> None:
        """Does nothing."""


@contextmanager
def fp8_autocast(
    enabled: bool = True, calibrating: bool = False, fp8_recipe=None, fp8_group=None, _graph: bool = False
) -> Iterator[None]:
    """Raises NotImplementedError where fp8 is to be on."""
    if enabled:
        raise NotImplementedError("the stand-in for Transformer Engine has no fp8")
    yield


@contextmanager
def fp8_model_init(enabled: bool = True, recipe=None, preserve_high_precision_init_val: bool = False) -> Iterator[None]:
    """Raises NotImplementedError where parameters are to be fp8."""
    if enabled:
        raise NotImplementedError("the stand-in for Transformer Engine has no fp8")
    yield


def get_fp8_torch_dtype(fp8_recipe, fprop_tensor: bool = True) -> torch.dtype:
    """Raises NotImplementedError."""
    raise NotImplementedError("the stand-in for Transformer Engine has no fp8")
