"""Records samples as the update saw them, for `megagrpo view`: advantages, and tokens with the two log-probabilities.

trained/replica_0.jsonl has a line a step, of the samples that one data-parallel rank trained on:

    sample_ids, advantages   of all; a mean over trained tokens, null where none is trained on
    tokens                   of the step's first groups: [{"sample_id", "ids", "difference"}, ...], "difference" being
                             the trainer's minus the engine's log-probability, null where it was not trained on
    pieces                   the text of token ids that earlier lines have not shown
"""

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from megagrpo.algo.statistics import row_sums
from megagrpo.monitor.step_lines import StepLines, drop_absent
from megagrpo.system.run_folder import RunFolder
from megagrpo.types import Batch


class TrainedLog:
    """Writes the record of one data-parallel rank. No collective: samples are joined by id when they are looked at.

    num_groups: groups of a step whose tokens are kept, over all ranks; 0 keeps advantages alone. pieces: token ids ->
    the text of each by itself. start_step: see StepLines.
    """

    def __init__(
        self,
        folder: RunFolder,
        replica: int,
        num_replicas: int,
        num_groups: int,
        pieces: Callable[[Sequence[int]], Iterable[str]],
        start_step: int = 0,
    ) -> None:
        self._lines = StepLines(folder.trained_file(replica), start_step)
        if replica == 0:
            drop_absent(folder.trained_files(), num_replicas, start_step)
        self._num_groups, self._pieces = num_groups, pieces
        self._shown: set[int] = set()

    def write(self, step: int, batch: Batch, logprobs: Tensor) -> None:
        """Records the batch of an update that has been made; logprobs: [T], the trainer's."""
        assert batch.advantages is not None, "written after the update"
        counts = row_sums(batch.loss_mask.long(), batch.lengths)
        sums = row_sums((batch.advantages * batch.loss_mask).double(), batch.lengths)
        means = sums / counts  # NaN where nothing is trained on
        ids, advantages = batch.sample_ids.tolist(), means.tolist()
        chosen = [
            (sample_id, slice(start + prompt, start + length))
            for sample_id, group_id, start, prompt, length in zip(
                ids,
                batch.group_ids.tolist(),
                batch.starts.tolist(),
                batch.prompt_lengths.tolist(),
                batch.lengths.tolist(),
                strict=True,
            )
            if group_id < self._num_groups
        ]
        differences = (logprobs - batch.rollout_logprobs).masked_fill(~batch.loss_mask, torch.nan)
        kept_tokens = [(sample_id, batch.tokens[span], differences[span]) for sample_id, span in chosen]

        def line() -> dict:
            kept = [
                {
                    "sample_id": sample_id,
                    "ids": tokens.tolist(),
                    "difference": _rounded(difference.tolist(), 2),
                }
                for sample_id, tokens, difference in kept_tokens
            ]
            pieces = self._new_pieces({token for sample in kept for token in sample["ids"]})
            return {"sample_ids": ids, "advantages": _rounded(advantages, 5), "tokens": kept, "pieces": pieces}

        self._lines.append(step, line)

    def close(self) -> None:
        """Waits until everything is written."""
        self._lines.close()

    def _new_pieces(self, ids: set[int]) -> dict[str, str]:
        new = sorted(ids - self._shown)
        self._shown |= ids
        return {str(token): text for token, text in zip(new, self._pieces(new), strict=True)}


def _rounded(values: list[float], digits: int) -> list[float | None]:
    """Rounds to significant digits; null for what is not finite."""
    return [float(f"{value:.{digits}g}") if math.isfinite(value) else None for value in values]
