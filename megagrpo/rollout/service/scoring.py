"""What SGLang 0.5.21 lacks for scores of a teacher: a temperature, and tokens of one's own at each
position.

It scores input at temperature 1 whatever a request says, and takes one list of tokens
(token_ids_logprob) for all positions of a request.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers import logprob_processor
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.managers.schedule_batch import ScheduleBatch


@dataclass(frozen=True)
class _Candidates:
    """Tokens to score at the positions of a request, k at each, in the part of it that a forward
    reads."""

    ids: Sequence[int]  # k after k, from position `start` on
    k: int
    first: int  # position of the part's first log-probabilities, counted from `start`

    def __len__(self) -> int:
        return 0  # no tokens for the position after the last, which SGLang would score alike

    def at(self, position: int) -> Sequence[int]:
        """Returns the tokens of a position of the part; after the last any, which are dropped."""
        begin = (self.first + position) * self.k
        return self.ids[begin : begin + self.k] or self.ids[: self.k]


def prepare(temperature: float) -> None:
    """Makes the engine of this process score at `temperature`, and read token_ids_logprob as k
    tokens of each position: the same number of every position but the last."""
    logits_of = LogitsProcessor._get_logits
    prepare_batch = ScheduleBatch.prepare_for_extend
    chunk_of = logprob_processor.get_token_ids_logprobs_chunk

    def scaled(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        return logits_of(self, *args, **kwargs).div_(temperature)

    def with_candidates(self: Any, *args: Any, **kwargs: Any) -> None:
        prepare_batch(self, *args, **kwargs)
        if self.token_ids_logprobs is not None:
            parts = zip(self.reqs, self.prefix_lens, self.extend_logprob_start_lens, strict=True)
            self.token_ids_logprobs = [_candidates(*part) for part in parts]

    def of_positions(
        logprobs: torch.Tensor,
        candidates: Sequence[_Candidates | None],
        lengths: Sequence[int],
        *args: Any,
        **kwargs: Any,
    ) -> int:
        begun = args[2] if len(args) > 2 else 0  # positions of the first in earlier chunks
        k = max(each.k for each in candidates if each is not None)
        rows: list[Sequence[int]] = []
        for each, length in zip(candidates, lengths, strict=True):
            positions = range(begun, length)
            rows += [[0] * k if each is None else each.at(position) for position in positions]
            begun = 0
        columns = torch.tensor(rows[: len(logprobs)], device=logprobs.device)
        found = [None if each is None else list(range(k)) for each in candidates]
        return chunk_of(logprobs.gather(1, columns), found, lengths, *args, **kwargs)

    if temperature != 1:
        LogitsProcessor._get_logits = scaled
    ScheduleBatch.prepare_for_extend = with_candidates
    logprob_processor.get_token_ids_logprobs_chunk = of_positions


def _candidates(request: Any, num_cached: int, start: int) -> _Candidates | None:
    """Returns those of the part of a request after `num_cached` tokens; start: of its
    log-probabilities in the part."""
    ids = request.logprob.token_ids_logprob
    if ids is None:
        return None
    positions = len(request.origin_input_ids) - 1 - request.logprob_start_len
    return _Candidates(ids, len(ids) // positions, num_cached + start - request.logprob_start_len)
