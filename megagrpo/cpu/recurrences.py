"""Stands in for the kernels of flash-linear-attention, causal-conv1d and mamba-ssm, with which
trainers compute gated delta nets, Kimi Delta Attention and Mamba-2: the published recurrences by chunks,
in torch.

Names and arguments are those with which models/kinds calls the kernels. Sequences that are packed
into one row are laid out as rows, with zeros behind them.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

CHUNK = 32  # tokens that are computed at once; more are wasted on short sequences


def causal_conv1d(*, x, weight, activation, cu_seqlens) -> tuple[Tensor, None]:
    """Convolves each channel of x [b, s, channels] with its weight [channels, kernel]."""
    assert activation == "silu" and x.is_contiguous()
    return _by_row(_lengths(cu_seqlens), partial(_convolved, weight=weight, bias=None), x), None


def causal_conv1d_fn(x, weight, bias, *, seq_idx, activation) -> Tensor:
    """As causal_conv1d, for x [b, channels, s], with numbers of sequences [1, s] in place of
    borders."""
    assert activation == "silu" and x.stride(1) == 1
    convolved = partial(_convolved, weight=weight, bias=bias)
    return _by_row(_lengths(seq_idx), convolved, x.transpose(1, 2)).transpose(1, 2)


def chunk_gated_delta_rule(
    query, key, value, *, g, beta, use_qk_l2norm_in_kernel, cu_seqlens
) -> tuple[Tensor, None]:
    """Computes the rule for query, key [b, s, heads, d], value [b, s, heads, e], decay g [b, s,
    heads] or of each channel of the keys [b, s, heads, d], and beta [b, s, heads]: [b, s, heads,
    e]."""
    assert use_qk_l2norm_in_kernel
    return _by_row(_lengths(cu_seqlens), _delta_rule, query, key, value, g, beta), None


chunk_kda = chunk_gated_delta_rule


def mamba_chunk_scan_combined(
    x,
    steps,
    decay,
    into,
    out_of,
    _,
    *,
    D,  # noqa: N803  # its name
    seq_idx,
) -> Tensor:
    """Computes the scan for x [b, s, heads, d], steps [b, s, heads], decay, D [heads], into and
    out_of (B and C) [b, s, groups, n]: [b, s, heads, d]."""
    scan = partial(_scan, decay=decay, skip=D)
    return _by_row(_lengths(seq_idx), scan, x, steps, into, out_of)


def _lengths(packed: Tensor | None) -> list[int] | None:
    """Returns the lengths of sequences, from their borders or the number of each token's [1, T]."""
    if packed is None:
        return None
    return (packed.diff() if packed.dim() == 1 else packed[0].bincount()).tolist()


def _by_row(lengths: list[int] | None, function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """Returns a function of sequences that are rows [b, s, ...], or packed into one [1, T, ...]."""
    if lengths is None:
        return function(*tensors)
    out = function(*(pad_sequence(t[0].split(lengths), batch_first=True) for t in tensors))
    return torch.cat([row[:n] for row, n in zip(out, lengths, strict=True)])[None]


def _convolved(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    past = F.pad(x.transpose(1, 2), (weight.shape[-1] - 1, 0))
    return F.silu(F.conv1d(past, weight[:, None], bias, groups=len(weight))).transpose(1, 2)


def _in_chunks(t: Tensor) -> Tensor:
    """Lays [b, s, heads, ...] out as [b, heads, chunks, places, ...] in float32, 0 at the end."""
    t = t.float().transpose(1, 2)
    after = (0, 0) * (t.dim() - 3) + (0, -t.shape[2] % CHUNK)
    return F.pad(t, after).unflatten(2, (-1, CHUNK))


def _delta_rule(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    if decay.dim() < key.dim():
        decay = decay[..., None]
    length = query.shape[1]
    query, key, value, decay, beta = (_in_chunks(t) for t in (query, key, value, decay, beta))
    query, key = _unit(query) * query.shape[-1] ** -0.5, _unit(key)
    total = decay.double().cumsum(-2)  # rounded, it would be a rounded exponent
    new, erased, inside = _inside_chunks(query, key, value, total, beta)
    from_start, to_end = total.exp().float(), (total[..., -1:, :] - total).exp().float()
    from_state, to_state = query * from_start, key * to_end
    state = query.new_zeros(*query.shape[:2], key.shape[-1], value.shape[-1])
    outputs = []
    for i in range(query.shape[2]):
        values = new[:, :, i] - erased[:, :, i] @ state
        outputs.append(from_state[:, :, i] @ state + inside[:, :, i] @ values)
        state = state * from_start[:, :, i, -1, :, None] + to_state[:, :, i].mT @ values
    return torch.cat(outputs, 2)[:, :, :length].transpose(1, 2)


def _unit(t: Tensor) -> Tensor:
    return t * torch.rsqrt(t.square().sum(-1, keepdim=True) + 1e-6)


def _inside_chunks(
    query: Tensor, key: Tensor, value: Tensor, total: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns of each chunk the values that it writes if its first state is 0, the keys at which
    that state is erased, and the weights of its queries on values.

    Its recurrence is one triangular system (Yang et al., arXiv 2406.06484, 3). total: sums of decays
    from the chunk's start.
    """
    past = torch.ones(CHUNK, CHUNK, dtype=torch.bool).tril()
    between = total[..., :, None, :] - total[..., None, :, :]
    between = between.masked_fill(~past[..., None], -torch.inf).exp().float()
    written = key * beta[..., None]
    system = _products(written, key, between).tril(-1) + torch.eye(CHUNK)
    right = torch.cat((value * beta[..., None], written * total.exp().float()), -1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    new, erased = solved.split((value.shape[-1], key.shape[-1]), -1)
    return new, erased, _products(query, key, between)


def _products(rows: Tensor, key: Tensor, between: Tensor) -> Tensor:
    """Returns each row's product with each key, times what decays from it to the row [..., rows,
    keys, 1 or d]."""
    if between.shape[-1] == 1:
        return rows @ key.mT * between[..., 0]
    return (rows[..., :, None, :] * key[..., None, :, :] * between).sum(-1)


def _scan(
    x: Tensor, steps: Tensor, into: Tensor, out_of: Tensor, decay: Tensor, skip: Tensor
) -> Tensor:
    """Computes the recurrence in chunks, whose inside is a masked product (arXiv 2405.21060, 6)."""
    groups = into.shape[2]
    # [b, groups, heads of each, chunks, places, d], and of into and out_of [..., 1, ..., n]
    written, total = (
        _in_chunks(t).unflatten(1, (groups, -1))
        for t in (x.float() * steps[..., None], steps * decay)
    )
    into, out_of = (_in_chunks(t)[:, :, None] for t in (into, out_of))
    total = total.double().cumsum(-1)  # rounded, it would be a rounded exponent
    past = torch.ones(CHUNK, CHUNK, dtype=torch.bool).tril()
    between = (total[..., :, None] - total[..., None, :]).masked_fill(~past, -torch.inf)
    inside = (out_of @ into.mT * between.exp().float()) @ written
    from_start = total.exp().float()
    to_end = (total[..., -1:] - total).exp().float()
    added = into.mT @ (written * to_end[..., None])  # [..., n, d], of each chunk
    state = torch.zeros_like(added[:, :, :, 0])
    outputs = []
    for i in range(added.shape[3]):
        carried = out_of[:, :, :, i] @ state * from_start[:, :, :, i, :, None]
        outputs.append(inside[:, :, :, i] + carried)
        state = state * from_start[:, :, :, i, -1:, None] + added[:, :, :, i]
    y = torch.cat(outputs, 3).flatten(1, 2)[:, :, : x.shape[1]].transpose(1, 2)
    return y + x.float() * skip.float()[:, None]
