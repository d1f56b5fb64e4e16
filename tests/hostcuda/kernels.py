"""Kernels that torch has on CUDA and nowhere else, with what they demand of their arguments."""

from collections.abc import Iterator

import torch
from torch import Tensor

from tests.hostcuda.cuda import host

_library: list[torch.library.Library] = []  # its kernels live as long as it does
HALF = (torch.bfloat16, torch.float16)


def _mm_out(a: Tensor, b: Tensor, out_dtype: torch.dtype, *, out: Tensor) -> Tensor:
    assert a.dtype == b.dtype and a.dtype in HALF and out_dtype == out.dtype == torch.float32
    assert a.device == b.device == out.device
    return out.copy_(a.float() @ b.float())


def _mm(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
    out = torch.empty(a.shape[0], b.shape[1], dtype=out_dtype, device=a.device)
    return _mm_out(a, b, out_dtype, out=out)


def _sequences(q, k, v, cu_q, cu_k, max_q, dropout) -> Iterator[tuple[slice, slice]]:
    """Yields the rows of each sequence; refuses what mha_varlen_fwd of flash_api.cpp refuses."""
    for t in (q, k, v):
        assert t.is_cuda and t.dtype in HALF and t.dtype == q.dtype, (t.device, t.dtype)
        assert t.dim() == 3 and t.stride(-1) == 1, (t.shape, t.stride())
    for cu in (cu_q, cu_k):
        assert cu.device == q.device and cu.dtype == torch.int32 and cu.is_contiguous(), (cu.device, cu.dtype)
    size = q.shape[-1]
    assert size <= 256 and size % 8 == 0 and k.shape[-1] == v.shape[-1] == size, size
    assert q.shape[1] % k.shape[1] == 0 and isinstance(max_q, int) and dropout == 0.0
    of_q, of_k = (host().as_host(cu).tolist() for cu in (cu_q, cu_k))
    assert of_q[-1] == len(q) and of_k[-1] == len(k), (of_q, of_k)
    ends = list(zip(of_q[:-1], of_q[1:], of_k[:-1], of_k[1:], strict=True))
    assert max(b - a for a, b, _, _ in ends) <= max_q
    for a, b, c, d in ends:
        yield slice(a, b), slice(c, d)


def _scores(q: Tensor, k: Tensor, scale: float, left: int | None, right: int | None) -> Tensor:
    scores = q @ k.transpose(1, 2) * scale
    n, m = scores.shape[1:]
    distance = torch.arange(m)[None] - (torch.arange(n)[:, None] + (m - n))
    if right is not None and right >= 0:
        scores = scores.masked_fill(distance > right, -torch.inf)
    if left is not None and left >= 0:
        scores = scores.masked_fill(-distance > left, -torch.inf)
    return scores


def _heads_first(t: Tensor, repeats: int = 1) -> Tensor:
    return t.repeat_interleave(repeats, 1).float().transpose(0, 1)


def _attention(
    q, k, v, cu_q, cu_k, max_q, max_k, dropout, causal, debug, *, scale=None, window_size_left=None,
    window_size_right=None, **_,
):  # fmt: skip
    assert cu_q is not None, "attention of equal lengths is not played"
    out, lse = torch.empty_like(q), q.new_empty(q.shape[1], len(q), dtype=torch.float32)
    o, logs, qs, ks, vs = map(host().as_host, (out, lse, q, k, v))
    repeats, scale = q.shape[1] // k.shape[1], scale or q.shape[-1] ** -0.5
    right = 0 if causal else window_size_right
    for rows, keys in _sequences(q, k, v, cu_q, cu_k, max_q, dropout):
        mine = _heads_first(qs[rows]), _heads_first(ks[keys], repeats)
        scores = _scores(*mine, scale, window_size_left, right)
        o[rows] = (scores.softmax(-1) @ _heads_first(vs[keys], repeats)).transpose(0, 1).to(q.dtype)
        logs[:, rows] = scores.logsumexp(-1)
    state = torch.empty(2, dtype=torch.uint64, device=q.device)
    return out, lse, state, torch.empty((), dtype=torch.uint64, device=q.device), q.new_empty(0)


def _attention_backward(
    g, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, dropout, causal, state, unused, *, scale=None,
    window_size_left=None, window_size_right=None,
):  # fmt: skip
    assert state.is_cuda and unused.is_cuda and g.dtype == q.dtype
    gradients = [torch.empty_like(t) for t in (q, k, v)]
    into = [host().as_host(t) for t in gradients]
    gs, qs, ks, vs = map(host().as_host, (g, q, k, v))
    repeats, scale = q.shape[1] // k.shape[1], scale or q.shape[-1] ** -0.5
    right = 0 if causal else window_size_right
    for rows, keys in _sequences(q, k, v, cu_q, cu_k, max_q, dropout):
        one, two, three = (_heads_first(qs[rows]), _heads_first(ks[keys], repeats), _heads_first(vs[keys], repeats))
        up, p = (_heads_first(gs[rows]), _scores(one, two, scale, window_size_left, right).softmax(-1))
        dp = up @ three.transpose(1, 2)
        ds = p * (dp - (dp * p).sum(-1, keepdim=True)) * scale
        found = ds @ two, ds.transpose(1, 2) @ one, p.transpose(1, 2) @ up
        for target, values, part in zip(into, found, (rows, keys, keys), strict=True):
            if part is keys:
                values = values.view(-1, repeats, *values.shape[1:]).sum(1)
            target[part] = values.transpose(0, 1).to(target.dtype)
    return tuple(gradients)


def _convolution_backward(g, x, weight, *options) -> tuple[Tensor | None, ...]:
    found = torch.ops.aten.convolution_backward(*map(host().as_host, (g, x, weight)), *options)
    return tuple(None if t is None else t.to(g.device) for t in found)


def install() -> None:
    """Registers the kernels."""
    library = torch.library.Library("aten", "IMPL", "CUDA")
    library.impl("_flash_attention_forward", _attention)
    library.impl("_flash_attention_backward", _attention_backward)
    library.impl("convolution_backward", _convolution_backward)
    library.impl("mm.dtype", _mm)
    library.impl("mm.dtype_out", _mm_out)
    _library.append(library)
