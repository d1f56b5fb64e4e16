"""The sum of a token's experts without Transformer Engine's kernel: in float32, rounded once.

Megatron's own adds bfloat16 by atomic operations: its order differs from run to run, and so would
the log-probabilities of one sample in two passes of the same weights.
"""

import torch
from megatron.core.transformer.moe import moe_utils
from torch import Tensor

_unpermute = moe_utils.unpermute


def unpermute(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    restore_shape: torch.Size,
    probs: Tensor | None = None,
    routing_map: Tensor | None = None,
    fused: bool = False,
    **fused_options: object,
) -> Tensor:
    """Returns [tokens, h], sums of the rows of permuted_tokens [n, h] with the same index in
    sorted_indices [n].

    Takes the place of Megatron's, which does the rest: its fused kernel, probabilities, other
    types.
    """
    if fused or probs is not None or permuted_tokens.dtype is not torch.bfloat16:
        return _unpermute(
            permuted_tokens,
            sorted_indices,
            restore_shape,
            probs,
            routing_map,
            fused,
            **fused_options,
        )
    summed = torch.zeros(restore_shape, dtype=torch.float32, device=permuted_tokens.device)
    rows = permuted_tokens.float()
    if rows.is_cpu:
        summed.index_add_(0, sorted_indices, rows)
    else:  # on a GPU index_add is atomic, too, and this one sorts
        summed.index_put_((sorted_indices,), rows, accumulate=True)
    return summed.to(permuted_tokens.dtype)
