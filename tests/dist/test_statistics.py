"""Statistics and advantages are the same bits for every data-parallel size, rank order and placement, over gloo."""

from dataclasses import fields, replace

import pytest
import torch

from megagrpo.algo.advantage import with_advantages
from megagrpo.algo.statistics import group_statistics, moments
from megagrpo.config.algorithm import AlgorithmConfig
from megagrpo.mesh import Mesh
from megagrpo.types import AlgoState, Batch
from tests.dist.workers.launch import run_meshes
from tests.padding import batch_of_rows

WORLDS = (1, 2, 4)
PLACEMENTS = 2
NUM_GROUPS, GROUP_SIZE, WIDTH = 7, 4, 12
STEP = torch.tensor([0.0, 0.1, 0.2, 0.3], dtype=torch.float64).repeat(NUM_GROUPS)


def rewards_of(kind: str, generator: torch.Generator) -> torch.Tensor:
    noise = torch.randn(NUM_GROUPS * GROUP_SIZE, generator=generator, dtype=torch.float64)
    return {
        "offset": 1000 + STEP[torch.randperm(len(STEP), generator=generator)],
        "tiny": 1e-4 * noise,
        "mixed": noise * 10.0 ** torch.randint(-30, 30, noise.shape, generator=generator),
        "huge": noise * 1e300,
        "constant": torch.full_like(noise, 0.7),
        "binary": (noise > 0).double(),
    }[kind]


KINDS = ("offset", "tiny", "mixed", "huge", "constant", "binary")
SHAPING = {"overlong": {"buffer_tokens": 4}, "mean": "running", "std": "batch", "clip": 5.0}
ALGORITHMS = {
    "grpo": {},
    "dr_grpo": {"advantage": {"name": "dr_grpo"}, "whiten_advantages": True},
    "grpo_passk": {"advantage": {"name": "grpo_passk"}},
    "rloo": {"advantage": {"name": "rloo"}, "kl": {"reward_coef": 0.1, "adaptive": {"target": 0.1, "horizon": 100.0}}},
    "reinforce_plus_plus": {
        "advantage": {"name": "reinforce_plus_plus", "gamma": 0.9},
        "kl": {"reward_coef": 0.1, "estimator": "k1"},
    },
    "reinforce_plus_plus_baseline": {"advantage": {"name": "reinforce_plus_plus_baseline"}, "reward": SHAPING},
    "reinforce": {
        "advantage": {"name": "reinforce"},
        "reward": {"mean": "group", "std": "group", "clip": 1.5},
        "kl": {"reward_coef": 0.1, "estimator": "k1"},
    },
    "remax": {"advantage": {"name": "remax"}, "advantage_clip": 2.0, "kl": {"reward_coef": 0.1, "estimator": "k1"}},
    "opo": {"advantage": {"name": "opo"}, "mask_truncated": True},
    "gdpo": {"advantage": {"name": "gdpo", "whiten_over": "responses"}},
    "gdpo over tokens": {"advantage": {"name": "gdpo"}, "mask_truncated": True},
    "gpg": {
        "advantage": {"name": "gpg"},
        "mismatch": {
            "weight": {"name": "tis", "over": "sequence", "self_normalize": True},
            "reject": {"low": 0.5, "high": 2.0},
        },
    },
}


for NAME, SINGLE in (("optimal_token_baseline", "zero"), ("optimal_token_baseline, raw", "raw")):
    ALGORITHMS[NAME] = {
        "advantage": {"name": "optimal_token_baseline", "single_sample": SINGLE},
        "mismatch": {"weight": {"name": "tis"}},
    }
for LOSS in ("clip_cov", "kl_cov"):
    ALGORITHMS[LOSS] = {"loss": {"name": LOSS, "fraction": 0.1} | ({"low": 0.1} if LOSS == "clip_cov" else {})}


def whole_batch(kind: str) -> Batch:
    generator = torch.Generator().manual_seed(KINDS.index(kind))
    n = NUM_GROUPS * GROUP_SIZE
    lengths = torch.randint(2, WIDTH + 1, (n,), generator=generator)
    columns = torch.arange(WIDTH)
    holes = torch.rand(n, WIDTH, generator=generator) > 0.2

    def logprobs() -> torch.Tensor:
        return -torch.rand(n, WIDTH, generator=generator)

    return batch_of_rows(
        sample_ids=torch.arange(n),
        group_ids=torch.arange(n) // GROUP_SIZE,
        num_groups=NUM_GROUPS + 1,  # the last one has no sample
        tokens=torch.zeros(n, WIDTH, dtype=torch.int64),
        lengths=lengths,
        prompt_lengths=torch.ones_like(lengths),
        loss_mask=((columns >= 1) & (columns < lengths[:, None]) & holes).float(),
        rollout_logprobs=logprobs(),
        rewards=rewards_of(kind, generator),
        valid=torch.rand(n, generator=generator) > 0.1,
        truncated=torch.rand(n, generator=generator) > 0.8,
        parts=torch.stack([rewards_of(each, generator) for each in (kind, KINDS[0])], 1),
        weights=torch.tensor([1.0, -0.3], dtype=torch.float64),
        greedy_rewards=torch.rand(n, generator=generator, dtype=torch.float64),
        token_scores=torch.randn(n, WIDTH, generator=generator, dtype=torch.float64),
        old_logprobs=logprobs().mul(4).round() / 4,  # some tokens have equal covariances
        squares=torch.rand(n, WIDTH, generator=generator),
        ref_logprobs=logprobs(),
    )


def share(batch: Batch, owner: torch.Tensor, rank: int, seed: int) -> Batch:
    """This rank's samples in random order."""
    rows = torch.nonzero(owner == rank).flatten()
    rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))]
    of_each = [torch.arange(n) + start for n, start in zip(batch.lengths, batch.starts, strict=True)]
    tokens = torch.cat([torch.zeros(0, dtype=torch.int64), *(of_each[row] for row in rows)])

    def taken(part):
        values = {
            name: value for name, value in vars(part).items() if isinstance(value, torch.Tensor) and name != "weights"
        }
        return replace(part, **{n: v[tokens if len(v) == len(batch.tokens) else rows] for n, v in values.items()})

    return replace(taken(batch), rewards=taken(batch.rewards))


def measure(batch: Batch, reduce) -> dict:
    """Everything that must not depend on the placement; per-sample things by sample id, doubles as their bits."""
    out, rewards = {}, batch.rewards
    stats = group_statistics(rewards.values, batch.group_ids, batch.num_groups, rewards.valid, reduce)
    out["stats"] = [getattr(stats, f.name).double().view(torch.int64).tolist() for f in fields(stats)]
    spread = moments(rewards.values[rewards.valid], reduce)
    out["moments"] = [float(getattr(spread, f.name)).hex() for f in fields(spread)]
    for name, options in ALGORITHMS.items():
        result, state, metrics = with_advantages(batch, AlgorithmConfig(**options), reduce, AlgoState(), WIDTH - 1)
        out[name] = metrics, state
        weights = result.loss_mask if result.correction.weights is None else result.correction.weights
        chosen = result.loss_mask if result.chosen is None else result.chosen
        for row, sample in enumerate(batch.sample_ids.tolist()):
            start, length = int(batch.starts[row]), int(batch.lengths[row])
            out[name, sample] = [
                t[start : start + length].float().view(torch.int32).tolist()
                for t in (result.advantages, result.loss_mask, weights, chosen)
            ]
    return out


def of_rank(mesh: Mesh) -> list:
    rank, world, results = mesh.rank, mesh.world_size, []
    for kind in KINDS:
        batch = whole_batch(kind)
        for placement in range(PLACEMENTS):
            owner = torch.randint(0, world, (len(batch.lengths),), generator=torch.Generator().manual_seed(placement))
            if placement == 0:
                owner = torch.full_like(owner, world - 1)  # everybody else has no sample at all
            mine = measure(share(batch, owner, rank, seed=10 * placement + rank), mesh.reduce)
            merged: dict = {}
            for part in mesh.gather_dp(mine):
                for key, value in part.items():
                    assert key not in merged or merged[key] == value, f"ranks disagree about {key} of {kind}"
                    merged[key] = value
            results.append((kind, merged))
    return results if rank == 0 else []


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[int, list]:
    folder = tmp_path_factory.mktemp("ranks")
    return {world: run_meshes(world, folder, of_rank)[0] for world in WORLDS}


@pytest.mark.verifies("algorithms", "group statistics: same bits for any placement and number of ranks")
@pytest.mark.parametrize("kind", KINDS)
def test_bit_identical_for_every_size_and_placement(results, kind):
    everywhere = [merged for world in WORLDS for k, merged in results[world] if k == kind]
    assert len(everywhere) == len(WORLDS) * PLACEMENTS
    for other in everywhere[1:]:
        different = [key for key in everywhere[0] if everywhere[0][key] != other[key]]
        assert different == [] and everywhere[0].keys() == other.keys()
