"""Records the samples of each step; the leader of each replica writes its own in a background
thread.

rollouts/step_000012.replica_0.jsonl has one line per prompt: text, answer, and each sample with the
reward and outcome of its rollout, its finish reason, and with an environment its turns: who said
what, and each turn's reward; with teachers the response's log-probability under them. A step has a
file for each replica, with groups in order of their ids; `read_rollouts` merges them.
"""

import heapq
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from operator import itemgetter
from pathlib import Path

import numpy as np
import orjson

from megagrpo.monitor.step_lines import BackgroundWriter
from megagrpo.system.run_folder import RunFolder, write_json_lines
from megagrpo.types import Outcome, RolloutGroup, Sample

Decode = Callable[[np.ndarray], str]


class RolloutLog(BackgroundWriter):
    """Writes the samples of one replica. decode: token ids -> text."""

    def __init__(self, folder: RunFolder, replica: int, decode: Decode = str) -> None:
        super().__init__("rollouts")
        self._folder = folder
        self._replica = replica
        self._decode = decode

    def write(self, step: int, groups: Sequence[RolloutGroup]) -> None:
        """Starts writing this replica's groups of a step."""
        path = self._folder.rollout_file(step, self._replica)
        in_order = sorted(groups, key=lambda group: group.group_id)
        self.submit(
            lambda: write_json_lines(path, (_record(group, self._decode) for group in in_order))
        )


def read_rollouts(files: Iterable[Path]) -> Iterator[dict]:
    """Yields the lines of one step's files (RunFolder.rollout_files) in order of their groups."""
    with ExitStack() as stack:
        lines = [map(_parsed, stack.enter_context(path.open("rb"))) for path in files]
        yield from heapq.merge(*lines, key=itemgetter("group_id"))


def _parsed(line: bytes) -> dict:
    try:
        return orjson.loads(line)
    except orjson.JSONDecodeError:  # it refuses half of a character, which json reads
        return json.loads(line)


def turns_of(sample: Sample, rewards: Iterator[float], decode: Decode) -> list[dict]:
    """Returns what was said in a response, [{"by": "model" or "environment", "text"}]; the model's
    is trained on.

    rewards: of the rollout's turns from here on; a turn of the model takes the next one as its
    "reward".
    """
    mask = (
        np.ones(len(sample.token_ids), np.bool_) if sample.loss_mask is None else sample.loss_mask
    )
    turns = []
    for ids in np.split(np.arange(len(mask)), np.flatnonzero(mask[1:] != mask[:-1]) + 1):
        if len(ids):
            own = bool(mask[ids[0]])
            turn = {"by": "model" if own else "environment", "text": decode(sample.token_ids[ids])}
            turns.append(
                turn
                | (
                    {"reward": reward}
                    if own and (reward := next(rewards, None)) is not None
                    else {}
                )
            )
    return turns


def _record(group: RolloutGroup, decode: Decode) -> dict:
    rewards = [iter(outcome.turn_rewards) for outcome in group.outcomes]
    samples = [
        {
            "text": sample.text,
            **({} if sample.rollout is None else {"rollout": sample.rollout}),
            "reward": outcome.value if outcome.ok else None,
            "outcome": _outcome_record(outcome),
            "finish_reason": sample.finish_reason,
            "num_tokens": len(sample.token_ids),
            "weight_version": sample.weight_version,
            **({"newer_weights": sample.newer} if sample.newer else {}),
            **({} if sample.prompt_ids is None else {"prompt": decode(sample.prompt_ids)}),
            **(
                {}
                if sample.teacher is None
                else {"teacher_logprob": float(sample.teacher.logprobs.sum())}
            ),
            **(
                {"turns": turns_of(sample, rewards[sample.rollout_index], decode)}
                if outcome.end
                else {}
            ),
        }
        for sample in group.samples
        for outcome in (group.outcomes[sample.rollout_index],)
    ]
    prompt = {
        "prompt_id": group.prompt.id,
        "prompt": group.prompt.text,
        "answer": group.prompt.answer,
    }
    source = {"source": group.prompt.source} if group.prompt.source else {}
    images = {"images": [image.key for image in group.prompt.images]} if group.prompt.images else {}
    return {"group_id": group.group_id, **prompt, **source, **images, "samples": samples}


def _outcome_record(outcome: Outcome) -> dict:
    optional = {
        "parts": {name: _outcome_record(part) for name, part in outcome.parts.items()},
        "token_rewards": outcome.token_rewards,
        "end": outcome.end,
        "turn_rewards": outcome.turn_rewards,
    }
    always = {"status": outcome.status, "value": outcome.value, "detail": outcome.detail}
    return always | {key: value for key, value in optional.items() if value}
