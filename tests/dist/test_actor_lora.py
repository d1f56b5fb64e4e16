"""Adapters: one rank against a formula by hand and against PEFT, every layout against one rank, resume."""

import json
from pathlib import Path

import pytest

from tests.dist.cases import LAYOUTS
from tests.dist.workers.launch import run_peft_reference, run_ranks

LOSS_BOUND, GRADIENT_BOUND, WEIGHT_BOUND = 1e-6, 1e-5, 1e-6
pytestmark = pytest.mark.timeout(900)  # one launch runs many checks
LORA = {"rank": 4, "alpha": 8.0}
PARTLY = {"rank": 4, "alpha": 8.0, "targets": ["q_proj", "v_proj", "o_proj", "up_proj"]}
CASES = [  # model, layout, lora, options
    ("qwen3", "DP2", LORA, {}),
    ("qwen2", "TP2+SP", LORA, {}),
    ("qwen3", "TP2+SP", PARTLY, {"packing": False, "recompute": "full"}),
    ("llama", "PP2", LORA, {"recompute": "selective"}),
    ("qwen3_tied", "PP2", LORA, {"recompute": "full"}),
    ("qwen3", "PP2xVPP2", PARTLY, {}),
    ("qwen3", "CP2", LORA, {}),
    ("qwen3_moe", "CP2", LORA, {"packing": False}),
    ("qwen3_moe", "EP2", LORA, {}),
    ("qwen3_moe", "TP2+SP", LORA, {}),
    ("qwen3_moe", "TP2xEP2", LORA, {"recompute": "full"}),
    ("qwen3_moe", "TP2xETP2", LORA, {}),
    ("qwen3_moe", "PP2", LORA, {}),
]
ONE_RANK = {"qwen3": ("qwen3", LORA), "qwen3 partly": ("qwen3", PARTLY), "qwen3_moe": ("qwen3_moe", LORA)}
NUM_TENSORS = {"qwen3": 4 * 7 * 2, "qwen3 partly": 4 * 4 * 2, "qwen3_moe": 4 * (4 + 8 * 3) * 2}


def test_two_ranks(hf_models: Path, tmp_path: Path):
    def job(model: str, layout: str, lora: dict, options: dict) -> dict:
        which = "all" if lora is LORA else "some"
        return {
            "do": "layout",
            "model": str(hf_models / model),
            "lora": lora,
            "parallel": LAYOUTS.get(layout, {}),
            "reference": str(tmp_path / f"{model}.{which}.pt"),
            **options,
        }

    references = {
        (model, str(lora)): job(model, "1", lora, {"write": True, "packing": False, "budget": 4096})
        for model, _, lora, _ in CASES
    }
    run_ranks(1, tmp_path / "one", list(references.values()))
    results = run_ranks(2, tmp_path / "two", [job(*case) for case in CASES])
    problems = []
    for (model, layout, _, options), result in zip(CASES, results, strict=True):
        place = f"{model}, {layout}, {options}"
        assert result["gradients"]
        for name, bound in {"loss": LOSS_BOUND, "norm": GRADIENT_BOUND, "weights": WEIGHT_BOUND}.items():
            if not result[name] <= bound:
                problems.append(f"{place}: {name} off by {result[name]:.2g}")
        off = {name: value for name, value in result["gradients"].items() if not value <= GRADIENT_BOUND}
        problems += [f"{place}: gradient of {name} off by {value:.2g}" for name, value in list(off.items())[:4]]
    assert not problems, "\n".join(problems)


@pytest.fixture(scope="module")
def adapted(hf_models: Path, tmp_path_factory) -> dict[str, dict]:
    """By case: what the actor says of its adapters, and in "errors" what transformers and PEFT say of it."""
    folder = tmp_path_factory.mktemp("adapted")
    jobs = {}
    for name, (model, lora) in ONE_RANK.items():
        jobs[name] = {"do": "adapters", "model": str(hf_models / model), "lora": lora, "out": str(folder / name)}
        (folder / name).mkdir()
        (folder / name / "job.json").write_text(json.dumps(jobs[name]))
    results = run_ranks(1, folder / "ranks", list(jobs.values()))
    run_peft_reference(folder)
    return {
        name: result | {"errors": json.loads((folder / name / "errors.json").read_text())}
        for name, result in zip(jobs, results, strict=True)
    }


@pytest.mark.parametrize("name", ONE_RANK)
def test_gradients_are_those_of_the_dense_effective_weight(adapted: dict[str, dict], name: str):
    errors = adapted[name]["errors"]
    assert errors["loss"] <= LOSS_BOUND and errors["gradients"] <= GRADIENT_BOUND
    assert errors["compared"] == NUM_TENSORS[name]


@pytest.mark.parametrize("name", ONE_RANK)
def test_merged_export_and_peft_have_the_logits_of_the_actor(adapted: dict[str, dict], name: str):
    errors = adapted[name]["errors"]
    assert errors["merged"] <= 1e-5 and errors["peft"] <= 1e-5
    assert errors["off"] > 1e-2, "without adapters it is another model"


@pytest.mark.parametrize("name", ONE_RANK)
def test_merging_changes_the_targets_and_leaves_no_trace(adapted: dict[str, dict], name: str):
    result = adapted[name]
    assert result["merged"] <= 1e-5 < 1e-2 < result["moved"]
    assert result["restored"] and result["changed"] > 0
