"""Names the class of fp8 tensors; there are none."""

from .tensor import QuantizedTensor


class Float8Tensor(QuantizedTensor):
    """Has no instances here."""
