"""The cost of Kimi Delta Attention, as flash-linear-attention's kernels compute it. No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megagrpo.models.costs import FP32, LayerCost, Share
from megagrpo.models.kinds.recurrence import recurrent_cost

if TYPE_CHECKING:
    from megagrpo.models.kinds.kda.describe import Kda

_CHUNK = 64  # tokens that the kernel computes at once


def layer(kda: Kda, at: Share) -> LayerCost:
    """Returns the cost of one for a micro-batch."""
    p = at.parallel
    heads = kda.heads / p.tp
    values = heads * kda.dim
    rows = 5 * values + heads
    # the rows; convolved queries, keys and values; products of a chunk's queries and keys; the
    # rule's output, normed and gated; narrow decays and gates; decays and beta, and sums of them
    kept = (rows + 6 * values + 2 * heads * _CHUNK + 2 * kda.dim / p.tp) * at.width
    kept += 2 * (values + heads) * FP32
    # of a token: products in its chunk; the state is read twice and written; decays and gates come
    # through a narrow projection, not from the hidden state as the other rows
    rule = 10 * _CHUNK * values + 6 * values * kda.dim
    narrow = 4 * kda.dim * (at.hidden_size / p.tp + values) - 4 * at.hidden_size * values
    return recurrent_cost(at, rows, values, kept, rule + narrow, copies=5)
