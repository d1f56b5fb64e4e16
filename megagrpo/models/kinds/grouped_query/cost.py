"""The cost of grouped-query attention. No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megagrpo.models.costs import FP32, LayerCost, Share

if TYPE_CHECKING:
    from megagrpo.models.kinds.grouped_query.describe import GroupedQuery


def layer(attention: GroupedQuery, at: Share) -> LayerCost:
    """Returns the cost of a layer's attention for a micro-batch."""
    p = at.parallel
    dim = attention.head_dim
    heads = attention.heads / p.tp
    groups = max(attention.kv_heads / p.tp, 1)
    gates = attention.heads * attention.output_gate
    qkv = (attention.heads + gates + 2 * attention.kv_heads) / p.tp * dim
    # with fewer key/value heads than ranks each gathers the whole projection, and has one of them
    held = qkv * p.tp if attention.kv_heads < p.tp else qkv
    # the projection; queries before their norm; queries and keys turned; attention's output and its
    # log-sum-exp; with a gate its sigmoid and their product
    kept = (
        held
        + heads * dim * attention.qk_norm
        + (heads + groups) * dim
        + heads * dim * (1 + 2 * attention.output_gate)
    ) * at.width + heads * FP32
    if attention.norm_over_heads:  # of plain torch: its input in float32, and divided by the root
        kept += (heads + groups) * dim * FP32 * (1 + (at.width < FP32))
    return LayerCost(
        kept=kept * at.whole,
        transient=2 * held * at.whole * at.width + at.gathered,
        flops=2 * at.hidden_size * (qkv + heads * dim) * at.whole,
        pair_flops=4 * heads * dim * (not attention.window),
        chosen_flops=4 * heads * dim * bool(attention.window),
        sent={
            "tp": at.gathers(2),
            "cp": 2 * groups * dim * at.whole * at.width * (p.cp - 1),
        },
    )
