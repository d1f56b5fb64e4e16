"""Groups to tensors: rollouts are balanced over data-parallel ranks by cost."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from megagrpo.algo.rollouts import of_rollouts, of_samples
from megagrpo.batching.balance import balanced_parts, sample_cost
from megagrpo.batching.rows import (
    NO_NEEDS,
    LossNeeds,
    SampleRow,
    of_responses,
    rows_of,
    streams_of,
    with_demonstration,
)
from megagrpo.mesh import Mesh
from megagrpo.models.architecture import Architecture
from megagrpo.models.table import attention_length, patch_cost
from megagrpo.types import Batch, Rewards, RolloutGroup, Routing, Updates


def build_batch(
    groups: Sequence[RolloutGroup],
    updates: Updates,
    mesh: Mesh,
    arch: Architecture | None = None,
    trained_version: int | None = None,
    routed_layers: Sequence[int] | None = None,
    needs: LossNeeds = NO_NEEDS,
) -> Batch:
    """Collective. Returns this replica's share of all samples, from the groups that each replica
    sampled.

    updates: of the step (`plan_updates`). Each update of the first pass is balanced separately, by
    cost; later passes mix the samples but do not move them. The samples of a rollout stay together.
    arch: of the model, whose attention and vision tower then count as cost. trained_version:
    version of the weights that the step trains, if the sampling weights may be older.
    routed_layers: this rank's layers with experts, whose routed experts the replica's leader sends.
    needs: of the experiment's loss. Rows are ordered by sample id. Raises ValueError if a scored
    response has no score of one of `needs.graders`.
    """
    most = max((len(g.samples) for g in groups), default=0)
    most = max(mesh.gather_dp(most))
    groups = list(map(with_demonstration, groups))
    experts = _cut_experts(groups, None)
    if routed_layers is not None:
        experts = mesh.cut_by_leader(tuple(routed_layers), partial(_cut_experts, groups))
    mine = [
        row
        for group, of_group in zip(groups, experts, strict=True)
        for row in rows_of(group, most, trained_version is not None, of_group, needs)
    ]
    own = [(r.sample_id, r.rollout_id, r.group_id, _cost(r, arch)) for r in mine]
    sizes = sorted(of_sample for part in mesh.gather_dp(own) for of_sample in part)
    # Statistics and updates number the groups of a step densely, in the order of their ids in the
    # run.
    group_ids = sorted({group_id for _, _, group_id, _ in sizes})
    dense = {group_id: number for number, group_id in enumerate(group_ids)}
    by_rollout = [(rollout_id, dense[group_id], cost) for _, rollout_id, group_id, cost in sizes]
    owner = _owners(by_rollout, updates, mesh.dp_size)
    outgoing = [
        [row for row in mine if owner[row.rollout_id] == rank] for rank in range(mesh.dp_size)
    ]
    received = [row for part in mesh.exchange_dp(outgoing) for row in part]
    has_greedy = any(mesh.gather_dp(any(g.greedy_outcome is not None for g in groups)))
    in_order = sorted(received, key=lambda r: r.sample_id)
    batch = _to_tensors(in_order, dense, updates, has_greedy, trained_version)
    if needs.graders:
        batch = replace(batch, rewards=_with_scores(batch.rewards, in_order, needs.graders))
    batch = replace(batch, streams=streams_of(in_order, needs.algorithm))
    if routed_layers is not None:
        batch = _with_routed_experts(batch, in_order, len(routed_layers))
    return batch


def _owners(
    samples: Sequence[tuple[int, int, int]], updates: Updates, num_ranks: int
) -> dict[int, int]:
    """Returns the rank of each rollout. samples: (rollout, its group's number, cost), in order."""
    owner: dict[int, int] = {}
    for numbers in map(frozenset, updates[0]):
        costs: dict[int, int] = {}
        for rollout_id, group, cost in samples:
            if group in numbers:
                costs[rollout_id] = costs.get(rollout_id, 0) + cost
        members = list(costs)
        for rank, part in enumerate(balanced_parts(list(costs.values()), num_ranks)):
            owner.update((members[i], rank) for i in part)
    return owner


def _cost(row: SampleRow, arch: Architecture | None) -> int:
    if arch is None:
        return sample_cost(row.length)
    patches = sum(math.prod(image.grid) for image in row.images)
    return sample_cost(row.length, attention_length(arch)) + round(patches * patch_cost(arch))


def _to_tensors(
    rows: Sequence[SampleRow],
    dense: dict[int, int],
    updates: Updates,
    has_greedy: bool,
    trained_version: int | None,
) -> Batch:
    sizes = list(Counter(row.rollout_id for row in rows).values())  # in order: rows are
    lags = None
    if trained_version is not None:
        versions = (row.versions for row in rows)
        of_rows = (None if each is None else trained_version - each for each in versions)
        lags = of_responses(rows, of_rows, np.int32, default=0)
    parts = (part for row in rows for part in (row.prompt, row.response))
    return Batch(
        sample_ids=torch.tensor([row.sample_id for row in rows], dtype=torch.int64),
        group_ids=torch.tensor([dense[row.group_id] for row in rows], dtype=torch.int64),
        num_groups=sum(map(len, updates[0])),
        tokens=torch.from_numpy(np.concatenate([np.zeros(0, np.int32), *parts])),
        lengths=torch.tensor([row.length for row in rows], dtype=torch.int64),
        prompt_lengths=torch.tensor([len(row.prompt) for row in rows], dtype=torch.int64),
        loss_mask=of_responses(rows, (r.response_mask for r in rows), np.bool_, default=True),
        rollout_logprobs=of_responses(rows, (r.logprobs for r in rows), np.float32),
        rewards=_rewards(rows, has_greedy),
        truncated=torch.tensor([row.truncated for row in rows], dtype=torch.bool),
        lags=lags,
        updates=updates,
        rollout_sizes=torch.tensor(sizes, dtype=torch.int64) if len(sizes) < len(rows) else None,
        images=tuple(row.images for row in rows) if any(row.images for row in rows) else (),
    )


def _rewards(rows: Sequence[SampleRow], has_greedy: bool) -> Rewards:
    greedy = torch.tensor([row.greedy_reward for row in rows], dtype=torch.float64)
    tokens = None
    if any(row.token_rewards for row in rows):
        tokens = of_responses(rows, map(_token_rewards, rows), np.float64)
    return Rewards(
        values=torch.tensor([row.reward for row in rows], dtype=torch.float64),
        valid=torch.tensor([row.valid for row in rows], dtype=torch.bool),
        greedy=greedy if has_greedy else None,
        tokens=tokens,
    )


def _with_scores(
    rewards: Rewards, rows: Sequence[SampleRow], graders: Mapping[str, float]
) -> Rewards:
    """Returns the rewards with the scores of each grader and its weight."""
    parts = torch.tensor([row.parts for row in rows], dtype=torch.float64)
    weights = torch.tensor(list(graders.values()), dtype=torch.float64)
    return replace(rewards, parts=parts.view(len(rows), len(weights)), weights=weights)


def _token_rewards(row: SampleRow) -> np.ndarray:
    """Returns the rewards of the response's tokens, [T] float64."""
    out = np.zeros(len(row.response))
    for index, reward in row.token_rewards:
        out[index] += reward
    return out


def _cut_experts(
    groups: Sequence[RolloutGroup], layers: tuple[int, ...] | None
) -> list[list[np.ndarray | None]]:
    """Returns the experts of each sample in these layers; of none without layers, and where they
    are not known."""
    return [
        [
            None
            if s.routed_experts is None or layers is None
            else s.routed_experts[:, list(layers)]
            for s in g.samples
        ]
        for g in groups
    ]


def _with_routed_experts(batch: Batch, rows: Sequence[SampleRow], num_layers: int) -> Batch:
    """Returns the batch with its samples' routed experts, if any are known.

    A sample from a checkpoint has none if it was sampled before they were recorded.
    """
    known = [row.routed_experts for row in rows if row.routed_experts is not None]
    if not known:
        return batch
    kind = torch.from_numpy(known[0][:0]).dtype
    experts = torch.zeros(len(batch.tokens), num_layers, known[0].shape[2], dtype=kind)
    lengths = torch.zeros_like(batch.lengths)
    for i, (start, row) in enumerate(zip(batch.starts.tolist(), rows, strict=True)):
        if row.routed_experts is not None:
            lengths[i] = len(row.routed_experts)
            assert lengths[i] == row.length - 1, (
                f"sample {row.sample_id}: experts of {lengths[i]} tokens"
            )
            experts[start : start + len(row.routed_experts)] = torch.from_numpy(row.routed_experts)
    return replace(batch, routing=Routing(experts, lengths))


def shuffle_rewards(batch: Batch, seed: int, step: int, mesh: Mesh) -> Batch:
    """Collective over data-parallel ranks. Returns the batch with rewards permuted over the valid
    rollouts of the step.

    The order of sample ids decides, so that every layout shuffles alike.
    """
    whole = of_rollouts(batch)
    rewards = whole.rewards
    # a reward, and the scores that it is made of
    both = rewards.values[:, None]
    if rewards.parts is not None:
        both = torch.cat((both, rewards.parts), 1)
    ids = whole.sample_ids.tolist()
    rows = zip(ids, both.tolist(), rewards.valid.tolist(), strict=True)
    scored = [(sample_id, reward) for sample_id, reward, valid in rows if valid]
    everyone = sorted(pair for part in mesh.gather_dp(scored) for pair in part)
    order = torch.randperm(
        len(everyone), generator=torch.Generator().manual_seed((seed * 1_000_003 + step) % 2**63)
    ).tolist()
    moved = {everyone[i][0]: everyone[j][1] for i, j in enumerate(order)}
    none = [0.0] * both.shape[1]
    both = torch.tensor([moved.get(i, none) for i in ids], dtype=torch.float64).view(both.shape)
    both = of_samples(both, batch)
    parts = None if rewards.parts is None else both[:, 1:].clone()
    rewards = replace(batch.rewards, values=both[:, 0].clone(), tokens=None, parts=parts)
    return replace(batch, rewards=rewards)
