"""Which cases a certificate has, what it certifies of an experiment, and its bounds."""

import json
import math
from dataclasses import asdict
from functools import partial
from pathlib import Path

import pytest

from megagrpo.check.problems import layout_problems
from megagrpo.config.load import load_config
from megagrpo.config.schema import ActorConfig, ParallelConfig
from megagrpo.models.architecture import Architecture
from megagrpo.models.table import FAMILIES, architecture_of
from megagrpo.tools.certify import command, synthetic
from megagrpo.tools.certify.cases import LAYOUTS, NEIGHBOR, REFERENCE, grid, layouts_of
from megagrpo.tools.certify.certificate import FACTOR, LARGEST, LEAST, bounds_of, failures, write_certificate
from megagrpo.tools.certify.tiny_model import TinySizes, hf_config

CONFIG = Path(__file__).parents[2] / "configs" / "quickstart.yaml"


def test_the_grid_names_what_is_left_out():
    dense, moe = (partial(layout_problems, tiny_model(family)) for family in ("qwen3", "qwen3_moe"))
    cases, left_out = grid(LAYOUTS, 2, dense, only=None)
    assert cases[0] == REFERENCE and all(c not in cases[:i] for i, c in enumerate(cases))
    for name in ("EP2", "TP2xEP2", "EP2xPP2", "TP2xETP2"):
        assert "a qwen3 model has no experts" in left_out.pop(name)
    small = ("TP2xPP2", "TP2xDP2", "TP2xCP2", "CP2xPP2")
    assert left_out == dict.fromkeys(small, "needs 4 ranks, 2 were given")
    _, left_out = grid(LAYOUTS, 2, dense, only=None)
    assert {c.layout for c in cases} - {NEIGHBOR.layout} | left_out.keys() == LAYOUTS.keys()
    with pytest.raises(ValueError, match="no layout is called 'TP3'"):
        grid(LAYOUTS, 2, moe, ["TP3"])
    _, whole = grid(LAYOUTS, 2, partial(layout_problems, tiny_model("gpt_oss")), None)
    assert "etp = 2 does not divide the model's parts of an expert" in whole["TP2xETP2"]
    for asked, reason in ("TP2xPP2", "needs 4 ranks, 2 were given"), ("EP2", "has no experts"):
        with pytest.raises(ValueError, match=f"nothing ran, because {asked} cannot: .*{reason}"):
            grid(LAYOUTS, 2, dense, ["DP2", asked])


def tiny_model(family: str) -> Architecture:
    return architecture_of(hf_config(TinySizes(family=family)))


def test_gpus_leave_out_what_they_cannot_share_in_float32(monkeypatch):
    config, tiny = load_config(CONFIG), tiny_model("qwen3_moe")
    for gpus, left in ([], set()), (["0", "1"], {"CP2", "TP2xCP2", "CP2xPP2"}):
        monkeypatch.setattr(command, "trainer_gpus", lambda config, gpus=gpus: gpus)
        _, left_out = grid(LAYOUTS, 4, partial(command.refusals, tiny, config), None)
        assert left_out.keys() == left and all("on a GPU" in why for why in left_out.values())


@pytest.mark.parametrize(
    "settings",
    [
        {"routing_replay": "rollout"},
        {"router_losses": {"balance": 1e-3}},
        {"vision": {"train": "projector"}},
        {"lora": {"rank": 4}},
    ],
)
def test_what_the_experiment_trains_is_certified(tmp_path: Path, settings):
    config = load_config(CONFIG, [f"actor.{key}={json.dumps(one)}" for key, one in settings.items()])
    tiny = command.tiny_experiment(config, tmp_path / "model", tmp_path, 2).actor
    assert tiny.world_size == 2
    for key in settings:
        assert getattr(tiny, key) == getattr(config.actor, key) is not None


def test_the_experiments_own_layout_is_in_the_grid():
    own = layouts_of(ActorConfig(world_size=4, parallel=ParallelConfig(tp=2, ep=2)))
    assert own["the experiment's"] == (4, {"tp": 2, "ep": 2})
    assert layouts_of(ActorConfig(world_size=2, parallel=ParallelConfig(ep=2))) == LAYOUTS
    dynamic = layouts_of(ActorConfig(world_size=2, parallel=ParallelConfig(cp=2, dynamic_context=True)))
    assert dynamic["the experiment's"] == (2, {"cp": 2, "dynamic_context": True})
    cases, _ = grid(dynamic, 2, lambda actor: [], only=["the experiment's"])
    assert all(case.packing for case in cases if case.layout == "the experiment's")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
def test_the_tiny_model_can_be_cut_in_every_layout(family, heads):
    """Ranks that share a sequence divide the heads of recurrent layers, too."""
    real = hf_config(TinySizes(family=family, num_heads=heads[0], num_kv_heads=heads[1]))
    own = {"cp": 8}, {"tp": 2, "cp": 4}, {"tp": 3, "pp": 3}
    for parallel in (*(sizes for _, sizes in LAYOUTS.values()), *own):
        layout = ParallelConfig.model_validate(parallel)
        sizes = synthetic._tiny_sizes(architecture_of(real), layout if parallel in own else ParallelConfig())
        tiny = architecture_of(synthetic._description(real, sizes))
        whole = family == "gpt_oss" and "etp" in parallel
        assert whole or not any(cut.number % cut.ranks for cut in tiny.cuts(layout)), (parallel, tiny)


def test_a_part_of_a_head_that_turns_is_a_size():
    """A tiny DeepSeek-V4 has another one than the experiment's."""
    hf = hf_config(TinySizes(family="deepseek_v4", head_dim=64))
    real = hf | {"qk_rope_head_dim": 16, "partial_rotary_factor": 0.25}
    sizes = synthetic._tiny_sizes(architecture_of(real), ParallelConfig())
    assert architecture_of(synthetic._description(real, sizes)).attention.rope_dim == 8


def test_a_bound_is_what_rounding_moves_within_limits():
    figures = {"loss_error": 0.0, "norm_error": 1.0, "weights": math.nan}
    found = bounds_of({**figures, "gradients": {"a": 5e-6, "b": 1e-7}})
    assert found["loss"] == LEAST["loss"] and found["norm"] == LARGEST * LEAST["norm"]
    assert found["gradient"] == FACTOR * 5e-6 and found["weights"] == LEAST["weights"]


def test_not_a_number_is_above_every_bound(tmp_path: Path):
    figures = dict.fromkeys(("loss", "loss_error", "grad_norm", "norm_error", "weights"), math.nan)
    result = {
        "fault": None,
        "case": asdict(NEIGHBOR) | {"layout": "DP2"},
        "variant": "x",
        **figures,
        "gradients": {"a": 0.0, "b": math.inf},
    }
    assert len(failures(result, LEAST)) == 4
    results = [result, result | {"case": asdict(NEIGHBOR)}]
    assert write_certificate(tmp_path, name="name", family="qwen3", results=results, left_out={})[1] is False
    report = json.loads((tmp_path / "report.json").read_text(), parse_constant=lambda name: pytest.fail(name))
    assert report["cases"][0]["gradients"] == {"a": 0.0, "b": None}
