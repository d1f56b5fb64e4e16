"""What hooks on the actor show is the same in every layout, and planted experts are those that are computed with."""

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))
from transport_cases import make_model

from megagrpo.models.folder import Model
from tests.dist.bounds import within
from tests.dist.workers.captured import LENGTHS, captured, planted
from tests.dist.workers.launch import POOL

BOUND = 1e-5
LAYOUTS: dict[str, list[dict]] = {  # of two ranks; the first of a family are what every CI run has
    "qwen3_moe": [
        {"parallel": {"tp": 2}, "packing": True, "recompute": "full"},
        {"parallel": {"cp": 2}, "packing": False, "micro_batch_tokens": 30},
        {"parallel": {"pp": 2}, "packing": True, "micro_batch_tokens": 30},
        {"parallel": {"ep": 2}, "packing": False},
    ],
    "qwen2": [{"parallel": {"tp": 2}, "packing": False, "micro_batch_tokens": 30}, {"parallel": {}}],
    "deepseek_v3": [{"parallel": {"tp": 2, "ep": 2}, "packing": False}, {"parallel": {"cp": 2}, "packing": True}],
    "minimax_m2": [
        {"parallel": {"tp": 2}, "packing": True},
        {"parallel": {"pp": 2}, "packing": False, "recompute": "full"},
    ],
}


@pytest.mark.parametrize(
    "family",
    ["qwen3_moe", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen2", "deepseek_v3", "minimax_m2"))],
)
def test_every_layout_shows_what_one_rank_shows(family: str, tmp_path: Path):
    model = make_model(tmp_path / family, family)
    (alone,) = POOL.run(1, captured, tmp_path, model, [{"world": 1, "packing": False}])[0]
    cases = [{"world": 2, **case} for case in LAYOUTS[family]]
    together = POOL.run(2, captured, tmp_path, model, cases)[0]
    arch = Model.read(model).arch
    assert len(alone) == len(together[0]) > 10 * arch.num_layers
    problems = []
    for case, found in zip(cases, together, strict=True):
        problems += [
            f"{case}: {name} off by {off}"
            for name in alone
            if not within("activation", off := _off(found, alone, name), BOUND)
        ]
    assert not problems, "\n".join(problems)
    _assert_consistent(alone)
    if arch.is_moe:
        _assert_forced(alone, arch)


def _off(found: dict[str, Tensor], alone: dict[str, Tensor], name: str) -> float:
    scale = float(alone[name].float().abs().max())
    return float((found[name].float() - alone[name].float()).abs().max()) / scale


def _assert_consistent(found: dict[str, Tensor]) -> None:
    """What modules add is what the residual stream grows by, and the head ends in the log-probabilities."""
    added = found["embedding"] + found["layers.0.attention_out"]
    assert torch.allclose(added, found["layers.0.after_attention"], atol=1e-5)
    assert torch.allclose(added + found["layers.0.mlp_out"], found["layers.0.output"], atol=1e-5)
    of_sequences = torch.cat([found["logprobs"][row, 1:length] for row, length in enumerate(LENGTHS)])
    assert torch.allclose(found["head"], of_sequences, atol=1e-5)


def _assert_forced(found: dict[str, Tensor], arch) -> None:
    """Planted experts have all of the weight where they are given; elsewhere the router's own choice has it."""
    routing = planted(arch)
    known = torch.cat([torch.arange(n) < n - 1 for n in LENGTHS])[:, None]
    for slot, layer in enumerate(arch.routed_layers):
        maps = found[f"forced/layers.{layer}.experts"].bool()  # what the router would have chosen
        wanted = torch.zeros_like(maps).scatter(1, routing.experts[:, slot], True)
        wanted = torch.where(known, wanted, maps)
        shares = found[f"forced/layers.{layer}.expert_shares"]
        assert torch.equal(shares > 0, wanted)
        assert not torch.equal(wanted, maps)
