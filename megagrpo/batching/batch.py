"""Groups to tensors: rollouts are balanced over data-parallel ranks by cost."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, compress

import numpy as np
import torch

from megagrpo.algo.rollouts import by_rollout, to_samples
from megagrpo.batching.balance import balanced_parts, sample_cost
from megagrpo.batching.sample_rows import (
    NO_NEEDS,
    LossNeeds,
    SampleRow,
    response_values,
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

    updates: the step's, from `plan_updates`. Each update of the first pass is balanced separately,
    by cost; later passes mix the samples but do not move them. The samples of a rollout stay
    together. arch: the model's; its attention and vision tower then count as cost. trained_version:
    version of the weights that the step trains, if the sampling weights may be older.
    routed_layers: this rank's layers with experts, whose routed experts the replica's leader sends.
    needs: what the experiment's loss reads. Rows are ordered by sample id. Raises ValueError if a
    scored response has no score from one of `needs.graders`.
    """
    most = max(mesh.gather_dp(max((len(g.samples) for g in groups), default=0)))
    groups = list(map(with_demonstration, groups))
    experts = _cut_experts(groups, None)
    if routed_layers is not None:
        experts = mesh.cut_by_leader(tuple(routed_layers), partial(_cut_experts, groups))
    mine = [
        row
        for group, group_experts in zip(groups, experts, strict=True)
        for row in rows_of(group, most, trained_version, group_experts, needs)
    ]
    own = [(row.sample_id, row.rollout_id, row.group_id, _cost(row, arch)) for row in mine]
    sizes = sorted(chain(*mesh.gather_dp(own)))
    # Statistics and updates number the groups of a step densely, in the order of their ids in the
    # run.
    group_ids = {group_id for _, _, group_id, _ in sizes}
    dense = {group_id: number for number, group_id in enumerate(sorted(group_ids))}
    by_rollout = [(rollout_id, dense[group_id], cost) for _, rollout_id, group_id, cost in sizes]
    owner = _owners(by_rollout, updates, mesh.dp_size)
    outgoing = [
        [row for row in mine if owner[row.rollout_id] == rank] for rank in range(mesh.dp_size)
    ]
    # a user's estimator finds the same fields on all ranks
    found = mesh.largest(
        any(g.greedy_outcome is not None for g in groups), any(row.token_rewards for row in mine)
    )
    in_order = sorted(chain(*mesh.exchange_dp(outgoing)), key=lambda r: r.sample_id)
    lags = None
    if trained_version is not None:
        lags = response_values(in_order, (row.lags for row in in_order), np.int32)
    batch = _to_tensors(in_order, dense, updates, _rewards(in_order, found, needs.graders))
    batch = replace(batch, lags=lags, streams=streams_of(in_order, needs))
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
    rewards: Rewards,
) -> Batch:
    sizes = list(Counter(row.rollout_id for row in rows).values())  # in order: rows are
    rollout_sizes = None
    if len(sizes) < len(rows):
        rollout_sizes = torch.tensor(sizes, dtype=torch.int64)
    images = tuple(row.images for row in rows)
    parts = (part for row in rows for part in (row.prompt, row.response))
    return Batch(
        sample_ids=torch.tensor([row.sample_id for row in rows], dtype=torch.int64),
        group_ids=torch.tensor([dense[row.group_id] for row in rows], dtype=torch.int64),
        num_groups=sum(map(len, updates[0])),
        tokens=torch.from_numpy(np.concatenate([np.zeros(0, np.int32), *parts])),
        lengths=torch.tensor([row.length for row in rows], dtype=torch.int64),
        prompt_lengths=torch.tensor([len(row.prompt) for row in rows], dtype=torch.int64),
        loss_mask=response_values(rows, (r.response_mask for r in rows), np.bool_, default=True),
        rollout_logprobs=response_values(rows, (r.logprobs for r in rows), np.float32),
        rewards=rewards,
        truncated=torch.tensor([row.truncated for row in rows], dtype=torch.bool),
        updates=updates,
        rollout_sizes=rollout_sizes,
        images=images if any(images) else (),
    )


def _rewards(
    rows: Sequence[SampleRow], found: Sequence[int], graders: Mapping[str, float]
) -> Rewards:
    """Returns the rewards, with the scores and the weight of each of these graders. found: whether
    any rank has rewards of greedy responses, and of tokens."""
    has_greedy, has_tokens = found
    rewards = Rewards(
        values=torch.tensor([row.reward for row in rows], dtype=torch.float64),
        valid=torch.tensor([row.valid for row in rows], dtype=torch.bool),
    )
    if has_greedy:
        greedy = torch.tensor([row.greedy_reward for row in rows], dtype=torch.float64)
        rewards = replace(rewards, greedy=greedy)
    if has_tokens:
        tokens = response_values(rows, map(_token_rewards, rows), np.float64)
        rewards = replace(rewards, tokens=tokens)
    if graders:
        parts = torch.tensor([row.parts for row in rows], dtype=torch.float64)
        weights = torch.tensor(list(graders.values()), dtype=torch.float64)
        rewards = replace(rewards, parts=parts.view(len(rows), len(weights)), weights=weights)
    return rewards


def _token_rewards(row: SampleRow) -> np.ndarray:
    """Returns the rewards of the response's tokens, [T] float64."""
    out = np.zeros(len(row.response))
    for index, reward in row.token_rewards:
        out[index] += reward
    return out


def _cut_experts(
    groups: Sequence[RolloutGroup], layers: tuple[int, ...] | None
) -> list[list[np.ndarray | None]]:
    """Returns the experts of each sample in these layers; None without layers or if they are not
    known."""

    def cut(experts: np.ndarray | None) -> np.ndarray | None:
        if experts is None or layers is None:
            return None
        return experts[:, list(layers)]

    return [[cut(sample.routed_experts) for sample in group.samples] for group in groups]


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
    rollouts = by_rollout(batch)
    rewards = rollouts.rewards
    # a reward, and the graders' scores in it
    both = rewards.values[:, None]
    if rewards.parts is not None:
        both = torch.cat((both, rewards.parts), 1)
    ids = rollouts.sample_ids.tolist()
    scored = list(compress(zip(ids, both.tolist(), strict=True), rewards.valid.tolist()))
    everyone = sorted(pair for part in mesh.gather_dp(scored) for pair in part)
    order = torch.randperm(
        len(everyone), generator=torch.Generator().manual_seed((seed * 1_000_003 + step) % 2**63)
    ).tolist()
    moved = {everyone[i][0]: everyone[j][1] for i, j in enumerate(order)}
    none = [0.0] * both.shape[1]
    both = torch.tensor([moved.get(i, none) for i in ids], dtype=torch.float64).view(both.shape)
    both = to_samples(both, batch)
    rewards = replace(batch.rewards, values=both[:, 0].clone(), tokens=None)
    if rewards.parts is not None:
        rewards = replace(rewards, parts=both[:, 1:].clone())
    return replace(batch, rewards=rewards)
