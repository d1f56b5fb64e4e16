"""The cost of a Mamba-2 layer, as mamba-ssm's kernels compute it. No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megagrpo.models.costs import FP32, LayerCost, Share
from megagrpo.models.kinds.recurrence import recurrent_cost

if TYPE_CHECKING:
    from megagrpo.models.kinds.mamba2.describe import Mamba2

_CHUNK = 128  # tokens that the kernel computes at once


def layer(mamba: Mamba2, at: Share) -> LayerCost:
    """Returns the cost of one for a micro-batch."""
    p = at.parallel
    heads = mamba.heads / p.tp
    values = mamba.values / p.tp
    channels = mamba.channels / p.tp
    rows = mamba.rows / p.tp
    # the projection; convolved channels; the scan's output, and times its gate, normed; steps, and
    # the state at the end of each chunk
    kept = (rows + channels + 2 * values) * at.width
    kept += (heads + values * mamba.state / _CHUNK) * FP32
    # of a token: B with C of each group and scores with values in its chunk, on average half; the
    # state is read and written
    groups = mamba.groups / p.tp
    scan = _CHUNK * (groups * mamba.state + values) + 4 * values * mamba.state
    return recurrent_cost(at, rows, values, kept, scan, copies=3)
