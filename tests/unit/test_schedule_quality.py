"""The schedule's invariants for any lengths, and its quality on the recorded figures of public frameworks."""

import random
from collections.abc import Sequence
from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from megagrpo.batching import balance
from tests.unit.golden_cases import load

LENGTHS = st.lists(st.integers(1, 300), max_size=40)


def make_schedule(
    lengths: Sequence[int], num_ranks: int, budget: int, packed: bool = True, multiple: int = 1
) -> list[list[list[int]]]:
    """Sample indices by rank and micro-batch: what the ranks of a run decide together, here one after the other."""
    parts = balance.balanced_parts([balance.sample_cost(n) for n in lengths], num_ranks)
    own = [[lengths[i] for i in part] for part in parts]
    count = max(1, *(len(balance.fewest_micro_batches(part, budget, packed)) for part in own))
    count = -(-count // multiple) * multiple
    longest_of_all = [
        max(values) for values in zip(*(balance.longest_lengths(part, count) for part in own), strict=True)
    ]
    ways = [balance.candidate_cuts(part, budget, packed, count, longest_of_all) for part in own]
    loads = [
        [[balance.token_load(b, part, packed) for b in way] for way in of_rank]
        for part, of_rank in zip(own, ways, strict=True)
    ]
    slowest = [[max(step) for step in zip(*way, strict=True)] for way in zip(*loads, strict=True)]
    chosen = balance.cheapest_cut(slowest, one_shape=False)
    return [[[part[i] for i in b] for b in of_rank[chosen]] for part, of_rank in zip(parts, ways, strict=True)]


def step_sync_waste(loads: Sequence[Sequence[float]]) -> float:
    """loads[rank][micro-batch]: the share of time in which ranks wait, if they meet in every micro-batch."""
    slowest = sum(max(step) for step in zip(*loads, strict=True))
    return 1 - sum(map(sum, loads)) / (len(loads) * slowest)


@given(LENGTHS, st.integers(1, 6), st.integers(20, 400), st.booleans(), st.integers(1, 3))
@settings(max_examples=300)
def test_every_sample_once_within_the_budget_same_count(lengths, num_ranks, budget, packed, multiple):
    ranks = make_schedule(lengths, num_ranks, budget, packed=packed, multiple=multiple)
    assert sorted(i for bins in ranks for b in bins for i in b) == list(range(len(lengths)))
    assert len({len(bins) for bins in ranks}) == 1 and len(ranks[0]) % multiple == 0
    for bins in ranks:
        sizes = [balance.token_load(b, lengths, packed) for b in bins]
        assert sizes == sorted(sizes, reverse=True)
        assert all(size <= budget or len(b) == 1 for size, b in zip(sizes, bins, strict=True))


@given(st.lists(st.integers(1, 300), min_size=1, max_size=30), st.integers(1, 4), st.randoms())
def test_arrival_order_changes_nothing(lengths, num_ranks, random):
    shuffled = list(lengths)
    random.shuffle(shuffled)

    def by_length(values):
        return [[sorted(values[i] for i in b) for b in bins] for bins in make_schedule(values, num_ranks, 500)]

    assert by_length(lengths) == by_length(shuffled)


@given(st.lists(st.integers(1, 100), min_size=1, max_size=9))
def test_two_parts_are_close_to_the_best(costs):
    best = min(
        max(chosen, sum(costs) - chosen)
        for size in range(len(costs) + 1)
        for chosen in (sum(c) for c in combinations(costs, size))
    )
    parts = balance.balanced_parts(costs, 2)
    found = max(sum(costs[i] for i in part) for part in parts)
    assert found <= best * 7 / 6 + 1e-9  # longest first alone guarantees this for two parts (Graham 1969)
    alone = [0, 0]
    for cost in sorted(costs, reverse=True):
        alone[alone.index(min(alone))] += cost
    assert found <= max(alone)  # exchanges never make it worse


def test_exchanges_beat_longest_first_where_it_is_worst():
    """Graham's example: 3 3 2 2 2 in two parts is 7 + 5 by longest first, 6 + 6 at best."""
    costs = [3, 3, 2, 2, 2]
    assert sorted(sum(costs[i] for i in part) for part in balance.balanced_parts(costs, 2)) == [6, 6]


def test_a_long_sample_of_one_rank_is_met_by_full_micro_batches_of_the_others():
    """One rank has a sample of 90 and little else; the other fills its first micro-batch to 90 too, not both to 60."""
    ranks = make_schedule([90, 10, 10, 10, *[20] * 6], 2, 100, multiple=2)
    loads = [[sum([90, 10, 10, 10, *[20] * 6][i] for i in b) for b in bins] for bins in ranks]
    assert step_sync_waste(loads) <= 0.1
    assert balance.cheapest_cut([[100, 20], [60, 60]], one_shape=False) == 0
    assert balance.cheapest_cut([[100, 20], [60, 60]], one_shape=True) == 1


def test_long_samples_cost_more_than_their_tokens():
    assert balance.sample_cost(100) == 100 and balance.sample_cost(100, 50) == 300
    lengths = [800, 400, 400, 100, 100, 100, 100]
    parts = balance.balanced_parts([balance.sample_cost(n, 400) for n in lengths], 2)
    assert [[lengths[i] for i in part] for part in parts] == [[800], [400, 400, 100, 100, 100, 100]]


def test_empty_ranks_and_samples_above_the_budget():
    ranks = make_schedule([700, 5], 3, 100)
    assert sorted(map(tuple, (b for bins in ranks for b in bins))) == [(), (0,), (1,)]
    assert balance.fewest_micro_batches([], 100, True) == [] and balance.longest_lengths([3, 9], 3) == [9, 3, 0]
    assert balance.candidate_cuts([], 100, True, 2, [50, 0]) == [[[], []]] * 3


def test_numbers_of_micro_batches_are_tried_in_growing_steps(monkeypatch):
    """Of 600 samples 249 filled micro-batches become 231 even ones; one by one, that were 19 tries. By their sum 300 of
    600 tokens need 180 micro-batches of 1,000: two go nowhere together, and no number from there to 300 is tried."""
    tried = []
    balanced = balance.balanced_parts

    def counted(costs: Sequence[int], count: int) -> list[list[int]]:
        tried.append(count)
        return balanced(costs, count)

    monkeypatch.setattr(balance, "balanced_parts", counted)
    assert len(balance.fewest_micro_batches([600] * 300, 1000, True)) == 300 and tried == []
    chance = random.Random(0)
    lengths = [chance.randrange(4097, 8193) for _ in range(600)]
    assert len(balance.fewest_micro_batches(lengths, 16384, True)) == 231 and len(tried) < 10


class CountedLength(int):
    """A length that counts its comparisons."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        CountedLength.compared += 1
        return int(self) == other

    def __le__(self, other: int) -> bool:
        CountedLength.compared += 1
        return int(self) <= other

    __hash__ = int.__hash__


def test_a_full_micro_batch_is_not_looked_at_again():
    """Of 1,000 samples no two fit together. Each would be compared with all micro-batches before it: 500,000 times."""
    lengths = [CountedLength(600 + i % 7) for i in range(1000)]
    assert balance.fewest_micro_batches(lengths, 1000, True) == [
        [i] for i in sorted(range(1000), key=lambda i: -(i % 7))
    ]
    assert 0 < CountedLength.compared < 20_000


def test_at_most_half_of_the_recorded_waste():
    checked = 0
    for case in load("balancing.json"):
        baseline, p = case["outputs"], case["params"]
        if baseline.get("step_sync_waste", 0) <= 0.05:
            continue
        lengths = case["inputs"]["lengths"]
        ranks = make_schedule(lengths, p["dp"], p["max_tokens_per_gpu"], multiple=p["mb_group"])
        loads = [[balance.token_load(b, lengths, True) for b in bins] for bins in ranks]
        assert max(map(max, loads)) <= p["max_tokens_per_gpu"]
        assert step_sync_waste(loads) <= baseline["step_sync_waste"] / 2, case["case"]
        checked += 1
    assert checked > 40
