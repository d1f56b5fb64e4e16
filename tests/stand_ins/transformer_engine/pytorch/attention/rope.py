"""Rotary embedding, with cosines and sines in float32 as the fused kernel has them."""

import torch
from torch import Tensor


def apply_rotary_pos_emb(
    t: Tensor,
    freqs: Tensor,
    tensor_format: str = "sbhd",
    start_positions: Tensor | None = None,
    interleaved: bool = False,
    fused: bool = False,
    cu_seqlens: Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> Tensor:
    """Rotates t [s, b, heads, d] ("sbhd") or [T / cp, heads, d] ("thd") by angles freqs [positions, 1, 1, d'], d' <= d.

    thd: cu_seqlens [k + 1] are of whole sequences, of which a rank holds two chunks each.
    """
    if start_positions is not None or interleaved or tensor_format not in ("sbhd", "thd"):
        raise NotImplementedError("the stand-in for Transformer Engine rotates sbhd and thd, from position 0")
    if tensor_format == "sbhd":
        return _rotated(t, freqs[: t.shape[0]].float())
    assert cu_seqlens is not None, "cu_seqlens must not be None when tensor_format is 'thd'."
    angles = []
    for length in (cu_seqlens[1:] - cu_seqlens[:-1]).tolist():
        chunk = length // (2 * cp_size)
        late = length - (cp_rank + 1) * chunk
        held = [freqs[cp_rank * chunk : (cp_rank + 1) * chunk], freqs[late : late + chunk]]
        angles += held if cp_size > 1 else [freqs[:length]]
    return _rotated(t, torch.cat(angles)[:, 0].float())


def _rotated(t: Tensor, angles: Tensor) -> Tensor:
    width = angles.shape[-1]
    turned, rest = t[..., :width].float(), t[..., width:]
    first, second = turned.chunk(2, -1)
    turned = turned * angles.cos() + torch.cat((-second, first), -1) * angles.sin()
    return torch.cat((turned.to(t.dtype), rest), -1)
