"""reward.shuffle, the control experiment: a step's rewards are kept, belong to other samples, and no layout matters."""

from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist

from megagrpo.batching.batch import build_batch, shuffle_rewards
from megagrpo.batching.updates import one_pass
from megagrpo.mesh import Mesh, make_mesh
from megagrpo.types import Outcome, Prompt, RolloutGroup, Sample
from tests.dist.workers.launch import POOL

NUM_GROUPS, GROUP_SIZE = 6, 4


def groups() -> list[RolloutGroup]:
    """Every reward differs from the others, but for the samples that have none."""
    made = []
    for g in range(NUM_GROUPS):
        samples = tuple(
            Sample(i, (5,) * (1 + (g + i) % 5), (-1.0,) * (1 + (g + i) % 5), "stop", 0, "") for i in range(GROUP_SIZE)
        )
        outcomes = tuple(
            Outcome("error") if (g, i) == (2, 1) else Outcome("score", 10.0 * g + i) for i in range(GROUP_SIZE)
        )
        made.append(RolloutGroup(g, Prompt(g, "", (4, 4), ""), samples, outcomes))
    return made


def shuffled(mesh: Mesh, seed: int = 1, step: int = 3) -> dict[int, tuple[float, bool]]:
    """(reward, valid) by sample id after the shuffle, of this rank."""
    mine = groups()[mesh.dp_rank :: mesh.dp_size]
    batch = shuffle_rewards(build_batch(mine, one_pass(NUM_GROUPS), mesh), seed, step, mesh)
    return dict(
        zip(
            batch.sample_ids.tolist(),
            zip(batch.rewards.values.tolist(), batch.rewards.valid.tolist(), strict=True),
            strict=True,
        )
    )


def run_rank(rank: int, world: int, folder: str) -> dict[int, tuple[float, bool]]:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    mine = shuffled(make_mesh(rank, world, torch.device("cpu"), deadline_s=60))
    dist.destroy_process_group()
    return mine


def test_rewards_are_permuted_and_kept(tmp_path: Path):
    alone = make_mesh(0, 1, torch.device("cpu"), deadline_s=60)
    whole = shuffled(alone)
    before = {
        g.group_id * GROUP_SIZE + i: (o.value if o.ok else 0.0, o.ok)
        for g in groups()
        for i, o in enumerate(g.outcomes)
    }
    assert whole.keys() == before.keys() and Counter(whole.values()) == Counter(before.values())
    moved = sum(whole[sample] != before[sample] for sample in before)
    assert moved > len(before) // 2
    assert sum(whole[sample][0] // 10 != sample // GROUP_SIZE for sample in before) > len(before) // 2, (
        "across groups, not inside them"
    )
    assert shuffled(alone, step=4) != whole and shuffled(alone, seed=2) != whole
    parts = POOL.run(3, run_rank, 3, str(tmp_path))
    assert {sample: value for part in parts for sample, value in part.items()} == whole and sum(map(len, parts)) == len(
        whole
    )
