"""Batches of responses without prompts, and inputs of losses and of single reward steps."""

from collections.abc import Sequence

import torch
from torch import Tensor

from megagrpo.algo import advantage
from megagrpo.algo.loss import Denominators, LossInputs, Term, token_scale
from megagrpo.algo.policy_loss import PolicyInputs, Rows
from megagrpo.algo.reward_shaping import RewardInputs
from megagrpo.algo.statistics import alone
from megagrpo.config.algorithm import AlgorithmConfig
from megagrpo.types import AlgoState, Batch
from tests.padding import as_rows, batch_of_rows


def rows_of(values: Tensor) -> Rows:
    """Of values [n, S]."""
    return Rows(torch.full((values.shape[0],), values.shape[1]))


def policy_inputs(logprobs: Tensor, *tensors: Tensor) -> PolicyInputs:
    """The inputs of a policy loss, given as [n, S]: log-probabilities, old ones, advantages, mask, the engine's (if not
    the old ones)."""
    old, advantages, mask, *rollout = (each.flatten() for each in tensors)
    return PolicyInputs(logprobs.flatten(), old, advantages, mask, rows_of(logprobs), *(rollout or [old]))


def loss_inputs(logprobs: Tensor, *tensors: Tensor, **more) -> LossInputs:
    """The inputs of the objective, given as [n, S] in their order; `more` may have counted_tokens [n]."""
    counted, weights = more.pop("counted_tokens", None), more.pop("weights", {})
    flat = {name: None if each is None else each.flatten() for name, each in more.items()}
    weights = {name: each.flatten() for name, each in weights.items()}
    given = (each.flatten() for each in (logprobs, *tensors))
    return LossInputs(*given, rows=rows_of(logprobs), counted_tokens=counted, weights=weights, **flat)


def aggregate(values: Tensor, mask: Tensor, aggregation: str, denominators: Denominators) -> Tensor:
    """The share of values [n, S] under a mask [n, S] in an aggregated loss."""
    counted = (mask > 0).sum(1, keepdim=True).expand_as(values).flatten()
    scale = token_scale(aggregation, denominators, counted)
    return Term(values.flatten(), (mask > 0).to(values.dtype).flatten(), scale).share()


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


def of_policy(p: list[list[float]], others: float = 0.0) -> dict[str, Tensor]:
    """Log-probabilities before the step, and squared probabilities of p and another token that has the rest of all but
    `others`, which many have."""
    own = torch.tensor(p, dtype=torch.float64)
    return {"old_logprobs": own.log(), "squares": own.square() + (1 - own - others).square()}
