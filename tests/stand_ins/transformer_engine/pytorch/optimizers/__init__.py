"""Holds Adam with its options for memory, SGD's name, and operations over lists of tensors."""

from .fused_adam import FusedAdam
from .fused_sgd import FusedSGD
from .multi_tensor import multi_tensor_applier, multi_tensor_l2norm, multi_tensor_scale, multi_tensor_scale_tensor

__all__ = [
    "FusedAdam", "FusedSGD", "multi_tensor_applier", "multi_tensor_l2norm", "multi_tensor_scale",
    "multi_tensor_scale_tensor",
]  # fmt: skip
