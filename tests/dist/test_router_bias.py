"""What is computed of routers beside routing: biases that move, losses; the same in every layout, of real tokens alone.

actor.router_bias_update moves biases by the counts of all tokens of an update; actor.router_losses are compared with
formulas written out in plain torch, on one rank, a sample at a time.
"""

from dataclasses import dataclass

import pytest

from tests.dist.bounds import bound_of, within
from tests.dist.random_models import write_model
from tests.dist.workers.launch import run_ranks
from tests.dist.workers.samples import LENGTHS

pytestmark = pytest.mark.verifies(
    "actor", "router losses and biases equal plain autograd's and counts by hand, 13 layouts"
)

RATE, LOSSES = 0.01, {"balance": 0.3, "z": 0.02}
VALUE_BOUND, GRADIENT_BOUND = 1e-5, 1e-5
# deepseek_v3: sigmoid routers with biases and groups; its first layer is dense. qwen3_moe: softmax routers
MODELS = ("deepseek_v3", "qwen3_moe")
BIAS_LAYOUTS = {
    "TP2xEP2 recomputed": {"parallel": {"tp": 2, "ep": 2}, "packing": False, "budget": 200, "recompute": "full"},
    "CP2 packed": {"parallel": {"cp": 2}},
    "PP2 padded": {"parallel": {"pp": 2}, "packing": False, "budget": 200},
    "DP2 packed": {"parallel": {}},
}
ONE_RANK = {
    "1 packed": {},
    "1 padded": {"packing": False, "budget": 4096},
    "1 recomputed": {"recompute": "full", "budget": 100},
}
_LOSSES_ALONE = {
    "TP2+SP packed": {"parallel": {"tp": 2}},
    "PP2xVPP2 recomputed": {"parallel": {"pp": 2, "vpp": 2}, "recompute": "full"},
    "PP2, experts recomputed": {
        "parallel": {"pp": 2},
        "recompute": "selective",
        "megatron": {"recompute_modules": ["moe"]},
    },
    "EP2 padded": {"parallel": {"ep": 2}, "packing": False, "budget": 100},
    "CP2 padded": {"parallel": {"cp": 2}, "packing": False, "budget": 200, "recompute": "full"},
    "DP2 small": {"parallel": {}, "budget": 1},
}
LOSS_LAYOUTS = {
    "deepseek_v3": BIAS_LAYOUTS | _LOSSES_ALONE,
    "qwen3_moe": {name: _LOSSES_ALONE[name] for name in ("TP2+SP packed", "EP2 padded", "CP2 padded")},
}


@dataclass
class Ran:
    """Results by job: (what, model, layout)."""

    results: dict[tuple[str, str, str], dict]

    def of(self, what: str) -> dict[tuple[str, str], dict]:
        return {key[1:]: result for key, result in self.results.items() if key[0] == what}


@pytest.fixture(scope="module")
def ran(tmp_path_factory, model_of) -> Ran:
    """Both features on one rank and on two, in one launch each."""
    folder, jobs = tmp_path_factory.mktemp("routers"), {1: {}, 2: {}}
    alone = {"packing": False, "budget": 1, "count": True}  # a sample a micro-batch: nothing is padded
    for family in MODELS:
        model = str(model_of(write_model, family))
        losses = {"model": model, "reference": str(folder / f"{family}.pt")}
        jobs[1]["by hand", family, "1"] = {**losses, "by_hand": LOSSES}
        for world, layouts in ((1, ONE_RANK), (2, LOSS_LAYOUTS[family])):
            jobs[world] |= {
                ("losses", family, name): {**losses, "router_losses": LOSSES, **options}
                for name, options in layouts.items()
            }
        if family == "deepseek_v3":
            base = {"model": model, "router_bias_update": RATE, "distributed": True}
            jobs[1]["bias", family, "1"] = {**base, **alone}
            jobs[1]["no bias", family, "1"] = {**base, **alone, "router_bias_update": None}
            jobs[2] |= {("bias", family, name): {**base, **options} for name, options in BIAS_LAYOUTS.items()}
    results: dict = {}
    for world, of_world in jobs.items():
        found = run_ranks(world, folder / f"world{world}", list(of_world.values()), script="router_bias_ranks.py")
        results |= dict(zip(of_world, found, strict=True))
    return Ran(results)


def test_biases_move_against_the_load_alike_in_every_layout(ran: Ran):
    found = ran.of("bias")
    one, still = found["deepseek_v3", "1"], ran.of("no bias")["deepseek_v3", "1"]
    assert still["after"] == still["before"] == one["before"], "without the option they stay"
    for layer, counts in one["counts"].items():
        assert sum(counts) == 2 * sum(LENGTHS), "every token chose two experts"
        mean = sum(counts) / len(counts)
        for count, before, after in zip(counts, one["before"][layer], one["after"][layer], strict=True):
            assert after == pytest.approx(before + RATE * ((mean > count) - (mean < count)), abs=1e-7)
    for name, result in found.items():
        assert (result["after"], result["load"]) == (one["after"], one["load"]), name


def test_losses_are_what_is_by_hand_in_every_layout(ran: Ran):
    found = ran.of("losses")
    assert len(found) == sum(len({*ONE_RANK, *layouts}) for layouts in LOSS_LAYOUTS.values())
    problems = []
    for name, result in found.items():
        values = {what: abs(result[what]) for what in ("balance", "z")}
        problems += [
            f"{name}: {what} off by {error:.2g}"
            for what, error in values.items()
            if not within(what, error, VALUE_BOUND)
        ]
        largest = max(result["gradients"], key=lambda tensor: result["gradients"][tensor])
        error = result["gradients"][largest]
        problems += (
            []
            if within("gradient", error, bound_of(GRADIENT_BOUND, result["rounding"]))
            else [f"{name}: gradient of {largest} off by {error:.2g}"]
        )
    assert not problems, "\n".join(problems)
