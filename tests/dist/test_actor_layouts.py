"""The actor against transformers and against itself on one rank: logits, gradients, export, one update.

Float32, gloo. tests/dist/cases.py says which cases run; a failing check is named by model, layout and what was done.
"""

import shutil
import tempfile
from collections.abc import Iterable
from itertools import combinations, product
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from megagrpo.weights.hf_folder import HfFolder
from tests.dist.bounds import bound_of, within
from tests.dist.cases import BATCHES, CHOICES, CI, LAYOUTS, MODELS, MOE, REST, LayoutCase, has, of_ci
from tests.dist.figures import LayoutFigures
from tests.dist.workers.launch import run_ranks
from tests.dist.workers.samples import LENGTHS

# A loss is a mean of terms of size 1 whose log-probabilities round apart by some 1e-6: it has no better bound itself.
LOGIT_BOUND, LOSS_BOUND, GRADIENT_BOUND, WEIGHT_BOUND = 1e-4, 4e-6, 1e-5, 1e-6
pytestmark = [
    pytest.mark.timeout(900),  # one launch runs many checks
    pytest.mark.verifies(
        "actor",
        "the actor equals transformers: logits, gradients, HF -> actor -> HF bit by bit (Llama, Qwen2, "
        "Qwen3, Qwen3-MoE, Mixtral, GLM-4.5, DeepSeek-V3, Moonlight, MiniMax-M2)",
        "dist/test_actor_families.py",
    ),
    pytest.mark.verifies(
        "actor",
        "losses and gradients of DP, TP+SP, PP, virtual PP, CP, EP, expert TP and mixtures "
        "equal one rank's; packed, padded, each recompute",
        "dist/test_actor_families.py",
        see="[table](#layouts-x-families)",
    ),
]
JobKey = tuple[str, str, str]  # model, layout, what is done
SPECIAL = ("qwen3", "qwen3_moe")  # the models of special_jobs


def one_rank_jobs(folder: Path, models: Iterable[str] = MODELS) -> dict[JobKey, dict]:
    """Every model and kind of batch. A model's first jobs write what its updates in other layouts are compared with."""
    jobs = {}
    for model in models:
        base = {"model": str(folder / model), "reference": str(folder / f"{model}.rank1.pt")}
        whole = {**base, "do": "layout", "write": True, **BATCHES["padded"], "budget": 4096}
        jobs[model, "1", "reference"] = whole
        if model in SPECIAL:
            one = {"keep": 1, "reference": str(folder / f"{model}.few.pt")}
            jobs[model, "1", "few"] = {**base, "do": "layout", "write": True, **one}
        for batch, options in BATCHES.items():
            jobs[model, "1", batch] = {**base, **options, "do": ["forward", "layout"]}
    return jobs


def jobs_of(cases: list[LayoutCase], world: int, folder: Path) -> dict[JobKey, dict]:
    """A forward and an update of each case on this number of ranks."""
    jobs = {}
    for case in cases:
        if case.world == world:
            base = {"model": str(folder / case.model), "reference": str(folder / f"{case.model}.rank1.pt")}
            job = {**base, "parallel": LAYOUTS[case.layout], **BATCHES[case.batch]}
            job |= {"recompute": case.recompute, "do": ["forward", "layout"]}
            jobs[case.model, case.layout, f"{case.batch}, recompute {case.recompute}"] = job
    return jobs


def special_jobs(model: str, folder: Path) -> dict[JobKey, dict]:
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


def check(folder: Path, world: int, jobs: dict[JobKey, dict], figures: LayoutFigures) -> dict[JobKey, dict]:
    """Run the jobs, keep their figures, fail with every problem; returns the results, which of a
    job that does several things are by their names."""
    first = "-".join(next(iter(jobs))).replace(" ", "_")
    # two tests may begin with the same job; ranks that found another's stores would not meet
    place = Path(tempfile.mkdtemp(prefix=f"world{world}_{first}-", dir=folder))
    measured = run_ranks(world, place, list(jobs.values()))
    results = {}
    for (model, layout, what), job, result in zip(jobs, jobs.values(), measured, strict=True):
        if isinstance(job["do"], str):
            results[model, layout, what] = result
        else:
            results[model, layout, f"forward {what}"] = result["forward"]
            results[model, layout, f"update {what}"] = result["layout"]
    problems = []
    for (model, layout, what), result in results.items():
        found = problems_of(what, result)
        problems += [f"{model}, {layout}, {what}: {problem}" for problem in found]
        if result:  # the jobs that write references have none
            figures.add(model, layout, what, result)
    assert not problems, "\n".join(problems)
    return results


def problems_of(what: str, result: dict) -> list[str]:
    gradient_bound = bound_of(GRADIENT_BOUND, result.get("rounding", {}).get("gradient", 0.0))
    forward = what.startswith("forward")
    kind = "forward" if forward else "update"
    bounds = {"logits": LOGIT_BOUND, "logprobs": LOGIT_BOUND, "norm": GRADIENT_BOUND, "weights": WEIGHT_BOUND}
    bounds |= {"loss": 1e-5 if forward else LOSS_BOUND, "seen_logprobs": LOGIT_BOUND}
    found = [
        f"{name} off by {result[name]:.2g}"
        for name, bound in bounds.items()
        if name in result and not within(f"{kind} {name}", result[name], bound)
    ]
    gradients = result.get("gradients", {}).items()
    found += [
        f"gradient of {name} off by {value:.2g}"
        for name, value in gradients
        if not within(f"{kind} gradient", value, gradient_bound)
    ]
    if forward and not result["export"]:
        found.append("HF -> actor -> HF is not bit-equal")
    return found


@pytest.fixture(scope="module")
def one_rank(hf_models: Path, layout_figures: LayoutFigures) -> Path:
    """The one-rank runs, checked against transformers, which leave the references for all other layouts."""
    results = check(hf_models, 1, one_rank_jobs(hf_models), layout_figures)
    compared = {result["positions"] for (_, _, what), result in results.items() if what.startswith("forward")}
    assert compared == {sum(LENGTHS) - len(LENGTHS)}, "every position that predicts a token was compared"
    return hf_models


def test_one_rank_equals_transformers(one_rank: Path):
    assert all((one_rank / f"{model}.rank1.pt").exists() for model in MODELS)


def test_two_ranks(one_rank: Path, layout_figures: LayoutFigures):
    check(one_rank, 2, jobs_of(CI, 2, one_rank), layout_figures)


def test_few_samples_distributed_optimizer_and_recompute(one_rank: Path, layout_figures: LayoutFigures):
    jobs = {key: job for model in SPECIAL for key, job in special_jobs(model, one_rank).items()}
    results = check(one_rank, 2, jobs, layout_figures)
    calls = {key[1:]: result["mlp_calls"] for key, result in results.items()}
    for layout, kind in product(("PP2", "TP2xEP2"), ("full", "selective")):
        assert calls[layout, f"update recompute {kind}"] == 2 * calls[layout, "update recompute none"], (
            "it was computed once more"
        )


def test_an_output_layer_stored_beside_a_tied_embedding_is_not_loaded(one_rank: Path):
    """As published Qwen3 models have it, and equal: computed, and exported without it, over two stages and ranks."""
    source, folder = one_rank / "qwen3_tied", one_rank / "stored"
    for suffix in ("", ".gradients"):
        shutil.copytree(f"{source}{suffix}", f"{folder}{suffix}")
    shutil.copy(f"{source}.pt", f"{folder}.pt")
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, folder / "model.safetensors")
    jobs = [{"do": "forward", "model": str(folder), "parallel": LAYOUTS[layout]} for layout in ("TP2+SP", "PP2")]
    for result in run_ranks(2, one_rank / "stored_ranks", jobs):
        assert within("forward logits", result["logits"], LOGIT_BOUND) and not result["export"], (
            "it lacks what the source has"
        )
    assert HfFolder(one_rank / "stored_ranks" / "exported").keys() == HfFolder(source).keys()


def test_four_ranks(one_rank: Path, layout_figures: LayoutFigures):
    check(one_rank, 4, jobs_of(CI, 4, one_rank), layout_figures)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_the_rest_of_the_grid(one_rank: Path, layout_figures: LayoutFigures, world: int):
    check(one_rank, world, jobs_of(REST, world, one_rank), layout_figures)


def test_every_two_choices_meet_in_a_case():
    """Whatever the function that makes the table does; by its definition, over the choices that CI can make."""
    rows = [vars(case) for case in CI]
    for (one, values), (other, others) in combinations(CHOICES.items(), 2):
        seen = {(row[one], row[other]) for row in rows}
        expected = set(product(values, others))
        if (one, other) == ("model", "layout"):
            expected = {pair for pair in expected if of_ci(*pair)}
        assert seen == expected, (one, other, expected - seen)
    assert all(of_ci(case.model, case.layout) for case in CI) and len(set(CI)) == len(CI) < 50
    grid = {(case.model, case.layout, case.batch) for case in CI + REST}
    assert grid == {row for row in product(MODELS, LAYOUTS, BATCHES) if has(*row[:2])}, "--full checks everything"
