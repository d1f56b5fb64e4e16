"""Checkpoints of the actor: the same layout resumes bit for bit, another one with the same next step.

Ranks save, another world loads, saves again, and the first world loads that: 2 ranks, 1 rank, 2 ranks. Where the
optimizer is distributed they save in the other form too, which the same ranks load and other layouts refuse.
"""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from tests.dist.bounds import within
from tests.dist.workers.launch import run_ranks

LOSS_BOUND, GRADIENT_BOUND, WEIGHT_BOUND = 2e-6, 1e-5, 1e-6
LORA = {"rank": 4, "alpha": 8.0}
CASES = {
    "DP2": {"model": "qwen3"},
    "DP2 distributed optimizer": {"model": "qwen3", "distributed": True},
    "TP2": {"model": "qwen3", "parallel": {"tp": 2}},
    "TP2 distributed optimizer": {"model": "qwen3", "parallel": {"tp": 2}, "distributed": True},
    "PP2 tied": {"model": "qwen3_tied", "parallel": {"pp": 2}},
    "PP2xVPP2": {"model": "qwen3", "parallel": {"pp": 2, "vpp": 2}},
    "CP2 distributed optimizer": {"model": "qwen3", "parallel": {"cp": 2}, "distributed": True},
    "EP2": {"model": "qwen3_moe", "parallel": {"ep": 2}},
    "EP2 distributed optimizer": {"model": "qwen3_moe", "parallel": {"ep": 2}, "distributed": True},
    "TP2xEP2": {"model": "qwen3_moe", "parallel": {"tp": 2, "ep": 2}},
    "TP2 LoRA": {"model": "qwen3", "parallel": {"tp": 2}, "lora": LORA},
    "EP2 LoRA distributed optimizer": {"model": "qwen3_moe", "parallel": {"ep": 2}, "lora": LORA, "distributed": True},
}
# the optimizer has no state yet
BEFORE_THE_FIRST_STEP = ("DP2 distributed optimizer", "TP2", "EP2 distributed optimizer")
RUNS = [(name, 2) for name in CASES] + [(name, 0) for name in BEFORE_THE_FIRST_STEP]  # and updates before the save
PLAIN = (
    "DP2",
    "TP2 distributed optimizer",
    "PP2 tied",
    "CP2 distributed optimizer",
    "EP2",
    "TP2 LoRA",
)  # near to others: by --full
LATER = [run for run in RUNS if run[0] in PLAIN or run in (("TP2", 0), ("EP2 distributed optimizer", 0))]
ADAPTERS = [run for run in RUNS if "lora" in CASES[run[0]] and run not in LATER]
SETS = {"first": [run for run in RUNS if run not in LATER + ADAPTERS], "adapters": ADAPTERS, "later": LATER}
OWN_PARTS = [
    (part, *run) for part in ("first", "adapters") for run in SETS[part] if CASES[run[0]].get("distributed") and run[1]
]
EVERY_RUN = [
    pytest.param(part, *run, marks=[pytest.mark.slow] * (part != "first"))
    for part, runs in SETS.items()
    for run in runs
]
pytestmark = [
    pytest.mark.timeout(900),  # one fixture runs three launches for all tests
    pytest.mark.verifies(
        "actor",
        "checkpoints: same layout bit by bit, another one the same next steps; optimizer "
        "state to the host and back bit by bit",
    ),
]


def key(name: str, warm: int) -> str:
    return f"{name.replace(' ', '_')}.after{warm}"


@pytest.fixture(scope="module")
def saved(hf_models: Path, tmp_path_factory) -> Callable[[str], Path]:
    """Every case of a set saved by two ranks, resumed by two, by one, which saves again, and by two from that."""

    @cache
    def folder_of(part: str) -> Path:
        folder = tmp_path_factory.mktemp(part)
        launches: list[list[dict]] = [[], [], []]
        refused: list[dict] = []
        for name, warm in SETS[part]:
            case = CASES[name]
            base = {**case, "model": str(hf_models / case["model"]), "do": "checkpoint"}
            alone = {option: value for option, value in base.items() if option != "parallel"}
            place = folder / key(name, warm)
            from_two, from_one = (str(place / "two" / "step_000001"), str(place / "one" / "step_000001"))
            # saved while it is on the host: what resumes, where it never left the device, takes the same steps
            straight = {**base, "away": True, "warm": warm, "save": str(place / "two"), "then": f"{place}.straight.pt"}
            if (part, name, warm) in OWN_PARTS:
                own_parts = str(place / "own" / "step_000001")
                straight["save_own_parts"] = str(place / "own")
                launches[2].append({**base, "load": own_parts, "then": f"{place}.own.pt"})
                refused.append({**alone, "do": "refusal", "load": own_parts, "twin": from_two})
            launches[0].append(straight)
            launches[0].append({**base, "load": from_two, "then": f"{place}.same.pt"})
            launches[1].append({**alone, "load": from_two, "save": str(place / "one"), "then": f"{place}.other.pt"})
            launches[2].append({**base, "load": from_one, "then": f"{place}.back.pt"})
        launches[1] += refused
        results = [
            run_ranks(world, folder / f"launch{number}", jobs)
            for number, (world, jobs) in enumerate(zip((2, 1, 2), launches, strict=True))
        ]
        (folder / "refusals.json").write_text(json.dumps(results[1][len(launches[1]) - len(refused) :]))
        return folder

    return folder_of


@pytest.mark.parametrize("part, name, warm", EVERY_RUN)
def test_same_layout_is_bit_identical(saved: Callable[[str], Path], part: str, name: str, warm: int):
    assert_identical(saved(part) / key(name, warm), "same")


@pytest.mark.parametrize("part, name, warm", OWN_PARTS)
def test_own_parts_are_bit_identical_for_the_same_layout(saved: Callable[[str], Path], part: str, name: str, warm: int):
    assert_identical(saved(part) / key(name, warm), "own")


@pytest.mark.parametrize("part", ["first", "adapters"])
def test_own_parts_are_refused_by_another_layout(saved: Callable[[str], Path], part: str):
    """But for the weights alone, which every layout can load."""
    refusals = json.loads((saved(part) / "refusals.json").read_text())
    of_part = [run for run in OWN_PARTS if run[0] == part]
    for (_, name, warm), refusal in zip(of_part, refusals, strict=True):
        folder = saved(part) / key(name, warm) / "own" / "step_000001"
        (message,) = refusal["messages"]
        sizes = ", ".join(f"{axis} {size}" for axis, size in {"ranks": 2, **CASES[name].get("parallel", {})}.items())
        assert f"checkpoint {folder} can be loaded by its own layout alone ({sizes})" in message
        assert "this run has another (ranks 1)" in message and "checkpoint.reshardable" in message
        assert "\n" not in message and refusal["untouched"]
        assert refusal["alone"]


def assert_identical(place: Path, kind: str) -> None:
    straight, resumed = (
        torch.load(f"{place}.straight.pt", map_location="cpu"),
        torch.load(f"{place}.{kind}.pt", map_location="cpu"),
    )
    for what, value in straight.items():
        if isinstance(value, dict):
            assert value and all(
                torch.equal(tensor, resumed[what][tensor_name]) for tensor_name, tensor in value.items()
            ), what
        else:
            assert value == resumed[what], what


def test_the_optimizers_own_weights_come_back_from_the_host_bit_by_bit(hf_models: Path, tmp_path: Path):
    """Under bfloat16 it has weights of its own, in float32."""
    job = {"do": "checkpoint", "model": str(hf_models / "qwen3_moe"), "dtype": "bfloat16", "distributed": True}
    kinds = {"straight": False, "same": True}
    jobs = [job | {"warm": 1, "away": away, "then": str(tmp_path / f"x.{kind}.pt")} for kind, away in kinds.items()]
    run_ranks(2, tmp_path / "ranks", jobs)
    assert_identical(tmp_path / "x", "same")


@pytest.mark.parametrize("part, name, warm", EVERY_RUN)
def test_other_layout_takes_the_same_next_steps(saved: Callable[[str], Path], part: str, name: str, warm: int):
    straight = torch.load(saved(part) / f"{key(name, warm)}.straight.pt", map_location="cpu")
    for kind in ("other", "back"):
        resumed = torch.load(saved(part) / f"{key(name, warm)}.{kind}.pt", map_location="cpu")
        assert resumed["updates_done"] == straight["updates_done"] == warm
        for number in (10, 11):
            apart = abs(resumed[f"loss{number}"] - straight[f"loss{number}"])
            assert within("loss", apart, LOSS_BOUND)
            apart = abs(resumed[f"norm{number}"] / straight[f"norm{number}"] - 1)
            assert within("norm", apart, GRADIENT_BOUND)
            for parameter, expected in straight.get(f"gradients{number}", {}).items():
                error = (resumed[f"gradients{number}"][parameter] - expected).abs().max()
                ratio = float(error / expected.abs().max()) if error else 0.0
                assert within("gradient", ratio, GRADIENT_BOUND), (kind, parameter, ratio)
            for parameter, expected in straight[f"weights{number}"].items():
                error = float((resumed[f"weights{number}"][parameter] - expected).abs().max())
                assert within("weights", error, WEIGHT_BOUND), (kind, parameter, error)


def test_the_two_updates_move_the_weights(saved: Callable[[str], Path]):
    """Else the comparisons above would compare nothing."""
    after = torch.load(saved("first") / f"{key('EP2 distributed optimizer', 2)}.straight.pt", map_location="cpu")
    moved = {
        name: float((after["weights11"][name] - tensor).abs().max()) for name, tensor in after["weights10"].items()
    }
    assert min(moved.values()) > 100 * WEIGHT_BOUND
