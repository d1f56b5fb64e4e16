"""Advantages of a step, beside verl's: the function alone on padded tensors, and as its default (V1)
trainer calls it on the nested tensors of its queue."""

from collections.abc import Callable

import numpy as np
import torch

from megagrpo.algo.advantage import with_advantages
from megagrpo.config.algorithm import AlgorithmConfig
from megagrpo.types import AlgoState
from peers_kit.measure import OURS, Call, Case, Cases
from peers_kit.work import (
    LIMIT,
    nested,
    our_batch,
    own_rank,
    response_lengths,
    response_rewards,
    uids,
)

ESTIMATORS = {
    "grpo": {"name": "grpo", "eps": 1e-6},
    "rloo": {"name": "rloo"},
    "reinforce_plus_plus": {"name": "reinforce_plus_plus"},
}


def _ours(estimator: str) -> Callable[[], Call]:
    def prepare() -> Call:
        batch = our_batch(response_lengths())
        algorithm = AlgorithmConfig.model_validate({"advantage": ESTIMATORS[estimator]})

        def call():
            made, _, _ = with_advantages(batch, algorithm, own_rank, AlgoState(), LIMIT)
            return made.advantages[made.loss_mask], {"tokens": int(made.loss_mask.sum())}

        return call

    return prepare


def _padded(lengths: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    number, last = len(lengths), torch.from_numpy(lengths) - 1
    mask = (torch.arange(int(lengths.max()))[None] <= last[:, None]).long()
    rewards = torch.zeros(mask.shape)
    rewards[torch.arange(number), last] = torch.from_numpy(response_rewards(number))
    return rewards, mask


def _function(estimator: str, vectorized: bool = False):
    from verl.trainer.ppo import core_algos

    kind = "_vectorized" if vectorized else ""
    return getattr(core_algos, f"compute_{estimator}{kind}_outcome_advantage")


def _options(estimator: str, number: int) -> dict[str, object]:
    from verl.trainer.config import AlgoConfig

    options: dict[str, object] = {"config": AlgoConfig(gamma=1.0)}
    if estimator != "reinforce_plus_plus":
        options["index"] = uids(number)
    return options


def _verl(estimator: str, vectorized: bool = False) -> Callable[[], Call]:
    def prepare() -> Call:
        function = _function(estimator, vectorized)
        lengths = response_lengths()
        rewards, mask = _padded(lengths)
        options = _options(estimator, len(lengths))

        def call():
            made, _ = function(token_level_rewards=rewards, response_mask=mask, **options)
            return lambda: made[mask.bool()], {"cells": made.numel()}

        return call

    return prepare


def _verl_trainer(estimator: str) -> Callable[[], Call]:
    """As trainer/ppo/v1/trainer_base.py _compute_advantage: padded, computed, nested again."""

    def prepare() -> Call:
        from tensordict import TensorDict
        from verl.workers.utils.padding import response_to_nested

        function = _function(estimator)
        lengths = response_lengths()
        scores = [torch.zeros(n) for n in lengths.tolist()]
        for score, reward in zip(scores, response_rewards(len(lengths)).tolist(), strict=True):
            score[-1] = reward
        logprobs = [-torch.rand(n) for n in lengths.tolist()]
        masks = [torch.ones(n, dtype=torch.int64) for n in lengths.tolist()]
        fields = {
            "response_mask": nested(masks),
            "rm_scores": nested(scores),
            "rollout_log_probs": nested(logprobs),
            "old_log_probs": nested(logprobs),
        }
        data = TensorDict(fields, batch_size=len(lengths))
        options = _options(estimator, len(lengths))

        def call():
            padded = data.to_padded_tensor()
            both = function(
                token_level_rewards=padded["rm_scores"],
                response_mask=padded["response_mask"],
                **options,
            )
            made, _ = [response_to_nested(values, data["response_mask"]) for values in both]
            return made.values(), {}

        return call

    return prepare


CASES = Cases()
for _name in ESTIMATORS:
    _item = f"advantages, {_name}"
    CASES.append(Case(_item, OURS, _ours(_name)))
    CASES.append(Case(_item, "verl (function)", _verl(_name)))
    if _name != "reinforce_plus_plus":
        CASES.append(Case(_item, "verl (vectorized function)", _verl(_name, True)))
    CASES.append(Case(_item, "verl (its trainer)", _verl_trainer(_name)))
