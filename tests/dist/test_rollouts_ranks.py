"""Rollouts of several samples over data-parallel ranks: nobody is cut in two, advantages have the same bits."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megagrpo.algo.advantage import with_advantages
from megagrpo.algo.statistics import alone
from megagrpo.batching.batch import build_batch, shuffle_rewards
from megagrpo.batching.sample_rows import LossNeeds
from megagrpo.batching.updates import one_pass
from megagrpo.config.algorithm import AlgorithmConfig
from megagrpo.mesh import Mesh, make_mesh
from megagrpo.types import AlgoState
from tests.dist.workers.launch import run_meshes
from tests.rollout_groups import GRADERS, NUM_GROUPS, split_groups

ALGORITHMS = [
    {},
    {"advantage": {"name": "opo"}},
    {"advantage": {"name": "reinforce_plus_plus", "gamma": 0.9}},
    {"advantage": {"name": "gdpo"}},
]
Found = dict[int, tuple[int, list[tuple[float, ...]]]]  # by sample id: its rank, and its advantages by algorithm


def advantages(mesh: Mesh, shuffle: bool) -> Found:
    mine = split_groups()[mesh.dp_rank :: mesh.dp_size]
    batch = build_batch(mine, one_pass(NUM_GROUPS, 2), mesh, needs=LossNeeds(graders=GRADERS))
    if shuffle:
        batch = shuffle_rewards(batch, 1, 3, mesh)
    reduce = alone if mesh.dp_size == 1 else mesh.reduce
    of_all = [
        with_advantages(batch, AlgorithmConfig(**options), reduce, AlgoState(), 60)[0].advantages.split(
            batch.lengths.tolist()
        )
        for options in ALGORITHMS
    ]
    rows = zip(*of_all, strict=True)
    return {
        sample: (mesh.dp_rank, [tuple(values.tolist()) for values in row])
        for sample, row in zip(batch.sample_ids.tolist(), rows, strict=True)
    }


def of_rank(mesh: Mesh) -> list[Found]:
    first, *others = split_groups()
    plain = [replace(g, outcomes=tuple(replace(o, token_rewards=()) for o in g.outcomes)) for g in others]
    few = [first, *plain][mesh.dp_rank :: mesh.dp_size]
    fields = mesh.gather_dp(build_batch(few, one_pass(NUM_GROUPS), mesh).rewards.tokens is None)
    assert not any(fields), "a user's estimator finds rewards of tokens on some ranks"
    return [advantages(mesh, shuffle) for shuffle in (False, True)]


@pytest.mark.parametrize("world", [2, 4])
def test_rollouts_stay_whole_and_advantages_have_the_same_bits(tmp_path: Path, world: int):
    one = make_mesh(0, 1, torch.device("cpu"), deadline_s=60)
    parts = run_meshes(world, tmp_path, of_rank)
    groups = split_groups()
    most = max(len(group.samples) for group in groups)
    for which, shuffle in enumerate((False, True)):
        whole = advantages(one, shuffle)
        found = {sample: value for part in parts for sample, value in part[which].items()}
        assert {s: v for s, (_, v) in found.items()} == {s: v for s, (_, v) in whole.items()}
        for group in groups:
            for rollout in group.rollouts:
                assert len({found[group.group_id * most + sample.index][0] for sample in rollout}) == 1
        assert len({rank for rank, _ in found.values()}) == world, "every rank trains"
