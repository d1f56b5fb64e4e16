"""A draft in the actor: loss and gradients against transformers' layers, layouts; the model's own bits stay.

Float32, gloo. GLM-4.5 (grouped-query attention), DeepSeek-V3 (latent attention, groups of experts) and GLM-4.7-Flash.
"""

from pathlib import Path

import pytest
import torch

from megagrpo.weights.hf_folder import HfFolder
from tests.dist.bounds import within
from tests.dist.cases import BATCHES, LAYOUTS
from tests.dist.workers.launch import TRANSFORMER_ENGINE_POOL, run_ranks, run_transformers

BOUND = 1e-5  # of each parameter's largest gradient
MODELS = ("glm4_moe", "deepseek_v3", "glm4_moe_lite")
pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.verifies("actor", "drafts: loss and gradients of transformers' layers; the model's bits unchanged"),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("drafts")
    run_transformers(folder, "hf_draft.py")
    return folder


def job(folder: Path, model: str, layout: str = "DP2", batch: str = "packed", **more) -> dict:
    where = {"model": str(folder / model), "alone": str(folder / f"{model}.{layout}.{batch}.pt")}
    return {**where, "parallel": LAYOUTS[layout], **BATCHES[batch], **more}


def check(result: dict, name: str) -> None:
    for what in ("draft_loss", "draft_norm"):
        assert within(what, result[what], BOUND), (name, what, result[what])
    wrong = {tensor: value for tensor, value in result["draft"].items() if not within("draft gradient", value, BOUND)}
    assert not wrong and not result["others"], (name, wrong, result["others"])
    assert result["moved"] == len(result["draft"]), f"{name}: parameters of the draft that no update moves"
    kept = {what: result[what] for what in ("loss", "norm", "gradients", "weights")}
    assert all(kept.values()), f"{name}: the draft changes the model's {kept}"
    assert result["export"], f"{name}: HF -> actor -> HF is not bit-equal"


@pytest.mark.parametrize("batch", list(BATCHES))
def test_one_rank_equals_transformers_and_leaves_the_model_alone(models: Path, batch: str):
    jobs = []
    for model in MODELS:
        of_model = job(models, model, "DP2", batch) | {"parallel": {}, "alone": str(models / f"{model}.1.{batch}.pt")}
        jobs += [of_model, of_model | {"draft": {}}]
    for model, result in zip(MODELS, run_ranks(1, models / f"one_{batch}", jobs, "draft_ranks.py")[1::2], strict=True):
        check(result, model)


CASES = [
    ("glm4_moe", "TP2+SP", "packed"), ("deepseek_v3", "CP2", "packed"), ("glm4_moe", "PP2xVPP2", "padded"),
    ("deepseek_v3", "EP2", "padded"),
]  # fmt: skip
MORE = [
    ("glm4_moe", "DP2", "packed"), ("deepseek_v3", "PP2", "packed"), ("glm4_moe", "CP2", "padded"),
    ("deepseek_v3", "TP2xEP2", "packed"), ("glm4_moe", "TP2xETP2", "padded"), ("glm4_moe_lite", "TP2xEP2", "packed"),
    ("glm4_moe_lite", "CP2", "padded"), ("glm4_moe_lite", "PP2xVPP2", "packed"),
]  # fmt: skip


@pytest.mark.parametrize("cases", [CASES, pytest.param(MORE, marks=pytest.mark.slow)])
def test_layouts(models: Path, cases):
    jobs = []
    for case in cases:
        jobs += [job(models, *case), job(models, *case) | {"draft": {}}]
    for case, result in zip(cases, run_ranks(2, models / "two", jobs, "draft_ranks.py")[1::2], strict=True):
        check(result, " ".join(case))


def test_a_checkpoint_goes_on_in_another_layout(models: Path):
    """The draft's optimizer state is part of it: bit-equal in the same layout, within a bound in others."""
    base = {"do": "checkpoint", "model": str(models / "glm4_moe"), "distributed": True, "draft": {}}
    saved = models / "checkpoints"
    run_ranks(1, models / "save", [base | {"warm": 1, "save": str(saved), "then": str(models / "whole.pt")}])
    load = base | {"load": str(saved / "step_000001")}
    run_ranks(1, models / "same", [load | {"then": str(models / "same.pt")}])
    layouts = ("TP2xEP2", "PP2")
    jobs = [load | {"parallel": LAYOUTS[name], "then": str(models / f"{name}.pt")} for name in layouts]
    run_ranks(2, models / "others", jobs)
    whole, same = (
        torch.load(models / "whole.pt", map_location="cpu"),
        torch.load(models / "same.pt", map_location="cpu"),
    )
    drafts = [name for name in whole["weights11"] if name.startswith("model.layers.4.")]
    assert len(drafts) == 43
    assert all(torch.equal(whole["weights11"][n], t) for n, t in same["weights11"].items())
    before = HfFolder(models / "glm4_moe")
    for name in layouts:
        other = torch.load(models / f"{name}.pt", map_location="cpu")["weights11"]
        for tensor, value in whole["weights11"].items():
            moved = (value - before[tensor]).abs().max()
            apart = float((other[tensor] - value).abs().max())
            assert within("resumed weights", apart, max(1e-3 * float(moved), 1e-6)), (name, tensor)


def test_a_draft_that_is_not_trained_stays(models: Path):
    plain = job(models, "glm4_moe", "DP2", "packed") | {"parallel": {}}
    path = models / "frozen.pt"
    frozen = {"do": "checkpoint", "model": plain["model"], "warm": 1, "draft": {"train": False}, "then": str(path)}
    run_ranks(1, models / "frozen", [frozen])
    assert not [
        name for name in torch.load(path, map_location="cpu")["weights11"] if name.startswith("model.layers.4.")
    ]


@pytest.mark.slow
@pytest.mark.parametrize("fused", [False, True])
def test_with_layers_of_transformer_engine(models: Path, fused: bool):
    """Megatron's wrappers around the stand-in; fused: weight gradients go into Megatron's buffers."""
    cases = [("glm4_moe", "TP2+SP", "packed"), ("deepseek_v3", "EP2", "padded")]
    more = {"transformer_engine": True, "megatron": {"gradient_accumulation_fusion": fused}}
    jobs = []
    for case in cases:
        of_model = job(models, *case, **more)
        of_model["alone"] += f".te{fused}"
        jobs += [of_model, of_model | {"draft": {}}]
    found = run_ranks(2, models / f"te{fused}", jobs, "draft_ranks.py", pool=TRANSFORMER_ENGINE_POOL)[1::2]
    for case, result in zip(cases, found, strict=True):
        check(result, " ".join(case))
