"""The cost of compressed attention as torch computes it, block by block. No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megagrpo.models.costs import FP32, LayerCost, Share

if TYPE_CHECKING:
    from megagrpo.models.kinds.compressed.describe import CompressedAttention

BLOCK = 1024  # queries whose scores are in memory at once


def layer(attention: CompressedAttention, at: Share) -> LayerCost:
    """Returns the cost of a layer's attention for a micro-batch, the mean over layers."""
    p = at.parallel
    heads = attention.heads / p.tp
    dim = attention.head_dim
    far = attention.compressed_rows
    low = 2 * attention.q_lora_rank + 2 * dim + far
    # queries, normed and turned; attention's output, turned back; outputs of groups
    high = 4 * heads * dim + attention.groups * attention.group_rank / p.tp
    whole = at.hidden_size * (attention.q_lora_rank + dim + far)
    cut = heads * dim * (attention.q_lora_rank + attention.group_rank)
    cut += attention.groups * attention.group_rank / p.tp * at.hidden_size
    scores = heads * min(at.whole, BLOCK) * (at.whole * p.cp + attention.window)
    return LayerCost(
        kept=(low * at.part + high * at.whole + (dim + far) * at.whole * p.cp) * at.width,
        transient=2 * scores * FP32 + at.gathered,
        flops=2 * (whole * at.part + cut * at.whole),
        pair_flops=attention.index_flops,
        chosen_flops=4 * heads * dim,
        sent={
            "tp": at.gathers(1)
            + (attention.q_lora_rank + dim + far) * at.part * (p.tp - 1) * at.width,
            "cp": (dim + far) * at.whole * at.width * (p.cp - 1),
        },
    )
