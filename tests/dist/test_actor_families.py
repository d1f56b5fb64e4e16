"""Mixtral, GLM-4.5, DeepSeek-V3 and Moonlight in the actor, as test_actor_layouts.py does for the
smaller families."""

import json
import shutil
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megagrpo.weights.hf_folder import HfFolder
from tests.dist.cases import (
    BATCHES,
    FAMILIES,
    FAMILIES_CI,
    FAMILIES_FULL,
    FAMILY_LAYOUTS,
    LAYOUTS,
    MORE_FAMILIES,
    RECOMPUTE,
)
from tests.dist.figures import LayoutFigures
from tests.dist.test_actor_layouts import LOGIT_BOUND, check, jobs_of
from tests.dist.workers.launch import run_ranks, run_transformers

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def hf_families(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("hf_families")
    run_transformers(folder, "hf_reference.py", *FAMILIES)
    return folder


def one_rank_jobs(folder: Path, model: str) -> dict[tuple[str, str, str], dict]:
    """What other layouts are compared with, and one rank against transformers."""
    base = {"model": str(folder / model), "reference": str(folder / f"{model}.rank1.pt")}
    return {
        (model, "1", "reference"): {
            **base,
            "do": "layout",
            "write": True,
            **BATCHES["padded"],
            "budget": 4096,
        },
        (model, "1", "forward packed"): {**base, **BATCHES["packed"], "do": "forward"},
    }


@pytest.fixture(scope="module")
def one_rank(hf_families: Path, layout_figures: LayoutFigures) -> Path:
    jobs = {
        key: job for model in FAMILIES for key, job in one_rank_jobs(hf_families, model).items()
    }
    check(hf_families, 1, jobs, layout_figures)
    return hf_families


def test_layouts(one_rank: Path, layout_figures: LayoutFigures):
    check(one_rank, 2, jobs_of(FAMILIES_CI, 2, one_rank), layout_figures)


def test_choices_meet():
    rows = FAMILIES_CI
    assert {case.layout for case in rows} == set(FAMILY_LAYOUTS)
    for one, other, count in (
        ("model", "batch", 8),
        ("model", "recompute", 12),
        ("batch", "recompute", 6),
    ):
        assert len({(getattr(case, one), getattr(case, other)) for case in rows}) == count
    assert len(BATCHES) == 2 and len(RECOMPUTE) == 3


@pytest.mark.slow
@pytest.mark.parametrize("model", FAMILIES + MORE_FAMILIES)
def test_every_layout(hf_families: Path, layout_figures: LayoutFigures, model: str):
    if model in MORE_FAMILIES:
        run_transformers(hf_families, "hf_reference.py", model)
    check(hf_families, 1, one_rank_jobs(hf_families, model), layout_figures)
    cases = [case for case in FAMILIES_FULL if case.model == model]
    check(hf_families, 2, jobs_of(cases, 2, hf_families), layout_figures)


def test_biases_of_routers_stay_and_travel(one_rank: Path):
    """In bfloat16 they are float32 still, no update moves them, and a checkpoint brings them to
    another layout."""
    model, saved = str(one_rank / "deepseek_v3"), one_rank / "checkpoints"
    once = {"do": "checkpoint", "model": model, "distributed": True, "warm": 1}
    once |= {"then": str(one_rank / "one.pt"), "save": str(saved)}
    run_ranks(1, one_rank / "save", [once])
    layouts = {name: {"model": model, "parallel": LAYOUTS[name]} for name in ("TP2xEP2", "PP2")}
    load = {"do": "checkpoint", "distributed": True, "load": str(saved / "step_000001")}
    jobs = [
        {**load, **layout, "then": str(one_rank / f"{name}.pt")} for name, layout in layouts.items()
    ]
    *_, found = run_ranks(
        2, one_rank / "load", [*jobs, {"do": "biases", **layouts["TP2xEP2"], "dtype": "bfloat16"}]
    )
    one = torch.load(one_rank / "one.pt", map_location="cpu")
    for name, number in product(
        layouts, (10, 11)
    ):  # with biases of 0, as before loading, tokens would go elsewhere
        assert (
            abs(
                torch.load(one_rank / f"{name}.pt", map_location="cpu")[f"loss{number}"]
                - one[f"loss{number}"]
            )
            < 2e-6
        )
    assert (
        found["float32"]
        and found["unmoved"]
        and found["layers"] == [1, 2, 3]
        and found["trained"] == []
    )
    assert found["busy"] == 3 and found["imbalance_off"] < 1e-6


def test_layers_that_only_speculate_are_not_loaded(one_rank: Path):
    """A folder that has them, as published, is read, computed, and exported without them."""
    source, folder = one_rank / "deepseek_v3", one_rank / "speculating"
    shutil.copytree(source, folder)
    shutil.copytree(f"{source}.gradients", f"{folder}.gradients")
    shutil.copy(f"{source}.pt", f"{folder}.pt")
    tensors = load_file(folder / "model.safetensors")
    more = {
        name.replace("layers.3.", "layers.4."): t.clone()
        for name, t in tensors.items()
        if "layers.3." in name
    }
    save_file(
        {**tensors, **more, "model.layers.4.eh_proj.weight": torch.zeros(64, 128)},
        folder / "model.safetensors",
    )
    config = json.loads((folder / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    [result] = run_ranks(1, one_rank / "speculate", [{"do": "forward", "model": str(folder)}])
    assert result["logits"] < LOGIT_BOUND and not result["export"], "it lacks what the source has"
    assert HfFolder(one_rank / "speculate" / "exported").keys() == HfFolder(source).keys()
