"""Records every step's samples: each replica's leader writes those that it sampled, in the background.

rollouts/step_000012.replica_0.jsonl has a line per prompt: its text and answer, and every sample with reward, outcome
and finish reason. A step has a file of every replica, its groups in the order of their ids; `read_rollouts` joins them.
"""

import heapq
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict
from operator import itemgetter
from pathlib import Path

import orjson

from megagrpo.system.run_folder import RunFolder, write_json_lines
from megagrpo.types import Outcome, RolloutGroup


class RolloutLog:
    """Writes the samples of one replica. A failure to write is raised by the next call.

    A run that starts at `start_step` finished steps (0: from the beginning) drops this replica's files of later steps,
    which it makes again, and replica 0 those of replicas that an earlier start had and this one, with `num_replicas`,
    has not.
    """

    def __init__(self, folder: RunFolder, replica: int, num_replicas: int, start_step: int = 0) -> None:
        self._folder, self._replica = folder, replica
        last_kept = start_step if start_step > 0 else -1
        for step, files in folder.rollout_files().items():
            for of, path in files.items():
                if step > last_kept and (of == replica or (replica == 0 and of >= num_replicas)):
                    path.unlink()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rollouts")
        self._last: Future[None] | None = None

    def write(self, step: int, groups: Sequence[RolloutGroup]) -> None:
        """Begins to write this replica's groups of a step."""
        self.flush()
        path = self._folder.rollout_file(step, self._replica)
        in_order = sorted(groups, key=lambda group: group.group_id)
        self._last = self._thread.submit(lambda: write_json_lines(path, map(_record, in_order)))

    def flush(self) -> None:
        """Waits for what `write` has begun."""
        if self._last is not None:
            self._last.result()

    def close(self) -> None:
        """Waits until everything is written."""
        self._thread.shutdown(wait=True)
        self.flush()


def read_rollouts(files: Iterable[Path]) -> Iterator[dict]:
    """Yields the lines of one step's files (RunFolder.rollout_files), in the order of their groups."""
    with ExitStack() as stack:
        lines = [map(orjson.loads, stack.enter_context(path.open("rb"))) for path in files]
        yield from heapq.merge(*lines, key=itemgetter("group_id"))


def _record(group: RolloutGroup) -> dict:
    samples = [
        {
            "text": sample.text,
            "reward": outcome.value if outcome.ok else None,
            "outcome": _outcome_record(outcome),
            "finish_reason": sample.finish_reason,
            "num_tokens": len(sample.token_ids),
            "weight_version": sample.weight_version,
            **({"newer_weights": sample.newer} if sample.newer else {}),
        }
        for sample, outcome in zip(group.samples, group.outcomes, strict=True)
    ]
    prompt = group.prompt
    return {
        "group_id": group.group_id,
        "prompt_id": prompt.id,
        "prompt": prompt.text,
        "answer": prompt.answer,
        "samples": samples,
    }


def _outcome_record(outcome: Outcome) -> dict:
    record = asdict(outcome)
    parts = {name: _outcome_record(part) for name, part in outcome.parts.items()}
    return {**record, "parts": parts} if parts else {key: value for key, value in record.items() if key != "parts"}
