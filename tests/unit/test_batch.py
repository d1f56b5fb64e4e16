"""Samples to a Batch, a Batch to micro-batches, positions to targets, on one rank (see dist/test_actor_batches.py)."""

import random
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megagrpo.batching.batch import build_batch, shuffle_rewards
from megagrpo.batching.microbatch import MicroBatchSize, _context_part, plan_micro_batches
from megagrpo.batching.sample_rows import LossNeeds
from megagrpo.batching.updates import one_pass, plan_updates
from megagrpo.config.schema import ParallelConfig, TrainConfig
from megagrpo.mesh import Mesh
from megagrpo.types import Batch, ImageRef, MicroBatch, Outcome, Prompt, RolloutGroup, Sample

ALONE = Mesh(0, 1, 0, 1, None, None, 0, torch.device("cpu"))
SHAPES = st.lists(
    st.tuples(st.integers(1, 6), st.lists(st.integers(0, 12), min_size=1, max_size=4)), min_size=1, max_size=6
)


def groups_of(shapes: list[tuple[int, list[int]]], masks: bool = False) -> list[RolloutGroup]:
    """One group per (prompt length, response lengths); every token id says where it belongs."""
    groups = []
    for g, (prompt_length, responses) in enumerate(shapes):
        samples = tuple(
            Sample(
                i,
                tuple(1000 * g + 100 * i + 50 + t for t in range(length)),
                tuple(-0.01 * t - i for t in range(length)),
                "length" if length > 9 else "stop",
                weight_version=0,
                text="",
                loss_mask=tuple((t + i) % 3 != 0 for t in range(length)) if masks else None,
            )
            for i, length in enumerate(responses)
        )
        numbers = range(len(responses))
        outcomes = tuple(Outcome("score", 10.0 * g + i) if (g + i) % 5 else Outcome("timeout") for i in numbers)
        prompt = Prompt(g, "", tuple(1000 * g + t for t in range(prompt_length)), "")
        groups.append(RolloutGroup(g, prompt, samples, outcomes))
    return groups


def batch_of(shapes: list[tuple[int, list[int]]], **options) -> Batch:
    return build_batch(groups_of(shapes, **options), one_pass(len(shapes)), ALONE)


def test_patches_of_images_count_as_cost(monkeypatch):
    """A patch as costly as four tokens: a sample of 20 tokens with 16 patches is as long as four without."""
    seeing, *others = groups_of([(20, [0])] * 5)
    seeing = replace(seeing, prompt=replace(seeing.prompt, images=(ImageRef("key", 0, (1, 4, 4)),)))
    outgoing: list[list] = []
    mesh = SimpleNamespace(
        dp_size=2,
        gather_dp=lambda own: [own],
        largest=lambda *own: own,
        exchange_dp=lambda rows: outgoing.append(rows) or rows,
    )
    monkeypatch.setattr("megagrpo.batching.batch.attention_length", lambda arch: 10**9)
    monkeypatch.setattr("megagrpo.batching.batch.patch_cost", lambda arch: 4.0)
    for arch, sizes in (("a model", [1, 4]), (None, [2, 3])):
        build_batch([seeing, *others], one_pass(5), mesh, arch)
        assert sorted(map(len, outgoing.pop())) == sizes


@given(SHAPES, st.booleans(), st.randoms(use_true_random=False))
def test_a_batch_holds_what_was_sampled_in_any_order_of_arrival(shapes, masks: bool, chance: random.Random):
    groups = groups_of(shapes, masks)
    batch = build_batch(groups, one_pass(len(groups)), ALONE)
    group_size = max(len(g.samples) for g in groups)
    row, of_tokens = 0, (batch.tokens, batch.loss_mask, batch.rollout_logprobs)
    tokens, masks_of, logprobs = (values.split(batch.lengths.tolist()) for values in of_tokens)
    for group in groups:
        for sample, outcome in zip(group.samples, group.outcomes, strict=True):
            start, end = (len(group.prompt.token_ids), len(group.prompt.token_ids) + len(sample.token_ids))
            assert int(batch.sample_ids[row]) == group.group_id * group_size + sample.index
            assert int(batch.group_ids[row]) == group.group_id
            assert tokens[row].tolist() == [*group.prompt.token_ids, *sample.token_ids]
            assert (int(batch.prompt_lengths[row]), int(batch.lengths[row])) == (start, end)
            mask = [True] * len(sample.token_ids) if sample.loss_mask is None else list(sample.loss_mask)
            assert masks_of[row].tolist() == [False] * start + mask
            assert torch.equal(logprobs[row][start:], torch.tensor(sample.logprobs)) and not logprobs[row][:start].any()
            assert bool(batch.rewards.valid[row]) == outcome.ok and float(batch.rewards.values[row]) == outcome.value
            assert bool(batch.truncated[row]) == (sample.finish_reason == "length")
            row += 1
    assert row == len(batch.lengths)
    shuffled = list(groups)
    chance.shuffle(shuffled)
    assert same(build_batch(shuffled, one_pass(len(groups)), ALONE), batch)


def same(a: Batch, b: Batch) -> bool:
    pairs = [(value, getattr(b, name)) for name, value in vars(a).items() if name != "rewards"]
    pairs += [(value, getattr(b.rewards, name)) for name, value in vars(a.rewards).items()]
    return all(torch.equal(x, y) if torch.is_tensor(x) else x == y for x, y in pairs)


def test_every_pass_takes_every_group_once_and_the_first_takes_them_in_order():
    train = TrainConfig(num_prompts_per_step=12, num_updates_per_step=3, num_epochs_per_step=4)
    updates = plan_updates(train, 0, 7)
    assert updates[0] == ((0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11)) == one_pass(12, 3)[0]
    assert all(sorted(g for part in parts for g in part) == list(range(12)) for parts in updates)
    assert all(len(part) == 4 for parts in updates for part in parts)
    others = [plan_updates(train, seed, step)[1:] for seed, step in ((0, 7), (1, 7), (0, 8))]
    drawn = {parts for passes in others for parts in passes}
    assert len(drawn) == 9 and plan_updates(train, 0, 7) == updates, "each of its own, and always the same"


def test_greedy_rewards_are_kept_where_there_are_any():
    groups = groups_of([(2, [3, 3]), (2, [3, 3])])
    groups[0] = replace(groups[0], greedy=Sample(0, (1,), (0.0,), "stop", 0, ""), greedy_outcome=Outcome("score", 0.25))
    groups[1] = replace(groups[1], greedy=Sample(0, (1,), (0.0,), "stop", 0, ""), greedy_outcome=Outcome("error"))
    batch = build_batch(groups, one_pass(2), ALONE)
    assert batch.rewards.greedy[:2].tolist() == [0.25, 0.25]
    assert not batch.rewards.valid[2:].any(), "without the greedy response there is no advantage"


def test_scores_of_graders_are_kept_if_the_estimator_reads_them():
    groups = groups_of([(2, [3, 3]), (2, [3, 3])])
    parts = {"b": Outcome("score", 0.5), "a": Outcome("score", 2.0), "other": Outcome("score", 9.0)}
    failed = Outcome("timeout", parts={"a": Outcome("score", 2.0), "b": Outcome("timeout")})
    groups[0] = replace(groups[0], outcomes=(Outcome("score", 3.0, parts=parts), failed))
    outcomes = tuple(Outcome("score", 1.0, parts=parts) for _ in range(2))
    groups[1] = replace(groups[1], outcomes=outcomes)
    rewards = build_batch(groups, one_pass(2), ALONE, needs=LossNeeds(graders={"a": 1.0, "b": 0.1})).rewards
    assert rewards.parts.tolist() == [[2.0, 0.5], [0.0, 0.0], [2.0, 0.5], [2.0, 0.5]]
    assert rewards.weights.tolist() == [1.0, 0.1] and rewards.valid.tolist() == [1, 0, 1, 1]
    assert rewards.parts.dtype == rewards.weights.dtype == torch.float64
    assert build_batch(groups, one_pass(2), ALONE).rewards.parts is None
    with pytest.raises(ValueError, match="no score of c: it was sampled before"):
        build_batch(groups, one_pass(2), ALONE, needs=LossNeeds(graders={"a": 1.0, "c": 1.0}))
    none = build_batch([], ((()),), ALONE, needs=LossNeeds(graders={"a": 1.0, "b": 0.1}))
    assert none.rewards.parts.shape == (0, 2) == shuffle_rewards(none, 0, 0, ALONE).rewards.parts.shape


@given(SHAPES, st.integers(0, 3), st.integers(0, 3))
def test_shuffled_rewards_are_a_permutation_that_seed_and_step_decide(shapes, seed: int, step: int):
    batch = batch_of(shapes)
    shuffled = shuffle_rewards(batch, seed, step, ALONE)
    pairs = lambda b: list(zip(b.rewards.values.tolist(), b.rewards.valid.tolist(), strict=True))  # noqa: E731
    assert sorted(pairs(shuffled)) == sorted(pairs(batch)), "a reward and its validity move together"
    assert same(shuffled, shuffle_rewards(batch, seed, step, ALONE))
    assert same(replace(shuffled, rewards=batch.rewards), batch), "nothing else changes"


def test_rewards_are_really_shuffled():
    batch = batch_of([(2, [3] * 4)] * 6)
    shuffled = (shuffle_rewards(batch, seed, step, ALONE) for seed in range(3) for step in range(3))
    orders = {tuple(each.rewards.values.tolist()) for each in shuffled}
    assert len(orders) == 9 and tuple(batch.rewards.values.tolist()) not in orders
    moved = [sum(r // 10 != row // 4 for row, r in enumerate(order)) for order in orders]
    assert min(moved) > 12, "across groups, not inside them"


LAYOUTS = st.sampled_from(
    [{}, {"tp": 2}, {"tp": 4}, {"pp": 2}, {"pp": 2, "vpp": 2}, {"tp": 2, "pp": 2}, {"cp": 2}, {"tp": 2, "cp": 2}]
    + [{"cp": 4, "dynamic_context": True, **more} for more in ({}, {"tp": 2}, {"pp": 2}, {"pp": 2, "vpp": 2})]
)


@given(SHAPES, st.integers(1, 60), st.booleans(), LAYOUTS)
def test_every_token_is_in_one_micro_batch_and_none_is_above_the_budget(shapes, budget: int, packed: bool, sizes: dict):
    batch, layout = batch_of(shapes), ParallelConfig(**sizes)
    packed = packed or layout.dynamic_context
    seen = torch.zeros_like(batch.tokens)
    contexts = []  # of each rank's micro-batches
    for cp_rank in range(layout.cp):
        micros = plan_micro_batches(
            batch, range(len(batch.lengths)), MicroBatchSize(budget, packed), layout, ALONE, cp_rank
        )
        assert len(micros) % (layout.pp if layout.vpp > 1 else 1) == 0
        assert layout.pp == 1 or len({tuple(m.tokens.shape) for m in micros}) == 1, "pipeline stages exchange one shape"
        assert [m.tokens.shape for m in micros] == list(micros.shapes)
        contexts.append([micro.context for micro in micros])
        for micro in micros:
            check_micro_batch(micro, batch, budget, packed, layout)
            real = micro.rows >= 0
            seen[batch.starts[micro.rows[real]] + micro.columns[real]] += 1
    assert (seen == 1).all()
    assert all(of_rank == contexts[0] for of_rank in contexts), "in a round all ranks of a group share alike"


def check_micro_batch(micro: MicroBatch, batch: Batch, budget: int, packed: bool, layout: ParallelConfig) -> None:
    real = micro.rows >= 0
    height, width = micro.tokens.shape
    assert width % layout.tp == 0 and (height == 1 or not packed)
    assert torch.equal(micro.columns >= 0, real)
    theirs = batch.tokens[batch.starts[micro.rows[real]] + micro.columns[real]]
    assert torch.equal(micro.tokens[real], theirs.long()) and not micro.tokens[~real].any()
    assert torch.equal(micro.positions[real], micro.columns[real]), "rotary positions are those in the sequence"
    members = micro.members.tolist()
    assert set(micro.rows[real].tolist()) <= set(members) and members == sorted(set(members))
    cp = micro.context
    unit = 2 * cp if cp > 1 else 1
    everyone = [-(-int(n) // unit) * unit for n in batch.lengths]
    lengths = [everyone[member] for member in members]
    if layout.pp > 1:  # one shape: all are as wide as the longest sample
        whole = 2 * layout.cp if layout.cp > 1 else 1
        budget = max(budget, -(-max(everyone) // whole) * whole)
    if len(lengths) > 1:
        assert (sum(lengths) if packed else len(lengths) * max(lengths)) * layout.cp <= budget * cp
    if packed:
        bounds = micro.cu_seqlens.tolist()
        assert bounds[0] == 0 and bounds[-1] == width * cp and not any((b - a) % unit for a, b in pairwise(bounds))
        assert max(micro.sizes) == max(b - a for a, b in pairwise(bounds))
    else:
        assert micro.cu_seqlens is None


def test_pipeline_stages_compute_few_tokens_that_are_none():
    """One shape for all: micro-batches filled to the budget alone would all be as wide as the
    longest sample, and their tails one sequence, whose attention is quadratic."""
    chance = random.Random(0)
    lengths = [min(int(chance.lognormvariate(8.5, 0.7)), 20480) for _ in range(127)] + [20480]
    batch = batch_of([(1, [length - 1 for length in lengths])])
    micros = plan_micro_batches(batch, range(128), MicroBatchSize(4096, True), ParallelConfig(pp=2), ALONE)
    real = sum(lengths)
    assert sum(height * width for height, width in micros.shapes) < 1.1 * real
    assert all(max(micro.sizes) <= 20480 for micro in micros)
    [dummy] = plan_micro_batches(
        batch, [0], MicroBatchSize(10 * 20480, True, 4 * lengths[0]), ParallelConfig(pp=2), ALONE
    )
    assert dummy.cu_seqlens.tolist() == [lengths[0] * i for i in range(5)]


@given(SHAPES, st.integers(1, 60), st.booleans(), LAYOUTS, st.booleans())
def test_targets_are_the_trained_tokens_each_from_the_position_before(
    shapes, budget: int, packed: bool, sizes: dict, masks: bool
):
    batch, layout = batch_of(shapes, masks=masks), ParallelConfig(**sizes)
    packed = packed or layout.dynamic_context
    found = torch.zeros_like(batch.tokens)
    for cp_rank in range(layout.cp):
        for micro in plan_micro_batches(
            batch, range(len(batch.lengths)), MicroBatchSize(budget, packed), layout, ALONE, cp_rank
        ):
            of = micro.targets
            assert torch.equal(micro.rows.flatten()[of.flat], of.rows)
            assert torch.equal(micro.columns.flatten()[of.flat] + 1, of.columns)
            found[batch.starts[of.rows] + of.columns] += 1
            theirs = batch.tokens[batch.starts[of.rows] + of.columns]
            assert torch.equal(micro.at_targets(batch.tokens), theirs)
            assert torch.equal(micro.at_trained(batch.tokens)[micro.target_order], theirs)
            owner = torch.repeat_interleave(micro.members, micro.num_trained)
            assert torch.equal(torch.searchsorted(batch.starts, micro.trained, right=True) - 1, owner)
    assert torch.equal(found, batch.loss_mask.int())


@pytest.mark.parametrize("sizes", [{}, {"tp": 2}, {"cp": 2}, {"tp": 2, "cp": 2}])
def test_a_ranks_part_of_a_row_is_a_multiple_where_products_in_fp8_ask_for_one(sizes: dict):
    batch, layout = batch_of([(2, [3, 9]), (4, [5])]), ParallelConfig(**sizes)
    for micro in plan_micro_batches(batch, range(3), MicroBatchSize(12, True, 32), layout, ALONE):
        assert micro.tokens.shape[1] % (32 * layout.tp) == 0  # context ranks have their parts, tensor ranks cut these


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("sizes", [{}, {"tp": 2, "cp": 2}])
def test_no_sample_gives_a_dummy_micro_batch(packed: bool, sizes: dict):
    """A rank without samples still takes part in every collective of the others."""
    batch = batch_of([(2, [3])])
    micros = plan_micro_batches(batch, [], MicroBatchSize(10, packed), ParallelConfig(**sizes), ALONE)
    for micro in micros:
        assert micro.tokens.shape[1] > 0 and (micro.rows == -1).all()
        assert all(len(tensor) == 0 for tensor in vars(micro.targets).values())


def test_bytes_follow_the_tokens_and_not_the_longest_sample():
    """A long tail: one sample in 64 is as long as 40 others. Padded, a value of a token would be N x S."""
    batch = batch_of([(4, [400 if g == i == 0 else 10 for i in range(16)]) for g in range(4)] * 4)
    total, padded = len(batch.tokens), len(batch.lengths) * int(batch.lengths.max())
    assert total == 252 * 14 + 4 * 404 and padded > 15 * total
    of_tokens = (batch.tokens, batch.loss_mask, batch.rollout_logprobs)
    assert [values.numel() * values.element_size() for values in of_tokens] == [4 * total, total, 4 * total]
    micros = plan_micro_batches(batch, range(len(batch.lengths)), MicroBatchSize(500, True), ParallelConfig(), ALONE)
    on_device = []
    for micro, (height, width) in zip(micros, micros.shapes, strict=True):
        moved = [micro.tokens, micro.positions, micro.rows, micro.columns, *vars(micro.targets).values()]
        moved += [micro.cu_seqlens, micro.target_order]
        on_device.append(sum(values.numel() * values.element_size() for values in moved))
        assert (height, width) == micro.tokens.shape
    assert len(micros) > 8 and max(on_device) < 500 * 80, "of one micro-batch alone"


def test_what_is_trained_is_looked_up_once_for_all_micro_batches(monkeypatch):
    """It is a pass over all tokens of the step."""
    batch = batch_of([(4, [10] * 8)] * 8)
    passes, found = [], Batch.trained_mask.fget
    monkeypatch.setattr(Batch, "trained_mask", property(lambda self: passes.append(1) or found(self)))
    micros = plan_micro_batches(batch, range(len(batch.lengths)), MicroBatchSize(30, True), ParallelConfig(), ALONE)
    assert len(list(micros)) > 8 and len(passes) == 1


def test_a_context_parallel_rank_has_one_chunk_from_either_end():
    """Of 2 cp chunks of every sequence; Megatron's own order (get_batch_on_this_cp_rank)."""
    assert [_context_part([0, 8], rank, 2).tolist() for rank in (0, 1)] == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert _context_part([0, 4, 12], 1, 2).tolist() == [1, 2, 6, 7, 8, 9]
