"""Batches of responses without prompts, and inputs of single reward steps."""

from collections.abc import Sequence

import torch
from torch import Tensor

from megagrpo.algo import advantage
from megagrpo.algo.reward_shaping import RewardInputs
from megagrpo.algo.statistics import alone
from megagrpo.config.algorithm import AlgorithmConfig
from megagrpo.types import AlgoState, Batch
from tests.padding import as_rows, batch_of_rows


def batch_of(rewards: Tensor, groups: Sequence[int], mask: Tensor, **more) -> Batch:
    """Valid responses [n] whose tokens `mask` [n, S] selects; `more` replaces what is given by default."""
    n, width = mask.shape
    given = {"sample_ids": torch.arange(n), "group_ids": torch.tensor(groups, dtype=torch.int64), "rewards": rewards}
    given |= {"num_groups": max(groups, default=-1) + 1, "tokens": torch.zeros(n, width, dtype=torch.int64)}
    given |= {"lengths": torch.full((n,), width), "prompt_lengths": torch.zeros(n, dtype=torch.int64)}
    given |= {"loss_mask": mask.float(), "rollout_logprobs": torch.zeros(n, width)}
    given |= {"valid": torch.ones(n, dtype=torch.bool), "truncated": torch.zeros(n, dtype=torch.bool)}
    return batch_of_rows(**given | more)


def with_advantages(batch: Batch, algorithm: AlgorithmConfig, longest: int = 100) -> tuple[Batch, AlgoState, dict]:
    """On one rank, from a new state: (the batch as rows, the state, metrics)."""
    result, *rest = advantage.with_advantages(batch, algorithm, alone, AlgoState(), longest)
    return as_rows(result), *rest


def reward_inputs(group_ids: torch.Tensor) -> RewardInputs:
    """Valid responses of one token in these groups, on a single rank."""
    ones, valid = torch.ones_like(group_ids), torch.ones_like(group_ids, dtype=torch.bool)
    sizes = {"num_groups": int(group_ids.max()) + 1, "max_response_tokens": 1}
    return RewardInputs(response_lengths=ones, group_ids=group_ids, valid=valid, reduce=alone, **sizes)
