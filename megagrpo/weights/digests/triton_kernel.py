"""The digest of a batch of slices in one kernel: reads every element once, writes one sum for each
block of rows.

Multipliers (see digest.py) are computed in registers, once for a column of a whole block of rows.
Needs Triton.
"""

from contextlib import nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 4096  # elements whose int64 sums are held in registers: 32 a thread
_MAX_ROWS = 16  # of a tile, which share a column's multiplier


def fused_digest(bits: Tensor, *seeds: int) -> Tensor:
    """Returns the sums of bits times their multipliers over the last one or two dimensions, int64
    [...].

    bits: signed integers of any width and strides, [..., n] with one seed or [..., rows, columns]
    with two; `seeds`: digest.index_seed of these dimensions.
    """
    weigh_rows = len(seeds) == 2
    lead = bits.shape[: -len(seeds)]
    if not bits.numel():
        return torch.zeros(lead, dtype=torch.int64, device=bits.device)
    # a view, except for odd 3-D boxes
    matrices = bits.reshape(-1, bits.shape[-2] if weigh_rows else 1, bits.shape[-1])
    row_seed, column_seed = seeds if weigh_rows else (0, *seeds)
    # neighbors in memory must be neighbors in a tile
    if weigh_rows and matrices.stride(1) < matrices.stride(2):
        matrices, row_seed, column_seed = matrices.transpose(1, 2), column_seed, row_seed
    batch, rows, columns = matrices.shape
    tile_rows = min(_MAX_ROWS, triton.next_power_of_2(rows))
    row_blocks = triton.cdiv(rows, tile_rows)
    sums = torch.empty(batch, row_blocks, dtype=torch.int64, device=bits.device)
    # Triton launches on the thread's current device, which is the first one in a new thread.
    with torch.cuda.device(bits.device) if bits.is_cuda else nullcontext():
        _block_sums[(batch * row_blocks,)](
            matrices,
            sums,
            rows,
            columns,
            row_blocks,
            *matrices.stride(),
            row_seed,
            column_seed,
            WEIGH_ROWS=weigh_rows,
            ROWS=tile_rows,
            COLUMNS=min(_TILE // tile_rows, triton.next_power_of_2(columns)),
        )
    return sums.sum(1).view(lead)


@triton.jit
def _odd_number(index, seed):
    x = (index + seed).to(tl.uint64, bitcast=True)  # unsigned: shifts right are logical
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    x = (x ^ (x >> 31)) | 1
    return x.to(tl.int64, bitcast=True)


# compiles for few kinds of sizes
@triton.jit(do_not_specialize=["rows", "row_blocks", "row_seed", "column_seed"])
def _block_sums(
    bits,  # [batch, rows, columns]
    sums,  # [batch, row_blocks] int64
    rows,
    columns,
    row_blocks,
    batch_stride,
    row_stride,
    column_stride,
    row_seed,
    column_seed,
    WEIGH_ROWS: tl.constexpr,  # noqa: N803  # Triton writes compile-time constants in capitals
    ROWS: tl.constexpr,  # noqa: N803
    COLUMNS: tl.constexpr,  # noqa: N803
):
    program = tl.program_id(0).to(tl.int64)  # of a batch * row_blocks grid
    row = (program % row_blocks) * ROWS + tl.arange(0, ROWS)
    start = bits + (program // row_blocks) * batch_stride
    total = tl.zeros([ROWS, COLUMNS], tl.int64)
    for first in range(0, columns, COLUMNS):
        column = first + tl.arange(0, COLUMNS).to(tl.int64)
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        offsets = row[:, None] * row_stride + column[None, :] * column_stride
        values = tl.load(start + offsets, mask=inside, other=0).to(tl.int64)
        total += values * _odd_number(column, column_seed)[None, :]
    per_row = tl.sum(total, axis=1)
    if WEIGH_ROWS:
        per_row *= _odd_number(row, row_seed)
    tl.store(sums + program, tl.sum(per_row, axis=0))
