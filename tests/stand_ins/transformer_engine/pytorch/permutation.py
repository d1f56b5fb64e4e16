"""Sorting tokens by expert and back, under the names of the fused kernels."""

import torch
from torch import Tensor


def moe_permute(
    inp: Tensor, routing_map: Tensor, num_out_tokens: int = -1, max_token_num: int = -1, map_type: str = "mask"
) -> tuple[Tensor, Tensor]:
    """Returns the rows of inp [tokens, hidden], expert after expert, and where each came from."""
    if map_type != "mask":
        raise NotImplementedError("the stand-in for Transformer Engine sorts by a mask")
    rows = _sources(routing_map)
    return inp[rows[1]], rows


def moe_permute_with_probs(
    inp: Tensor, probs: Tensor, routing_map: Tensor, num_out_tokens: int = -1
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the rows of inp [tokens, hidden] and of probs [tokens, experts] so, and where each came from."""
    rows = _sources(routing_map)
    return inp[rows[1]], probs.t()[rows[0], rows[1]], rows


def moe_unpermute(
    inp: Tensor,
    row_id_map: Tensor,
    merging_probs: Tensor | None = None,
    restore_shape: torch.Size | None = None,
    map_type: str = "mask",
    probs: Tensor | None = None,
    pad_offsets: Tensor | None = None,
) -> Tensor:
    """Returns the sums [tokens, hidden] of what moe_permute took apart, weighted by merging_probs
    [tokens, experts]."""
    if pad_offsets is not None:
        raise NotImplementedError("the stand-in for Transformer Engine pads no experts")
    expert, token = row_id_map
    if merging_probs is not None:
        inp = inp * merging_probs.t()[expert, token][:, None]
    assert restore_shape is not None, "the stand-in does not guess the number of tokens"
    return inp.new_zeros(restore_shape).index_add(0, token, inp)


def moe_sort_chunks_by_index(inp: Tensor, split_sizes: Tensor, sorted_index: Tensor) -> Tensor:
    """Returns the chunks of inp [rows, hidden] in another order."""
    chunks = inp.split(split_sizes.tolist())
    return torch.cat([chunks[number] for number in sorted_index.tolist()])


def moe_sort_chunks_by_index_with_probs(
    inp: Tensor, probs: Tensor, split_sizes: Tensor, sorted_index: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns the chunks of inp [rows, hidden] and of probs [rows] in another order."""
    of_rows, of_probs = (moe_sort_chunks_by_index(t, split_sizes, sorted_index) for t in (inp, probs))
    return of_rows, of_probs


def _sources(routing_map: Tensor) -> Tensor:
    """Returns [2, rows]: expert and token of each row, by expert."""
    return routing_map.bool().t().nonzero().t()
