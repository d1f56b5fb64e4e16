"""Rotary embeddings without Transformer Engine's kernel: float32 angles, no device synchronization.

Megatron's own rounds cosines and sines to bfloat16, which no engine does, splits packed rows by
lengths that it reads back from the GPU, for queries and keys of every layer, and copies the numbers
of a context rank's parts there.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from megagrpo.models.kinds.grouped_query.layer import local_places, zigzag_position

# cu_seqlens -> angles, and the cosines and sines that follow from them for its tokens; all layers
# share one cu_seqlens
_packed_angles: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def rotate(
    t: Tensor,
    freqs: Tensor,
    rotary_interleaved: bool = False,
    mla_rotary_interleaved: bool = False,
    mscale: float = 1.0,
) -> Tensor:
    """Rotates t [s, b, heads, d] by angles freqs [s, 1, 1, d'], d' <= d, as RoFormer does (Su et
    al. 2021).

    Latent attention's checkpoints have the two parts of a pair beside each other; its result has
    them apart.
    """
    assert not rotary_interleaved, "no family has it"
    return _rotated(t, torch.cos(freqs) * mscale, torch.sin(freqs) * mscale, mla_rotary_interleaved)


def rotate_packed(
    t: Tensor,
    cu_seqlens: Tensor,
    freqs: Tensor,
    rotary_interleaved: bool = False,
    mla_rotary_interleaved: bool = False,
    mscale: float = 1.0,
    cp_group: torch.distributed.ProcessGroup | None = None,
) -> Tensor:
    """Rotates t [T / cp, heads, d], in which cu_seqlens [k + 1] bounds whole sequences, by freqs
    [s, 1, 1, d'].

    freqs [T / cp, 1, d'] are the angles of these very tokens, which positions in a sequence do not
    tell of images.
    """
    assert not rotary_interleaved and cp_group is not None
    known = _packed_angles.get(cu_seqlens)
    if known is None or known[0] is not freqs or known[1] != mscale:
        angles = freqs[:, None]  # of these tokens
        # the first call's, when the micro-batch was under way: a forward that is computed again may
        # come with another's
        group = cp_group if known is None else known[2]
        if freqs.dim() != 3:
            local, sequence, place = local_places(cu_seqlens, len(t), group.size())
            angles = freqs[zigzag_position(place, local[sequence], group.rank(), group.size())]
        known = (freqs, mscale, group, torch.cos(angles) * mscale, torch.sin(angles) * mscale)
        _packed_angles[cu_seqlens] = known
    *_, cos, sin = known
    return _rotated(t.unsqueeze(1), cos, sin, mla_rotary_interleaved).squeeze(1)


def own_angles(angles: Tensor, _: int, group: torch.distributed.ProcessGroup) -> Tensor:
    """Returns a context rank's part of the angles [s, 1, 1, d] of whole sequences."""
    local = len(angles) // group.size()
    place = torch.arange(local, device=angles.device)
    return angles[zigzag_position(place, local, group.rank(), group.size())]


def section_angles(
    positions: Tensor, dim: int, theta: float, section: Sequence[int], interleaved: bool
) -> Tensor:
    """Returns the angles [s, b, 1, dim] of heads at positions [3, b, s] in time, height and width.

    section: how many of the dim / 2 frequencies turn with each. In blocks (Qwen2-VL), or
    interleaved (Qwen3-VL): the first three times the height's of them alternate, time, height,
    width, and so on to the width's; the rest are time.
    """
    half = dim // 2
    places = torch.arange(0, dim, 2, device=positions.device)
    frequencies = 1 / theta ** (places / dim)
    axis = [0] * half
    for number in (1, 2):
        first, step = (number, 3) if interleaved else (sum(section[:number]), 1)
        for place in range(first, first + step * section[number], step):
            axis[place] = number
    by_axis = positions.float()[..., None] * frequencies  # [3, b, s, half]
    angles = torch.stack([by_axis[number, ..., place] for place, number in enumerate(axis)], -1)
    return torch.cat((angles, angles), -1).transpose(0, 1)[:, :, None]


def _rotated(t: Tensor, cos: Tensor, sin: Tensor, pairs_beside: bool) -> Tensor:
    width = cos.shape[-1]
    turned, rest = t[..., :width], t[..., width:]
    if pairs_beside:
        turned = torch.cat((turned[..., 0::2], turned[..., 1::2]), -1)
    first, second = turned.chunk(2, -1)
    turned = turned * cos + torch.cat((-second, first), -1) * sin
    return torch.cat((turned.to(t.dtype), rest), -1)
