"""Batches written as padded rows, which tests read and write more easily than values without padding."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megagrpo.types import Batch


def flat(values: Tensor, lengths: Tensor) -> Tensor:
    """[N, S, ...] to [T, ...]."""
    return values[torch.arange(values.shape[1]) < lengths[:, None]]


def padded(values: Tensor, lengths: Tensor) -> Tensor:
    """[T, ...] to [N, S, ...], 0 beyond the ends."""
    longest = int(lengths.max()) if len(lengths) else 1
    out = values.new_zeros(len(lengths), longest, *values.shape[1:])
    out[torch.arange(longest) < lengths[:, None]] = values
    return out


def batch_of_rows(**given: Any) -> Batch:
    """The batch whose values of tokens are given as [N, S]."""
    lengths, types = given["lengths"], {"tokens": torch.int32, "loss_mask": torch.bool}
    rows = {name: v for name, v in given.items() if isinstance(v, Tensor) and v.dim() > 1}
    return Batch(**given | {name: flat(v, lengths).to(types.get(name, v.dtype)) for name, v in rows.items()})


def as_rows(batch: Batch) -> Batch:
    """The batch with values of tokens as [N, S]: what they are is easier to say so, and nothing else may be done."""
    names = (
        "tokens loss_mask rollout_logprobs lags advantages old_logprobs ref_logprobs policy_weights denominator_mask"
    )
    rows = {name: v for name in names.split() if (v := getattr(batch, name)) is not None}
    return replace(batch, **{name: padded(values, batch.lengths) for name, values in rows.items()})
