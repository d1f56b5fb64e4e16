"""The actor's attention with stand-ins for torch's variable-length kernel, which needs CUDA, of two releases."""

from types import SimpleNamespace

import torch
from torch.nn.attention import varlen

LENGTHS, HEADS, GROUPS, DIM, WIDTH = [3, 7, 1], 4, 2, 8, 6


def _of_2_11(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1)):
    assert window_size == (-1, 0) and query.shape[-1] == value.shape[-1] and return_aux is None
    assert key.shape[1] == value.shape[1] == query.shape[1], "it says nothing of fewer key heads"
    assert max_q == max_k == max(LENGTHS)
    return _attend(query, key, value, cu_seq_q, scale)


def _of_2_13(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1), enable_gqa=False
):
    assert window_size == (-1, 0) and enable_gqa and key.shape[1] == GROUPS
    repeat = query.shape[1] // key.shape[1]
    return _attend(query, key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1), cu_seq_q, scale)


def _attend(query, key, value, cu, scale):
    """[T, heads, d] each, sequence by sequence."""
    parts = []
    for start, end in zip(cu[:-1].tolist(), cu[1:].tolist(), strict=True):
        q, k, v = (t[start:end].transpose(0, 1) for t in (query, key, value))
        future = torch.ones(end - start, end - start, dtype=torch.bool).triu(1)
        scores = (q @ k.transpose(1, 2) * scale).masked_fill(future, -torch.inf)
        parts.append((scores.softmax(-1) @ v).transpose(0, 1))
    return torch.cat(parts)


def run_rank(rank: int) -> dict[str, float]:
    """The largest difference of forward and gradients between the kernel's path and plain attention, by release."""
    from megagrpo.models.kinds.grouped_query.layer import CausalAttention

    config = SimpleNamespace(kv_channels=DIM, context_parallel_size=1)
    config.window_size, config.window_attn_skip_freq, config.softmax_type = None, None, "vanilla"
    attention = CausalAttention(config, 1, None, "self")
    sizes = ((HEADS, DIM), (GROUPS, DIM), (GROUPS, WIDTH))
    parts = [torch.randn(sum(LENGTHS), *size) for size in sizes]
    cu = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    packed = SimpleNamespace(cu_seqlens_q=cu, max_seqlen_q=max(LENGTHS))
    repeated = [p.clone().requires_grad_() for p in parts]
    expected = _attend(*(t.repeat_interleave(HEADS // t.shape[1], 1) for t in repeated), cu, DIM**-0.5).flatten(1)
    expected.square().sum().backward()
    found, kernel = {}, varlen.varlen_attn
    try:
        for release, stand_in in (("2.11", _of_2_11), ("2.13", _of_2_13)):
            varlen.varlen_attn = stand_in
            mine = [p.clone().requires_grad_() for p in parts]
            out = attention._varlen(*mine, packed)
            out.square().sum().backward()
            pairs = [(out, expected), *((m.grad, r.grad) for m, r in zip(mine, repeated, strict=True))]
            found[release] = max(float((a - b).abs().max()) for a, b in pairs)
    finally:
        varlen.varlen_attn = kernel
    return found
