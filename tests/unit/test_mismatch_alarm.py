"""The alarm of the first step: its bounds by dtype and family, and when it is raised."""

from types import SimpleNamespace

import pytest
import torch

from megagrpo.mesh import make_mesh
from megagrpo.monitor.alarm import MismatchAlarm, alarm_bounds
from tests.experiments import experiment

TOKENS = 2000


BF16 = {"actor": {"dtype": "bfloat16"}, "rollout": {"dtype": "bfloat16"}}


@pytest.mark.parametrize(
    ("sections", "is_moe", "bounds"),
    [
        ({}, False, (1e-3, 0.1)),
        ({}, True, (1e-3, 0.1)),
        (BF16, False, (0.05, 1.0)),
        ({"rollout": {"dtype": "bfloat16"}}, False, (0.05, 1.0)),
        (BF16, True, (0.1, 4.0)),
        (BF16 | {"actor": {"dtype": "bfloat16", "routing_replay": "rollout"}}, True, (0.05, 1.0)),
        ({"algorithm": {"mismatch": {"alarm": {"mean": 0.2}}}}, False, (0.2, 0.1)),
        ({"algorithm": {"mismatch": {"alarm": None}}}, False, None),
    ],
)
def test_bounds(sections, is_moe, bounds):
    assert alarm_bounds(experiment(**sections), is_moe) == bounds


def raised(apart: torch.Tensor, counts: bool = True, **mismatch) -> str:
    """What the alarm says of tokens whose log-probabilities are so far apart."""
    mesh, mask = make_mesh(0, 1, torch.device("cpu"), 30), torch.arange(TOKENS + 5) < TOKENS  # the last are a prompt's
    engine = torch.full((TOKENS + 5,), -1.0)
    engine[TOKENS:] = 50.0
    trainer = torch.full_like(engine, -1.0)
    trainer[:TOKENS] += apart
    alarm = MismatchAlarm(experiment(algorithm={"mismatch": mismatch}), is_moe=False)
    batch = SimpleNamespace(rollout_logprobs=engine, loss_mask=mask)
    text = alarm.judge(batch, trainer, counts, mesh)
    assert alarm.judge(batch, trainer + 10, True, mesh) == "", "only the first step is judged"
    return text


def test_it_is_raised_by_the_mean_and_by_the_tail():
    none = torch.zeros(TOKENS)
    assert raised(none + 0.9e-3) == ""
    assert "are 0.0011 apart in the mean (bound 0.001)" in raised(none - 1.1e-3)
    tail = none.clone()
    tail[:2] = 0.2  # 0.1 % of the tokens: the percentile itself
    assert raised(tail) == ""
    tail[:3] = 0.2
    assert "0.15% of tokens by more than 0.1 (bound 0.1%)" in raised(tail)
    assert raised(none + 5, alarm=None) == ""


def test_values_that_no_update_computed_do_not_count():
    assert raised(torch.ones(TOKENS), counts=False) == "", "another rank of the replica counts them"
    some = torch.full((TOKENS,), torch.nan)
    assert raised(some) == ""
    some[0] = 0.5
    assert "are 0.5 apart" in raised(some)
