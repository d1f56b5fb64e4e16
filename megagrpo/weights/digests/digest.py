"""A digest of any slice of a tensor: additive over disjoint slices, and changed by every changed
element.

    digest(slice) = sum over its elements of multiplier(index) * bits, modulo 2^64

`bits` is the element of the published dtype read as a signed integer of its width, `index` its
index in the whole HF tensor, and multiplier(i, j, ...) = odd_0(i) * odd_1(j) * ..., one odd 64-bit
number for every index along every dimension: odd_k(i) = mix64(k, i) | 1, where mix64 is the
finalizer of splitmix64 (Steele, Lea, Flood 2014).

Why that is enough:

- It is a sum over elements, so the digests of disjoint slices add up to that of their union, in any
  order, and an all-reduce (sum) of the ranks' parts is the digest of the whole. int64 wraps around
  alike on every device.
- It is linear: two contents whose bits differ by D(i, j) have digests that differ by sum D(i, j)
  odd_0(i) odd_1(j), so whether a change is noticed depends only on D. Equal contents have equal
  digests.
- A product of odd numbers is odd, hence invertible modulo 2^64: one element whose bits change by d
  != 0, |d| < 2^64, changes the digest by multiplier * d, which is not 0. No single change goes
  unnoticed; nor any number of changes in one row (column) whose sum weighted by odd_1 (odd_0) is
  not 0.
- Other changes: let 2^t be the largest power of two that divides all of D, and n = 64 - t. For odd
  numbers drawn uniformly and independently, the chance that the sum vanishes is at most
  n^(dimensions - 1) * 2^(1 - n): in one dimension some D / 2^t is odd, and its product with an odd
  number is uniform among the odd residues modulo 2^n. In two, w(i) = sum_j D(i, j) / 2^t odd_1(j)
  is divisible by 2^k for all i with a chance of at most 2^(1 - k), by the case before; what is
  left, sum_i w(i) odd_0(i), then vanishes with at most 2^(1 - n + k); summed over k this is n 2^(1
  - n). And so on. A generic change has t = 0 (2^-57 for a matrix); the worst are changes of nothing
  but sign bits: t = 15 for bfloat16 (2^-42) and t = 31 for float32 (2^-26). With 8 bytes t may be
  63, where two flipped signs cancel: dtypes that wide are not published.
- The numbers are not random but fixed, so this says that no change goes unnoticed which has nothing
  to do with mix64: exchanged elements, rows, columns or blocks, shifts, stale or missing parts. Two
  structural points: no two indices below 2^20 share their odd number (tested), or exchanged rows
  would go unnoticed; and dimensions have different numbers, or the transpose of a square matrix
  would: it changes the digest by the sum over i < j of (a(j, i) - a(i, j)) (odd_0(i) odd_1(j) -
  odd_0(j) odd_1(i)), 0 for every matrix if odd_0 = odd_1.
- Exchanged tensors (experts, layers) are noticed because every HF tensor has a digest of its own.

Why it is fast: the multiplier is a product, so a matrix needs one multiplication and one sum along
its rows, and then the same for the vector of row sums, instead of a hash for every element. On CUDA
one Triton kernel does both.
"""

import importlib.util
from functools import cache, lru_cache

import torch
from torch import Tensor

from megagrpo.weights.copies.views import Box

_CHUNK = 1 << 16  # elements: 512 KiB of int64 products stay in a core's cache
# by bytes of an element
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def slice_digest(values: Tensor, box: Box) -> Tensor:
    """Returns the digest of one slice [*box.size], int64 []; see batched_digest."""
    return batched_digest(values.unsqueeze(0), box)[0]


def batched_digest(values: Tensor, box: Box, firsts: Tensor | None = None) -> Tensor:
    """Returns the digests of one box of k HF tensors, int64 [k]. values: [k, *box.size] as
    published, any strides.

    firsts: of boxes with one index along the first of three dimensions, as experts in one tensor
    have, these indices, int64 [k]; box.start[0] counts for nothing then.
    """
    assert tuple(values.shape[1:]) == box.size, (values.shape, box)
    bits = values.view(INTEGERS[values.element_size()])
    if not box.size:
        return bits.to(torch.int64)

    def odd(k: int) -> Tensor:
        if k == 0 and firsts is not None:
            return _mixed(firsts[:, None] + index_seed(0, 0))
        return _odd(box.start[k], box.size[k], k, bits.device, _stream(bits))

    if bits.is_cuda and _has_triton():
        from megagrpo.weights.digests.triton_kernel import fused_digest

        done = min(2, len(box.size))
        sums = fused_digest(
            bits, *(index_seed(box.start[k], k) for k in range(len(box.size))[-done:])
        )
    else:
        done = 1
        sums = _row_sums(bits, odd(len(box.size) - 1))
    for k in reversed(range(len(box.size) - done)):
        sums = (sums * odd(k)).sum(-1)
    return sums


def index_seed(start: int, dimension: int) -> int:
    """Returns the int64 to which an index, counted from `start` on along a dimension, is added
    before mix64."""
    return _signed((start + (dimension + 1) * 0x9E3779B97F4A7C15) % 2**64)


def _row_sums(bits: Tensor, columns: Tensor) -> Tensor:
    """Returns sum_j bits[..., j] * columns[j], int64 [...]. bits [..., n] of any integer width,
    columns [n] int64."""
    chunk = max(_CHUNK, len(columns))
    if bits.numel() <= chunk:
        return bits.to(torch.int64).mul_(columns).sum(-1)
    if len(bits) == 1:
        return _row_sums(bits[0], columns)[None]
    parts = bits.split(max(1, chunk // bits[0].numel()))
    return torch.cat([_row_sums(part, columns) for part in parts])


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _stream(tensor: Tensor) -> int:
    """Returns the identity of the current CUDA stream on the tensor's device, 0 on a CPU."""
    return torch.cuda.current_stream(tensor.device).cuda_stream if tensor.is_cuda else 0


@lru_cache(maxsize=1024)  # the same slices come again in every layer, expert and publish
def _odd(start: int, count: int, dimension: int, device: torch.device, stream: int) -> Tensor:
    """Returns the odd multipliers [count] int64 of the indices from `start` on along a dimension.

    stream: in the key of the cache, because one stream must not use or free another one's tensors
    before they are finished.
    """
    return _mixed(
        torch.arange(count, dtype=torch.int64, device=device) + index_seed(start, dimension)
    )


def _mixed(x: Tensor) -> Tensor:
    x = (x ^ _shift(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift(x, 27)) * _signed(0x94D049BB133111EB)
    return (x ^ _shift(x, 31)).bitwise_or_(1)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Shifts right logically: int64's own shift keeps the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value
