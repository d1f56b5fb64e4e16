"""The cost of a layer's experts, router and shared experts included. No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megagrpo.models.costs import FP32, LayerCost, Share, mlp_cost

if TYPE_CHECKING:
    from megagrpo.models.kinds.experts.describe import Experts


def layer(experts: Experts, at: Share, imbalance: float) -> LayerCost:
    """Returns the cost for a micro-batch. imbalance: tokens of the fullest rank, over the mean."""
    p = at.parallel
    hidden = at.hidden_size
    copies = at.part * experts.per_token  # tokens that a rank sends to experts
    most = min(imbalance, p.ep, experts.count / experts.per_token)  # all tokens at most
    received = copies * p.etp * most
    inside = experts.ffn_size / p.etp * received
    shared = mlp_cost(at, experts.shared_ffn_size)
    scores = 6 * experts.count * at.part * FP32
    # experts' input; gate and up, silu(gate), up + 0, their product, and that times the router's
    # weight
    kept = (hidden * received + 6 * inside) * at.width + scores
    # before and after both exchanges, sorted by expert and not
    transient = 2 * hidden * (copies + received) * at.width + at.gathered
    sent = {
        "ep": 2 * copies * hidden * at.width * (p.ep - 1) / p.ep,
        "tp": 2 * copies * hidden * at.width * (p.etp - 1)
        + shared.sent["tp"] * bool(experts.shared_ffn_size),
    }
    flops = 6 * hidden * inside + 2 * hidden * experts.count * at.part
    return LayerCost(kept + shared.kept, transient, flops + shared.flops, sent)
