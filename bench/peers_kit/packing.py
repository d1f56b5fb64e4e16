"""Samples balanced over ranks, and each rank's samples cut into micro-batches."""

from collections.abc import Callable, Generator

import numpy as np
import torch

from megagrpo.batching.balance import (
    balanced_parts,
    candidate_cuts,
    cheapest_cut,
    fewest_micro_batches,
    longest_lengths,
    sample_cost,
    token_load,
)
from peers_kit.measure import OURS, Call, Cases
from peers_kit.work import BUDGET, LIMIT, PROMPT, RANKS, nested, response_lengths

CASES = Cases()
LINEAR = 24_576  # tokens at which attention costs as much as the matrices, of verl's formula


def _balanced(parts: list[list[int]], lengths: list[int]) -> dict[str, object]:
    work = [sum(LINEAR * lengths[i] + lengths[i] ** 2 for i in part) for part in parts]
    return {"slowest rank's work / mean": round(max(work) / (sum(work) / len(work)), 4)}


def _whole_lengths() -> list[int]:
    return (response_lengths() + PROMPT).tolist()


@CASES.add("balance over ranks", OURS)
def _our_balance() -> Call:
    lengths = _whole_lengths()

    def call():
        parts = balanced_parts([sample_cost(length, LINEAR) for length in lengths], RANKS)
        return None, _balanced(parts, lengths)

    return call


def _verl_balance(as_list: bool) -> Callable[[], Call]:
    """As its V1 trainer's _balance_batch does it, with a tensor; or with a list instead."""

    def prepare() -> Call:
        from verl.utils.seqlen_balancing import calculate_workload, get_seqlen_balanced_partitions

        lengths = _whole_lengths()

        def call():
            work = calculate_workload(torch.tensor(lengths, dtype=torch.int64))
            work = work.tolist() if as_list else work
            parts = get_seqlen_balanced_partitions(work, k_partitions=RANKS, equal_size=True)
            return None, _balanced(parts, lengths)

        return call

    return prepare


CASES.add("balance over ranks", "verl (its trainer)")(_verl_balance(False))
CASES.add("balance over ranks", "verl (a list for its tensor)")(_verl_balance(True))


def _ranks() -> list[list[int]]:
    """The lengths of each rank's samples, the same for all sides: dealt by length."""
    lengths = np.minimum(response_lengths(), LIMIT - PROMPT) + PROMPT
    order = np.argsort(-lengths, kind="stable")
    return [lengths[np.sort(order[rank::RANKS])].tolist() for rank in range(RANKS)]


def _cut(cuts: list[list[list[int]]], ranks: list[list[int]]) -> dict[str, object]:
    loads = [
        [sum(lengths[i] for i in part) for part in cut]
        for cut, lengths in zip(cuts, ranks, strict=True)
    ]
    number = max(map(len, loads))
    slowest = sum(max(row[k] if k < len(row) else 0 for row in loads) for k in range(number))
    mean = sum(map(sum, loads)) / RANKS
    return {"micro-batches": number, "slowest of each, summed / mean": round(slowest / mean, 4)}


Plan = Generator[np.ndarray, np.ndarray, list[list[int]]]


def _our_plan(own: list[int]) -> Plan:
    """As batching/microbatch.py _aligned; yields what it reduces over ranks, and gets the maxima."""
    (most,) = yield np.array([len(fewest_micro_batches(own, BUDGET, True))])
    longest = yield np.array(longest_lengths(own, int(most)))
    ways = candidate_cuts(own, BUDGET, True, int(most), longest.tolist())
    loads = yield np.array([token_load(part, own, True) for way in ways for part in way])
    slowest = [loads[i : i + most].tolist() for i in range(0, len(loads), int(most))]
    return ways[cheapest_cut(slowest, one_shape=False)]


@CASES.add("cutting into micro-batches", OURS)
def _our_cut() -> Call:
    ranks = _ranks()

    def call():
        plans = [_our_plan(own) for own in ranks]
        asked = [next(plan) for plan in plans]
        cuts: list[list[list[int]]] = []
        while not cuts:
            most = np.stack(asked).max(0)
            asked = []
            for plan in plans:
                try:
                    asked.append(plan.send(most))
                except StopIteration as end:
                    cuts.append(end.value)
        return None, _cut(cuts, ranks)

    return call


@CASES.add("cutting into micro-batches", "verl")
def _verl_cut() -> Call:
    from tensordict import TensorDict
    from verl.utils.seqlen_balancing import rearrange_micro_batches

    ranks = _ranks()
    made = []
    for own in ranks:  # nested, as its workers get them; one small field
        ids = nested([torch.zeros(length, dtype=torch.int8) for length in own])
        made.append(TensorDict({"input_ids": ids}, batch_size=len(own)))

    def call():
        at_least, cuts = None, []
        # all ranks raise their number until every one's cut fits, as its all-reduces do it
        while not cuts or any(len(cut) != at_least for cut in cuts):
            cuts = [
                rearrange_micro_batches(data, BUDGET, min_num_micro_batch=at_least)[1]
                for data in made
            ]
            at_least = max(map(len, cuts))
        return None, _cut(cuts, ranks)

    return call
