"""Records the samples of each step; the leader of each replica writes its samples in a background
thread.

rollouts/step_000012.replica_0.jsonl has one line per prompt: text, answer, and each sample with
finish reason and the reward and outcome of its rollout. With an environment a sample has turns
(writer, text and reward), with teachers the log-probability of the response under them. A step has
one file per replica, with groups in order of their ids; `read_rollouts` merges them.
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
    except orjson.JSONDecodeError:  # orjson refuses half of a character, json reads it
        return json.loads(line)


def turns_of(sample: Sample, rewards: Iterator[float], decode: Decode) -> list[dict]:
    """Returns the turns of a response, [{"by": "model" or "environment", "text"}]; the model's
    turns are trained on.

    rewards: those of the rollout's turns from here on; each turn of the model takes the next one as
    its "reward".
    """
    mask = sample.loss_mask
    if mask is None:
        mask = np.ones(len(sample.token_ids), np.bool_)
    turns = []
    for ids in np.split(np.arange(len(mask)), np.flatnonzero(mask[1:] != mask[:-1]) + 1):
        if len(ids):
            turn: dict[str, object] = {"by": "environment", "text": decode(sample.token_ids[ids])}
            if mask[ids[0]]:
                turn["by"] = "model"
                reward = next(rewards, None)
                if reward is not None:
                    turn["reward"] = reward
            turns.append(turn)
    return turns


def _record(group: RolloutGroup, decode: Decode) -> dict:
    prompt = group.prompt
    rewards = [iter(outcome.turn_rewards) for outcome in group.outcomes]
    record = {
        "group_id": group.group_id,
        "prompt_id": prompt.id,
        "prompt": prompt.text,
        "answer": prompt.answer,
        "samples": [
            _sample_record(
                sample, group.outcomes[sample.rollout_index], rewards[sample.rollout_index], decode
            )
            for sample in group.samples
        ],
    }
    return record | _kept(source=prompt.source, images=[image.key for image in prompt.images])


def _kept(**optional: object) -> dict[str, object]:
    """Returns the values that are not empty; a number never is."""
    return {key: value for key, value in optional.items() if value or value == 0}


def _sample_record(
    sample: Sample, outcome: Outcome, rewards: Iterator[float], decode: Decode
) -> dict:
    record = {
        "text": sample.text,
        "reward": outcome.value if outcome.ok else None,
        "outcome": _outcome_record(outcome),
        "finish_reason": sample.finish_reason,
        "num_tokens": len(sample.token_ids),
        "weight_version": sample.weight_version,
    }
    return record | _kept(
        rollout=sample.rollout,
        newer_weights=sample.newer,
        prompt=None if sample.prompt_ids is None else decode(sample.prompt_ids),
        teacher_logprob=sample.teacher and float(sample.teacher.logprobs.sum()),
        turns=turns_of(sample, rewards, decode) if outcome.end else None,
    )


def _outcome_record(outcome: Outcome) -> dict:
    always = {"status": outcome.status, "value": outcome.value, "detail": outcome.detail}
    return always | _kept(
        parts={name: _outcome_record(part) for name, part in outcome.parts.items()},
        token_rewards=outcome.token_rewards,
        end=outcome.end,
        turn_rewards=outcome.turn_rewards,
    )
