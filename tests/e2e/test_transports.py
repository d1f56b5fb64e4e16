"""Some cases of bench/transports.py: after `reshard` the engines' parameters are bit-equal to what `disk` gives.

Every trainer layout and every engine layout is there, and every family; all combinations take a quarter of an hour. And
what engines of the families that are not tried elsewhere then compute is what transformers computes.
"""

from pathlib import Path

import pytest
from transport_cases import (
    CHANGES,
    COMPUTED,
    DENSE,
    ENGINES,
    FAMILIES,
    TRAINERS,
    TransportCase,
    problems_of,
    run_computed,
    run_engine_cases,
)

pytestmark = pytest.mark.verifies(
    "weights",
    "`reshard`, `broadcast`, `disk`, `ipc`: same bits in every engine parameter; `reshard` moves each element once",
    see="[table](../../bench/results/transports.md)",
)

CASES = {  # (family, engines) -> trainers: an engine start each
    ("qwen3_moe", "TP2xEP2"): ("TP2xEP2", "EP2", "TP2xPP2"),
    ("llama", "two engines"): ("DP2", "TP2+SP"),
    ("qwen2", "two nodes"): ("TP2xPP2", "1"),
    ("qwen3", "TP2"): ("PP2", "DP2"),
    ("qwen3_moe", "DP attention"): ("TP2+SP", "EP2"),
    ("qwen3_5_moe_text", "TP2"): ("TP2+SP", "TP2xEP2"),
}

IN_EVERY_RUN = ("deepseek_v3", "TP2")


OFTEN = [("qwen3_moe", "TP2xEP2"), ("qwen2", "two nodes")]  # test_engines.py has two engines, COMPUTED those of TP2


@pytest.mark.parametrize(
    ("family", "engines"), [pytest.param(*case, marks=[pytest.mark.slow] * (case not in OFTEN)) for case in CASES]
)
def test_parameters_are_those_of_disk_and_no_byte_travels_twice(family, engines, pool, tmp_path: Path):
    cases = [TransportCase(family, trainers, engines) for trainers in CASES[family, engines]]
    transports = ["reshard", "ipc"] if engines == "TP2" else ["reshard", f"reshard{CHANGES}"]
    rows = list(run_engine_cases(pool, cases, tmp_path, transports))
    assert not [problem for row in rows for problem in problems_of(row)]
    assert len(transports) * len(cases) == len(rows)


@pytest.mark.parametrize(
    ("family", "engines"), [pytest.param(*case, marks=[pytest.mark.slow] * (case != IN_EVERY_RUN)) for case in COMPUTED]
)
def test_engines_compute_what_transformers_does(family, engines, pool, tmp_path: Path):
    transports = ["broadcast", "reshard"] if (family, engines) == IN_EVERY_RUN else ["disk", "broadcast", "reshard"]
    rows = list(run_computed(pool, family, engines, tmp_path, transports))
    assert len(rows) == len(transports) * len(COMPUTED[family, engines])
    assert not [problem for row in rows for problem in problems_of(row)]


def test_every_family_and_layout_is_in_some_case():
    assert {family for family, _ in [*CASES, *COMPUTED]} == set(FAMILIES) and {*DENSE} <= {name for name, _ in CASES}
    assert {engines for _, engines in [*CASES, *COMPUTED]} == set(ENGINES)
    assert set().union(*CASES.values()) == set(TRAINERS)
