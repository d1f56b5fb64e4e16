"""A rollout of several samples counts once, and learns what it would learn as a single sample."""

from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
import torch

from megagrpo.algo.advantage import with_advantages
from megagrpo.algo.loss import LossInputs, count_denominators, objective
from megagrpo.algo.policy_loss import Rows
from megagrpo.algo.rollouts import by_rollout, rollouts_of, to_samples, token_counts
from megagrpo.algo.statistics import alone
from megagrpo.batching.batch import build_batch, shuffle_rewards
from megagrpo.batching.sample_rows import LossNeeds
from megagrpo.batching.updates import one_pass
from megagrpo.checkpoint.groups import read_groups, write_groups
from megagrpo.config.algorithm import AlgorithmConfig
from megagrpo.config.fields import Aggregation
from megagrpo.mesh import Mesh
from megagrpo.monitor.rollout_log import _record
from megagrpo.types import AlgoState, Batch
from tests.rollout_groups import GRADERS, GROUP_SIZE, NUM_GROUPS, joined, split_groups

pytestmark = pytest.mark.verifies(
    "algorithms",
    "rollouts of one to five samples: eleven algorithms bit by bit as with one",
    "dist/test_rollouts_ranks.py",
)

ALONE = Mesh(0, 1, 0, 1, None, None, 0, torch.device("cpu"))


def both(**more) -> tuple[Batch, Batch]:
    """The batch of split rollouts and that of whole ones, whose tokens are the same ones in the same places."""
    groups = split_groups()
    split, whole = (
        build_batch(found, one_pass(NUM_GROUPS), ALONE, needs=LossNeeds(graders=GRADERS))
        for found in (groups, list(map(joined, groups)))
    )
    assert torch.equal(split.tokens, whole.tokens) and torch.equal(split.loss_mask, whole.loss_mask)
    whole = replace(whole, prompt_lengths=by_rollout(split).prompt_lengths)  # a context is no response
    more = {name: values(len(split.tokens)) for name, values in more.items()}
    return replace(split, **more), replace(whole, **more)


def noise(seed: int):
    return lambda count: -torch.rand(count, generator=torch.Generator().manual_seed(seed))


def test_samples_of_a_rollout_are_neighbors_with_one_reward():
    groups = split_groups()
    split, whole = both()
    assert split.rollout_sizes is not None and whole.rollout_sizes is None
    sizes = [len(parts) for group in groups for parts in group.rollouts]
    assert split.rollout_sizes.tolist() == sizes and set(sizes) >= {1, 5}
    assert split.sample_ids.tolist() == sorted(split.sample_ids.tolist()) and len(split.sample_ids) == sum(sizes)
    most = max(len(group.samples) for group in groups)
    assert split.sample_ids.tolist() == [g.group_id * most + s.index for g in groups for s in g.samples]
    seen = by_rollout(split)
    for name in ("lengths", "group_ids", "truncated"):
        assert torch.equal(getattr(seen, name), getattr(whole, name)), name
    assert torch.equal(seen.rewards.values, whole.rewards.values) and torch.equal(
        seen.rewards.valid, whole.rewards.valid
    )
    assert torch.equal(split.rewards.tokens, whole.rewards.tokens)
    assert torch.equal(to_samples(seen.rewards.values, split), split.rewards.values)
    first = next(i for i, size in enumerate(sizes) if size == 5)
    start = sum(sizes[:first])
    assert rollouts_of(torch.tensor([start, start + 4, 0]), split).tolist() == sorted({0, first})


def test_a_rollout_is_too_long_if_one_of_its_samples_is():
    """sampling.max_response_tokens limits a sample: ten short turns are no long response."""
    split, _ = both()
    lengths = (split.lengths - split.prompt_lengths).tolist()
    sizes = split.rollout_sizes.tolist()
    parts = [lengths[sum(sizes[:i]) : sum(sizes[: i + 1])] for i in range(len(sizes))]
    longest = max(lengths)
    assert any(sum(part) > longest for part in parts)
    buffer = longest // 2
    options = AlgorithmConfig(reward={"overlong": {"buffer_tokens": buffer, "factor": 1.0}})
    _, _, metrics = with_advantages(split, options, alone, AlgoState(), longest)
    valid = split.rewards.valid[split.rollout_sizes.cumsum(0) - split.rollout_sizes].tolist()
    penalties = [
        min(0, longest - buffer - max(part)) / buffer for part, judged in zip(parts, valid, strict=True) if judged
    ]
    mean = sum(penalties) / len(penalties)
    assert min(penalties) == -1 and metrics["reward/overlong_penalty"] == pytest.approx(mean)


ALGORITHMS = {
    "grpo": {},
    "truncated masked, clipped": {"mask_truncated": True, "reward": {"clip": 0.9}},
    "dr_grpo": {"advantage": {"name": "dr_grpo"}},
    "passk": {"advantage": {"name": "grpo_passk"}},
    "rloo": {"advantage": {"name": "rloo"}},
    "opo": {"advantage": {"name": "opo"}},
    "maxrl": {"advantage": {"name": "maxrl"}},
    "gpg": {"advantage": {"name": "gpg"}},
    "gdpo": {"advantage": {"name": "gdpo", "whiten_over": "responses"}},
    "reinforce": {"advantage": {"name": "reinforce", "gamma": 0.9}, "reward": {"mean": "group", "std": "batch"}},
    "reinforce++, kl": {"advantage": {"name": "reinforce_plus_plus"}, "kl": {"reward_coef": 0.1}},
    "tis over tokens": {"mismatch": {"weight": {"name": "tis"}}},
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_advantages_are_those_of_one_sample_a_rollout(name):
    algorithm = AlgorithmConfig(**ALGORITHMS[name])
    pair = both(old_logprobs=noise(1), ref_logprobs=noise(2))
    (split, _, of_split), (whole, _, of_whole) = (
        with_advantages(batch, algorithm, alone, AlgoState(), 60) for batch in pair
    )
    assert torch.equal(split.advantages, whole.advantages) and split.advantages.abs().sum() > 0
    assert torch.equal(split.loss_mask, whole.loss_mask) and of_split == of_whole


@pytest.mark.parametrize("aggregation", get_args(Aggregation))
def test_a_rollout_that_splits_has_no_extra_weight(aggregation):
    """Value and gradient of the loss: those of whole rollouts, and of the closed form."""
    algorithm = AlgorithmConfig(aggregation=aggregation)
    found = []
    for batch in both():
        batch, *_ = with_advantages(batch, algorithm, alone, AlgoState(), 60)
        logprobs = noise(3)(len(batch.tokens)).double().requires_grad_()
        rows = {"logprobs": logprobs, "old_logprobs": logprobs.detach(), "rollout_logprobs": logprobs.detach()}
        rows |= {"advantages": batch.advantages, "loss_mask": batch.loss_mask, "entropy": torch.zeros_like(logprobs)}
        counted = to_samples(token_counts(batch).rollouts, batch)
        inputs = LossInputs(**rows, rows=Rows(batch.lengths), counted_tokens=counted)
        every = torch.arange(len(batch.lengths))
        denominators = count_denominators(token_counts(batch).rollouts[rollouts_of(every, batch)], alone, 50.0)
        loss, _ = objective(inputs, algorithm, denominators)
        (gradient,) = torch.autograd.grad(loss, logprobs)
        found.append((loss.item(), gradient, batch))
    (split_loss, split_gradient, split), (whole_loss, whole_gradient, _) = found
    assert split_loss == pytest.approx(whole_loss, rel=1e-12)
    torch.testing.assert_close(split_gradient, whole_gradient, rtol=1e-12, atol=0)
    tokens = token_counts(split).rollouts
    sequences = int((tokens > 0).sum())
    a_token = {
        "token-mean": torch.full((len(tokens),), 1 / int(tokens.sum())),
        "seq-mean-token-sum": torch.full((len(tokens),), 1 / sequences),
        "seq-mean-token-mean": 1 / (tokens.clamp(min=1) * sequences),
        "seq-mean-token-sum-norm": torch.full((len(tokens),), 1 / (50.0 * sequences)),
    }[aggregation]
    weights = a_token.double().repeat_interleave(by_rollout(split).lengths)
    wanted = -weights * split.advantages * split.loss_mask  # a ratio of 1: d loss / d logprob is -A times the weight
    torch.testing.assert_close(split_gradient, wanted.double(), rtol=1e-6, atol=0)


def test_shuffled_rewards_are_of_rollouts():
    split, whole = (shuffle_rewards(batch, 1, 3, ALONE) for batch in both())
    sizes, before = split.rollout_sizes, both()[1].rewards.values
    assert sizes is not None
    moved = by_rollout(split).rewards.values
    assert torch.equal(to_samples(moved, split), split.rewards.values), "one reward for all samples of a rollout"
    assert sorted(moved.tolist()) == sorted(before.tolist()) and moved.tolist() != before.tolist()
    assert torch.equal(moved, whole.rewards.values), "the order of ids decides"
    scores = by_rollout(split).rewards.parts
    assert torch.equal(scores[:, 0], moved) and torch.equal(scores, whole.rewards.parts), (
        "a reward's scores move with it"
    )
    evens = dict(zip(before.tolist(), both()[1].rewards.parts[:, 1].tolist(), strict=True))
    assert scores[:, 1].tolist() == [evens[value] for value in moved.tolist()]


def test_records_and_checkpoints_keep_rollouts(tmp_path):
    groups = split_groups()
    write_groups(tmp_path / "groups.npz", groups)
    assert read_groups(tmp_path / "groups.npz") == groups
    record = _record(groups[2], str)
    assert [sample["rollout"] for sample in record["samples"]] == [s.rollout_index for s in groups[2].samples]
    rewards = {sample["rollout"]: sample["reward"] for sample in record["samples"]}
    assert rewards == {n: o.value if o.ok else None for n, o in enumerate(groups[2].outcomes)}
    assert "rollout" not in _record(joined(groups[2]), str)["samples"][0] and len(rewards) == GROUP_SIZE


def test_rollouts_out_of_order_are_refused():
    group = split_groups()[0]
    wrong = replace(group, samples=tuple(replace(s, index=i) for i, s in enumerate(reversed(group.samples))))
    with pytest.raises(AssertionError, match="one rollout after the other"):
        build_batch([wrong], one_pass(1), ALONE)
    assert np.array_equal(group.samples[0].token_ids, group.rollouts[0][0].token_ids)
