"""The cost of an indexer, and of attention to the keys that it chooses. No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megagrpo.models.costs import FP32, LayerCost, Share

if TYPE_CHECKING:
    from megagrpo.models.kinds.indexed.describe import LightningIndexer
    from megagrpo.models.kinds.latent.describe import LatentAttention

_SCORED_ROWS = 8192  # queries that Megatron's sparse attention scores at a time


def layer(
    attention: LatentAttention, indexer: LightningIndexer, at: Share, dense: LayerCost
) -> LayerCost:
    """Returns the cost with an indexer, which every tensor-parallel rank has whole, and of absorbed
    attention: with one key for all heads, the latent, whose first part is the value.

    dense: the cost without.
    """
    p = at.parallel
    heads = attention.heads / p.tp
    key = attention.kv_lora_rank + attention.rope_dim
    queries = attention.q_lora_rank or 0
    # queries before and after their turn, latent output, values; without keys and values of heads
    expanded = (attention.nope_dim + attention.v_dim) + 4 * attention.head_dim
    absorbed = 2 * key + attention.kv_lora_rank + attention.v_dim - expanded
    index = indexer.heads * indexer.head_dim
    projections = queries * index + at.hidden_size * (indexer.head_dim + indexer.heads)
    return LayerCost(
        # numbers of keys: int32
        kept=dense.kept + (heads * absorbed * at.width + indexer.topk * FP32) * at.whole,
        transient=dense.transient + min(at.whole, _SCORED_ROWS) * at.whole * p.cp * FP32,
        flops=dense.flops + 2 * projections * at.part / indexer.freq,
        pair_flops=2 * index / indexer.freq,  # the mean of layers that share a choice
        sent={
            "tp": dense.sent["tp"] + index * at.part * (p.tp - 1) * at.width,
            "cp": (key + indexer.head_dim) * at.whole * at.width * (p.cp - 1),
        },
        chosen_flops=2 * heads * (key + attention.kv_lora_rank),
    )
