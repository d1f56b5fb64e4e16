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
    shared = mlp_cost(at, experts.shared_ffn_size, experts.gated)
    sent_size = experts.latent_size or hidden
    latent = 2 * hidden * experts.latent_size * at.part  # multiply-adds of both projections
    scores = 6 * experts.count * at.part * FP32
    # experts' input; gate and up, silu(gate), up + 0, their product, and that times the router's
    # weight; without gates up, relu(up), its square, and that times the weight
    kept = (sent_size * received + (6 if experts.gated else 4) * inside) * at.width + scores
    kept += 2 * experts.latent_size * at.part * at.width  # what is sent, and what comes back
    # before and after both exchanges, sorted by expert and not
    transient = 2 * sent_size * (copies + received) * at.width + at.gathered
    sent = {
        "ep": 2 * copies * sent_size * at.width * (p.ep - 1) / p.ep,
        "tp": 2 * copies * sent_size * at.width * (p.etp - 1)
        + shared.sent["tp"] * bool(experts.shared_ffn_size),
    }
    flops = (6 if experts.gated else 4) * sent_size * inside + 2 * latent
    flops += 2 * hidden * experts.count * at.part
    return LayerCost(kept + shared.kept, transient, flops + shared.flops, sent)
