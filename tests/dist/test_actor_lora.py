"""Adapters: one rank against a formula by hand and PEFT, every layout against one rank, bytes against `check`."""

import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from megagrpo.config.schema import ActorConfig
from megagrpo.models.folder import Model
from megagrpo.tools.plan.trainer_memory import Load, trainer_side
from tests.dist.bounds import LARGEST, bound_of, within
from tests.dist.cases import LAYOUTS
from tests.dist.test_actor_layouts import problems_of
from tests.dist.workers.launch import run_ranks, run_transformers

LOGIT_BOUND, LOSS_BOUND, GRADIENT_BOUND = 1e-5, 4e-6, 1e-5
pytestmark = [
    pytest.mark.timeout(900),  # one launch runs many checks
    pytest.mark.verifies(
        "actor", "LoRA: gradients of dense effective weights, merged and PEFT exports, resume bit by bit"
    ),
]
LORA = {"rank": 4, "alpha": 8.0}
PARTLY = LORA | {"targets": ["q_proj", "v_proj", "o_proj", "up_proj"]}
EXPERTS = LORA | {"targets": ["down_proj", "gate_proj"]}
ONE_RANK = {"qwen3": LORA, "qwen2": PARTLY, "qwen3_moe": LORA}
NUM_TENSORS = {"qwen3": 4 * 7 * 2, "qwen2": 4 * 4 * 2, "qwen3_moe": 4 * (4 + 8 * 3) * 2}


@dataclass(frozen=True)
class Case:
    """One model with adapters in one layout; see layout_job of actor_ranks.py for the options."""

    model: str
    layout: str
    lora: dict
    options: dict = field(default_factory=dict)

    def job(self, models: Path, references: Path) -> dict:
        reference = f"{self.model}.{'-'.join(self.lora.get('targets', ['all']))}.pt"
        job = {"do": "layout", "model": str(models / self.model), "lora": self.lora, **self.options}
        return job | {"reference": str(references / reference), "parallel": LAYOUTS.get(self.layout, {})}


PADDED = {"packing": False}
CI = [
    Case("qwen3", "DP2", LORA),
    Case("qwen3", "TP2+SP", PARTLY, PADDED | {"recompute": "full"}),
    Case("qwen3_tied", "PP2", LORA, {"recompute": "full"}),
    Case("qwen3", "CP2", LORA),
    Case("qwen3_moe", "EP2", LORA, PADDED),
    Case("qwen3_moe", "TP2xETP2", LORA),
    Case("qwen3_moe", "EP2", EXPERTS, {"distributed": True}),
]
REST = [
    Case("qwen2", "TP2+SP", LORA),
    Case("llama", "PP2", LORA, {"recompute": "selective"}),
    Case("qwen3", "PP2xVPP2", PARTLY),
    Case("qwen3", "DP2", PARTLY, {"distributed": True}),
    Case("qwen3_moe", "DP2", EXPERTS),
    Case("qwen3_moe", "CP2", LORA, PADDED),
    Case("qwen3_moe", "TP2+SP", LORA),
    Case("qwen3_moe", "TP2xEP2", LORA, {"recompute": "full"}),
    Case("qwen3_moe", "PP2", LORA),
]
FOUR_RANKS = [
    Case("qwen3", "TP2xPP2", LORA),
    Case("qwen3_moe", "EP2xPP2", LORA),
    Case("qwen3", "CP2xPP2", PARTLY),
    Case("qwen3_moe", "TP2xETP2", LORA),
]


@pytest.mark.parametrize(
    "world, cases",
    [(2, CI), pytest.param(2, REST, marks=pytest.mark.slow), pytest.param(4, FOUR_RANKS, marks=pytest.mark.slow)],
)
def test_every_layout_equals_one_rank(hf_models: Path, tmp_path: Path, world: int, cases: list[Case]):
    alone = [Case(case.model, "1", case.lora, PADDED | {"write": True, "budget": 4096}) for case in cases]
    jobs = {job["reference"]: job for job in (case.job(hf_models, tmp_path) for case in alone)}
    run_ranks(1, tmp_path / "one", list(jobs.values()))
    results = run_ranks(world, tmp_path / "layouts", [case.job(hf_models, tmp_path) for case in cases])
    problems = []
    for case, result in zip(cases, results, strict=True):
        found = problems_of("update", result)
        assert bool(result["gradients"]) != ("distributed" in case.options)
        problems += [f"{case}: {problem}" for problem in found + memory_problems(case, world, hf_models, result)]
    assert not problems, "\n".join(problems)


def memory_problems(case: Case, world: int, models: Path, result: dict) -> list[str]:
    """The bytes of gradients and optimizer state that a rank really allocated against what `megagrpo check` says."""
    optimizer = {"distributed": "distributed" in case.options}
    config = ActorConfig.model_validate(
        {"world_size": world, "parallel": LAYOUTS[case.layout], "lora": case.lora, "optimizer": optimizer}
    )
    said = trainer_side(Model.read(models / case.model).arch, config, Load(64)).phases["rollout"].parts
    figures = {
        "gradients": (result["gradient_bytes"], said["gradients"]),
        "optimizer state": (result["state_bytes"], said["optimizer"]),
    }
    allowed = 0.1 if "distributed" in case.options else 0.0  # its buffers and its shards are padded
    return [
        f"{found} bytes of {what}, check says {expected}"
        for what, (found, expected) in figures.items()
        if not abs(found - expected) <= allowed * expected
    ]


@pytest.fixture(scope="module")
def adapted(hf_models: Path, tmp_path_factory) -> dict[str, dict]:
    """By model: what the actor says of its adapters, and in "errors" what transformers and PEFT say of it."""
    folder = tmp_path_factory.mktemp("adapted")
    jobs = {}
    for model, lora in ONE_RANK.items():
        jobs[model] = {"do": "adapters", "model": str(hf_models / model), "lora": lora, "out": str(folder / model)}
        (folder / model).mkdir()
        (folder / model / "job.json").write_text(json.dumps(jobs[model]))
    results = run_ranks(1, folder / "ranks", list(jobs.values()))
    run_transformers(folder, "peft_reference.py")
    return {
        model: result | {"errors": json.loads((folder / model / "errors.json").read_text())}
        for model, result in zip(jobs, results, strict=True)
    }


@pytest.mark.parametrize("model", ONE_RANK)
def test_gradients_are_those_of_the_dense_effective_weight(adapted: dict[str, dict], model: str):
    errors = adapted[model]["errors"]
    assert within("dense loss", errors["loss"], LOSS_BOUND)
    bound = bound_of(GRADIENT_BOUND, adapted[model]["rounding"]["gradient"])
    assert within("dense gradient", errors["gradients"], bound)
    assert errors["compared"] == NUM_TENSORS[model]


@pytest.mark.parametrize("model", ONE_RANK)
def test_merged_export_and_peft_have_the_logits_of_the_actor(adapted: dict[str, dict], model: str):
    errors = adapted[model]["errors"]
    bound = bound_of(LOGIT_BOUND, adapted[model]["rounding"]["logits"])
    assert within("merged logits", errors["merged"], bound)
    assert within("PEFT's logits", errors["peft"], bound)
    assert errors["off"] > 1e-2, "without adapters it is another model"


@pytest.mark.parametrize("model", ONE_RANK)
def test_merging_changes_the_targets_and_leaves_no_trace(adapted: dict[str, dict], model: str):
    result = adapted[model]
    bound = bound_of(LOGIT_BOUND, result["rounding"]["logits"])
    assert within("merged log-probabilities", result["merged"], bound)
    assert 10 * LARGEST * LOGIT_BOUND < 1e-2 < result["moved"]
    assert result["restored"] and result["changed"] > 0
