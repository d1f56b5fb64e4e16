"""Records samples as the update saw them, for `megagrpo view`: advantages and log-probability
differences.

trained/replica_0.jsonl has one line per step for the samples of one data-parallel rank:

- sample_ids, advantages: of all samples; an advantage is the mean over trained tokens, null if
  there are none
- tokens: of the step's first groups, [{"sample_id", "ids", "difference"}, ...]; a difference is the
  trainer's minus the engine's log-probability, null for tokens that are not trained
- pieces: the text of token ids that are new in this line
"""

import json
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from megagrpo.algo.statistics import by_row, in_runs, row_counts
from megagrpo.monitor.step_lines import BackgroundWriter, drop_later_steps
from megagrpo.system.run_folder import HALF_CHARACTERS, RunFolder
from megagrpo.types import Batch

_KEPT = 20  # lines: one may take megabytes


class TrainedLog(BackgroundWriter):
    """Writes the record of one data-parallel rank. Not collective: readers join samples by id.

    num_groups: number of groups of a step, over all ranks, whose tokens are recorded. pieces: token
    ids -> the text of each token. A line that cannot be written does not end the run: it is tried
    again with the next steps, at most _KEPT of them.
    """

    def __init__(
        self,
        folder: RunFolder,
        replica: int,
        num_groups: int,
        pieces: Callable[[Sequence[int]], Iterable[str]],
    ) -> None:
        super().__init__("trained")
        self._path = folder.trained_file(replica)
        self._num_groups = num_groups
        self._pieces = pieces
        self._shown: set[int] = set()
        self._unwritten = deque[dict](maxlen=_KEPT)

    def _write(self, entry: dict) -> None:
        self._unwritten.append(entry)
        self._write_all(again=len(self._unwritten) > 1)

    def _write_all(self, again: bool) -> None:
        """Writes what has not been written. again: the last attempt failed, perhaps within a line."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)  # a user may have removed it
            if again:
                drop_later_steps(self._path, self._unwritten[0]["step"] - 1)
            while self._unwritten:
                with self._path.open("a", encoding="utf-8", errors=HALF_CHARACTERS) as file:
                    entry = self._unwritten[0]
                    file.write(json.dumps(entry, ensure_ascii=False, allow_nan=False) + "\n")
                self._unwritten.popleft()
        except OSError as exc:
            if not again:
                print(f"{self._path} is not written: {exc}; tried again with each step", flush=True)

    def close(self) -> None:
        """Waits until everything is written, or cannot be."""
        super().close()
        if self._unwritten:
            self._write_all(again=True)

    def write(self, step: int, batch: Batch, logprobs: Tensor) -> None:
        """Records the batch of an update that has been made; logprobs: [T], the trainer's."""
        assert batch.advantages is not None, "written after the update"
        advantages_of_tokens, mask, lengths = batch.advantages, batch.loss_mask, batch.lengths

        def sums(rows: slice, tokens: slice) -> Tensor:
            trained = (advantages_of_tokens[tokens] * mask[tokens]).double()
            return by_row(trained, lengths[rows], "sum")

        def differences(tokens: slice) -> Tensor:
            found = logprobs[tokens] - batch.rollout_logprobs[tokens]
            return found.masked_fill(~mask[tokens], torch.nan)

        means = in_runs(sums, lengths) / row_counts(mask, lengths)  # NaN without trained tokens
        ids = batch.sample_ids.tolist()
        advantages = means.tolist()
        firsts = (batch.starts + batch.prompt_lengths).tolist()
        ends = (batch.starts + batch.lengths).tolist()
        kept_tokens = [
            (sample_id, batch.tokens[first:end], differences(slice(first, end)))
            for sample_id, group_id, first, end in zip(
                ids, batch.group_ids.tolist(), firsts, ends, strict=True
            )
            if group_id < self._num_groups
        ]

        def line() -> dict:
            recorded = [
                {
                    "sample_id": sample_id,
                    "ids": tokens.tolist(),
                    "difference": _rounded(difference.tolist(), 2),
                }
                for sample_id, tokens, difference in kept_tokens
            ]
            new = sorted({token for sample in recorded for token in sample["ids"]} - self._shown)
            self._shown.update(new)
            pieces = {str(token): text for token, text in zip(new, self._pieces(new), strict=True)}
            return {
                "step": step,
                "sample_ids": ids,
                "advantages": _rounded(advantages, 5),
                "tokens": recorded,
                "pieces": pieces,
            }

        self.submit(lambda: self._write(line()))


def _rounded(values: list[float], digits: int) -> list[float | None]:
    """Rounds to significant digits; None for non-finite values."""
    return [float(f"{value:.{digits}g}") if math.isfinite(value) else None for value in values]
