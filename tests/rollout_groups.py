"""Groups whose rollouts have one to five samples, and the same ones with a single sample for each rollout."""

from dataclasses import replace

import numpy as np

from megagrpo.types import Outcome, Prompt, RolloutGroup, Sample

NUM_GROUPS, GROUP_SIZE = 5, 4
GRADERS = {"fine": 1.0, "even": -0.5}  # of the outcomes' parts, with their weights


def split_groups() -> list[RolloutGroup]:
    """Rollouts of 1 to 5 samples, some with a context of their own, some partly off the loss mask; one has no score."""
    chance = np.random.default_rng(7)
    made = []
    for g in range(NUM_GROUPS):
        samples: list[Sample] = []
        outcomes = []
        for rollout in range(GROUP_SIZE):
            total = 0
            for part in range(int(chance.integers(1, 6))):
                length, context = int(chance.integers(1, 7)), int(chance.integers(1, 5))
                sample = Sample(
                    len(samples),
                    chance.integers(0, 90, length),
                    -chance.random(length),
                    "length" if (g, rollout, part) == (1, 2, 0) else "stop",
                    0,
                    "",
                    loss_mask=chance.random(length) < 0.8,
                    rollout=rollout,
                    prompt_ids=chance.integers(0, 90, context) if part else None,
                )
                samples.append(sample)
                total += length
            score = round(float(chance.random()), 3)
            parts = {"even": Outcome("score", total % 2), "fine": Outcome("score", score)}
            scored = Outcome("score", score, parts=parts, token_rewards=((total - 1, 0.25),))
            outcomes.append(Outcome("error") if (g, rollout) == (2, 1) else scored)
        prompt = Prompt(g, "", chance.integers(0, 90, 1 + g), "")
        made.append(RolloutGroup(g, prompt, tuple(samples), tuple(outcomes)))
    return made


def joined(group: RolloutGroup) -> RolloutGroup:
    """One sample for each rollout: the same tokens in the same order, contexts off the loss mask."""
    samples = []
    for number, parts in enumerate(group.rollouts):
        pieces = [np.concatenate([s.prompt_ids, s.token_ids]) if n else s.token_ids for n, s in enumerate(parts)]
        before = [len(p) - len(s.token_ids) for p, s in zip(pieces, parts, strict=True)]
        zeros = [np.zeros(n) for n in before]
        masks = [np.concatenate([z > 0, s.loss_mask]) for z, s in zip(zeros, parts, strict=True)]
        logprobs = [np.concatenate([z, s.logprobs]) for z, s in zip(zeros, parts, strict=True)]
        reason = "length" if any(s.finish_reason == "length" for s in parts) else "stop"
        whole = (np.concatenate(pieces), np.concatenate(logprobs), reason, 0, "", np.concatenate(masks))
        samples.append(Sample(number, *whole))
    last = [len(s.token_ids) - 1 for s in samples]  # the reward of a token was that of the last one
    outcomes = [replace(o, token_rewards=((last[n], 0.25),)) for n, o in enumerate(group.outcomes)]
    return RolloutGroup(group.group_id, group.prompt, tuple(samples), tuple(outcomes))
