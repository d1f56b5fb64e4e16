"""The cost of multi-head latent attention, with or without an indexer. No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megagrpo.models.costs import FP32, LayerCost, Share
from megagrpo.models.kinds.indexed import cost as indexed

if TYPE_CHECKING:
    from megagrpo.models.kinds.latent.describe import LatentAttention


def layer(attention: LatentAttention, at: Share) -> LayerCost:
    """Returns the cost of a layer's attention for a micro-batch."""
    p = at.parallel
    heads = attention.heads / p.tp
    dim = attention.head_dim
    queries = attention.q_lora_rank or 0
    values = attention.kv_lora_rank
    # down projections and their norms' outputs
    low = 2 * queries + 2 * values + attention.rope_dim
    # queries, keys' and values' projection, queries and keys with their turned parts, values and
    # output as wide as keys: the kernel takes no narrower ones
    high = heads * (dim + (attention.nope_dim + attention.v_dim) + 4 * dim)
    # whole on every tensor-parallel rank
    down = at.hidden_size * (queries + values + attention.rope_dim)
    up = heads * (
        (queries or at.hidden_size) * dim + values * (attention.nope_dim + attention.v_dim)
    )
    out = heads * attention.v_dim * at.hidden_size
    dense = LayerCost(
        kept=low * at.part * at.width + high * at.whole * at.width + heads * at.whole * FP32,
        transient=3 * heads * dim * at.whole * at.width + at.gathered,
        flops=2 * (down * at.part + (up + out) * at.whole),
        pair_flops=2 * heads * (dim + attention.v_dim),
        sent={
            "tp": at.gathers(1) + (queries + values) * at.part * (p.tp - 1) * at.width,
            "cp": heads * (dim + attention.v_dim) * at.whole * at.width * (p.cp - 1),
        },
    )
    if attention.indexer is None:
        return dense
    return indexed.layer(attention, attention.indexer, at, dense)
