"""Operations over lists of tensors."""

import torch


class MultiTensorApply:
    """Calls an operation with the size of its chunks."""

    def __init__(self, chunk_size: int):
        self.chunk_size = chunk_size

    def __call__(self, op, noop_flag_buffer, tensor_lists, *args):
        """Returns op(chunk size, flag, lists, ...)."""
        return op(self.chunk_size, noop_flag_buffer, tensor_lists, *args)


multi_tensor_applier = MultiTensorApply(2048 * 32)


def multi_tensor_l2norm(chunk_size, noop_flag, tensor_lists, per_tensor=False, *_):
    """Returns the norm [1] of all tensors, and of each where asked, in float32."""
    _check(tensor_lists)
    norms = torch.stack([t.float().norm() for t in tensor_lists[0]])
    return norms.norm()[None], norms if per_tensor else None


def multi_tensor_scale(chunk_size, noop_flag, tensor_lists, scale, *_) -> None:
    """Writes scale x the first list into the second."""
    _check(tensor_lists)
    for source, target in zip(*tensor_lists, strict=True):
        target.copy_(source * scale)


def multi_tensor_scale_tensor(chunk_size, noop_flag, tensor_lists, scale) -> None:
    """As multi_tensor_scale; scale is a tensor [1], which stays on the device."""
    multi_tensor_scale(chunk_size, noop_flag, tensor_lists, scale)


def _check(tensor_lists) -> None:
    """The kernels read all tensors of a list as the first one's type, whatever theirs is."""
    for tensors in tensor_lists:
        assert len({t.dtype for t in tensors}) == 1, "tensors of several types would be misread"
