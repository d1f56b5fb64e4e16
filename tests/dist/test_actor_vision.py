"""Models that see in the actor: beside transformers, beside themselves in other layouts, with a frozen tower.

Samples have 0 to 3 images of several sizes, one image comes twice, and responses contain placeholders that the policy
sampled. Float32, gloo.
"""

from itertools import product
from pathlib import Path

import pytest
import torch

from tests.dist.bounds import bound_of, within
from tests.dist.workers.launch import run_ranks, run_transformers
from tests.dist.workers.vision_samples import samples
from tests.tiny_vlm import FAMILIES

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.verifies(
        "actor",
        "images (Qwen2.5-VL, Qwen3-VL, Qwen3-VL-MoE): logits, gradients, export, every layout",
        see="[more](../vision.md#what-is-shown)",
    ),
]
BOUNDS = {"logits": 1e-5, "logprobs": 5e-6, "loss": 5e-6, "norm": 1e-5, "weights": 1e-6, "seen_logprobs": 1e-5}
GRADIENT_BOUND = 1e-5  # of the largest of each parameter
PACKED, PADDED = {"packing": True, "budget": 64}, {"packing": False, "budget": 200}
FREED = {"deallocate_pipeline_outputs": True}
PIPELINE = {"pp": 2, "first_stage_layers": 3, "last_stage_layers": 1}  # features are added behind three layers
LAYOUTS = {
    "DP2": {},
    "TP2+SP": {"tp": 2},
    "PP2": PIPELINE,
    "CP2": {"cp": 2},
    "EP2": {"ep": 2},
    "TP2xEP2": {"tp": 2, "ep": 2},
    "TP2xPP2": {"tp": 2, **PIPELINE},
    "CP2xPP2": {"cp": 2, **PIPELINE},
    "PP2xVPP2": {"pp": 2, "vpp": 2},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """The models with transformers' logits and gradients, and what one rank computes of the richer loss."""
    folder = tmp_path_factory.mktemp("hf_vision")
    run_transformers(folder, "hf_vision.py")
    jobs = {family: job(folder, family, do="layout", write=True, packing=False, budget=4096) for family in FAMILIES}
    run(folder, 1, jobs)
    return folder


def job(folder: Path, family: str, **options) -> dict:
    return {"model": str(folder / family), "reference": str(folder / f"{family}.rank1.pt"), **options}


def run(folder: Path, world: int, jobs: dict[str, dict]) -> dict[str, dict]:
    """The results by what was done; one that a bound excludes fails."""
    name = f"world{world}_" + "".join(letter for letter in next(iter(jobs)) if letter.isalnum())
    results = dict(zip(jobs, run_ranks(world, folder / name, list(jobs.values()), "vision_ranks.py"), strict=True))
    problems = []
    for what, result in results.items():
        rounding = result.get("rounding", {"gradient": 0.0, "logprobs": 0.0})
        bounds = BOUNDS | {name: bound_of(BOUNDS[name], rounding["logprobs"]) for name in ("logits", "logprobs")}
        off = {
            name: result[name]
            for name, bound in bounds.items()
            if name in result and not within(name, result[name], bound)
        }
        bound = bound_of(GRADIENT_BOUND, rounding["gradient"])
        off |= {
            name: value for name, value in result.get("gradients", {}).items() if not within("gradient", value, bound)
        }
        problems += [f"{what}: {name} off by {value:.2g}" for name, value in off.items()]
        problems += [f"{what}: HF -> actor -> HF is not bit-equal"] * (not result.get("export", True))
    assert not problems, "\n".join(problems)
    return results


def test_one_rank_equals_transformers(models: Path):
    batches = {"packed": PACKED, "padded": PADDED | {"recompute": "full"}}
    cases = [*product(FAMILIES, batches), ("qwen2_5_vl_tied", "packed")]
    jobs = {f"{family} {batch}": job(models, family, do="forward", **batches[batch]) for family, batch in cases}
    for result in run(models, 1, jobs).values():
        assert result["positions"] == int(samples()["lengths"].sum()) - len(samples()["lengths"])


def test_two_ranks_equal_transformers_and_one_rank(models: Path):
    dense, moe = ({"folder": models, "family": family} for family in ("qwen3_vl", "qwen3_vl_moe"))
    jobs = {
        "TP2+SP, forward": job(**dense, do="forward", parallel=LAYOUTS["TP2+SP"]),
        "TP2+SP, recompute": job(**dense, do="layout", parallel=LAYOUTS["TP2+SP"], recompute="full", **PADDED),
        "CP2, packed": job(**dense, do="layout", parallel=LAYOUTS["CP2"]),
        "CP2, padded": job(**dense, do="layout", parallel=LAYOUTS["CP2"], **PADDED),
        # as on GPUs: a stage frees what it has sent
        "PP2": job(**moe, do="layout", parallel=LAYOUTS["PP2"], recompute="full", megatron=FREED),
        "EP2": job(**moe, do="layout", parallel=LAYOUTS["EP2"]),
        "PP2xVPP2": job(models, "qwen2_5_vl", do="layout", parallel=LAYOUTS["PP2xVPP2"]),
    }
    run(models, 2, jobs)


def test_a_frozen_tower_stays_and_the_rest_has_the_same_gradients(models: Path):
    wanted = {"none": set(), "projector": {"merger", "deepstack_merger_list"}}
    jobs = {
        f"{family} {train}, {do}": job(models, family, do=do, vision={"train": train}, recompute=recompute)
        for family, train, (do, recompute) in product(
            ("qwen2_5_vl", "qwen3_vl"), wanted, (("forward", "none"), ("frozen", "full"))
        )
    }
    for what, result in run(models, 1, jobs).items():
        family, train = what.partition(",")[0].split()
        if jobs[what]["do"] == "frozen":
            there = wanted[train] & {"merger", "deepstack_merger_list"} - (
                {"deepstack_merger_list"} if family == "qwen2_5_vl" else set()
            )
            assert set(result["moved"]) == set(result["with_state"]) == there and result["text_moved"]


def test_reductions_that_overlap_need_the_tower_in_micro_batches_without_images(models: Path):
    overlap = {"distributed": True, "ddp": {"overlap_grad_reduce": True, "bucket_size": 20000}, "budget": 16}
    run(models, 2, {"overlap": job(models, "qwen3_vl", do="layout", **overlap)})


def test_planted_mistakes_move_the_samples_with_images_alone(models: Path):
    jobs = {
        f"{family} {mistake}": job(models, family, do="swapped", mistake=mistake)
        for family, mistake in product(("qwen2_5_vl", "qwen3_vl"), ("grids swapped", "a token late", "deepstack late"))
        if "deepstack" not in mistake or family == "qwen3_vl"
    }
    for what, result in run(models, 1, jobs).items():
        assert result["moved"] > 1e-2 and result["others"] < BOUNDS["logprobs"], what


def test_a_checkpoint_goes_on_in_another_layout(models: Path, tmp_path: Path):
    first, second = (str(tmp_path / f"{name}.pt") for name in ("saved", "resumed"))
    save = job(models, "qwen3_vl", do="checkpoint", warm=1, save=str(tmp_path / "c"), then=first)
    saved = run(models, 1, {"save": save})["save"]["saved"]
    resume = job(models, "qwen3_vl", do="checkpoint", load=saved, then=second, parallel=LAYOUTS["TP2+SP"])
    run(models, 2, {"resume": resume})
    one, other = torch.load(first, map_location="cpu"), torch.load(second, map_location="cpu")
    assert Path(saved).is_dir()
    assert within("resumed loss", abs(one["loss11"] - other["loss11"]), 1e-6)
    moved = {name: float((one["weights11"][name] - other["weights11"][name]).abs().max()) for name in one["weights11"]}
    assert within("resumed weights", max(moved.values()), 1e-6)
    assert any(".visual." in name for name in moved)


@pytest.mark.slow
def test_virtual_stages_with_deepstack(models: Path):
    deep = {"folder": models, "family": "qwen3_vl_12_layers"}
    run(models, 1, {"reference": job(**deep, do="layout", write=True, packing=False, budget=4096)})
    virtual = {"parallel": LAYOUTS["PP2xVPP2"]}
    cases = (("packed", PACKED), ("padded", PADDED | {"recompute": "full"}))
    jobs = {
        f"{do}, {name}": job(**deep, do=do, **virtual, **batch) for name, batch in cases for do in ("forward", "layout")
    }
    run(models, 2, jobs)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("world", [2, 4])
def test_every_layout(models: Path, family: str, world: int):
    jobs = {}
    for name, parallel in LAYOUTS.items():
        experts = "ep" in parallel and family != "qwen3_vl_moe"
        deep = "vpp" in parallel and family != "qwen2_5_vl"
        if experts or deep or (4 if name in ("TP2xPP2", "CP2xPP2") else 2) != world:
            continue
        for batch, recompute in ((PACKED, "none"), (PADDED, "full"), (PACKED, "selective")):
            options = {"parallel": parallel, "recompute": recompute, **batch}
            kind = f"{name}, {'packed' if batch is PACKED else 'padded'}, {recompute}"
            jobs[f"{kind}, forward"] = job(models, family, do="forward", **options)
            jobs[f"{kind}, layout"] = job(models, family, do="layout", **options)
        jobs[f"{name}, projector"] = job(models, family, do="forward", vision={"train": "projector"}, parallel=parallel)
    run(models, world, jobs)
