"""A digest of any slice of an HF tensor that adds up over disjoint slices and notices every single changed element.

    digest(slice) = sum over its elements of multiplier(index) * bits, modulo 2^64

`bits` is the element of the published dtype read as a signed integer of its width, `index` its place in the whole HF
tensor, and multiplier(i, j, ...) = odd_0(i) * odd_1(j) * ..., one odd 64-bit number for every index along every
dimension: odd_k(i) = mix64(k, i) | 1, where mix64 is the finaliser of splitmix64 (Steele, Lea, Flood 2014).

Why that is enough:

- It is a sum over elements, so the digests of disjoint slices add up to that of their union, in any order, and an
  all-reduce (sum) of the ranks' parts is the digest of the whole. int64 wraps around alike on every device.
- A product of odd numbers is odd, hence invertible modulo 2^64: one element whose bits change by d != 0, |d| < 2^64,
  changes the digest by multiplier * d, which is not 0. No single change goes unnoticed.
- Two exchanged elements change it by (m_a - m_b) (bits_b - bits_a), two exchanged rows by (odd_0(a) - odd_0(b)) times a
  sum over columns, a transposition by a sum over odd_0(i) odd_1(j) - odd_0(j) odd_1(i): these are 0 only if
  pseudo-random 64-bit numbers conspire. Exchanged tensors (experts, layers) are noticed because every HF tensor has a
  digest of its own.

Why it is fast: the multiplier is a product, so a matrix needs one multiplication and one sum along its rows, and then
the same for the vector of row sums, instead of a hash for every element.
"""

from functools import lru_cache

import torch
from torch import Tensor

from megagrpo.weights.views import Box

_CHUNK = 1 << 16  # elements: 512 KiB of int64 products stay in a core's cache
_CUDA_CHUNK = 1 << 26  # and on a GPU a launch should be worth it
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def slice_digest(values: Tensor, box: Box) -> Tensor:
    """Returns the digest of one slice, int64 [] on the values' device.

    `values`: of the published dtype, shaped like `box`, the slice's place in the HF tensor.
    """
    assert tuple(values.shape) == box.size, (values.shape, box)
    bits = values.contiguous().view(_INTEGERS[values.element_size()])
    factors = [_odd(start, n, k, values.device) for k, (start, n) in enumerate(zip(box.start, box.size, strict=True))]
    if not factors:
        return bits.to(torch.int64)
    columns = factors.pop()
    sums = _row_sums(bits.reshape(-1, box.size[-1]), columns).view(box.size[:-1])
    while factors:  # the last of the remaining dimensions each time
        sums = (sums * factors.pop()).sum(-1)
    return sums


def _row_sums(bits: Tensor, columns: Tensor) -> Tensor:
    """Returns sum_j bits[i, j] * columns[j], int64 [rows]. bits [rows, n] of any integer width, columns [n] int64."""
    rows = max(1, (_CUDA_CHUNK if bits.is_cuda else _CHUNK) // max(bits.shape[1], 1))
    return torch.cat([(part.to(torch.int64) * columns).sum(-1) for part in bits.split(rows)])


@lru_cache(maxsize=1024)  # the same slices come again in every layer, expert and publish
def _odd(start: int, count: int, dimension: int, device: torch.device) -> Tensor:
    """Returns the odd multipliers [count] int64 of the indices from `start` on along a dimension."""
    x = torch.arange(start, start + count, dtype=torch.int64, device=device)
    x += _signed((dimension + 1) * 0x9E3779B97F4A7C15 % 2**64)
    x = (x ^ _shift(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift(x, 27)) * _signed(0x94D049BB133111EB)
    return (x ^ _shift(x, 31)).bitwise_or_(1)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Shifts right logically: int64's own shift keeps the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value
