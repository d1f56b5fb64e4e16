"""Mixtral, GLM-4.5, DeepSeek-V3, Moonlight, Qwen3.5 and MiniMax-M2 in the actor, as test_actor_layouts.py
does for the smaller families."""

import json
import shutil
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megagrpo.weights.hf_folder import HfFolder
from tests.dist.bounds import within
from tests.dist.cases import (
    BATCHES,
    FAMILIES,
    FAMILIES_CI,
    FAMILIES_FULL,
    FAMILY_LAYOUTS,
    LAYOUTS,
    MORE_FAMILIES,
    ONE_RANK,
    RECOMPUTE,
)
from tests.dist.figures import LayoutFigures
from tests.dist.test_actor_layouts import LOGIT_BOUND, check, jobs_of, problems_of
from tests.dist.workers.launch import run_ranks, run_transformers
from tests.published import as_published, published_config

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def hf_families(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("hf_families")
    run_transformers(folder, "hf_reference.py", *FAMILIES, *ONE_RANK)
    return folder


def one_rank_jobs(folder: Path, model: str) -> dict[tuple[str, str, str], dict]:
    """What other layouts are compared with, and one rank against transformers."""
    base = {"model": str(folder / model), "reference": str(folder / f"{model}.rank1.pt")}
    return {
        (model, "1", "reference"): {**base, "do": "layout", "write": True, **BATCHES["padded"], "budget": 4096},
        (model, "1", "forward packed"): {**base, **BATCHES["packed"], "do": "forward"},
    }


@pytest.fixture(scope="module")
def one_rank(hf_families: Path, layout_figures: LayoutFigures) -> Path:
    jobs = {key: job for model in (*FAMILIES, *ONE_RANK) for key, job in one_rank_jobs(hf_families, model).items()}
    check(hf_families, 1, jobs, layout_figures)
    return hf_families


def test_layouts(one_rank: Path, layout_figures: LayoutFigures):
    check(one_rank, 2, jobs_of(FAMILIES_CI, 2, one_rank), layout_figures)


def test_choices_meet():
    rows = FAMILIES_CI
    assert {case.layout for case in rows} == set(FAMILY_LAYOUTS)
    for one, other, count in (
        ("model", "batch", 2 * len(FAMILIES)),
        ("model", "recompute", 3 * len(FAMILIES)),
        ("batch", "recompute", 6),
    ):
        assert len({(getattr(case, one), getattr(case, other)) for case in rows}) == count
    assert len(BATCHES) == 2 and len(RECOMPUTE) == 3


@pytest.mark.slow
@pytest.mark.parametrize("model", FAMILIES + MORE_FAMILIES)
def test_every_layout(hf_families: Path, layout_figures: LayoutFigures, model: str):
    if model not in (*FAMILIES, *ONE_RANK):  # those are there already
        run_transformers(hf_families, "hf_reference.py", model)
    check(hf_families, 1, one_rank_jobs(hf_families, model), layout_figures)
    cases = [case for case in FAMILIES_FULL if case.model == model]
    check(hf_families, 2, jobs_of(cases, 2, hf_families), layout_figures)


def resumed_elsewhere(folder: Path, model: str, layouts: tuple[str, ...], last: dict) -> dict:
    """A checkpoint of one rank goes on in each layout as it does there; returns the result of a
    `last` job on two ranks."""
    common = {"do": "checkpoint", "model": model, "distributed": True}
    once = {**common, "warm": 1, "then": f"{folder}/one.pt", "save": f"{folder}/checkpoints"}
    run_ranks(1, folder / "save", [once])
    load = {**common, "load": f"{folder}/checkpoints/step_000001"}
    jobs = [{**load, "parallel": LAYOUTS[name], "then": f"{folder}/{name}.pt"} for name in layouts]
    *_, found = run_ranks(2, folder / "load", [*jobs, last])
    one = torch.load(folder / "one.pt", map_location="cpu")
    for name, number in product(layouts, (10, 11)):
        other = torch.load(folder / f"{name}.pt", map_location="cpu")
        apart = abs(other[f"loss{number}"] - one[f"loss{number}"])
        assert within("loss", apart, 2e-6), name
    return found


@pytest.mark.parametrize(
    ("family", "layers"), [("deepseek_v3", [1, 2, 3]), pytest.param("minimax_m2", [0, 1, 2, 3], marks=pytest.mark.slow)]
)
def test_biases_of_routers_stay_and_travel(one_rank: Path, family: str, layers: list[int]):
    """In bfloat16 they are float32 still, no update moves them, and a checkpoint brings them to another layout."""
    model = str(one_rank / family)
    biases = {"do": "biases", "model": model, "parallel": LAYOUTS["TP2xEP2"], "dtype": "bfloat16"}
    # with biases of 0, as before loading, tokens would go elsewhere
    found = resumed_elsewhere(one_rank / f"biases_{family}", model, ("TP2xEP2", "PP2"), biases)
    assert found["float32"] and found["unmoved"] and found["layers"] == layers and found["trained"] == []
    assert found["busy"] == len(layers) and found["imbalance_off"] < 1e-6


@pytest.mark.verifies(
    "actor",
    "Qwen3.5's gated delta nets equal transformers; a state kept over a packed border is found; decays "
    "are float32 live, trained, exported and resumed",
    "dist/test_certify.py",
)
def test_decays_of_gated_delta_nets_are_float32_and_travel(one_rank: Path):
    """In bfloat16 they are read, trained and exported in float32; a checkpoint brings a gated delta
    net's parameters to ranks that hold other heads."""
    model = str(one_rank / "qwen3_5_moe")
    decays = {"do": "decays", "model": model, "dtype": "bfloat16", "distributed": True}
    layouts = ("TP2xEP2", "PP2xVPP2")
    found = resumed_elsewhere(one_rank / "decays", model, layouts, decays | {"parallel": LAYOUTS["TP2+SP"]})
    names = [f"model.layers.{layer}.linear_attn.A_log" for layer in range(3)]
    assert found["names"] == names and found["equal"] and found["moved"]
    assert found["live"] == found["exported"] == ["torch.float32"]
    assert found["others"] == ["torch.bfloat16"]


def test_layers_of_one_part_travel(one_rank: Path):
    """As above; in a checkpoint a layer without experts is not like one with."""
    model = str(one_rank / "nemotron_h")
    decays = {"do": "decays", "model": model, "dtype": "bfloat16", "distributed": True}
    layouts = ("TP2xEP2", "PP2")
    found = resumed_elsewhere(one_rank / "one_part", model, layouts, decays | {"parallel": LAYOUTS["TP2+SP"]})
    assert {f"backbone.layers.{layer}.mixer.A_log" for layer in (0, 4, 6)} < set(found["names"])
    assert found["equal"] and found["live"] == found["exported"] == ["torch.float32"]


def test_a_table_of_ngrams_stays_in_its_file(one_rank: Path):
    """A checkpoint goes on in other layouts without it, and an export in bfloat16 has it as it was."""
    source = one_rank / "qwen4_exp"
    export = {"do": "decays", "model": str(source), "dtype": "bfloat16", "distributed": True}
    found = resumed_elsewhere(one_rank / "ngrams", str(source), ("TP2xEP2", "PP2"), export)
    assert found["equal"] and found["moved"]
    before, after = HfFolder(source), HfFolder(one_rank / "ngrams" / "load" / "exported")
    tables = [name for name in before if ".ple_embedding." in name]
    assert len(tables) == 2 * (3 + 2) and after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in tables)


def test_an_optimizer_of_two_dtypes_is_resumed(one_rank: Path):
    """bfloat16 weights and float32 decays in one sharded optimizer: the next updates are those of a
    run that went on, bit by bit."""
    folder = one_rank / "two_dtypes"
    common = {"do": "checkpoint", "model": str(one_rank / "qwen3_5_moe"), "distributed": True}
    common |= {"dtype": "bfloat16"}
    once = {**common, "warm": 1, "then": f"{folder}/on.pt", "save": f"{folder}/checkpoints"}
    again = {**common, "then": f"{folder}/again.pt", "load": f"{folder}/checkpoints/step_000001"}
    run_ranks(1, folder, [once, again])
    on, resumed = (torch.load(folder / f"{name}.pt") for name in ("on", "again"))
    for number in (10, 11):
        assert on[f"loss{number}"] == resumed[f"loss{number}"]
        weights = resumed[f"weights{number}"]
        assert all(torch.equal(weights[name], w) for name, w in on[f"weights{number}"].items())


def test_a_stage_without_experts_is_saved_and_resumed(one_rank: Path):
    """Its optimizer of experts has counted no steps."""
    folder = one_rank / "no_experts"
    uneven = {"pp": 2, "first_stage_layers": 1, "last_stage_layers": 3}
    common = {"do": "checkpoint", "model": str(one_rank / "deepseek_v3"), "distributed": True}
    once = {**common, "parallel": uneven, "warm": 1, "then": f"{folder}/on.pt", "save": f"{folder}/checkpoints"}
    again = {**common, "load": f"{folder}/checkpoints/step_000001"}
    run_ranks(2, folder, [once, {**again, "parallel": uneven, "then": f"{folder}/again.pt"}])
    run_ranks(1, folder, [{**again, "then": f"{folder}/one.pt"}])
    on, resumed, one = (torch.load(folder / f"{name}.pt") for name in ("on", "again", "one"))
    for number in (10, 11):
        assert on[f"loss{number}"] == resumed[f"loss{number}"]
        assert within("loss", abs(on[f"loss{number}"] - one[f"loss{number}"]), 2e-6)


def test_layers_that_only_speculate_are_not_loaded(one_rank: Path):
    """A folder that has them, as published, is read, computed, and exported without them."""
    source, folder = one_rank / "deepseek_v3", one_rank / "speculating"
    shutil.copytree(source, folder)
    shutil.copytree(f"{source}.gradients", f"{folder}.gradients")
    shutil.copy(f"{source}.pt", f"{folder}.pt")
    tensors = load_file(folder / "model.safetensors")
    more = {name.replace("layers.3.", "layers.4."): t.clone() for name, t in tensors.items() if "layers.3." in name}
    save_file({**tensors, **more, "model.layers.4.eh_proj.weight": torch.zeros(64, 128)}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    [result] = run_ranks(1, one_rank / "speculate", [{"do": "forward", "model": str(folder)}])
    assert within("forward logits", result["logits"], LOGIT_BOUND)
    assert not result["export"], "it lacks what the source has"
    assert HfFolder(one_rank / "speculate" / "exported").keys() == HfFolder(source).keys()


def test_the_text_part_of_a_vision_language_file_is_loaded(one_rank: Path):
    """As published: nested config.json, other names, experts together, a tower and layers that
    speculate beside them."""
    source, folder = one_rank / "qwen3_5_moe", one_rank / "published"
    text = json.loads((source / "config.json").read_text())
    others = {"model.visual.pos_embed.weight": torch.zeros(4, 8), "mtp.fc.weight": torch.zeros(2)}
    for suffix, more in (("", others), (".gradients", {})):
        target = Path(f"{folder}{suffix}")
        target.mkdir()
        stored = as_published(HfFolder(f"{source}{suffix}").items())
        save_file({**stored, **more}, target / "model.safetensors")
        (target / "config.json").write_text(json.dumps(published_config(text)))
    shutil.copy(f"{source}.pt", f"{folder}.pt")
    job = {"do": "forward", "model": str(folder), "parallel": LAYOUTS["TP2xEP2"]}
    job["reference"] = f"{source}.rank1.pt"
    [result] = run_ranks(2, one_rank / "publish", [job])
    assert problems_of("forward", result | {"export": True}) == []
    stored = as_published(HfFolder(source).items())
    exported = HfFolder(one_rank / "publish" / "exported")
    stored |= others  # which are frozen, and which config.json promises
    assert exported.keys() == stored.keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in stored.items())
