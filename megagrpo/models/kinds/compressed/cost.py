"""The cost of compressed attention as torch computes it, block by block. No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megagrpo.models.costs import FP32, LayerCost, Share

INDEXED = 4  # tokens of a key in layers whose windows overlap, and whose keys an indexer chooses
if TYPE_CHECKING:
    from megagrpo.models.kinds.compressed.describe import CompressedAttention

BLOCK = 1024  # queries whose scores are in memory at once


def layer(attention: CompressedAttention, at: Share) -> LayerCost:
    """Returns the cost of a layer's attention for a micro-batch, the mean over layers."""
    p = at.parallel
    heads = attention.heads / p.tp
    dim, rank = attention.head_dim, attention.q_lora_rank
    groups = attention.groups * attention.group_rank / p.tp
    # what keys behind the window, and an indexer's, are made of
    both = dim + attention.index_dim
    far = attention.mean(lambda ratio: 4 * both if ratio == INDEXED else 2 * dim)
    # every tensor-parallel rank computes the latent and the keys; queries, normed and turned, and
    # the output
    kept = 2 * (rank + dim + far) + 4 * heads * dim + groups + at.hidden_size
    products = at.hidden_size * (rank + dim + far + groups)
    products += heads * dim * (rank + attention.group_rank)
    scores = heads * min(at.whole, BLOCK) * at.whole * p.cp
    return LayerCost(
        kept=kept * at.whole * at.width,
        transient=2 * scores * FP32 + at.gathered,
        flops=2 * products * at.whole,
        pair_flops=attention.index_flops,
        chosen_flops=4 * heads * dim,
        sent={"tp": at.gathers(2), "cp": (dim + far) * at.whole * at.width * (p.cp - 1)},
    )
