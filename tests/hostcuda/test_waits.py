"""The host waits for the device where docs/evidence/gpu.md says, counted by the GPU kit's own counter."""

import pytest

from tests.dist.random_models import write_model
from tests.dist.workers import launch

# what docs/evidence/gpu.md lists as once an update, and how often the host waits in it
ONCE = {
    "schedule.py:sum_over_ranks": 1,
    "clip_grads.py:get_grad_norm_fp32": 1,  # Megatron's own norm waits once a tensor
    "timing.py:take": 4,
}
OF_ROUTERS = {"losses.py:take": 1, "replay.py:take": 1, "step.py:_expert_metrics": 1}
ROUTERS = {"router_losses": {"balance": 0.1, "z": 0.1}, "routing_replay": "rollout"}


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_the_host_waits_where_it_is_documented_and_nowhere_else(family, tmp_path, model_of):
    options = ROUTERS if family == "qwen3_moe" else {}
    job = {"model": str(model_of(write_model, family)), "budget": 100, "distributed": True}
    job |= {"dtype": "bfloat16", "packing": True, **options}
    [found] = launch.run_ranks(1, tmp_path, [job], script="device_waits_ranks.py")
    expected = ONCE | (OF_ROUTERS if options else {})  # a dispatcher waits between ranks only
    assert found["micro_batches"] > 1 and found["waits"] == expected, found
