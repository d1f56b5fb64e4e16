"""The host waits for the device where docs/evidence/gpu.md says, counted by the GPU kit's own counter."""

from pathlib import Path

import pytest

from tests.dist.random_models import write_model
from tests.dist.test_synchronisations import documented
from tests.dist.workers import launch


@pytest.fixture(scope="module")
def ran(tmp_path_factory, model_of) -> list[tuple[dict, dict]]:
    folder = tmp_path_factory.mktemp("waits")
    base = {"budget": 100, "distributed": True, "dtype": "bfloat16"}
    routers = {"router_losses": {"balance": 0.1, "z": 0.1}, "routing_replay": "rollout"}
    jobs = [
        {"model": str(model_of(write_model, "qwen3")), **base, "packing": True},
        {"model": str(model_of(write_model, "qwen3_moe")), **base, **routers, "packing": True},
    ]
    found = launch.run_ranks(1, folder, jobs, script="device_waits_ranks.py")
    return list(zip(jobs, found, strict=True))


# what docs/evidence/gpu.md lists as once an update, and how often the host waits in it
ONCE = {
    "schedule.py:sum_over_ranks": 1,
    "clip_grads.py:get_grad_norm_fp32": 1,  # Megatron's own norm waits once a tensor
    "timing.py:take": 4,
}
OF_ROUTERS = {"losses.py:take": 1, "replay.py:take": 1, "step.py:_expert_metrics": 1}


def test_the_host_waits_where_it_is_documented_and_nowhere_else(ran: list[tuple[dict, dict]]):
    a_layer = {name.partition(" ")[2]: times for name, (times, _) in documented().items()}
    for job, found in ran:
        expected = dict(ONCE)
        if "routing_replay" in job:
            times = a_layer["moe_utils.py:permute"] * found["layers"][1] * found["micro_batches"]
            expected |= OF_ROUTERS | {"moe_utils.py:permute": times}
        assert found["micro_batches"] > 1 and found["waits"] == expected, (job, found)
