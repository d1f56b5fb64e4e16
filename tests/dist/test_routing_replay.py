"""Experts that are known are the ones that routers use, with weights and gradients of their own, in every layout.

Replaying what a router would choose anyway changes no bit; replaying anything else gives on many ranks what it gives on
one, where experts and weights are checked by hand. What is recorded on many ranks is what one rank records.
"""

from pathlib import Path

import pytest

from tests.dist import cases
from tests.dist.bounds import bound_of, within
from tests.dist.random_models import write_model
from tests.dist.workers.launch import run_ranks

pytestmark = pytest.mark.verifies(
    "actor", "routing replay: a router's own choice changes no bit; planted experts are used"
)

GRADIENT_BOUND, LOGPROB_BOUND, LOSS_BOUND = 1e-5, 1e-5, 1e-6
RECOMPUTE_EXPERTS = {"recompute": "selective", "megatron": {"recompute_modules": ["moe"]}}
# deepseek_v3: sigmoid routers with biases and groups, its first layer dense; qwen3_moe: softmax routers
ROUTERS = {"router_bias_update": 0.01, "router_losses": {"balance": 0.3, "z": 0.02}}
MODELS = {"deepseek_v3": ROUTERS, "qwen3_moe": {}}
LAYOUTS = {name: cases.LAYOUTS[name] for name in ("TP2+SP", "PP2", "PP2xVPP2", "CP2", "EP2", "TP2xEP2", "DP2")}
RECOMPUTE = {
    "none": {},
    "selective": {"recompute": "selective"},
    "experts": RECOMPUTE_EXPERTS,
    "full": {"recompute": "full"},
}
CI = {
    "deepseek_v3": [
        ("TP2+SP", "padded", "full"),
        ("PP2xVPP2", "packed", "full"),
        ("CP2", "packed", "none"),
        ("EP2", "padded", "experts"),
    ],
    "qwen3_moe": [("PP2", "packed", "experts"), ("CP2", "padded", "full")],
}
EVERY = [(layout, batch, recompute) for layout in LAYOUTS for batch in cases.BATCHES for recompute in RECOMPUTE]
ONE_RANK = [("padded", "none"), ("packed", "full"), ("padded", "experts")]


def options(layout: dict, batch: str, recompute: str) -> dict:
    return {"parallel": layout, **cases.BATCHES[batch], **RECOMPUTE[recompute]}


@pytest.fixture(scope="module", params=MODELS)
def reference(request: pytest.FixtureRequest, tmp_path_factory, model_of) -> tuple[str, Path, dict, dict]:
    """Family, folder, what all jobs have in common, and what one rank finds, a sample in each micro-batch."""
    family = request.param
    folder = tmp_path_factory.mktemp(family)
    base = {"model": str(model_of(write_model, family)), "reference": str(folder / "one.pt")}
    base |= {"routing_replay": "rollout", **MODELS[family]}
    alone = {**base, "packing": False, "budget": 1, "write": True}
    jobs = [alone, *({**base, **options({}, *which)} for which in ONE_RANK)]
    first, *others = run_ranks(1, folder / "one", jobs, script="routing_replay_ranks.py")
    assert problems({f"1 rank, {which}": found for which, found in zip(ONE_RANK, others, strict=True)}) == []
    return family, folder, base, first


def unchanged(name: str, result: dict) -> list[str]:
    """What differs though the same experts were replayed."""
    same = ("logprobs", "loss", "gradients", "reports nothing", "moved")
    found = [f"{name}: {what} not as it should be" for what in same if not result[what]]
    return found + ([f"{name}: {result['differs']} differ"] if result["differs"] else [])


def problems(results: dict[str, dict]) -> list[str]:
    found = []
    for name, result in results.items():
        found += unchanged(name, result)
        found += [f"{name}: {what}" for what in ("recorded", "planted counts") if not result[what]]
        bounds = {
            "planted logprobs": bound_of(LOGPROB_BOUND, result["rounding"]["logprobs"]),
            "planted loss": LOSS_BOUND,
            "planted differs": 0.0,
        }
        found += [
            f"{name}: {what} {result[what]}"
            for what, bound in bounds.items()
            if not within(what, abs(result[what]), bound)
        ]
        worst = max(result["planted gradients"], key=lambda tensor: result["planted gradients"][tensor])
        bound = bound_of(GRADIENT_BOUND, result["rounding"]["gradients"])
        if not within("planted gradient", result["planted gradients"][worst], bound):
            found.append(f"{name}: gradient of {worst} off by {result['planted gradients'][worst]:.2g}")
    return found


def ran(reference: tuple[str, Path, dict, dict], cases: list[tuple[str, str, str]]) -> dict[str, dict]:
    family, folder, base, _ = reference
    jobs = [{**base, **options(LAYOUTS[layout], *others)} for layout, *others in cases]
    results = run_ranks(2, folder / f"two{len(cases)}", jobs, script="routing_replay_ranks.py")
    return {f"{family}, {', '.join(case)}": result for case, result in zip(cases, results, strict=True)}


def test_planted_experts_are_used_with_weights_of_the_routers_own(reference):
    family, _, _, first = reference
    by_hand, planted = first["by hand"], first["planted"]
    assert unchanged(family, first) == []
    assert by_hand["wrong"] == 0, "tokens with other experts"
    assert within("weights of experts", by_hand["weights"], 1e-6)
    assert planted["differs"] > 0.5, "what is planted is what routers choose: nothing was tested"
    if family == "qwen3_moe":
        assert planted["differs"] == pytest.approx(by_hand["differs"], abs=1e-12)


def test_layouts_replay_and_record_what_one_rank_does(reference):
    assert problems(ran(reference, CI[reference[0]])) == []


@pytest.mark.slow
def test_every_layout_batch_and_recompute(reference):
    assert problems(ran(reference, [case for case in EVERY if case not in CI[reference[0]]])) == []
