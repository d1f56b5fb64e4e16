"""The cost of a gated delta net, as flash-linear-attention's kernels compute it. No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megagrpo.models.costs import FP32, LayerCost, Share
from megagrpo.models.kinds.recurrence import recurrent_cost

if TYPE_CHECKING:
    from megagrpo.models.kinds.gated_delta.describe import GatedDelta

_CHUNK = 64  # tokens that the kernel computes at once


def layer(delta: GatedDelta, at: Share) -> LayerCost:
    """Returns the cost of one for a micro-batch."""
    p = at.parallel
    heads = delta.value_heads / p.tp
    values = heads * delta.value_dim
    keys = heads * delta.key_dim  # each is repeated for the value heads that share it
    rows = delta.rows / p.tp
    # input of the convolution; queries, keys and values, each in one piece; the system of a chunk;
    # the rule's output, gates and their product; decay and beta, and sums of them
    kept = (delta.channels / p.tp + 2 * keys + 4 * values + heads * _CHUNK) * at.width
    kept += 4 * heads * FP32
    # of a token: products in its chunk; the state is read twice and written
    rule = 2 * _CHUNK * (3 * keys + 2 * values) + 6 * keys * delta.value_dim
    return recurrent_cost(at, rows, values, kept, rule, copies=5)
