"""The actor against transformers and itself on one rank: logits, log-probabilities, gradients, export, update.

Float32, gloo. All checks of one world size share a launch; a failing check is named by model, layout and variant.
"""

from itertools import product
from pathlib import Path

import pytest

from tests.dist.figures import LayoutFigures
from tests.dist.workers.launch import run_ranks
from tests.dist.workers.samples import LENGTHS

LOGIT_BOUND, LOSS_BOUND, GRADIENT_BOUND, WEIGHT_BOUND = 1e-4, 1e-6, 1e-5, 1e-6
MOE = ("qwen3_moe", "qwen3_moe_raw")
MODELS = ("qwen3", "qwen3_moe", "qwen2", "llama", "qwen3_tied", "qwen3_moe_raw")
LAYOUTS = {
    "1": {},
    "DP2": {},
    "TP2+SP": {"tp": 2},
    "PP2": {"pp": 2},
    "PP2xVPP2": {"pp": 2, "vpp": 2},
    "CP2": {"cp": 2},
    "EP2": {"ep": 2},
    "TP2xEP2": {"tp": 2, "ep": 2},
    "TP2xETP2": {"tp": 2, "etp": 2},
    "TP2xPP2": {"tp": 2, "pp": 2},
    "EP2xPP2": {"ep": 2, "pp": 2},
    "CP2xPP2": {"cp": 2, "pp": 2},
}
OF_OTHER_MODELS = ("TP2+SP", "PP2xVPP2", "TP2xEP2")  # what CI checks of them
WORLD = {"1": 1, "TP2xPP2": 4, "EP2xPP2": 4, "CP2xPP2": 4}  # others: 2
pytestmark = pytest.mark.timeout(900)  # one launch runs many checks
BOTH = ("packed", "padded")
VARIANTS = {"packed": {"packing": True, "budget": 64}, "padded": {"packing": False, "budget": 200}}


def layouts_for(model: str) -> list[str]:
    return [name for name, sizes in LAYOUTS.items() if model in MOE or not sizes.keys() & {"ep", "etp"}]


def jobs_of(
    world: int, models: tuple[str, ...], folder: Path, variants: tuple[str, ...]
) -> dict[tuple[str, str, str], dict]:
    """(model, layout, what) -> job. The first jobs of a model on one rank write the references of its update jobs."""
    jobs = {}
    for model in models:
        base = {"model": str(folder / model), "reference": str(folder / f"{model}.rank1.pt")}
        if world == 1:
            jobs[model, "1", "reference"] = {
                **base,
                "do": "layout",
                "write": True,
                **VARIANTS["padded"],
                "budget": 4096,
            }
            jobs[model, "1", "few"] = {
                **base,
                "do": "layout",
                "write": True,
                "keep": 1,
                "reference": str(folder / f"{model}.few.pt"),
            }
        for layout, variant in product(layouts_for(model), variants):
            if WORLD.get(layout, 2) == world:
                job = {**base, "parallel": LAYOUTS[layout], **VARIANTS[variant]}
                jobs[model, layout, f"forward {variant}"] = {**job, "do": "forward"}
                jobs[model, layout, f"update {variant}"] = {**job, "do": "layout"}
    return jobs


def special_jobs(model: str, folder: Path) -> dict[tuple[str, str, str], dict]:
    """On two ranks: fewer samples than ranks (one has dummy micro-batches only), distributed optimizer, recompute."""
    base = {"model": str(folder / model), "reference": str(folder / f"{model}.rank1.pt"), "do": "layout"}
    few = {**base, "keep": 1, "reference": str(folder / f"{model}.few.pt")}
    jobs = {
        (model, "DP2", "update one sample"): few,
        (model, "DP2", "update distributed optimizer"): {**base, "distributed": True},
    }
    if model in MOE:
        ep2 = {"parallel": {"ep": 2}}
        jobs[model, "EP2", "update one sample"] = {**few, **ep2, "packing": False}
        jobs[model, "EP2", "update distributed optimizer"] = {**base, **ep2, "distributed": True}
        for layout, kind in product(("PP2", "TP2xEP2"), ("none", "full", "selective")):
            jobs[model, layout, f"update recompute {kind}"] = {**base, "parallel": LAYOUTS[layout], "recompute": kind}
    return jobs


def check(
    folder: Path, world: int, jobs: dict[tuple[str, str, str], dict], figures: LayoutFigures
) -> dict[tuple[str, str, str], dict]:
    """Run the jobs, keep their figures, fail with every problem; returns the results."""
    first = "-".join(next(iter(jobs))).replace(" ", "_")
    results = dict(zip(jobs, run_ranks(world, folder / f"world{world}_{first}", list(jobs.values())), strict=True))
    problems = []
    for (model, layout, what), result in results.items():
        problems += [f"{model}, {layout}, {what}: {problem}" for problem in problems_of(what, result)]
        if result:  # the jobs that write references have none
            figures.add(model, layout, what, result)
    assert not problems, "\n".join(problems)
    return results


def problems_of(what: str, result: dict) -> list[str]:
    forward = what.startswith("forward")
    bounds = {"logits": LOGIT_BOUND, "logprobs": LOGIT_BOUND, "norm": GRADIENT_BOUND, "weights": WEIGHT_BOUND}
    bounds["loss"] = 1e-5 if forward else LOSS_BOUND
    found = [
        f"{name} off by {result[name]:.2g}"
        for name, bound in bounds.items()
        if name in result and not result[name] <= bound
    ]
    gradients = result.get("gradients", {}).items()
    found += [f"gradient of {name} off by {value:.2g}" for name, value in gradients if not value <= GRADIENT_BOUND]
    if forward and not result["export"]:
        found.append("HF -> actor -> HF is not bit-equal")
    return found


@pytest.fixture(scope="module")
def one_rank(hf_models: Path, layout_figures: LayoutFigures) -> Path:
    """The one-rank runs, checked against transformers, which leave the references for all other layouts."""
    results = check(hf_models, 1, jobs_of(1, MODELS, hf_models, BOTH), layout_figures)
    compared = {result["positions"] for (_, _, what), result in results.items() if what.startswith("forward")}
    assert compared == {sum(LENGTHS) - len(LENGTHS)}, "every position that predicts a token was compared"
    return hf_models


def test_one_rank_equals_transformers(one_rank: Path):
    assert all((one_rank / f"{model}.rank1.pt").exists() for model in MODELS)


def test_two_ranks(one_rank: Path, layout_figures: LayoutFigures):
    check(one_rank, 2, jobs_of(2, MODELS[:2], one_rank, BOTH), layout_figures)


def test_two_ranks_of_the_other_models(one_rank: Path, layout_figures: LayoutFigures):
    jobs = jobs_of(2, MODELS[2:], one_rank, ("packed",))
    check(one_rank, 2, {key: job for key, job in jobs.items() if key[1] in OF_OTHER_MODELS}, layout_figures)


def test_few_samples_distributed_optimizer_and_recompute(one_rank: Path, layout_figures: LayoutFigures):
    results = check(one_rank, 2, special_jobs("qwen3", one_rank) | special_jobs("qwen3_moe", one_rank), layout_figures)
    calls = {key[1:]: result["attention_calls"] for key, result in results.items()}
    for layout, kind in product(("PP2", "TP2xEP2"), ("full", "selective")):
        assert calls[layout, f"update recompute {kind}"] == 2 * calls[layout, "update recompute none"], (
            "it was computed once more"
        )


def test_four_ranks(one_rank: Path, layout_figures: LayoutFigures):
    check(
        one_rank,
        4,
        jobs_of(4, MODELS[:1], one_rank, ("padded",)) | jobs_of(4, MODELS[1:2], one_rank, ("packed",)),
        layout_figures,
    )


@pytest.mark.slow
def test_the_rest_of_the_grid(one_rank: Path, layout_figures: LayoutFigures):
    jobs = jobs_of(2, MODELS[2:], one_rank, ("packed",))
    check(one_rank, 2, {key: job for key, job in jobs.items() if key[1] not in OF_OTHER_MODELS}, layout_figures)
    check(one_rank, 2, jobs_of(2, MODELS[2:], one_rank, ("padded",)), layout_figures)
    check(
        one_rank,
        4,
        jobs_of(4, MODELS[:1], one_rank, ("packed",)) | jobs_of(4, MODELS[1:2], one_rank, ("padded",)),
        layout_figures,
    )
    check(one_rank, 4, jobs_of(4, MODELS[2:], one_rank, BOTH), layout_figures)
