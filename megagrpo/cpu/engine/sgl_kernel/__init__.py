"""Stands in for SGLang's compiled kernels, of which no CPU wheel is published.

SGLang imports names from here at load time and, on a CPU without AMX, calls none of them: every
name is a function that raises. Called, and so real, in plain torch, are the hash behind per-request
sampling seeds and the functions of speculative decoding and of gated delta nets. Some operators are
only declared: SGLang's file for Qwen3.5, which its image processors import, looks them up.
"""

import torch

from megagrpo.cpu.engine import drafts, gated_delta

__version__ = "0.0.0+cpu"
_U32 = 0xFFFFFFFF


def __getattr__(name: str):
    if name.startswith("__"):
        raise AttributeError(name)
    if hasattr(drafts, name):
        return getattr(drafts, name)

    def missing(*args, **kwargs):
        raise NotImplementedError(f"sgl_kernel.{name} does not exist on a CPU")

    missing.__name__ = name
    return missing


def _times(x: torch.Tensor, constant: int) -> torch.Tensor:
    """x * constant mod 2^32. In halves: the whole product of two 32-bit numbers does not fit a
    signed 64-bit one."""
    low = constant & 0xFFFF
    high = constant >> 16
    return (x * low + (((x * high) & 0xFFFF) << 16)) & _U32


def _rotate(x: torch.Tensor, bits: int) -> torch.Tensor:
    return ((x << bits) | (x >> (32 - bits))) & _U32


def _mix(state: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
    block = _times(_rotate(_times(block, 0xCC9E2D51), 15), 0x1B873593)
    return (_rotate(state ^ block, 13) * 5 + 0xE6546B64) & _U32


def murmur_hash32(
    seed: torch.Tensor, positions: torch.Tensor, columns: torch.Tensor
) -> torch.Tensor:
    """MurmurHash3 (32 bit) of the 16 bytes seed | position | column, as SGLang's GPU kernel
    computes it.

    seed [n] (u)int64, positions [n], columns [m] -> [n, m] int64 with values below 2^32.
    """
    seed = seed.view(torch.int64)
    state = torch.zeros_like(seed)
    for block in (seed & _U32, (seed >> 32) & _U32, positions.to(torch.int64) & _U32):
        state = _mix(state, block)
    state = _mix(state[:, None], (columns.to(torch.int64) & _U32)[None, :]) ^ 16
    state = _times(state ^ (state >> 16), 0x85EBCA6B)
    state = _times(state ^ (state >> 13), 0xC2B2AE35)
    return state ^ (state >> 16)


_library = torch.library.Library("sgl_kernel", "FRAGMENT")
_library.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor col_indices) -> Tensor")
_library.impl("murmur_hash32_cpu", murmur_hash32, "CPU")
# Found by name as SGLang's files look them up, and called as they are, without a schema.
for _name in dir(gated_delta):
    if _name.endswith("_cpu"):
        setattr(torch.ops.sgl_kernel, _name, getattr(gated_delta, _name))
for _name in (
    "causal_conv1d_fwd_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qkvzba_split_reshape_cat_cpu",
):
    _library.define(f"{_name}(Tensor x, Tensor y) -> Tensor")
