"""The host waits for the device in forward and backward of a micro-batch only where docs/evidence/gpu.md lists it."""

import re
from pathlib import Path

import pytest

from tests.dist.random_models import write_model
from tests.dist.workers.launch import run_ranks

pytestmark = pytest.mark.verifies(
    "actor", "an update waits for the device only where [the table](gpu.md#synchronizations-that-remain) says"
)

DOCS = Path(__file__).parents[2] / "docs" / "evidence" / "gpu.md"
ROW = re.compile(r"^\| `(\w+)` in `([\w.:]+)` \| (\d+) a layer( with experts)? \|", re.MULTILINE)


def documented() -> dict[str, tuple[int, bool]]:
    """Operator and place -> how often a layer of one micro-batch waits there, and whether only one with experts."""
    [section] = re.findall(
        r"^## Synchronizations that remain$(.*?)(?:^## |\Z)", DOCS.read_text(), re.MULTILINE | re.DOTALL
    )
    rows = ROW.findall(section)
    return {f"{what} {place}": (int(n), bool(experts)) for what, place, n, experts in rows}


@pytest.fixture(scope="module")
def ran(tmp_path_factory, model_of) -> list[tuple[dict, dict]]:
    """(job, what it found): updates with every option of ours that computes on routers, and a dense
    model's."""
    folder = tmp_path_factory.mktemp("waits")
    models = {family: str(model_of(write_model, family)) for family in ("qwen3", "qwen3_moe")}
    routers = {"router_losses": {"balance": 0.1, "z": 0.1}, "routing_replay": "rollout"}
    base = {"budget": 100, "distributed": True}
    one = [
        {"model": models["qwen3"], **base, "packing": True},
        {"model": models["qwen3_moe"], **base, **routers, "packing": False},
    ]
    two = [
        {"model": models["qwen3_moe"], **base, **routers, "packing": packing, "parallel": parallel}
        for packing, parallel in ((True, {"tp": 2, "ep": 2}), (False, {"cp": 2}))
    ]
    found = run_ranks(1, folder / "one", one, script="waiting_ranks.py")
    found += run_ranks(2, folder / "two", two, script="waiting_ranks.py")
    return list(zip([*one, *two], found, strict=True))


def test_the_host_waits_where_it_is_documented_and_nowhere_else(ran: list[tuple[dict, dict]]):
    for job, found in ran:
        layers, with_experts = found["layers"]
        expected = {
            name: times * (with_experts if of_experts else layers) * found["micro_batches"]
            for name, (times, of_experts) in documented().items()
            if "routing_replay" in job or not of_experts
        }
        assert found["micro_batches"] > 1 and found["waits"] == expected, (job, found)


def test_waits_are_seen(ran: list[tuple[dict, dict]]):
    """Else an empty list would prove nothing: Megatron's own, which are documented, are found in these runs."""
    seen = {name for _, found in ran for name in found["waits"]}
    assert seen == documented().keys() and any("synchronize" in name for name in seen)
