"""The work that all sides get: a step of responses with a long tail, from fixed seeds."""

import os

import numpy as np
import torch

from megagrpo.batching.updates import one_pass
from megagrpo.types import Batch, Rewards

GROUP, LIMIT, PROMPT = 16, 32_768, 512
BUDGET, RANKS = 32_768, 32
SCALE = float(os.environ.get("PEERS_SCALE", "1"))


def scaled(number: int, multiple: int = 1) -> int:
    return max(multiple, round(number * SCALE) // multiple * multiple)


NUM_RESPONSES = scaled(512, RANKS)


def response_lengths(number: int = NUM_RESPONSES) -> np.ndarray:
    """[N] tokens, log-normal."""
    drawn = np.random.default_rng(0).lognormal(7.93, 0.85, number)
    return np.clip(drawn, 16, LIMIT).astype(np.int64)


def response_rewards(number: int) -> np.ndarray:
    """[N] 0 or 1; prompts differ in how hard they are."""
    chance = np.random.default_rng(1)
    easy = np.repeat(chance.random(-(-number // GROUP)), GROUP)[:number]
    return (chance.random(number) < easy).astype(np.float32)


def uids(number: int) -> np.ndarray:
    """[N] names of the groups, as verl has them."""
    return np.array([f"uid-{i // GROUP:032d}" for i in range(number)], dtype=object)


def own_rank(tensor: torch.Tensor, op: str) -> torch.Tensor:
    """The reduction over a single data-parallel rank."""
    return tensor


def our_batch(lengths: np.ndarray, prompt: int = PROMPT) -> Batch:
    number = len(lengths)
    groups = max(number // GROUP, 1)
    whole = torch.from_numpy(lengths) + prompt
    total = int(whole.sum())
    start = whole.cumsum(0) - whole
    mask = torch.ones(total, dtype=torch.bool)
    mask[(start[:, None] + torch.arange(prompt)).flatten()] = False
    values = torch.zeros(total)
    values[mask] = -torch.rand(int(mask.sum()), generator=torch.Generator().manual_seed(2))
    rewards = torch.from_numpy(response_rewards(number)).double()
    return Batch(
        sample_ids=torch.arange(number),
        group_ids=torch.arange(number) // GROUP,
        num_groups=groups,
        tokens=torch.zeros(total, dtype=torch.int32),
        lengths=whole,
        prompt_lengths=torch.full((number,), prompt),
        loss_mask=mask,
        rollout_logprobs=values,
        rewards=Rewards(rewards, torch.ones(number, dtype=torch.bool)),
        truncated=torch.zeros(number, dtype=torch.bool),
        old_logprobs=values,
        updates=one_pass(groups),
    )


def nested(rows: list[torch.Tensor]) -> torch.Tensor:
    """A nested tensor as verl's V1 trainer has them, its longest row known."""
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)
