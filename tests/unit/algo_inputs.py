"""Inputs of single reward steps."""

import torch

from megagrpo.algo.reward_shaping import RewardInputs
from megagrpo.algo.statistics import alone


def reward_inputs(group_ids: torch.Tensor) -> RewardInputs:
    """Valid responses of one token in these groups, on a single rank."""
    return RewardInputs(
        response_lengths=torch.ones_like(group_ids),
        group_ids=group_ids,
        num_groups=int(group_ids.max()) + 1,
        valid=torch.ones_like(group_ids, dtype=torch.bool),
        max_response_tokens=1,
        reduce=alone,
    )
