"""Megatron's own wrappers of Transformer Engine's layers, around the stand-in for it, against torch's layers.

Weights loaded and exported bit by bit, logits and gradients against transformers, an update against one rank with
torch's layers, the certificate and its planted faults: within the bounds that torch's layers have.
"""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from megagrpo.config.load import load_config
from megagrpo.config.schema import ParallelConfig
from megagrpo.system import environment
from megagrpo.tools.certify.cases import LAYOUTS as CERTIFIED
from megagrpo.tools.certify.synthetic import make_models
from tests.dist.cases import BATCHES, FOUR_RANKS, LAYOUTS, MODELS, has
from tests.dist.test_actor_layouts import problems_of
from tests.dist.test_certify import (
    ABOVE,
    ALGORITHMS,
    CONFIG,
    FIRST,
    SPOILED,
    case,
    certify,
    described,
    measured,
    with_bounds,
)
from tests.dist.workers.launch import TRANSFORMER_ENGINE_POOL, run_ranks
from tests.dist.workers.pool import STAND_INS

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.verifies("actor", "Transformer Engine's wrappers over a stand-in with its classes and parameters"),
]
# model, layout, batch, recompute, distributed optimizer
CI = (
    ("qwen3", "CP2", "packed", "none", False),
    ("qwen3_moe", "TP2+SP", "packed", "full", False),
    ("qwen3_moe", "EP2", "padded", "none", True),
)
ALL = [
    (model, layout, batch, recompute, False)
    for model in MODELS
    for layout in LAYOUTS
    for batch, recompute in (("packed", "none"), ("padded", "full"))
    if has(model, layout) and layout not in FOUR_RANKS
]


@pytest.fixture(scope="module")
def reference(hf_models: Path) -> Callable[[str], Path]:
    """What torch's layers on one rank compute of a model, once."""

    @cache
    def of(model: str) -> Path:
        file = hf_models / f"{model}.torch.pt"
        job = {"do": "layout", "write": True, "model": str(hf_models / model), "reference": str(file)}
        run_ranks(1, hf_models / f"torch_{model}", [{**job, **BATCHES["padded"], "budget": 4096}])
        return file

    return of


def check(folder: Path, reference: Callable[[str], Path], cases: list[tuple]) -> None:
    jobs = []
    for model, layout, batch, recompute, distributed in cases:
        base = {"model": str(folder / model), "reference": str(reference(model)), "transformer_engine": True}
        base |= {"parallel": LAYOUTS[layout], **BATCHES[batch]}
        jobs.append({**base, "do": "forward"})
        fused = {"gradient_accumulation_fusion": recompute == "full"}  # weight gradients go into Megatron's buffers
        jobs.append({**base, "do": "layout", "recompute": recompute, "distributed": distributed, "megatron": fused})
    results = run_ranks(2, folder / f"te_{len(jobs)}", jobs, pool=TRANSFORMER_ENGINE_POOL)
    problems = []
    for job, result in zip(jobs, results, strict=True):
        found = problems_of("forward" if job["do"] == "forward" else "update", result)
        problems += [f"{Path(job['model']).name}, {job['parallel']}, {job['do']}: {problem}" for problem in found]
    assert not problems, "\n".join(problems)


def test_layers_are_as_torchs(hf_models: Path, reference: Callable[[str], Path]):
    check(hf_models, reference, list(CI))


def test_ranks_of_other_layers_are_refused(hf_models: Path):
    """Else buckets of experts' gradients would be summed in two orders."""
    job = {"do": "forward", "model": str(hf_models / "qwen3_moe"), **BATCHES["packed"]}
    with pytest.raises(AssertionError, match="rank 1 has no Transformer Engine and rank 0 has"):
        run_ranks(
            2, hf_models / "te_mixed", [job | {"transformer_engine": [True, False]}], pool=TRANSFORMER_ENGINE_POOL
        )


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_every_layout(hf_models: Path, reference: Callable[[str], Path], model: str):
    check(hf_models, reference, [one for one in ALL if one[0] == model])


def certified(folder: Path, family: str, cases: list[dict], *more: str) -> tuple[list[dict], list[list[str]]]:
    """What the certificate measures of a family's tiny model with Transformer Engine's layers, and
    `more` settings; and the failures."""
    settings = [*described(folder, family), "actor.transformer_engine=true", *more]
    make_models(folder, load_config(str(CONFIG), settings), ParallelConfig(), 0)
    common = {"config": str(CONFIG), "folder": str(folder), "algorithm": ALGORITHMS[FIRST], "settings": settings}
    common = with_bounds(folder, common, TRANSFORMER_ENGINE_POOL)
    return measured(folder, [common | one for one in cases], TRANSFORMER_ENGINE_POOL)


def test_latent_attention_is_certified_and_a_fault_found(tmp_path: Path):
    """Down projections, which Transformer Engine marks as shards, count once in the norm; experts'
    gradients are summed over tensor-parallel ranks."""
    fault = "experts-not-reduced-over-tp"
    cases = [case("TP2+SP"), case("TP2+SP", fault)]
    results, found = certified(tmp_path, "deepseek_v3", cases)
    assert found[0] == [] and any("gradient of" in problem for problem in found[1])
    spoiled = {name for name, value in results[1]["gradients"].items() if value > ABOVE}
    assert spoiled and all(".experts." in name for name in spoiled)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "glm4_moe", "mixtral", "kimi_k2", "minimax_m2"])
def test_families_are_certified(tmp_path: Path, family: str):
    left_out = {"ep", "etp"} if family == "qwen3" else set()
    names = [name for name, (ranks, sizes) in CERTIFIED.items() if ranks == 2 and not sizes.keys() & left_out]
    _, found = certified(tmp_path, family, [case(name) for name in names])
    assert found == [[]] * len(names)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "glm4_moe", "kimi_k2"])
def test_replayed_experts_are_certified(tmp_path: Path, family: str):
    cases = [case("TP2+SP", recompute="full"), case("PP2xVPP2"), case("CP2"), case("EP2")]
    wrong = case("CP2", "experts-of-token-before")
    settings = "actor.routing_replay=rollout"
    _, found = certified(tmp_path, family, [*cases, wrong], settings)
    assert found[:-1] == [[]] * len(cases)
    assert any("gradient of" in problem for problem in found[-1])


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3"], ids=["quickstart", "dense"])
def test_the_command_certifies_its_layers(tmp_path: Path, monkeypatch, family: str):
    monkeypatch.setenv("PYTHONPATH", environment.child_environment({}, [str(STAND_INS)])["PYTHONPATH"])
    done = certify(tmp_path, "--set", "actor.transformer_engine=true", family=family)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "run" / "certify" / "report.json").read_text())
    assert report["passed"] and "Transformer Engine's layers" not in report["not_run"]


@pytest.mark.slow
def test_every_fault_is_found(tmp_path: Path):
    cases = [case(layout, fault) for fault, layout in SPOILED.items()]
    _, found = certified(tmp_path, "qwen3_moe", cases)
    assert all(found), dict(zip(SPOILED, found, strict=True))
