"""Batches written as padded rows, which tests read and write more easily than values without padding."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megagrpo.types import Batch, Rewards


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
    of_graders = given.pop("parts", None), given.pop("weights", None)
    lengths, types = given["lengths"], {"tokens": torch.int32, "loss_mask": torch.bool}
    rows = {name: v for name, v in given.items() if isinstance(v, Tensor) and v.dim() > 1}
    given |= {name: flat(v, lengths).to(types.get(name, v.dtype)) for name, v in rows.items()}
    rewards = Rewards(
        given.pop("rewards"),
        given.pop("valid"),
        given.pop("greedy_rewards", None),
        given.pop("token_scores", None),
        *of_graders,
    )
    return Batch(**given, rewards=rewards)


def as_rows(batch: Batch) -> Batch:
    """The batch with values of tokens as [N, S]: what they are is easier to say so, and nothing else may be done."""
    names = ["tokens", "loss_mask", "rollout_logprobs", "lags", "advantages", "old_logprobs", "ref_logprobs"]
    correction = replace(batch.correction, **_padded(batch.correction, ("weights", "counted"), batch.lengths))
    return replace(batch, **_padded(batch, names, batch.lengths), correction=correction)


def _padded(part: object, names: Sequence[str], lengths: Tensor) -> dict[str, Tensor]:
    return {name: padded(v, lengths) for name in names if (v := getattr(part, name)) is not None}
