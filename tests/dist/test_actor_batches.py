"""Samples over three data-parallel ranks: each trained on once, whoever sampled it; micro-batches agree."""

import random

import torch

from megagrpo.batching.batch import build_batch, shuffle_rewards
from megagrpo.batching.microbatch import MicroBatchSize, plan_micro_batches
from megagrpo.batching.updates import one_pass
from megagrpo.config.schema import ParallelConfig
from megagrpo.mesh import Mesh
from megagrpo.types import Outcome, Prompt, RolloutGroup, Sample
from tests.dist.workers.launch import run_meshes

WORLD, ROUNDS = 3, 40


def some_groups(chance: random.Random) -> list[RolloutGroup]:
    groups, size = [], chance.randint(1, 5)
    for g in range(chance.randint(1, 9)):
        prompt = Prompt(g, "", tuple(chance.randrange(100) for _ in range(chance.randint(1, 8))), "")
        lengths = [chance.randint(0, 30) for _ in range(size)]
        tokens = [[chance.randrange(100) for _ in range(n)] for n in lengths]
        samples = tuple(Sample(i, ids, [-chance.random() for _ in ids], "stop", 0, "") for i, ids in enumerate(tokens))
        groups.append(RolloutGroup(g, prompt, samples, tuple(Outcome("score", chance.random()) for _ in lengths)))
    return groups


def of_rank(mesh: Mesh) -> list[dict]:
    found = []
    for number in range(ROUNDS):
        chance = random.Random(number)
        groups = some_groups(chance)
        num_updates = chance.choice([n for n in (1, 2, 3) if n <= len(groups)])
        kept = []
        for _ in range(2):  # two placements of the same groups, one of which may leave a rank without any
            places = [chance.randrange(WORLD) for _ in groups]
            mine = [group for group, place in zip(groups, places, strict=True) if place == mesh.rank]
            chance.shuffle(groups)
            batch = build_batch(mine, one_pass(len(groups), num_updates), mesh)
            shuffled = shuffle_rewards(batch, 1, number, mesh)
            kept.append((batch, shuffled.rewards.values.tolist()))
        (batch, rewards), (again, rewards_again) = kept
        pairs = ((batch.tokens, again.tokens), (batch.sample_ids, again.sample_ids))
        same = all(torch.equal(*pair) for pair in pairs) and rewards == rewards_again
        packed, layout = chance.random() < 0.5, ParallelConfig(pp=chance.choice([1, 2]))
        shapes = []
        for update in batch.updates[0]:
            rows = [r for r, g in enumerate(batch.group_ids.tolist()) if g in update]
            micros = plan_micro_batches(batch, rows, MicroBatchSize(chance.randint(20, 80), packed), layout, mesh)
            assert sorted(r for m in micros for r in m.members.tolist()) == rows
            shapes.append([tuple(m.tokens.shape) for m in micros])
        tokens = [of_one.tolist() for of_one in batch.tokens.split(batch.lengths.tolist())]
        result = {"ids": batch.sample_ids.tolist(), "tokens": tokens, "same": same, "shapes": shapes}
        found.append(result | {"pp": layout.pp, "rewards": rewards})
    return found


def test_every_sample_once_and_micro_batches_agree(tmp_path):
    by_rank = run_meshes(WORLD, tmp_path, of_rank)
    for number in range(ROUNDS):
        groups = some_groups(random.Random(number))
        parts = [found[number] for found in by_rank]
        size = len(groups[0].samples)
        expected = {g.group_id * size + s.index: [*g.prompt.token_ids, *s.token_ids] for g in groups for s in g.samples}
        trained = {i: tokens for part in parts for i, tokens in zip(part["ids"], part["tokens"], strict=True)}
        assert trained == expected and sum(len(part["ids"]) for part in parts) == len(expected)
        assert all(part["same"] for part in parts), "the plan depends on the samples, not on who brought them"
        rewards = sorted(outcome.value for group in groups for outcome in group.outcomes)
        assert sorted(r for part in parts for r in part["rewards"]) == rewards
        for update in zip(*(part["shapes"] for part in parts), strict=True):
            assert len({len(shapes) for shapes in update}) == 1, "every rank runs the same number of micro-batches"
            assert parts[0]["pp"] == 1 or len({shape for shapes in update for shape in shapes}) == 1, (
                "pipeline stages exchange one shape"
            )
