"""Some cases of bench/transports.py: after `reshard` the engines' parameters are bit-equal to what `disk` gives.

Every trainer layout and every engine layout is there, and every family; all combinations take a quarter of an hour.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from transport_cases import ENGINES, FAMILIES, TRAINERS, TransportCase, problems_of, run_engine_cases

from tests.dist.workers.pool import RankPool

CASES = {  # (family, engines) -> trainers: an engine start each
    ("qwen3_moe", "TP2xEP2"): ("TP2xEP2", "EP2", "TP2xPP2"),
    ("llama", "two engines"): ("DP2", "TP2+SP"),
    ("qwen2", "two nodes"): ("TP2xPP2", "1"),
    ("qwen3", "TP2"): ("PP2", "DP2"),
}


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    pool = RankPool()
    yield pool
    pool.stop()


@pytest.mark.parametrize(("family", "engines"), CASES)
def test_parameters_are_those_of_disk_and_no_byte_travels_twice(family, engines, ranks, tmp_path: Path):
    cases = [TransportCase(family, trainers, engines) for trainers in CASES[family, engines]]
    rows = list(run_engine_cases(ranks, cases, tmp_path, ["reshard"]))
    assert len(rows) == len(cases)
    assert not [problem for row in rows for problem in problems_of(row)]


def test_every_family_and_layout_is_in_some_case():
    assert {family for family, _ in CASES} == set(FAMILIES)
    left = set(ENGINES) - {engines for _, engines in CASES} | set(TRAINERS) - set().union(*CASES.values())
    assert left == {"TP1"}, "which every one of two engines is"
